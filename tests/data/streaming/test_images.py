"""Streams of rows with images: their size has the activations of the vision tower."""

from __future__ import annotations

import json
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.planner import StreamingPlanner, plan_stream, stream_steps
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec

LIMIT = 64


def random_rows(seed: int, num_rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Lengths int64 [B], and image tokens and FLOPs int64 [B, 2]; about half have images."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 25, num_rows) * rng.integers(0, 2, num_rows)
    lengths = tokens + rng.integers(1, 25, num_rows)
    return lengths, np.stack([tokens, 10_000 * tokens], axis=1)


def spec_of(selection: Selection, weight: float) -> StreamSpec:
    plan = PlanSpec(max_tokens=LIMIT, num_ranks=2, image_weight=weight)
    return StreamSpec(plan=plan, selection=selection, window_rows=6, microbatches_per_step=2)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(get_args(Selection)), st.sampled_from([0.4, 1.6]))
def test_no_microbatch_exceeds_the_weighted_limit(
    seed: int, selection: Selection, weight: float
) -> None:
    lengths, images = random_rows(seed)
    spec = spec_of(selection, weight)
    seen = []
    for step in stream_steps(lengths, StreamingPlanner(spec), images=images):
        ids = np.array(step.rows)
        microbatches = list(zip(*step.plan.ranks, strict=True))
        for ranks in microbatches:
            own = [ids[list(each.rows)] for each in ranks]
            for rows in own:
                sizes = [lengths[row] + math.ceil(weight * images[row, 0]) for row in rows]
                # A row above the limit is alone.
                assert sum(sizes) <= LIMIT or len(rows) == 1
            has_images = any(images[rows, 0].any() for rows in own)
            assert [each.has_images for each in ranks] == [has_images] * 2
        seen += step.rows
    assert sorted(seen) == list(range(len(lengths)))


def test_a_stream_continues_from_its_state_with_the_same_sizes() -> None:
    lengths, images = random_rows(3)
    spec = spec_of("best_fit", 1.6)
    expected = [step.rows for step in stream_steps(lengths, StreamingPlanner(spec), images=images)]
    planner = StreamingPlanner(spec)
    found = []
    for row, (length, own) in enumerate(zip(lengths.tolist(), images.tolist(), strict=True)):
        planner.push(row, length, images=tuple(own))
        state = json.loads(json.dumps(planner.state_dict()))
        planner = StreamingPlanner(spec)
        planner.load_state_dict(state)
        while (step := planner.next_step()) is not None:
            found.append(step.rows)
    planner.close()
    while (step := planner.next_step()) is not None:
        found.append(step.rows)
    assert found == expected


def test_the_plan_of_a_stream_has_the_work_of_the_tower() -> None:
    lengths, images = random_rows(0)
    plan_spec = spec_of("best_fit", 1.6)
    plan = plan_stream(lengths, plan_spec, images=images)
    assert plan.image_work is not None and plan.image_tokens is not None
    assert plan.image_tokens.tolist() == images[plan.rows, 0].tolist()
    step = next(stream_steps(lengths, StreamingPlanner(plan_spec), images=images))
    ids = np.array(step.rows)
    by_rank = [images[ids[step.plan.rows_of_rank(rank)], 1].sum() for rank in range(2)]
    expected = max(by_rank) / np.mean(by_rank)
    assert step.metrics()["packing/rank_imbalance_vision"] == pytest.approx(expected)


def test_without_images_a_stream_is_planned_as_before() -> None:
    lengths, _ = random_rows(1)
    plain = plan_stream(lengths, spec_of("best_fit", 0.0))
    zeros = np.zeros((len(lengths), 2), dtype=np.int64)
    assert "image" not in plain.to_json()
    weighted = plan_stream(lengths, spec_of("best_fit", 1.6), images=zeros)
    assert weighted.rows.tolist() == plain.rows.tolist()
