"""Dynamic batches of VeOmni as a configuration of the streaming planner: the observed examples,
and the cases in which the reference is defective.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.planner import PlannedStep, StreamingPlanner
from nemo_like.data.streaming.spec import StreamSpec, WarmupBudget
from nemo_like.torch_data.packed_batch import count_supervised_tokens
from nemo_like.torch_data.packed_collate import PackingCollator, pack_length


def dyn_bsz(max_tokens: int, num_ranks: int = 1, **settings: Any) -> StreamSpec:
    """Settings of `dyn_bsz`: packed microbatches by first-fit, rows above the limit dropped."""
    plan = PlanSpec(max_tokens=max_tokens, num_ranks=num_ranks, oversize="drop")
    return StreamSpec(plan=plan, selection="first_fit", **settings)


def steps_of(
    planner: StreamingPlanner, lengths: list[int], trained: list[int] | None = None
) -> list[PlannedStep]:
    """All steps of a stream, each as soon as it is ready."""
    steps = []
    for row, length in enumerate(lengths):
        planner.push(row, length, None if trained is None else trained[row])
        while (step := planner.next_step()) is not None:
            steps.append(step)
    planner.close()
    while (step := planner.next_step()) is not None:
        steps.append(step)
    return steps


@pytest.mark.filterwarnings(f"ignore::{OversizeWarning.__module__}.{OversizeWarning.__name__}")
def test_batches_of_a_stream_with_growing_lengths() -> None:
    # A row of each length from 1 to 50; the reference emits a batch from 10 waiting rows on.
    planner = StreamingPlanner(dyn_bsz(32, window_rows=10, window_tokens=0))
    steps = steps_of(planner, list(range(1, 51)))
    batches = [[row + 1 for row in step.rows] for step in steps]
    assert batches[:5] == [list(range(1, 8)), [8, 9, 10], [11, 12], [13, 14], [15, 16]]
    assert [sum(batch) for batch in batches[:5]] == [28, 27, 23, 27, 31]
    # Rows of 17 tokens and more are alone, rows of more than 32 are dropped and counted.
    assert batches[5:] == [[length] for length in range(17, 33)]
    assert planner.counts.num_dropped == 18


def test_rows_below_the_limit_of_the_window_are_drained_at_the_end() -> None:
    planner = StreamingPlanner(dyn_bsz(8, window_rows=200))
    steps = steps_of(planner, [3, 3, 3])
    assert [step.rows for step in steps] == [(0, 1), (2,)]


def test_a_full_budget_needs_no_minimum_number_of_rows() -> None:
    # The reference waits for 200 rows although one batch is full.
    planner = StreamingPlanner(dyn_bsz(8, window_rows=200, window_tokens=8))
    planner.push(0, 8)
    step = planner.next_step()
    assert step is not None and step.rows == (0,)


def test_rows_without_supervised_tokens_do_not_exceed_the_physical_limit() -> None:
    # The reference emits 36 tokens against a limit of 8.
    spec = dyn_bsz(5, count_mode="effective", physical_overflow_ratio=1.5, window_tokens=40)
    steps = steps_of(StreamingPlanner(spec), [4] * 9, [0] * 9)
    sizes = [batch.num_tokens for step in steps for rank in step.plan.ranks for batch in rank]
    assert sum(sizes) == 36
    assert max(sizes) <= 8


@pytest.mark.parametrize(
    ("count_mode", "ratio", "lengths", "batches"),
    [
        ("total", 1.5, [4, 4], [[0], [1]]),
        ("effective", 2.0, [4, 4], [[0, 1]]),
        ("effective", 1.5, [3, 3, 3], [[0, 1], [2]]),
        # The second row fits the budget, but not the physical limit of 8.
        ("effective", 2.0, [6, 6, 2], [[0, 2], [1]]),
    ],
)
def test_the_budget_counts_all_tokens_or_those_with_loss_up_to_the_physical_limit(
    count_mode: str, ratio: float, lengths: list[int], batches: list[list[int]]
) -> None:
    ratios: dict[str, Any] = {"physical_overflow_ratio": ratio} if count_mode == "effective" else {}
    spec = dyn_bsz(4, count_mode=count_mode, window_rows=8, window_tokens=0, **ratios)
    steps = steps_of(StreamingPlanner(spec), lengths, [2] * len(lengths))
    assert [list(step.rows) for step in steps] == batches


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 30), st.integers(0, 40))
def test_the_warmup_of_the_planner_is_that_of_the_budget(
    max_tokens: int, init_tokens: int, num_steps: int, step: int
) -> None:
    spec = dyn_bsz(max_tokens, warmup_steps=num_steps, warmup_init_tokens=init_tokens)
    budget = WarmupBudget(max_tokens, min(init_tokens, max_tokens), num_steps)
    assert spec.limits(step).max_tokens == budget.at(step)


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=40),
    num_ranks=st.integers(1, 3),
    micro_batch_size=st.integers(1, 3),
)
def test_planned_microbatches_fit_the_inferred_pad_length(
    lengths: list[int], num_ranks: int, micro_batch_size: int
) -> None:
    max_tokens = pack_length(micro_batch_size, max_seq_len=16)
    collator = PackingCollator(pad_to_length=max_tokens)
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]
    # The first token of a row is not predicted.
    trained = [length - 1 for length in lengths]
    spec = dyn_bsz(max_tokens, num_ranks, window_rows=4, microbatches_per_step=2)
    seen: list[int] = []
    for step in steps_of(StreamingPlanner(spec), lengths, trained):
        batches = []
        for microbatch in chain.from_iterable(step.plan.ranks):
            ids = [step.rows[row] for row in microbatch.rows]
            seen += ids
            batches.append(collator([rows[row] for row in ids]) if ids else collator.dummy())
        assert len({len(rank) for rank in step.plan.ranks}) == 1
        assert all(batch["input_ids"].shape == (1, max_tokens) for batch in batches)
        assert count_supervised_tokens(batch["labels"] for batch in batches) == step.num_trained
    assert sorted(seen) == list(range(len(lengths)))
