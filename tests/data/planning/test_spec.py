"""What a spec derives and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.data.planning.plan import PlanSpec, plan_batch


def test_worked_example_with_context_and_sequence_parallelism() -> None:
    spec = PlanSpec(max_tokens=64, cp_size=2, tp_size=4, sequence_parallel=True)
    assert (spec.row_multiple, spec.total_multiple, spec.dummy_tokens) == (4, 8, 8)
    (microbatch,) = plan_batch([5, 3, 4], spec).ranks[0]
    assert dict(zip(microbatch.rows, microbatch.padded_lengths, strict=True)) == {0: 8, 1: 4, 2: 4}
    assert microbatch.num_tokens == 16
    padded = replace(spec, layout="padded")
    assert padded.row_multiple == 8 and plan_batch([5, 3, 4], padded).ranks[0][0].num_tokens == 24


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "the packed layout needs max_tokens"),
        ({"layout": "padded"}, r"max_tokens \(a token budget\) or max_rows"),
        ({"layout": "jagged", "max_tokens": 8}, "layout is one of packed, padded; got 'jagged'"),
        ({"max_tokens": 8, "max_rows": 2}, "max_rows applies to the padded layout"),
        ({"max_tokens": 8, "num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        (
            {"max_tokens": 6, "cp_size": 2, "sequence_length_round": 3},
            "train_mb_tokens is 6, .* multiples of 12 .* at least 12",
        ),
        ({"max_tokens": 8, "balance": "none"}, "algorithm balanced assigns rows to ranks by work"),
        ({"max_tokens": 8, "algorithm": "best"}, "algorithm is 'best'; it must be one of"),
    ],
)
def test_a_spec_that_is_inconsistent_is_refused_with_the_reason(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PlanSpec(**values)  # type: ignore[arg-type]
