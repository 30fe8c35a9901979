"""The invariants in `balance`'s docstring as properties, compiled and interpreted, and how
balanced schedules are.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.packing.algorithms import get_packer
from nemo_like.data.packing.balance import assign_bins, schedule
from nemo_like.data.packing.bounds import l2_bound, lockstep_bound
from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.spec import CostModel

SYNCS = pytest.mark.parametrize("sync", ["microbatch", "step"])


def planned(
    lengths: Any, max_tokens: int, num_ranks: int, work: np.ndarray | None = None, **options: Any
) -> Packing:
    values = np.array(lengths, dtype=np.int64)
    work = CostModel().of(values) if work is None else work
    return schedule(values, max_tokens, num_ranks, work=work, **options)


def by_rank(step: Packing, num_ranks: int) -> list[list[list[int]]]:
    bins = step.bins()
    count = len(bins) // num_ranks
    return [bins[rank * count : (rank + 1) * count] for rank in range(num_ranks)]


def stats(step: Packing, lengths: np.ndarray, max_tokens: int, num_ranks: int) -> dict[str, float]:
    """Work of the max-loaded rank and of all microbatches, over simple and over best bounds."""
    work = CostModel().of(lengths)
    bin_work = step.loads(work).reshape(num_ranks, -1)
    floor = max(work.sum() / num_ranks, work.max())
    lockstep = bin_work.max(axis=0).sum()
    bound = lockstep_bound(lengths, work, max_tokens, num_ranks, bin_work.shape[1])
    return {
        "rank_imbalance": bin_work.sum(axis=1).max() / floor,
        "lockstep_ratio": lockstep / floor,
        "lockstep_over_bound": lockstep / max(floor, bound),
    }


@st.composite
def cases(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 60) -> dict[str, Any]:
    """Arguments of `schedule`: all settings, short and long rows."""
    max_tokens = draw(st.integers(8, 100))
    num_rows = draw(st.integers(min_rows, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    longest = draw(st.sampled_from([8, max_tokens]))
    arguments: dict[str, Any] = {
        "lengths": rng.integers(1, longest + 1, num_rows),
        "max_tokens": max_tokens,
        "num_ranks": draw(st.integers(1, 9)),
        "sync": draw(st.sampled_from(["microbatch", "step"])),
        "microbatch_multiple": draw(st.integers(1, 3)),
    }
    if draw(st.booleans()):
        arguments["work"] = rng.random(num_rows) * draw(st.sampled_from([0.0, 1.0, 1e12]))
    return arguments


def assert_invariants(step: Packing, arguments: dict[str, Any]) -> None:
    lengths = arguments["lengths"]
    num_rows, num_ranks = len(lengths), arguments["num_ranks"]
    sizes = np.diff(step.offsets)
    assert sorted(step.perm.tolist()) == list(range(num_rows))
    assert step.offsets[0] == 0 and step.offsets[-1] == num_rows and (sizes >= 0).all()
    assert (step.loads(lengths) <= arguments["max_tokens"]).all()
    # Every rank has the same number of bins, a multiple, at least the minimum.
    count, rest = divmod(len(sizes), num_ranks)
    assert rest == 0 and count % arguments.get("microbatch_multiple", 1) == 0
    assert len(sizes) >= (l2_bound(lengths, arguments["max_tokens"]) if num_rows else 0)
    # No bin is empty unless there are fewer rows than bins.
    assert np.count_nonzero(sizes) == min(num_rows, len(sizes))
    # The bins of a rank are sorted by decreasing work.
    work = arguments.get("work", CostModel().of(lengths))
    bin_work = step.loads(work).reshape(num_ranks, -1)
    tolerance = 1e-9 * work.sum() + 1e-9
    assert (np.diff(bin_work, axis=1) <= tolerance).all()


@given(arguments=cases())
@settings(max_examples=150, deadline=None)
def test_every_interpreted_schedule_satisfies_the_invariants(arguments: dict[str, Any]) -> None:
    assert_invariants(planned(**arguments), arguments)


@given(arguments=cases(128, 200))
@settings(max_examples=100, deadline=None)
def test_compiled_and_interpreted_schedules_are_equal(arguments: dict[str, Any]) -> None:
    compiled = planned(**arguments, compiled=True)
    assert_invariants(compiled, arguments)
    interpreted = planned(**arguments)
    assert compiled.perm.tolist() == interpreted.perm.tolist()
    assert compiled.offsets.tolist() == interpreted.offsets.tolist()


def test_many_random_schedules_never_overflow() -> None:
    rng = np.random.default_rng(5)
    for trial in range(400):
        max_tokens, num_rows = int(rng.integers(1, 200)), int(rng.integers(0, 120))
        if trial % 4 == 0:
            num_rows += 201
        lengths = 1 + rng.integers(0, max_tokens, num_rows) // 3
        if trial % 2:
            lengths = rng.integers(1, max_tokens + 1, num_rows)
        arguments: dict[str, Any] = {
            "lengths": lengths,
            "max_tokens": max_tokens,
            "num_ranks": int(rng.integers(1, 20)),
            "sync": "step" if trial % 3 else "microbatch",
        }
        assert_invariants(planned(**arguments), arguments)


def lognormal(num_rows: int, seed: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(1200), 0.95, num_rows)
    return np.clip(lengths.astype(np.int64), 16, 8192)


def long_tailed(num_rows: int, seed: int) -> np.ndarray:
    return np.clip(
        (32 * (1 + np.random.default_rng(seed).pareto(0.9, num_rows))).astype(np.int64), 16, 8192
    )


@pytest.mark.parametrize("lengths_of", [lognormal, long_tailed])
def test_schedules_are_balanced_and_as_short_as_proven_possible(lengths_of: Any) -> None:
    for seed in range(3):
        lengths = lengths_of(512, seed)
        for num_ranks in (4, 8):
            met = planned(lengths, 8192, num_ranks)
            free = planned(lengths, 8192, num_ranks, sync="step")
            assert met.num_bins == free.num_bins
            assert met.num_bins == -(-l2_bound(lengths, 8192) // num_ranks) * num_ranks
            of_met = stats(met, lengths, 8192, num_ranks)
            of_free = stats(free, lengths, 8192, num_ranks)
            assert of_free["lockstep_ratio"] >= of_met["lockstep_ratio"] * 0.999
            assert of_met["lockstep_over_bound"] < 1.01
            assert of_free["rank_imbalance"] < 1.03


def test_round_robin_over_a_packers_bins_has_more_lockstep_work() -> None:
    lengths, num_ranks = lognormal(512, 0), 64
    work = CostModel().of(lengths)
    packed = get_packer(
        "modified_first_fit_decreasing", 8192, bin_count_multiple=num_ranks
    ).pack_csr(lengths)
    bin_work = np.add.reduceat(work[packed.perm], packed.offsets[:-1]).reshape(-1, num_ranks)
    step = planned(lengths, 8192, num_ranks)
    assert step.num_bins <= bin_work.size
    own_work = step.loads(work).reshape(num_ranks, -1)
    assert own_work.max(axis=0).sum() < 0.97 * bin_work.max(axis=1).sum()


@SYNCS
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_few_rows_on_many_ranks(sync: Any, num_rows: int) -> None:
    step = planned([5] * num_rows, 10, 4, sync=sync)
    assert step.num_bins == (4 if num_rows else 0)
    assert sorted(step.perm.tolist()) == list(range(num_rows))


def test_the_examples_of_the_docstrings() -> None:
    assert by_rank(planned([6, 4, 4, 4, 2], 10, 2), 2) == [[[0, 3]], [[1, 2, 4]]]
    assert assign_bins([5, 1, 4, 2], 2).tolist() == [[0, 1], [2, 3]]


def test_rows_of_equal_work_fill_the_bins() -> None:
    step = planned([4] * 12, 8, 3, work=np.zeros(12))
    assert step.num_bins == 6 and (step.loads(np.full(12, 4)) == 8).all()


@pytest.mark.parametrize("lengths", [[4, 11], [4, 0]])
def test_a_row_that_fits_into_no_bin_is_an_error(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="from 1 to the capacity 10"):
        planned(lengths, 10, 2)


@given(
    st.lists(st.floats(0.0, 100.0), max_size=40),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from(["microbatch", "step"]),
)
@settings(max_examples=100, deadline=None)
def test_assigned_bins_are_unchanged_and_balanced_by_work(bin_work, num_ranks, multiple, sync):
    ids = assign_bins(bin_work, num_ranks, sync=sync, microbatch_multiple=multiple)
    assert sorted(ids[ids >= 0].tolist()) == list(range(len(bin_work)))
    assert ids.shape[0] == num_ranks and ids.shape[1] % multiple == 0
    assert ids.size - len(bin_work) < num_ranks * multiple
    work = np.append(bin_work, 0.0)[ids]
    if sync == "microbatch":
        best = np.sort(np.append(bin_work, np.zeros(ids.size - len(bin_work))))[::-1][
            ::num_ranks
        ].sum()
        assert work.max(axis=0, initial=0.0).sum() == pytest.approx(best)
    else:
        dealt = np.append(bin_work, 0.0)[
            assign_bins(bin_work, num_ranks, microbatch_multiple=multiple)
        ]
        assert work.sum(axis=1).max() <= dealt.sum(axis=1).max() * (1 + 1e-9)


def test_importing_and_small_schedules_load_nothing_heavy():
    code = (
        "import sys; from nemo_like.data.planning.plan import PlanSpec, plan_batch\n"
        "plan_batch([3, 4, 5], PlanSpec(max_tokens=8, num_ranks=2))\n"
        "print(*{'numba', 'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
