"""Rotary frequencies that depend on the length: every row has those that it has alone.

The expected log-probs come from a fresh model of transformers per row, one unpadded row at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import (
    DynamicBatchingConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_columns, plan_spec, shared_prefix_mode
from nemo_like.policy.dtensor.row_rope import RowRope
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.inputs.model_inputs import build_inputs
from nemo_like.policy.isolation import IsolationError
from tests.policy.tiny import compute_and_fetch, context, run_ranks

ORIGINAL = 32
_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2],
    "long_factor": [1.5, 4.0, 12.0, 40.0],
    "original_max_position_embeddings": ORIGINAL,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
CONFIGS: dict[str, PretrainedConfig] = {
    "phi3, longrope": Phi3Config(
        **_SIZES,
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=_FACTORS,
    ),
    "phimoe, longrope": PhimoeConfig(
        **_SIZES,
        max_position_embeddings=256,
        num_local_experts=4,
        rope_parameters={**_FACTORS, "short_mscale": 1.1, "long_mscale": 1.4},
    ),
    "llama, longrope": LlamaConfig(
        **_SIZES, max_position_embeddings=256, rope_parameters={**_FACTORS, "factor": 8.0}
    ),
    "llama, dynamic": LlamaConfig(
        **_SIZES, max_position_embeddings=ORIGINAL, rope_parameters=_DYNAMIC
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return the directory of a model and the model of transformers."""
    models: dict[str, tuple[Path, Any]] = {}

    def build(name: str) -> tuple[Path, Any]:
        if name not in models:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(CONFIGS[name]), attn_implementation="eager"
            )
            directory = tmp_path_factory.mktemp("model")
            model.save_pretrained(directory)
            models[name] = directory, model.eval()
        return models[name]

    return build


@torch.no_grad()
def alone(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """Return the log-probs of tokens 1, 2, ... of a row by a copy without any earlier call."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    logits = copy.deepcopy(model)(input_ids=tokens, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def rows_of(lengths: Sequence[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 67, length).astype(np.int32) for length in lengths]


def batch_of(lengths: Sequence[int]) -> BatchedDataDict:
    ids = Jagged.from_rows(rows_of(lengths), np.int32)
    mask = np.ones(len(ids.values), dtype=np.uint8)
    mask[ids.offsets[:-1]] = 0
    return BatchedDataDict(
        input_ids=ids, token_mask=Jagged(mask, ids.offsets), length=np.array(lengths)
    )


def policy(directory: Path, layout: str, budget: int, **options: Any) -> PolicyConfig:
    return PolicyConfig(
        model_name=str(directory),
        max_total_sequence_length=128,
        sequence_packing=SequencePackingConfig(
            enabled=layout == "packed", train_mb_tokens=budget, logprob_mb_tokens=budget
        ),
        dynamic_batching=DynamicBatchingConfig(
            enabled=layout == "padded", train_mb_tokens=budget, logprob_mb_tokens=budget
        ),
        **options,
    )


def shard_of(config: PolicyConfig, batch: BatchedDataDict, cp: int = 1) -> Any:
    spec = plan_spec(config, purpose="evaluate", parallel_layout=ParallelLayout(cp=cp), model=None)
    return batch.shard(plan_columns(batch, spec, False))[0]


def check_rows(found: Any, model: PreTrainedModel) -> None:
    """Compare `(ids, log-probs)` of each row with those of the row alone."""
    for ids, logprobs in found:
        np.testing.assert_allclose(logprobs[1:], alone(model, ids), atol=2e-5)


def outputs_of(worker: DTensorPolicyWorker, shard: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    outputs = compute_and_fetch(worker, shard)["prev_logprobs"]
    return [
        (np.asarray(ids), np.asarray(row))
        for ids, row in zip(shard["input_ids"], outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def worker_of(saved: Any) -> Callable[[str, str], DTensorPolicyWorker]:
    workers: dict[tuple[str, str], DTensorPolicyWorker] = {}

    def build(name: str, layout: str) -> DTensorPolicyWorker:
        if (name, layout) not in workers:
            config = policy(saved(name)[0], layout, 128)
            workers[name, layout] = DTensorPolicyWorker(context(), config=config)
        return workers[name, layout]

    return build


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(2, 100), st.sampled_from([ORIGINAL - 1, ORIGINAL, ORIGINAL + 1])),
        min_size=1,
        max_size=5,
    )
)
@example(lengths=[20, 45, 10, 30, 60])
def test_a_row_is_the_same_in_any_company(name, layout, lengths, saved, worker_of):
    """In a microbatch with longer rows, and after one."""
    worker = worker_of(name, layout)
    shard = shard_of(worker.config, batch_of(lengths))
    check_rows(outputs_of(worker, shard), saved(name)[1])


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic"])
def test_the_factors_matter(name, saved):
    """A row has other log-probs with the frequencies of a longer one."""
    _, model = saved(name)
    rows = rows_of((20, 60))
    both = torch.zeros(2, 60, dtype=torch.int64)
    for index, row in enumerate(rows):
        both[index, : len(row)] = torch.from_numpy(row)
    with torch.no_grad():
        logits = copy.deepcopy(model)(input_ids=both, use_cache=False).logits[0, :19]
    found = logits.log_softmax(-1).gather(1, both[0, 1:20, None])[:, 0].numpy()
    assert np.abs(found - alone(model, rows[0])).max() > 0.01


def compute_on_rank(
    worker_context: WorkerContext, directory: Path, batch: BatchedDataDict
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Log-probs with context parallelism of 2, and the isolation check."""
    try:
        config = policy(directory, "packed", 256)
        worker = DTensorPolicyWorker(
            worker_context, config=config, start=PolicyStart(parallel=ParallelConfig(context=2))
        )
        worker.probe_isolation()
        return outputs_of(worker, shard_of(config, batch, cp=2))
    finally:
        process_groups.destroy()


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic"])
def test_context_parallel_ranks_use_the_length_of_the_complete_row(name, saved, rank_pool, meeting):
    """Of rows of 40, rank 1 has no position above the original length of 32."""
    directory, model = saved(name)
    batch = batch_of((40, 8, 70, 40))
    for found in run_ranks(rank_pool, compute_on_rank, 2, meeting, directory, batch):
        check_rows(found, model)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_isolation_check_has_a_row_above_the_original_length(layout, saved):
    worker = DTensorPolicyWorker(context(), config=policy(saved("phi3, longrope")[0], layout, 128))
    assert worker.probe_isolation().num_rows == 5
    engine: Any = worker.engine
    for module in engine.model.modules():
        # The factors of transformers: by the longest row of a call.
        if hasattr(module, "rope_type"):
            del module.forward
    with pytest.raises(IsolationError, match="row"):
        worker.probe_isolation()


def test_rows_share_no_prefix_where_their_frequencies_may_differ(saved):
    directory, _ = saved("phi3, longrope")
    config = policy(directory, "packed", 256, shared_prefix=True)
    spec = ModelSpec.from_config(CONFIGS["phi3, longrope"])
    assert spec.rope_threshold == ORIGINAL
    with pytest.raises(ConfigError, match=r"policy\.shared_prefix is true.*above 32 tokens"):
        shared_prefix_mode(config, spec)
    assert shared_prefix_mode(replace(config, shared_prefix="auto"), spec) is False
    short = replace(config, max_total_sequence_length=ORIGINAL)
    assert shared_prefix_mode(short, spec) is True
    # Without the rule above, the engine refuses such a microbatch.
    rows = rows_of((40, 20))
    rows[1][:9] = rows[0][:9]
    microbatch = Microbatch((0, 1), (40, 20), (40, 11), 51, (0, 9))
    inputs = build_inputs(
        {"input_ids": Jagged.from_rows(rows, np.int32)},
        microbatch,
        PlanSpec(layout="packed", max_tokens=51),
    )
    with pytest.raises(ConfigError, match=r"policy\.shared_prefix=false"):
        RowRope(saved("phi3, longrope")[1], ORIGINAL).set(inputs)
