"""The invariants in `balance`'s docstring as properties, compiled and interpreted, and how
balanced schedules are.
"""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.packing.algorithms import get_packer
from nemo_like.data.planning.balance import Schedule, assign_bins, schedule
from nemo_like.data.planning.bounds import l2_bound
from nemo_like.data.planning.cost import CostModel

WAYS = pytest.mark.parametrize("use_numba", [True, False], ids=["compiled", "interpreted"])
SYNCS = pytest.mark.parametrize("sync", ["microbatch", "step"])


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Arguments of `schedule`: all settings, short and long rows, groups that fit."""
    max_tokens = draw(st.integers(8, 100))
    lengths = draw(st.lists(st.integers(1, max_tokens) | st.integers(1, 8), max_size=60))
    arguments = {
        "lengths": lengths,
        "max_tokens": max_tokens,
        "num_ranks": draw(st.integers(1, 9)),
        "sync": draw(st.sampled_from(["microbatch", "step"])),
        "microbatch_multiple": draw(st.integers(1, 3)),
        "min_microbatches": draw(st.integers(1, 4)),
        "effort": draw(st.sampled_from([0.0, 0.1, 1.0])),
    }
    if draw(st.booleans()):
        work = st.floats(0, 1e12, allow_nan=False)
        arguments["work"] = np.array(
            draw(st.lists(work, min_size=len(lengths), max_size=len(lengths)))
        )
    if draw(st.booleans()):
        size = draw(st.integers(1, 4))
        arguments["lengths"] = [min(length, max_tokens // size) for length in lengths]
        arguments["groups"] = [-7 * (row // size) for row in range(len(lengths))]
    return arguments


def assert_invariants(planned: Schedule, arguments: dict) -> None:
    lengths, groups = np.array(arguments["lengths"], dtype=np.int64), arguments.get("groups")
    num_rows, num_ranks, count = len(lengths), arguments["num_ranks"], planned.num_microbatches
    sizes = np.diff(planned.offsets)
    # each row is in one bin, and the rows of a group are in the same one
    assert sorted(planned.perm.tolist()) == list(range(num_rows))
    assert planned.offsets[0] == 0 and planned.offsets[-1] == num_rows and (sizes >= 0).all()
    bin_of = np.empty(num_rows, dtype=np.int64)
    bin_of[planned.perm] = np.repeat(np.arange(len(sizes)), sizes)
    ids = (
        np.arange(num_rows)
        if groups is None
        else np.unique(np.asarray(groups, dtype=int), return_inverse=True)[1]
    )
    num_groups = len(set(ids.tolist()))
    assert len(set(zip(ids.tolist(), bin_of.tolist(), strict=True))) == num_groups
    # no bin holds more than the cap
    loads = np.bincount(bin_of, lengths, minlength=len(sizes))
    assert (loads <= arguments["max_tokens"]).all()
    assert (planned.bin_tokens.ravel() == loads).all()
    # every rank has the same number of bins, a multiple, at least the minimum
    assert len(sizes) == num_ranks * count and count % arguments.get("microbatch_multiple", 1) == 0
    assert count >= planned.min_microbatches
    # no bin is empty unless there are fewer groups than bins
    assert np.count_nonzero(sizes) == min(num_groups, len(sizes))
    # the bins of a rank are sorted by decreasing work
    assert (np.diff(planned.bin_work, axis=1) <= 1e-9 * planned.bin_work[:, :-1] + 1e-9).all()


@WAYS
@given(arguments=cases())
@settings(max_examples=150, deadline=None)
def test_every_schedule_satisfies_the_invariants(use_numba, arguments):
    assert_invariants(schedule(**arguments, use_numba=use_numba), arguments)


@given(arguments=cases())
@settings(max_examples=60, deadline=None)
def test_the_same_arguments_give_the_same_schedule_compiled_or_not(arguments):
    compiled, again, interpreted = (
        schedule(**arguments, use_numba=way) for way in (True, True, False)
    )
    for other in (again, interpreted):
        assert compiled.perm.tolist() == other.perm.tolist()
        assert compiled.offsets.tolist() == other.offsets.tolist()


def test_a_thousand_random_schedules_never_overflow():
    rng = np.random.default_rng(5)
    for trial in range(1000):
        max_tokens, num_rows = int(rng.integers(1, 200)), int(rng.integers(0, 120))
        arguments = {
            "lengths": rng.integers(1, max_tokens + 1, num_rows)
            if trial % 2
            else 1 + rng.integers(0, max_tokens, num_rows) // 3,
            "max_tokens": max_tokens,
            "num_ranks": int(rng.integers(1, 20)),
            "sync": "step" if trial % 3 else "microbatch",
        }
        assert_invariants(schedule(**arguments, use_numba=True, effort=0.3), arguments)


def lognormal(num_rows: int, seed: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(1200), 0.95, num_rows)
    return np.clip(lengths.astype(np.int64), 16, 8192)


def long_tailed(num_rows: int, seed: int) -> np.ndarray:
    return np.clip(
        (32 * (1 + np.random.default_rng(seed).pareto(0.9, num_rows))).astype(np.int64), 16, 8192
    )


@WAYS
@pytest.mark.parametrize("lengths_of", [lognormal, long_tailed])
def test_schedules_are_balanced_and_as_short_as_proven_possible(use_numba, lengths_of):
    for seed in range(3):
        lengths = lengths_of(512, seed)
        for num_ranks in (4, 8):
            met = schedule(lengths, 8192, num_ranks, use_numba=use_numba)
            free = schedule(lengths, 8192, num_ranks, sync="step", use_numba=use_numba)
            assert met.num_microbatches == free.num_microbatches == met.min_microbatches
            assert met.min_microbatches == -(-l2_bound(lengths, 8192) // num_ranks)
            assert met.stats["lockstep_over_bound"] < 1.01
            assert free.stats["rank_imbalance"] < 1.03
            assert free.stats["lockstep_ratio"] >= met.stats["lockstep_ratio"] * 0.999


def test_round_robin_over_a_packers_bins_has_more_lockstep_work():
    lengths, num_ranks = lognormal(512, 0), 64
    work = CostModel().of(lengths)
    packed = get_packer(
        "modified_first_fit_decreasing", 8192, bin_count_multiple=num_ranks
    ).pack_csr(lengths)
    bin_work = np.add.reduceat(work[packed.perm], packed.offsets[:-1]).reshape(-1, num_ranks)
    planned = schedule(lengths, 8192, num_ranks, work=work)
    assert planned.num_microbatches <= len(bin_work)
    assert planned.bin_work.max(axis=0).sum() < 0.97 * bin_work.max(axis=1).sum()


@SYNCS
def test_more_effort_is_no_worse_and_none_is_allowed(sync):
    lengths = lognormal(512, 3)
    plans = [schedule(lengths, 8192, 8, sync=sync, effort=effort).stats for effort in (0.0, 1.0)]
    measure = "lockstep_ratio" if sync == "microbatch" else "rank_imbalance"
    assert plans[1][measure] < plans[0][measure]


@SYNCS
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_few_rows_on_many_ranks(sync, num_rows):
    planned = schedule([5] * num_rows, 10, 4, sync=sync)
    assert planned.num_microbatches == (1 if num_rows else 0)
    assert sorted(planned.perm.tolist()) == list(range(num_rows))
    assert all(len(rank) == planned.num_microbatches for rank in planned.bins())
    assert set(planned.stats) == set(schedule([5], 10, 4).stats)


def test_the_examples_of_the_docstrings():
    assert schedule([6, 4, 4, 4, 2], max_tokens=10, num_ranks=2).bins() == [[[0, 3]], [[1, 2, 4]]]
    assert assign_bins([5, 1, 4, 2], 2).tolist() == [[0, 1], [2, 3]]


def test_rows_of_equal_work_keep_their_order():
    planned = schedule([4] * 12, 8, 3, work=np.zeros(12))
    assert planned.num_microbatches == 2 and (planned.bin_tokens == 8).all()


def test_groups_stay_together_and_keep_their_order():
    lengths, groups = [3, 3, 2, 2, 5, 1], [9, 8, 9, 8, 3, 3]
    planned = schedule(lengths, 7, 3, groups=groups)
    assert sorted(bins[0] for bins in planned.bins()) == [[0, 2], [1, 3], [4, 5]]


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [4, 11]}, "row 1 has 11 tokens, above max_tokens=10"),
        ({"lengths": [6, 3, 6], "groups": [0, 1, 0]}, r"group of rows \[0, 2\] has 12 tokens"),
        ({"lengths": [4, 0]}, "row 1 has length 0"),
        ({"lengths": [4.5]}, "integers"),
        ({"num_ranks": 0}, "num_ranks is an integer >= 1; got 0"),
        ({"microbatch_multiple": 0}, "microbatch_multiple"),
        ({"sync": "never"}, "sync is one of microbatch, step"),
        ({"effort": -1.0}, "effort"),
        ({"work": np.ones(3)}, "one number per row"),
        ({"work": np.array([1.0, np.nan])}, "row 1 has work nan"),
        ({"groups": [1]}, "one group id per row"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"lengths": [4, 5], "max_tokens": 10, "num_ranks": 2, **changes})


def test_importing_and_small_schedules_load_nothing_heavy():
    code = (
        "import sys; from nemo_like.data.planning.balance import schedule; schedule([3, 4, 5], 8,"
        " 2)\n"
        "print(*{'numba', 'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
