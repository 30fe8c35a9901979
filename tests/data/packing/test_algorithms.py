"""The packers against naive loops, compiled and interpreted; the requested number of bins;
messages; no import cost.
"""

from __future__ import annotations

import random
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.packing import kernels
from nemo_like.data.packing.algorithms import PackingAlgorithm, SequencePacker, get_packer
from nemo_like.data.packing.bounds import l2_bound

WAYS = [
    "interpreted",
    pytest.param(
        "compiled", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
    ),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to run a kernel, whatever the number of rows."""
    monkeypatch.setattr(kernels, "MIN_COMPILED", 0 if request.param == "compiled" else 1 << 60)
    return request.param


BIN_PACKERS = [name for name in PackingAlgorithm if name != PackingAlgorithm.BALANCED]


def random_cases(count: int) -> list[tuple[list[int], int, int | None]]:
    """(lengths, capacity, max_items), many of them with equal lengths, tight and loose."""
    rng = np.random.default_rng(7)
    cases = []
    for _ in range(count):
        capacity = int(rng.integers(1, rng.choice([8, 60, 400, 9000])))
        longest = max(1, int(capacity * rng.choice([0.2, 0.5, 1.0])))
        lengths = rng.integers(1, longest + 1, int(rng.integers(0, 120))).tolist()
        cases.append((lengths, capacity, int(rng.integers(1, 7)) if rng.random() < 0.3 else None))
    return cases


def decreasing(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def naive_first_fit(
    lengths: list[int], order: list[int], capacity: int, max_items: int | None
) -> list[list[int]]:
    bins: list[list[int]] = []
    for row in order:
        for rows in bins:
            if sum(lengths[r] for r in rows) + lengths[row] <= capacity and len(rows) < (
                max_items or len(lengths)
            ):
                rows.append(row)
                break
        else:
            bins.append([row])
    return bins


def naive_best_fit_loads(lengths: list[int], capacity: int) -> list[int]:
    loads: list[int] = []
    for row in decreasing(lengths):
        fitting = [b for b, load in enumerate(loads) if load + lengths[row] <= capacity]
        if fitting:
            loads[max(fitting, key=lambda b: loads[b])] += lengths[row]
        else:
            loads.append(lengths[row])
    return sorted(loads)


def naive_next_fit(lengths: list[int], capacity: int, max_items: int | None) -> list[list[int]]:
    bins: list[list[int]] = []
    for row, length in enumerate(lengths):
        if (
            bins
            and sum(lengths[r] for r in bins[-1]) + length <= capacity
            and len(bins[-1]) < (max_items or len(lengths))
        ):
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def naive_modified_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The five phases word by word, over plain lists that stay sorted."""
    left = decreasing(lengths)  # longest first

    def room(rows: list[int]) -> int:
        return capacity - sum(lengths[row] for row in rows)

    def take(row: int, rows: list[int]) -> None:
        left.remove(row)
        rows.append(row)

    def longest(limit: int, above: int = 0, up_to: int = capacity) -> int | None:
        return next((r for r in left if lengths[r] <= limit and above < lengths[r] <= up_to), None)

    bins: list[list[int]] = []
    for row in [r for r in left if 2 * lengths[r] > capacity]:
        bins.append([])
        take(row, bins[-1])
    for rows in bins:
        medium = longest(room(rows), above=capacity // 3, up_to=capacity // 2)
        if medium is not None:
            take(medium, rows)
    for rows in reversed(bins):
        small = sorted(
            (r for r in left if capacity // 6 < lengths[r] <= capacity // 3),
            key=lambda r: (lengths[r], r),
        )
        if (
            len(rows) == 1
            and len(small) >= 2
            and lengths[small[0]] + lengths[small[1]] <= room(rows)
        ):
            take(small[0], rows)
            largest = longest(room(rows), above=capacity // 6, up_to=capacity // 3)
            assert largest is not None
            take(largest, rows)
    for rows in bins:
        while (row := longest(room(rows))) is not None:
            take(row, rows)
    return bins + naive_first_fit(lengths, left, capacity, None)


def test_first_fit_decreasing_is_the_naive_loop(way: str) -> None:
    for lengths, capacity, max_items in random_cases(150):
        packer = get_packer("first_fit_decreasing", capacity, max_items=max_items)
        assert packer.pack(lengths) == naive_first_fit(
            lengths, decreasing(lengths), capacity, max_items
        )


def test_first_fit_shuffle_is_the_naive_loop_over_its_own_permutation(way: str) -> None:
    for seed, (lengths, capacity, max_items) in enumerate(random_cases(60)):
        order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
        packer = get_packer("first_fit_shuffle", capacity, max_items=max_items, seed=seed)
        assert packer.pack(lengths) == naive_first_fit(lengths, order, capacity, max_items)


def test_best_fit_decreasing_has_the_loads_of_the_naive_loop(way: str) -> None:
    for lengths, capacity, _ in random_cases(150):
        bins = get_packer("best_fit_decreasing", capacity).pack(lengths)
        assert sorted(sum(lengths[row] for row in rows) for rows in bins) == naive_best_fit_loads(
            lengths, capacity
        )


def test_concatenative_is_the_naive_loop(way: str) -> None:
    for lengths, capacity, max_items in random_cases(60):
        assert get_packer("concatenative", capacity, max_items=max_items).pack(
            lengths
        ) == naive_next_fit(lengths, capacity, max_items)


def test_modified_first_fit_decreasing_has_the_loads_of_the_five_phases(way: str) -> None:
    for lengths, capacity, _ in random_cases(150):
        bins = get_packer("modified_first_fit_decreasing", capacity).pack(lengths)
        loads = [sum(lengths[row] for row in rows) for rows in bins]
        assert loads == [
            sum(lengths[row] for row in rows)
            for rows in naive_modified_first_fit(lengths, capacity)
        ]


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize("algorithm", BIN_PACKERS)
def test_compiled_and_interpreted_give_the_same_bins(
    algorithm: PackingAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lengths, capacity, max_items in random_cases(80):
        packer = get_packer(algorithm, capacity, max_items=max_items)
        bins = []
        for least in (0, 1 << 60):
            monkeypatch.setattr(kernels, "MIN_COMPILED", least)
            bins.append(packer.pack(lengths))
        assert bins[0] == bins[1]


lengths_and_capacity = st.integers(1, 200).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


@settings(max_examples=60, deadline=None)
@given(
    lengths_and_capacity,
    st.sampled_from(PackingAlgorithm),
    st.sampled_from([1, 4, 6]),
    st.none() | st.integers(1, 5),
    st.integers(0, 8),
    st.integers(1, 5),
)
def test_bins_partition_the_rows_within_every_bound(
    case: tuple[list[int], int],
    algorithm: PackingAlgorithm,
    pad_multiple: int,
    max_items: int | None,
    min_bin_count: int,
    bin_count_multiple: int,
) -> None:
    lengths, capacity = case
    capacity *= pad_multiple
    packer = get_packer(
        algorithm,
        capacity,
        min_bin_count=min_bin_count,
        bin_count_multiple=bin_count_multiple,
        max_items=max_items if algorithm in BIN_PACKERS else None,
        pad_multiple=pad_multiple,
    )
    try:
        bins = packer.pack(lengths)
    except ValueError as error:
        assert "but there are only" in str(error)
        return
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert len(bins) >= min_bin_count and len(bins) % bin_count_multiple == 0
    for rows in bins:
        assert 1 <= len(rows) <= (packer.max_items or len(lengths))
        assert sum(-(-lengths[row] // pad_multiple) * pad_multiple for row in rows) <= capacity


def test_decreasing_packers_are_close_to_the_lower_bound() -> None:
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(1200), 0.95, 4096).astype(int), 16, 8192
    )
    for algorithm in (
        "best_fit_decreasing",
        "first_fit_decreasing",
        "modified_first_fit_decreasing",
        "balanced",
    ):
        assert get_packer(algorithm, 8192).pack_csr(lengths).num_bins <= 1.001 * l2_bound(
            lengths, 8192
        )


def test_more_bins_than_needed_are_even() -> None:
    """Taking one row at a time from the fullest bins gives 1.40 here."""
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(1200), 0.95, 512).astype(int), 16, 8192
    )
    for algorithm in PackingAlgorithm:
        packing = get_packer(algorithm, 8192, min_bin_count=64, bin_count_multiple=64).pack_csr(
            lengths
        )
        loads = packing.loads(lengths)
        assert packing.num_bins == (192 if algorithm == "concatenative" else 128)
        assert loads.max() <= max(1.03 * loads.mean(), lengths.max())


def test_bins_are_split_where_dealing_anew_does_not_fit() -> None:
    """Full bins of a long and a short row each: the longest four would be dealt one to a bin, and
    then nothing fits.
    """
    lengths = [7, 7, 7, 7, 3, 3, 3, 3]
    packer = get_packer("best_fit_decreasing", 10, min_bin_count=5)
    assert packer.bin_count_multiple is None, "not given"
    bins = packer.pack(lengths)
    assert len(bins) == 5
    assert all(sum(lengths[row] for row in rows) <= 10 for rows in bins)
    assert sorted(row for rows in bins for row in rows) == list(range(8))


def test_a_spread_leaves_lighter_bins_alone() -> None:
    """Loads 10, 10 and 2: the two full ones become three, the light one stays."""
    lengths = [5, 5, 5, 5, 2]
    bins = get_packer("concatenative", 10, min_bin_count=4).pack(lengths)
    assert [4] in bins and sorted(sum(lengths[row] for row in rows) for rows in bins) == [
        2,
        5,
        5,
        10,
    ]


def test_equal_lengths_keep_their_order() -> None:
    assert get_packer("first_fit_decreasing", 10).pack([5, 5, 5, 5]) == [[0, 1], [2, 3]]


def test_names_in_any_case_and_members() -> None:
    lengths = [5, 9, 3, 8, 2]
    for algorithm in PackingAlgorithm:
        assert get_packer(algorithm.name, 10).pack(lengths) == get_packer(algorithm, 10).pack(
            lengths
        )
    with pytest.raises(ValueError, match=r"must be one of .* \(did you mean first_fit_decreasing"):
        get_packer("first_fit_decrasing", 10)
    with pytest.raises(ValueError, match=r"algorithm is 'best_fit'; .*mean best_fit_decreasing\?"):
        get_packer("best_fit", 10)
    with pytest.raises(ValueError, match=r"algorithm is 'zzz'; it must be one of .*concatenative$"):
        get_packer("zzz", 10)


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_messages_name_row_length_capacity_and_key(algorithm: PackingAlgorithm) -> None:
    with pytest.raises(
        ValueError, match=r"row 1 has 11 tokens, above the bin capacity 10; raise bin_capacity"
    ):
        get_packer(algorithm, 10).pack([3, 11])
    with pytest.raises(
        ValueError,
        match=r"row 0 has 9 tokens \(12 when rounded up to a multiple of 4\), above .* 10",
    ):
        get_packer(algorithm, 10, pad_multiple=4).pack([9, 1])
    with pytest.raises(ValueError, match="row 2 has length 0"):
        get_packer(algorithm, 10).pack([3, 4, 0])
    with pytest.raises(ValueError, match=r"4 bins were requested .* only 3 rows"):
        get_packer(algorithm, 10, min_bin_count=4).pack([3, 4, 5])
    assert get_packer(algorithm, 10).pack([]) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"bin_capacity": 0},
        {"min_bin_count": -1},
        {"bin_count_multiple": 0},
        {"max_items": 0},
        {"pad_multiple": 0},
    ],
)
def test_numbers_out_of_range_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SequencePacker(algorithm=PackingAlgorithm.BALANCED, **{"bin_capacity": 10, **settings})


def test_lengths_must_be_one_list_of_integers() -> None:
    for lengths in ([[1, 2]], [1.5, 2.0]):
        with pytest.raises(ValueError, match="one list of integers"):
            get_packer("balanced", 10).pack(lengths)  # type: ignore[arg-type]


def test_balanced_has_bins_of_nearly_equal_load() -> None:
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(300), 0.9, 512).astype(int), 16, 2048
    )
    packing = get_packer("balanced", 4096).pack_csr(lengths)
    loads = packing.loads(lengths)
    assert packing.num_bins == l2_bound(lengths, 4096)
    assert loads.max() <= 1.01 * loads.mean()


def test_balanced_has_no_limit_on_rows_per_bin() -> None:
    with pytest.raises(ValueError, match="leave max_items at None"):
        get_packer("balanced", 10, max_items=2)


def test_only_its_own_seed_matters() -> None:
    lengths = list(range(1, 40))
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    bins = get_packer("first_fit_shuffle", 50, seed=3).pack(lengths)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    random.seed(2)
    np.random.seed(2)
    packer = get_packer("first_fit_shuffle", 50, seed=3)
    assert packer.pack(lengths) == bins == packer.pack(lengths)
    assert get_packer("first_fit_shuffle", 50, seed=4).pack(lengths) != bins


def test_metrics_are_gathered_on_request() -> None:
    packer = get_packer("best_fit_decreasing", 10, collect_metrics=True)
    packer.pack([6, 4, 5])
    packer.pack([10])
    assert packer.metrics is not None
    aggregate = packer.metrics.get_aggregated_stats()
    assert aggregate["total_bins"] == 3 and aggregate["average_utilization"] == pytest.approx(
        25 / 30
    )
    assert aggregate["average_packing_time"] > 0
    assert get_packer("best_fit_decreasing", 10).metrics is None


def test_a_capacity_far_above_the_rows_costs_nothing() -> None:
    for algorithm in PackingAlgorithm:
        assert len(get_packer(algorithm, 1 << 40).pack([1 << 33, 5, 1 << 20, 7])) == 1


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_without_a_place_for_machine_code_kernels_are_interpreted() -> None:
    scope: dict[str, Any] = {}
    exec(
        "def kernel(x):\n    return x", scope
    )  # no file, so numba finds no directory for its cache
    assert kernels.compiled(scope["kernel"]) is None


def test_small_batches_import_no_heavy_library() -> None:
    code = (
        "import sys; from nemo_like.data.packing.algorithms import get_packer, PackingAlgorithm\n"
        "for algorithm in PackingAlgorithm: get_packer(algorithm, 100).pack(list(range(1, 100)))\n"
        "print([name for name in ('numba', 'torch', 'ray', 'transformers') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_row_above_the_capacity_is_named_with_the_argument() -> None:
    with pytest.raises(ValueError, match=r"row 1 has 9 tokens.*raise bin_capacity or shorten"):
        get_packer("concatenative", bin_capacity=8).pack([3, 9])
