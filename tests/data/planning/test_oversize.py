"""Rows and groups above the cap under each policy, and the checks of lengths and groups."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.planning.plan import BatchPlan, Microbatch, PlanSpec, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts


def microbatches(plan: BatchPlan) -> list[Microbatch]:
    return [microbatch for rank in plan.ranks for microbatch in rank]


def test_an_oversize_row_is_an_error_by_default() -> None:
    for layout, key in (("packed", "sequence_packing"), ("padded", "dynamic_batching")):
        spec = PlanSpec(layout=layout, max_tokens=16, sequence_length_round=4)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError,
            match=rf"row 1 has 18 tokens \(20 rounded .* policy.{key}.train_mb_tokens = 16; raise",
        ):
            plan_batch([3, 18, 5], spec)


def test_an_oversize_row_is_cut_run_alone_or_left_out_with_a_warning() -> None:
    for layout in ("packed", "padded"):
        spec = PlanSpec(layout=layout, max_tokens=18, sequence_length_round=4, oversize="truncate")  # type: ignore[arg-type]
        with pytest.warns(OversizeWarning, match="row 1 has 20 tokens"):
            cut = plan_batch([3, 20, 5], spec)
        assert {
            row: n for m in microbatches(cut) for row, n in zip(m.rows, m.lengths, strict=True)
        } == {0: 3, 1: 16, 2: 5}
        assert cut.num_truncated == cut.num_oversize == 1
        with pytest.warns(OversizeWarning, match="they run alone"):
            alone = plan_batch([3, 20, 5], replace(spec, oversize="singleton"))
        assert Microbatch((1,), (20,), (20,), 20) in microbatches(alone)
        assert (
            alone.metrics()["packing/num_oversize"] == 1
            and alone.metrics()["packing/utilization"] <= 1
        )
        with pytest.warns(OversizeWarning, match="they are left out"):
            without = plan_batch([3, 20, 5], replace(spec, oversize="drop"))
        assert without.dropped == (1,)


def test_a_plan_has_its_warning_beside_its_value() -> None:
    spec = PlanSpec(max_tokens=16, oversize="singleton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_batch([3, 20, 5], spec, warn=False)
        assert plan_batch([3, 16, 5], spec).oversize_warning == ""
    assert plan.oversize_warning == (
        "row 1 has 20 tokens: above policy.sequence_packing.train_mb_tokens = 16; they run alone,"
        " above the budget"
    )
    assert BatchPlan.from_json(plan.to_json()) == plan
    assert "oversize_warning" not in plan.to_json()


def test_one_warning_of_rows_that_are_planned_without_and_with_prefixes() -> None:
    # One common token of twenty saves too little work for `auto`.
    counts = TokenCounts(np.array([20, 20]), prefixes=SharedPrefixes.of_groups([0, 0], [1, 1]))
    spec = PlanSpec(max_tokens=16, oversize="singleton")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_batch(counts, spec, shared_prefix="auto")
    assert plan.shared is None
    assert [str(each.message) for each in caught] == [plan.oversize_warning]
    assert caught[0].filename == __file__


def test_a_step_whose_rows_are_all_left_out_still_runs() -> None:
    with pytest.warns(OversizeWarning):
        plan = plan_batch(
            [30, 40, 5, 6],
            PlanSpec(max_tokens=16, num_ranks=2, global_batch_size=2, oversize="drop"),
        )
    assert plan.step_offsets[1] == 1 and all(rank[0].is_dummy for rank in plan.ranks)


def test_a_pair_above_the_cap_together_is_treated_as_one() -> None:
    lengths, pairs = [12, 9, 3, 4], [0, 0, 1, 1]
    spec = PlanSpec(max_tokens=16)
    with pytest.raises(
        ValueError, match="row 0 has 12 tokens in a group that must share a microbatch"
    ):
        plan_batch(lengths, spec, pairs)
    with pytest.warns(OversizeWarning):
        cut = plan_batch(lengths, replace(spec, oversize="truncate"), pairs)
    assert Microbatch((0, 1), (8, 8), (8, 8), 16) in microbatches(cut)
    with pytest.warns(OversizeWarning):
        assert plan_batch(lengths, replace(spec, oversize="drop"), pairs).dropped == (0, 1)
    with pytest.raises(
        ValueError, match=r"rows 0, 1, 2 are one group .* even truncated to 8 tokens"
    ):
        plan_batch(
            [9, 9, 9],
            PlanSpec(max_tokens=16, sequence_length_round=8, oversize="truncate"),
            [0, 0, 0],
        )


def test_a_group_that_no_truncation_fits_names_the_usable_limit() -> None:
    # Rows of multiples of 12 in microbatches of multiples of 20: 40 of 48 tokens.
    spec = PlanSpec(max_tokens=48, sequence_length_round=3, microbatch_length_round=5, cp_size=2)
    with pytest.raises(ValueError, match=r"truncated to 12 tokens .* = 48 \(usable: 40\)"):
        plan_batch([1] * 4, replace(spec, oversize="truncate"), [0] * 4)


def test_a_group_must_fit_a_step_and_a_microbatch() -> None:
    with pytest.raises(
        ValueError, match="group 5 has rows 1 and 2, of two optimizer steps of 2 rows"
    ):
        plan_batch([3, 3, 3], PlanSpec(max_tokens=16, global_batch_size=2), [4, 5, 5])
    with pytest.raises(ValueError, match="group 4 has 3 rows, more than the 2 of a microbatch"):
        plan_batch([3, 3, 3], PlanSpec(layout="padded", max_rows=2), [4, 4, 4])
    with pytest.raises(ValueError, match=r"one id per row; got shape \(2,\) for 3 rows"):
        plan_batch([3, 3, 3], PlanSpec(max_tokens=16), [4, 4])


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="row 1 has length 0"):
        plan_batch([3, 0], PlanSpec(max_tokens=16))
    with pytest.raises(ValueError, match="one list of integers"):
        plan_batch([3.5], PlanSpec(max_tokens=16))  # type: ignore[list-item]
