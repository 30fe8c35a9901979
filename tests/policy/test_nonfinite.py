"""Steps with a loss or gradients that are not finite are skipped, equally on every rank of both
engines.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig, SchedulerConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import ClippedPolicyGradientLoss, LossInputs, NllLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.loss_step import row_loss_sums
from nemo_like.policy.optim import LARGEST, NonFiniteError, all_within, clip_factor
from nemo_like.policy.worker import PolicyWorker
from tests.exhaustive import usually
from tests.policy.megatron.ranks import joined, meeting_in, of_model, open_pool
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS
from tests.policy.tiny import random_batch, run_ranks, saved_tensors

CONFIG = dataclasses.replace(
    LAYOUTS["packed, 2 microbatches"],
    optimizer=OptimizerConfig(lr=0.02, weight_decay=0.5),
    scheduler=SchedulerConfig(kind="linear", decay_steps=10),
)
BAD_ROW = 3
LOSS = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig())
PLACES: dict[str, tuple[str, int, ParallelConfig]] = {
    "dtensor, one rank": ("dtensor", 1, ParallelConfig()),
    "dtensor, tp2 x cp2": ("dtensor", 4, ParallelConfig(tensor=2, context=2)),
    "dtensor, dp2": ("dtensor", 2, ParallelConfig()),
    "megatron, pp2 x dp2": ("megatron", 4, ParallelConfig(pipeline=2)),
    "megatron, tp2 x cp2": ("megatron", 4, ParallelConfig(tensor=2, context=2)),
}


def with_advantage(value: float) -> BatchedDataDict:
    """A batch of which one row has this advantage."""
    batch = random_batch(LENGTHS)
    batch["advantages"][BAD_ROW] = value
    return batch


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    dp_rank: int
    is_output_rank: bool
    rows: list[int]
    """Rows of the batch in this rank's shard, in its order."""
    metrics: dict[str, list[dict[str, float]]]
    skipped: dict[str, list[Any]]
    message: str
    save_message: str


def program(
    context: WorkerContext, engine: str, parallel: ParallelConfig, config: PolicyConfig, out: Path
) -> Outcome:
    """A good step, skipped ones, a good step; then a step that makes the weights infinite."""
    if engine == "megatron":
        with joined(context, parallel) as rank:
            return check(rank.worker(config), context, rank.parallel_layout, config, out)
    try:
        worker = DTensorPolicyWorker(context, config=config, start=PolicyStart(parallel=parallel))
        parallel_layout = build_layout(parallel, context.world_size)
        return check(worker, context, parallel_layout, config, out)
    finally:
        process_groups.destroy()


def check(
    worker: PolicyWorker,
    context: WorkerContext,
    parallel_layout: ParallelLayout,
    config: PolicyConfig,
    out: Path,
) -> Outcome:
    spec = plan_spec(
        config, purpose="train", parallel_layout=parallel_layout, model=load_spec(config.model_name)
    )
    plan = plan_batch(np.array(LENGTHS), spec)
    dp_rank = parallel_layout.dp_rank(context.rank)
    metrics, skipped = {}, {}

    def step(name: str, batch: BatchedDataDict) -> None:
        results = worker.train(batch.shard(plan)[dp_rank], None, LOSS)
        metrics[name] = [metric_values(result) for result in results]
        skipped[name] = worker.skipped_steps()

    step("first", random_batch(LENGTHS))
    worker.save(out / "before")
    step("loss", with_advantage(math.inf))
    step("gradient", with_advantage(1e30))
    worker.save(out / "after")
    step("second", random_batch(LENGTHS))
    worker.save(out / "continued")
    worker.load(out / "before")
    step("control", random_batch(LENGTHS))
    worker.save(out / "control")
    worker.config = dataclasses.replace(config, optimizer=OptimizerConfig(lr=1e38))
    with pytest.raises(NonFiniteError) as raised:
        step("huge", random_batch(LENGTHS))
    with pytest.raises(NonFiniteError) as refused:
        worker.save(out / "refused")
    return Outcome(
        dp_rank=dp_rank,
        is_output_rank=parallel_layout.output_rank(dp_rank) == context.rank,
        rows=plan.rows_of_rank(dp_rank).tolist(),
        metrics=metrics,
        skipped=skipped,
        message=str(raised.value),
        save_message=str(refused.value),
    )


@pytest.fixture(scope="module")
def pool():
    with open_pool() as ranks:
        yield ranks


@pytest.mark.parametrize(
    "place", usually(PLACES, "dtensor, one rank", "dtensor, dp2", "megatron, pp2 x dp2")
)
def test_a_step_that_is_not_finite_is_skipped_on_every_rank(place, model_dir, pool, tmp_path):
    engine, world_size, parallel = PLACES[place]
    config = of_model(CONFIG, model_dir("qwen3"))
    ranks = run_ranks(
        pool, program, world_size, meeting_in(tmp_path), engine, parallel, config, tmp_path
    )
    for rank in ranks:
        found = {
            name: [step.get("policy/skipped_steps") for step in steps]
            for name, steps in rank.metrics.items()
        }
        assert found == {
            "first": [0.0],
            "loss": [1.0],
            "gradient": [1.0],
            "second": [0.0],
            "control": [0.0],
        }
        assert rank.metrics["loss"][0]["policy/lr"] == rank.metrics["second"][0]["policy/lr"], (
            "the schedule stands still"
        )
        assert math.isnan(rank.metrics["loss"][0]["policy/grad_norm"])
        assert "policy.optimizer.lr (now 1e+38)" in rank.message
        assert "not finite" in rank.save_message
    assert not (tmp_path / "refused").exists(), "a checkpoint of weights that are not finite"
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        before, after, continued, control = (
            saved_tensors(tmp_path / name, kind)
            for name in ("before", "after", "continued", "control")
        )
        for name in before:
            assert torch.equal(before[name], after[name]), (
                f"{kind} {name} was changed by a skipped step"
            )
            assert torch.equal(continued[name], control[name]), (
                f"{kind} {name} depends on the skipped steps"
            )
    losses, losses_of_large = {}, {}
    for rank in ranks:
        if rank.is_output_rank:
            losses |= {
                rank.rows[row]: loss for row, loss in rank.skipped["loss"][0].row_losses.items()
            }
            losses_of_large |= {
                rank.rows[row]: loss for row, loss in rank.skipped["gradient"][0].row_losses.items()
            }
            assert rank.skipped["second"] == []
    assert sorted(losses) == list(range(len(LENGTHS)))
    assert [row for row, loss in losses.items() if not math.isfinite(loss)] == [BAD_ROW]
    assert all(map(math.isfinite, losses_of_large.values())), "here the gradient alone is too large"
    assert max(losses_of_large, key=lambda row: abs(losses_of_large[row])) == BAD_ROW


@given(st.floats(allow_nan=True), st.floats(0, 1e30))
def test_applied_gradients_have_squares_that_are_finite_in_float32(norm, max_norm):
    norm = abs(norm)
    factor = clip_factor(norm, max_norm)
    if factor is None:
        assert not math.isfinite(np.float32(norm) ** 2) or norm > 1.8e19
        return
    assert 0 <= factor <= 1
    assert math.isfinite(np.float32(norm * factor) ** 2)
    assert not 0 < max_norm < norm or norm * factor <= max_norm * (1 + 1e-9)


@given(
    st.lists(st.floats(width=32), min_size=0, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_within_finds_what_isfinite_finds_and_what_is_too_large(values, dtype):
    tensor = torch.tensor(values, dtype=torch.float32).to(dtype)
    tensors = [torch.ones(3, 2), tensor, torch.empty(0)]
    assert all_within(tensors) == bool(tensor.isfinite().all())
    assert all_within(tensors, LARGEST) == all(abs(value) <= LARGEST for value in tensor.tolist())


@given(data=st.data())
def test_row_losses_add_up_to_the_loss_of_the_microbatch(data):
    num_rows, num_tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    row_ids = torch.from_numpy(rng.integers(0, num_rows, num_tokens))
    mask = torch.from_numpy(rng.random(num_tokens) < 0.7)
    inputs = LossInputs(
        policy_logprobs=torch.from_numpy(rng.normal(-3, 1, num_tokens).astype(np.float32)),
        token_mask=mask,
        row_ids=row_ids,
        row_num_tokens=torch.bincount(row_ids[mask], minlength=num_rows).float(),
        columns={},
    )
    for normalization in ("token", "sequence"):
        loss = NllLoss(normalization=normalization)
        assert sum(row_loss_sums(loss, inputs)) == pytest.approx(
            float(loss(inputs).loss_sum), rel=1e-5, abs=1e-6
        )
    if mask.any():
        bad = int(mask.nonzero()[0])
        inputs.policy_logprobs[bad] = -math.inf
        sums = row_loss_sums(NllLoss(), inputs)
        assert [row for row, value in enumerate(sums) if not math.isfinite(value)] == [
            int(row_ids[bad])
        ]
