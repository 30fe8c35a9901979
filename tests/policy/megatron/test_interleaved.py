"""Virtual pipeline stages change neither gradients nor outputs nor checkpoints, and have the bubble
that the plan predicts.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import EmaConfig, ParallelConfig, PolicyConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.outputs import TokenLogprobs
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import Placement
from tests.exhaustive import usually
from tests.policy.megatron.ranks import (
    Run,
    as_tensors,
    joined,
    look_around,
    of_model,
    train,
    train_dtensor,
    train_runs,
)
from tests.policy.megatron.reference import assert_same_logprobs, check_cases, train_transformers
from tests.policy.megatron.test_ema import saved_averages
from tests.policy.megatron.test_optimizer import CONFIG
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import DEEP, random_batch, relative_error

CASES = (
    ("llama_deep", "packed, 4 microbatches"),
    # The plan makes two microbatches of one.
    ("qwen3_deep", "packed, 1 microbatch"),
    ("qwen3_deep", "packed with activation checkpointing"),
    ("llama_deep", "packed, selective checkpointing"),
    ("llama_deep", "shared prefixes, groups divided"),
    ("qwen3_deep", "padded, 1 row"),
)
MIXTURES = (
    ("qwen3_moe_deep", "packed, 4 microbatches"),
    ("qwen3_moe_deep", "packed with activation checkpointing"),
    ("deepseek_v3_deep", "packed, 2 microbatches"),
    ("gpt_oss_deep", "packed, selective checkpointing"),
)
CASES_OF = {
    "pp2 x v2": CASES,
    "pp2 x v2 x cp2": (CASES[0], CASES[2], CASES[4]),
    "tp2 x pp2 x v2 + sp": (CASES[0], CASES[3], CASES[5]),
    "pp2 x v2 x ep2": MIXTURES,
}
"""Layout -> architectures and ways of batching."""


@pytest.mark.parametrize("parallel", usually(CASES_OF, "pp2 x v2"))
def test_virtual_stages_have_the_gradient_of_transformers(parallel, model_dir, expected, on_ranks):
    check_cases(CASES_OF[parallel], parallel, model_dir, expected, on_ranks)


@pytest.mark.parametrize("parallel", usually(("pp2 x v2", "tp2 x pp2 x v2 + sp"), "pp2 x v2"))
def test_logprobs_weights_and_the_isolation_check(parallel, model_dir, on_ranks):
    """The isolation check has single microbatches, which the engine completes to a group."""
    config = of_model(LAYOUTS["packed, 4 microbatches"], model_dir("llama_deep"))
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    ranks = on_ranks(look_around, parallel, config)
    rows = ranks[-1]["rows"]
    for found, row in zip(
        ranks[-1]["outputs"]["prev_logprobs"], zip(*rows.values(), strict=True), strict=True
    ):
        assert_same_logprobs(model, found, *row)
    for name, parameter in model.named_parameters():
        assert np.array_equal(ranks[0]["weights"][name], parameter.detach().numpy()), name
    assert ranks[0]["outputs"] == {}, "only the last stage has outputs"
    assert ranks[-1]["kept"] == ranks[-1]["sent"]
    assert ranks[-1]["trained"]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_checkpoints_go_from_virtual_stages_to_one_rank_and_back(model_dir, on_ranks, tmp_path):
    """With averages of the weights, in float32 and, to about the same losses, in bfloat16."""
    config = of_model(CONFIG, model_dir("llama_deep"))
    # A small step: of a gradient near 0, that is mostly rounding, Adam makes a complete one.
    optimizer = dataclasses.replace(config.optimizer, lr=0.005)
    ema = EmaConfig(enabled=True, decay=0.5)
    config = dataclasses.replace(config, optimizer=optimizer, ema=ema)
    losses, _, weights = train_transformers(config)
    (alone,) = on_ranks(train, "one rank", config, 2, None, tmp_path / "alone")
    half = dataclasses.replace(config, precision="bfloat16")
    runs = [
        Run(config, 2, None, tmp_path / "virtual"),
        Run(config, 2, tmp_path / "alone"),
        Run(half, 4),
    ]
    first, continued, rounded = zip(*on_ranks(train_runs, "pp2 x v2", runs), strict=True)
    assert alone.losses == pytest.approx(losses[:2], rel=TOLERANCE)
    assert first[-1].losses == pytest.approx(losses[:2], rel=TOLERANCE)
    assert continued[-1].losses == pytest.approx(losses[2:], rel=TOLERANCE)
    assert relative_error(as_tensors(continued[0].weights), weights) < 10 * TOLERANCE
    assert rounded[-1].losses == pytest.approx(losses, rel=0.05)
    (back,) = on_ranks(train_dtensor, "one rank", config, tmp_path / "virtual", None)
    assert back == pytest.approx(losses[2:], rel=TOLERANCE)
    averages = [saved_averages(tmp_path / name) for name in ("virtual", "alone")]
    assert relative_error(*averages) < 10 * TOLERANCE
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "virtual" / "hf")
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), first[0].weights[name]), name


def offloaded(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig
) -> list[float]:
    """The gradient norms of two steps, between which the device has none of the state."""
    with joined(context, parallel) as rank:
        worker = rank.worker(config)
        shard = rank.shard(config, worker, random_batch(LENGTHS))
        engine: Any = worker.engine
        norms = []
        for _ in range(2):
            (metrics,) = worker.train(shard, None, NllLoss())
            norms.append(metrics["policy/grad_norm"].value)
            engine.move_to_host()
            state = [*engine.resident_tensors(), *engine.parameters.values()]
            assert all(each.untyped_storage().nbytes() == 0 for each in state)
            engine.move_to_device()
    return norms


def test_all_chunks_are_offloaded(model_dir, on_ranks):
    config = of_model(CONFIG, model_dir("llama_deep"))
    _, norms, _ = train_transformers(config)
    for found in on_ranks(offloaded, "pp2 x v2", config):
        assert found == pytest.approx(norms[:2], rel=10 * TOLERANCE)


class _Recorder:
    """Timers of a schedule, which note the beginning of each forward (F) and backward (B)."""

    def __init__(self) -> None:
        self.order = ""

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        letter = {"forward-compute": "F", "backward-compute": "B"}.get(name, "")

        def start(*_: Any, **__: Any) -> None:
            self.order += letter

        return SimpleNamespace(start=start, stop=lambda *_, **__: None)


def executed(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig
) -> tuple[str, dict[str, float]]:
    """The order of forwards and backwards on a stage, and the metrics of its plan."""

    def loss(inputs: Any, outputs: TokenLogprobs) -> tuple[Tensor, None]:
        return -(outputs.logprobs * inputs.label_mask).sum(), None

    with joined(context, parallel) as rank:
        worker = rank.worker(config)
        shard = rank.shard(config, worker, random_batch(LENGTHS))
        recorder = _Recorder()
        engine: Any = worker.engine
        engine.chunks[0].config.timers = recorder
        rows = worker.rows(shard, shard.plan.spec)
        engine.run(map(rows.inputs, shard.plan.microbatches), loss, backward=True)
        plan = plan_batch(random_batch(LENGTHS)["length"], shard.plan.spec)
        assert len(plan.ranks[0]) == len(shard.plan.microbatches)
        return recorder.order, plan.metrics()


def order_of(stage: int, pp: int, vpp: int, num_microbatches: int) -> str:
    """The order in which Megatron-Core's schedule computes on a stage."""
    group = SimpleNamespace(size=lambda: pp, rank=lambda: stage)
    size = None if vpp == 1 else vpp
    communicator: Any = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=size)
    _, _, warmup, remaining = get_pp_rank_microbatches(
        num_microbatches, vpp, pp, p2p_communicator=communicator
    )
    return "F" * warmup + "FB" * remaining + "B" * warmup


def simulated(orders: list[str], vpp: int) -> tuple[float, list[float]]:
    """The idle share of the time of the stages, where a backward takes twice as long as a forward,
    and the most microbatches whose activations each stage has at a time.
    """
    pp = len(orders)
    last = pp * vpp - 1
    table = get_schedule_table(orders[0].count("F") // vpp, vpp, pp)
    remaining = []
    for stage, order in enumerate(orders):
        forwards = iter([("F", each, chunk * pp + stage) for each, chunk in table])
        backwards = iter([("B", each, (vpp - 1 - chunk) * pp + stage) for each, chunk in table])
        remaining.append([next(forwards if kind == "F" else backwards) for kind in order])
    ends: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * pp
    while any(remaining):
        for stage, tasks in enumerate(remaining):
            while tasks:
                kind, microbatch, virtual = tasks[0]
                before = ("F", microbatch, virtual - 1)
                if kind == "B":
                    before = ("B", microbatch, virtual + 1)
                    if virtual == last:
                        before = ("F", microbatch, virtual)
                if before[2] >= 0 and before not in ends:
                    break
                start = max(clocks[stage], ends.get(before, 0.0))
                clocks[stage] = start + (1.0 if kind == "F" else 2.0)
                ends[tasks.pop(0)] = clocks[stage]
    in_flight = []
    for order in orders:
        counts = np.cumsum([1 if kind == "F" else -1 for kind in order])
        in_flight.append(counts.max() / vpp)
    return 1 - 3 * orders[0].count("F") / max(clocks), in_flight


@pytest.mark.parametrize(("parallel", "vpp"), [("pp2 x v2", 2), ("pp2", 1)])
def test_the_bubble_in_the_metrics_is_that_of_the_schedule_that_ran(
    parallel, vpp, model_dir, on_ranks
):
    config = of_model(LAYOUTS["packed, 4 microbatches"], model_dir("llama_deep"))
    orders, metrics = zip(*on_ranks(executed, parallel, config), strict=True)
    num_microbatches = int(metrics[0]["packing/num_microbatches"])
    assert num_microbatches % 2 == 0 or vpp == 1
    assert list(orders) == [order_of(stage, 2, vpp, num_microbatches) for stage in (0, 1)]
    share, _ = simulated(list(orders), vpp)
    assert metrics[0]["packing/pipeline_bubble_share"] == pytest.approx(share)


@pytest.mark.parametrize(("pp", "vpp"), list(product((2, 4), (1, 2, 3))))
def test_the_plan_predicts_bubble_and_activations_of_the_schedule(pp, vpp):
    spec = PlanSpec(max_tokens=64, pp_size=pp, vpp_size=vpp, microbatch_multiple=pp)
    plan = plan_batch(np.full(8 * pp, 64), spec)
    assert plan.num_microbatches == 8 * pp
    orders = [order_of(stage, pp, vpp, plan.num_microbatches) for stage in range(pp)]
    share, in_flight = simulated(orders, vpp)
    assert plan.metrics()["packing/pipeline_bubble_share"] == pytest.approx(share)
    placement = Placement(parallel_layout=ParallelLayout(pp=pp, vpp=vpp), engine="megatron")
    memory = MemoryModel(ModelSpec.from_config(DEEP["llama_deep"][1]), placement)
    assert memory.num_in_flight(0) == pytest.approx(in_flight[0])
    assert memory.num_in_flight(pp - 1) == pytest.approx(in_flight[-1])
