"""The columns of docs/models.md about vLLM, which samples from a tiny model of a type.

After optimizer steps a policy of the DTensor engine sends its weights to vLLM as in GRPO. The
log-probs of the tokens that vLLM then samples must be those of the policy.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from nemo_like.commands.check_model_type import Layout, TypeCheck
from nemo_like.config.errors import ConfigError, error_text
from nemo_like.config.rollout import GenerationConfig, VLLMGenerationConfig
from nemo_like.config.schema import (
    AdapterConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import local_context
from nemo_like.distributed.worker_group import Handle, WorkerGroup
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import SamplingParams
from nemo_like.losses import NllLoss
from nemo_like.models.tiny import save_tiny_copy, type_config
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.policy import Policy
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import training_rows
from nemo_like.training.parity import in_mode
from nemo_like.training.rollout_workers import GeneratorStart
from nemo_like.training.workers import local_policy
from nemo_like.weight_sync.sync import WeightSync

_SIZES = {"head_dim": 32, "kv_lora_rank": 512}
"""Of the tiny model: the smallest that vLLM has on CPU; latent attention there has heads of 576."""
_FILE_KEYS = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "head_dim": 64,
    "first_k_dense_replace": 1,
}
"""In the files of real models with groups of experts. transformers needs none of these keys."""
LIMIT = 1e-4
"""Max absolute difference of the log-prob of a sampled token, in nats."""
_MIN_CHANGE = 100 * LIMIT
"""Of the largest log-prob by an update: stale weights are visible then."""
_TIMEOUT_S = 300.0
_NUM_UPDATES = 2
_SECOND_SEED = 1000
_NUM_STEPS = 2
"""Optimizer steps before each update."""
_LR = 0.005
_MAX_LENGTH = 64
_MAX_PROMPT = 40
_MAX_TOKEN = 250
_NUM_PROMPTS = 6
_NUM_NEW_TOKENS = 16
_ADAPTER = AdapterConfig(enabled=True, rank=4, alpha=8, target_modules=("all-linear",))


VLLM_COLUMNS = {"vLLM": False, "vLLM, adapters": True}
"""Column -> whether the policy sends its adapters alone."""


class VLLMTypeCheck(TypeCheck):
    """The checks of a model type, and those with vLLM."""

    def checks(self) -> dict[str, Callable[[], str]]:
        columns = {name: partial(self._check_vllm, sends) for name, sends in VLLM_COLUMNS.items()}
        return super().checks() | columns

    def _check_vllm(self, sends_adapters: bool) -> str:
        """Compare log-probs of the tokens that vLLM samples after weight updates."""
        if find_spec("vllm") is None:
            raise ConfigError("vLLM is not installed")
        directory = self.directory / "vllm"
        if not directory.exists():
            save_vllm_copy(self.model_type, directory)
            self.tokenizer.save_pretrained(directory)
        policy = replace(self.tiny_run(Layout()).policy, model_name=str(directory))
        config = RunConfig(run_name="parity", policy=policy, data=DataConfig(train_path="random"))
        return compare_vllm(config, sends_adapters=sends_adapters)


class _VLLMGroup:
    """A group of one worker in a process of its own, which vLLM changes as it needs."""

    name = "vLLM"
    parallel_layout = ParallelLayout()
    world_size = 1

    def __init__(self, pool: ProcessPoolExecutor, worker_class: type, kwargs: Any) -> None:
        """Start the worker in `pool`. Raises ConfigError if that fails."""
        self._pool = pool
        pool.submit(_start, worker_class, kwargs).result(_TIMEOUT_S)

    def submit_all(self, method: str, /, *args: Any) -> list[Handle]:
        values = [each.value if isinstance(each, Handle) else each for each in args]
        return [Handle(self._pool.submit(_call, method, values))]

    def is_done(self, handles: Sequence[Handle]) -> bool:
        return all(each.value.done() for each in handles)

    def wait_any(self, handles: Sequence[Handle], timeout_s: float) -> list[Handle]:
        wait([each.value for each in handles], timeout_s, FIRST_COMPLETED)
        return [each for each in handles if each.value.done()]

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        return [each.value.result(_TIMEOUT_S) for each in handles]


_workers: list[Any] = []
"""The worker of this process."""


def _start(worker_class: type, kwargs: dict[str, Any]) -> None:
    try:
        _workers.append(worker_class(local_context(num_threads=1), **kwargs))
    except ConfigError:
        raise
    # Exceptions of vLLM may not survive the way to another process.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(f"vLLM on CPU cannot run it: {error_text(error)}") from None


def _call(method: str, args: Sequence[Any]) -> Any:
    try:
        return getattr(_workers[0], method)(*args)
    except Exception as error:  # noqa: BLE001
        raise RuntimeError(f"vLLM on CPU cannot run it: {error_text(error)}") from None


def save_vllm_copy(model_type: str, directory: Path) -> None:
    """Write a tiny model of `model_type` that vLLM can run, without a tokenizer."""
    config = type_config(model_type)
    if getattr(config, "n_group", None) is not None:
        config.update(_FILE_KEYS)
    save_tiny_copy(config, ParallelConfig(), directory, **_SIZES)


def compare_vllm(config: RunConfig, *, sends_adapters: bool) -> str:
    """Return the first difference between vLLM and the policy, or "".

    The policy trains all weights and then adapters that it merges; with `sends_adapters`, only
    adapters, which it sends alone. Raises ConfigError if vLLM cannot start with the model.
    """
    full = _with_vllm(config, AdapterConfig())
    merged = _with_vllm(config, replace(_ADAPTER, weight_sync="merged"))
    alone = _with_vllm(config, replace(_ADAPTER, weight_sync="adapter"))
    runs = {"adapters": alone} if sends_adapters else {"all weights": full, "merged LoRA": merged}
    first, *_ = runs.values()
    # Forked from this process, it would inherit the threads of torch in an undefined state.
    method = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=method) as pool:
        group = cast(
            "WorkerGroup",
            _VLLMGroup(pool, *GeneratorStart(policy=first.policy, seed=first.seed).worker()),
        )
        generator = Generator(lambda _: group)
        try:
            _sample(generator, 0)
        except RuntimeError as error:
            # Such as a kernel that vLLM lacks on CPU.
            raise ConfigError(str(error)) from error
        comparison = _Comparison(group, generator)
        found = (comparison.run(name, each) for name, each in runs.items())
        return next(filter(None, found), "")


class _Comparison:
    """vLLM against policies that send their weights to it one after the other."""

    def __init__(self, group: WorkerGroup, generator: Generator) -> None:
        self._group = group
        self._generator = generator
        self._version = 0

    def run(self, name: str, config: RunConfig) -> str:
        """Train a policy and send its weights; return the first difference, or ""."""
        with local_policy(config.policy, config.cluster, seed=config.seed) as policy:
            sync = WeightSync(policy.group, dtype="float32")
            rows, difference = self._compare(policy)
            if self._version == 0 and not difference <= LIMIT:
                return f"log-probs differ by {difference:.1e} with the weights of the files"
            for _ in range(_NUM_UPDATES):
                for _ in range(_NUM_STEPS):
                    policy.train(policy.shard(rows, policy.plan_rows(rows)), None, NllLoss())
                if not (change := _difference(policy, rows)) >= _MIN_CHANGE:
                    return f"training of {name} changes log-probs by {change:.1e} only"
                self._version += 1
                for failure in sync.push([self._group], self._version).failed.values():
                    raise failure
                self._generator.set_version(self._generator.replicas, self._version)
                rows, difference = self._compare(policy)
                if not difference <= LIMIT:
                    return f"log-probs differ by {difference:.1e} after an update of {name}"
        return ""

    def _compare(self, policy: Policy) -> tuple[BatchedDataDict, float]:
        """Sample rows with vLLM; return them with the max difference of a log-prob.

        A difference above the limit is measured again with other prompts: a token whose router is
        near a tie of two experts changes with the composition of vLLM's batches.
        """
        seed = self._version
        rows = _sample(self._generator, seed)
        difference = _difference(policy, rows)
        if not difference <= LIMIT:
            rows = _sample(self._generator, seed + _SECOND_SEED)
            difference = _difference(policy, rows)
        return rows, difference


def _with_vllm(config: RunConfig, adapter: AdapterConfig) -> RunConfig:
    """Return `config` with padded rows, vLLM as generator, and a large learning rate."""
    vllm = VLLMGenerationConfig(kv_cache_gib=0.125, max_num_seqs=_NUM_PROMPTS)
    policy = replace(
        config.policy,
        lora=adapter,
        generation=GenerationConfig(backend="vllm", vllm=vllm),
        max_total_sequence_length=_MAX_LENGTH,
        train_global_batch_size=_NUM_PROMPTS,
        optimizer=OptimizerConfig(lr=_LR),
    )
    return replace(config, policy=in_mode(policy, "dynamic"))


def _sample(generator: Generator, seed: int) -> BatchedDataDict:
    """Sample completions of random prompts; return rows with the log-probs of vLLM."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, _MAX_PROMPT, _NUM_PROMPTS)
    prompts = [rng.integers(2, _MAX_TOKEN, length, dtype=np.int32) for length in lengths]
    completions = generator.generate(
        Jagged.from_rows(prompts, np.int32),
        rng.integers(2**63, size=_NUM_PROMPTS, dtype=np.uint64),
        SamplingParams(max_new_tokens=_NUM_NEW_TOKENS),
        max_total_length=_MAX_LENGTH,
    )
    rows = []
    for position, prompt in enumerate(prompts):
        rows.append(ConversationRow.start(Prompt(token_ids=prompt, text="", answer=None), 0))
        rows[-1].add_turn(completions, position)
    return training_rows(rows)


def _difference(policy: Policy, rows: BatchedDataDict) -> float:
    """Return the max absolute difference of a log-prob, vLLM's against the policy's."""
    sharded = policy.shard(rows, policy.plan(rows["length"], "evaluate"))
    logprobs = policy.compute_logprobs(sharded, ("prev_logprobs",), as_sampled=False)
    expected = policy.fetch_logprobs(logprobs)["prev_logprobs"].values
    # Both are 0 for the tokens of prompts.
    return float(np.abs(rows["generation_logprobs"].values - expected).max())
