"""Expert parallelism where ranks differ: without a token, with frozen experts, with adapters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, JetMoeConfig, PreTrainedConfig, Qwen3MoeConfig

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import OptimizerConfig, ParallelConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.routed_experts import ROUTED_EXPERTS
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.dtensor.experts import distribute_all
from nemo_like.policy.dtensor.parallel import ExpertParallel, Groups, ShardSpec
from nemo_like.policy.dtensor.parameters import ShardedParameter
from nemo_like.prediction.placement import Placement
from tests.policy.adapters import ALL_LINEAR, adapter_values
from tests.policy.dtensor.test_layouts import PACKED, Rank, gradients, local_shard, train, worst
from tests.policy.tiny import GROUPED_LENGTHS, context, random_batch, run_ranks

RECOMPUTED = dataclasses.replace(PACKED, activation_checkpointing="full")
VARIANTS = {
    "as routed": PACKED,
    "one rank has no token": PACKED,
    "one rank has no token, recomputed": RECOMPUTED,
    "selective": dataclasses.replace(PACKED, activation_checkpointing="selective"),
    "experts are frozen": dataclasses.replace(PACKED, freeze=("*.experts.*",)),
    "adapters": dataclasses.replace(PACKED, lora=ALL_LINEAR),
}
MUON = dataclasses.replace(PACKED, optimizer=OptimizerConfig(name="muon", lr=1e-2))


def batch_of(variant: str) -> BatchedDataDict:
    """Random rows. Every token of "one rank has no token" chooses the experts 1 and 0 of 4."""
    batch = random_batch(GROUPED_LENGTHS)
    if "no token" in variant:
        num_tokens = sum(GROUPED_LENGTHS)
        chosen = np.tile(np.array([1, 0], dtype=np.uint8), (num_tokens, 2, 1))
        batch[ROUTED_EXPERTS] = Jagged.from_lengths(chosen, np.asarray(GROUPED_LENGTHS))
    return batch


def program(
    worker_context: WorkerContext, parallel: ParallelConfig, model: str
) -> dict[str, tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Gradients, on rank 0, and metrics of each variant; the losses of Muon."""
    rank = Rank(worker_context, parallel)
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    try:
        found = {}
        for variant, config in VARIANTS.items():
            worker = rank.worker(dataclasses.replace(config, model_name=model))
            engine: Any = worker.engine
            for sharded in engine.trained if variant == "adapters" else ():
                full = adapter_values(sharded.name, sharded.spec.full_shape)
                (row, column), (num_rows, num_columns) = sharded.block()
                part = full[row : row + num_rows, column : column + num_columns]
                local_shard(sharded.parameter).copy_(part)
            gradient, metrics = gradients(worker, rank.shard(config, batch_of(variant)))
            trained = {each.name: gradient[each.name] for each in engine.trained}
            found[variant] = trained, metrics
        worker = rank.worker(dataclasses.replace(MUON, model_name=model))
        found["muon"] = ({}, dict(enumerate(train(worker, rank, range(3)))))
        return found
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


def test_two_expert_parallel_ranks_have_the_gradients_of_one_process(model_dir, rank_pool, meeting):
    model = model_dir("qwen3_moe")
    expected = program(context(), ParallelConfig(), model)
    ranks = run_ranks(rank_pool, program, 2, meeting, ParallelConfig(expert=2), model)
    for variant in VARIANTS:
        gradient, metrics = expected[variant]
        error, where = worst(ranks[0][variant][0], gradient)
        assert error < 1e-5, (variant, where)
        for rank in ranks:
            found = rank[variant][1]
            for name in ("policy/loss", "policy/grad_norm", "policy/expert_load_max"):
                assert found[name] == pytest.approx(metrics[name], rel=1e-5), (variant, name)
            ratio = found["policy/expert_rank_load_max"]
            assert 1 <= ratio <= found["policy/expert_load_max"]
            if "no token" in variant:
                # Two of four experts, and one of two ranks, have all tokens.
                assert found["policy/expert_load_max"] == ratio == 2
    trained = {variant: gradient for variant, (gradient, _) in ranks[0].items()}
    assert sum(".experts." in name for name in trained["as routed"]) == 4
    assert not any(".experts." in name for name in trained["experts are frozen"])
    assert all(".lora_" in name for name in trained["adapters"])
    assert ranks[0]["muon"][1] == pytest.approx(expected["muon"][1], rel=1e-4)


def model_of(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_ranks_have_consecutive_experts_and_experts_of_another_form_are_refused():
    group: Any = None
    model = model_of(Qwen3MoeConfig(**SIZES, num_experts=6))
    specs = distribute_all(ExpertParallel(group, 1, 3), model, "a model", {})
    weight = model.model.layers[1].mlp.experts.down_proj
    assert weight.shape == (2, 32, 16)
    assert specs[weight] == ShardSpec((6, 32, 16), stop=6, ep=3)
    # The plan's memory has what FSDP gathers on a rank.
    placement = Placement(parallel_layout=ParallelLayout(dp=6, ep=3))
    num_gathered = sum(each.numel() for each in model.model.layers[1].parameters())
    found = placement.gathered_layer_params(ModelSpec.from_config(model.config))
    assert found == pytest.approx(num_gathered)
    with pytest.raises(ConfigError, match=r"jetmoe cannot be .* no stacked experts; set parallel"):
        distribute_all(ExpertParallel(group, 0, 2), model_of(JetMoeConfig()), "jetmoe", {})


class _Group:
    """The size of a process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_each_expert_belongs_to_one_rank(num_experts: int, ep: int, num_shards: int) -> None:
    """`num_experts` of each expert-parallel rank, sharded over `num_shards` ranks."""
    shard: Any = _Group(ep * num_shards)
    groups = Groups(layout=ParallelLayout(), rank=0, device=torch.device("cpu"), shard=shard)
    weight = torch.nn.Parameter(torch.empty(num_experts, 3))
    sharded = ShardedParameter("w", weight, ShardSpec((ep * num_experts, 3), ep=ep), groups)
    rows = [range(*sharded.rows(rank)) for rank in range(ep * num_shards)]
    assert sorted(row for part in rows for row in part) == list(range(ep * num_experts))
    for rank, part in enumerate(rows):
        # Consecutive ranks form a group.
        assert all(row // num_experts == rank % ep for row in part)
