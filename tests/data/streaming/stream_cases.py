"""Random rows and settings of streams, and checks of a planned step that do not use the planner."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import numpy as np
from hypothesis import strategies as st

from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.planning.plan import Microbatch
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.planner import PlannedStep
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec, Tail
from nemo_like.parallel_layout import Oversize, RowLayout


class Row(NamedTuple):
    length: int
    num_trained: int
    extra: int


@st.composite
def stream_specs(
    draw: st.DrawFn,
    num_ranks: st.SearchStrategy[int],
    oversize: tuple[Oversize, ...] = get_args(Oversize),
    tails: tuple[Tail, ...] = ("emit", "emit", "drop", "wrap"),
) -> StreamSpec:
    """Every layout, rule, policy and limit; padding multiples of cp, tp and the configuration."""
    layout: RowLayout = draw(st.sampled_from(["packed", "padded"]))
    multiple = draw(st.integers(1, 3))
    plan = PlanSpec(
        layout=layout,
        max_tokens=draw(st.integers(48, 160)),
        num_ranks=draw(num_ranks),
        algorithm=PackingAlgorithm.BEST_FIT_DECREASING,
        balance=draw(st.sampled_from(["flops", "tokens", "none"])),
        sync=draw(st.sampled_from(["microbatch", "step"])),
        microbatch_order=draw(st.sampled_from(["packer", "largest_first"])),
        sequence_length_round=draw(st.sampled_from([1, 1, 3, 4])),
        microbatch_length_round=draw(st.sampled_from([1, 1, 24])) if layout == "packed" else 1,
        cp_size=draw(st.sampled_from([1, 1, 2])),
        # With sequence parallelism the total multiple is above that of a row.
        tp_size=draw(st.sampled_from([1, 2, 4, 8])),
        sequence_parallel=draw(st.booleans()),
        microbatch_multiple=multiple,
        oversize=draw(st.sampled_from(oversize)),
    )
    return StreamSpec(
        plan=plan,
        selection=draw(st.sampled_from(get_args(Selection))),
        microbatches_per_step=multiple * draw(st.integers(1, 2)),
        window_rows=draw(st.integers(1, 24)),
        window_tokens=draw(st.none() | st.integers(0, 400)),
        tail=draw(st.sampled_from(tails)),
        max_rows=draw(st.none() | st.none() | st.integers(1, 6)),
        max_extra=draw(st.none() | st.none() | st.integers(1, 12)),
        count_mode=draw(st.sampled_from(["total", "total", "effective"])),
        physical_overflow_ratio=draw(st.sampled_from([1.0, 1.3, 2.0])),
        warmup_steps=draw(st.sampled_from([0, 0, 3])),
        warmup_init_tokens=draw(st.integers(1, 60)),
    )


@st.composite
def stream_rows(draw: st.DrawFn, max_rows: int) -> list[Row]:
    """Few rows of drawn lengths, or up to `max_rows` of a distribution."""
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 60) | st.integers(1, 220), max_size=14))
    else:
        generator = np.random.default_rng(draw(st.integers(0, 2**16)))
        scale = draw(st.sampled_from([5, 30, 90]))
        lengths = generator.lognormal(np.log(scale), 0.8, draw(st.integers(0, max_rows)))
        lengths = np.clip(lengths, 1, 260).astype(int).tolist()
    share = draw(st.sampled_from([0, 1, 2, 3]))
    rows = []
    for number, length in enumerate(lengths):
        # Trained tokens between none and all, and a second resource, without long draws.
        num_trained = length * ((number + share) % 4) // 3
        rows.append(Row(length, num_trained, (number * share) % 7))
    return rows


def multiples(spec: StreamSpec) -> tuple[int, int]:
    """Multiples of a row and of a microbatch, by the formulas of docs/planner.md."""
    plan = spec.plan
    total = 2 * plan.cp_size if plan.cp_size > 1 else 1
    row = math.lcm(plan.sequence_length_round, total)
    if plan.sequence_parallel and plan.tp_size > 1:
        total = math.lcm(total, plan.cp_size * plan.tp_size)
    # Every padded row has the size of the microbatch, so both multiples apply to it.
    if plan.layout == "padded":
        return math.lcm(row, total), total
    return row, math.lcm(total, plan.microbatch_length_round)


def token_limit(spec: StreamSpec, step: int) -> int:
    limit = spec.plan.max_tokens or 0
    if step >= spec.warmup_steps:
        return limit
    first = min(spec.warmup_init_tokens, limit)
    return first + math.floor((limit - first) * step / spec.warmup_steps)


def max_positions(spec: StreamSpec, tokens: int) -> int:
    if spec.count_mode == "total":
        return tokens
    return math.ceil(tokens * spec.physical_overflow_ratio)


def is_window_ready(spec: StreamSpec, step: int, lengths: list[int]) -> bool:
    """True if a window of rows of `lengths` has enough of them for a microbatch of `step`."""
    plan = spec.plan
    row, total = multiples(spec)
    limit = max(max_positions(spec, token_limit(spec, step)) // total, 1) * total
    size = sum(-(-length // row) * row for length in lengths)
    if len(lengths) >= plan.num_ranks * spec.window_rows:
        seeks_similar = plan.layout == "padded" and spec.selection not in ("first_fit", "in_order")
        has_max_rows = spec.max_rows is not None and len(lengths) >= spec.max_rows
        if spec.window_tokens == 0 or has_max_rows or size >= (4 if seeks_similar else 1) * limit:
            return True
    min_tokens = spec.window_tokens
    if min_tokens is None:
        min_tokens = (4 if plan.layout == "packed" else 16) * limit
    return min_tokens > 0 and size >= plan.num_ranks * min_tokens


def max_row_length(spec: StreamSpec) -> int:
    """Largest length of a row that is not oversize."""
    row, total = multiples(spec)
    positions = max_positions(spec, spec.plan.max_tokens or 0)
    return positions // total * total // row * row


def with_policy(rows: list[Row], spec: StreamSpec) -> list[Row]:
    """Without rows above the limit if these are an error."""
    if spec.plan.oversize != "error":
        return rows
    limit = max_row_length(spec)
    return [Row(min(row.length, limit), min(row.num_trained, limit), row.extra) for row in rows]


def check_step(spec: StreamSpec, step: PlannedStep, row_of: dict[int, Row]) -> None:
    """Check the invariants of one step of `spec.plan.num_ranks` ranks."""
    plan = step.plan
    assert len(set(step.rows)) == len(step.rows)
    assert plan.num_steps == 1
    assert len(plan.ranks) == spec.plan.num_ranks
    assert plan.num_microbatches % spec.plan.microbatch_multiple == 0
    assert plan.num_microbatches <= spec.microbatches_per_step
    planned = [row for rank in plan.ranks for microbatch in rank for row in microbatch.rows]
    assert sorted(planned) == list(range(len(step.rows)))
    for rank in plan.ranks:
        assert len(rank) == plan.num_microbatches
        for microbatch in rank:
            rows = [row_of[step.rows[row]] for row in microbatch.rows]
            check_microbatch(spec, step.step, microbatch, rows)


def check_microbatch(spec: StreamSpec, step: int, microbatch: Microbatch, rows: list[Row]) -> None:
    row_multiple, total_multiple = multiples(spec)
    limit = max_row_length(spec)
    for row, length, padded in zip(
        rows, microbatch.lengths, microbatch.padded_lengths, strict=True
    ):
        is_truncated = spec.plan.oversize == "truncate" and row.length > limit
        assert length == (limit if is_truncated else row.length)
        assert padded >= length
        assert padded % row_multiple == 0
    assert microbatch.num_tokens % total_multiple == 0
    if not rows:
        return
    sizes = [-(-length // row_multiple) * row_multiple for length in microbatch.lengths]
    if spec.plan.layout == "padded":
        assert set(microbatch.padded_lengths) == {max(sizes)}
        assert microbatch.num_tokens == len(sizes) * max(sizes)
    else:
        assert list(microbatch.padded_lengths) == sizes
        assert microbatch.num_tokens == -(-sum(sizes) // total_multiple) * total_multiple
    if len(rows) == 1:
        assert spec.plan.oversize == "singleton" or microbatch.lengths[0] <= limit
        return
    tokens = token_limit(spec, step)
    # The smallest microbatch has one multiple, also where a warm-up begins below it.
    assert microbatch.num_tokens <= max(max_positions(spec, tokens), total_multiple)
    assert spec.max_rows is None or len(rows) <= spec.max_rows
    assert spec.max_extra is None or sum(row.extra for row in rows) <= spec.max_extra
    if spec.count_mode == "effective":
        assert trained_of(rows, limit, spec) <= tokens


def trained_of(rows: list[Row], limit: int, spec: StreamSpec) -> int:
    """Trained tokens; those of a truncated row are at most its remaining tokens."""
    if spec.plan.oversize != "truncate":
        return sum(row.num_trained for row in rows)
    return sum(min(row.num_trained, limit) for row in rows)


def check_metrics(step: PlannedStep) -> None:
    """Check the metrics of a step against its microbatches."""
    metrics = step.metrics()
    num_bins = [microbatch for rank in step.plan.ranks for microbatch in rank]
    assert metrics["packing/num_rows"] == len(step.rows)
    assert metrics["packing/num_microbatches"] == step.plan.num_microbatches
    assert metrics["packing/num_dummies"] == sum(not microbatch.rows for microbatch in num_bins)
    assert metrics["packing/num_deferred"] == step.num_deferred
    positions = sum(microbatch.num_tokens for microbatch in num_bins)
    real = sum(sum(microbatch.lengths) for microbatch in num_bins)
    share = metrics["packing/padding_share"]
    assert math.isclose(share, 1 - real / positions if positions else 0.0, abs_tol=1e-12)
    for name in ("packing/rank_imbalance_tokens", "packing/rank_imbalance_flops"):
        assert metrics[name] >= 1 - 1e-9
    assert all(math.isfinite(value) for value in metrics.values())
