from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.jagged import Jagged
from nemo_like.metrics import metric_values
from nemo_like.weight_sync.channel import WeightSyncError
from nemo_like.weight_sync.check import LogprobCheck, probe_rows

ROWS = probe_rows(100)


def logprobs(seed: int, *, scale: float = 1.0) -> Jagged:
    """Random log-probs of the rows; the first of each is 0."""
    values = -scale * np.random.default_rng(seed).exponential(size=len(ROWS.values))
    result = Jagged(values.astype(np.float32), ROWS.offsets)
    for row in result:
        row[0] = 0.0
    return result


def shifted(base: Jagged, seed: int, error: float) -> Jagged:
    """Differences of at most `error`, some of them equal to it."""
    signs = np.random.default_rng(seed).choice([-1.0, -0.3, 0.5, 1.0], size=len(base.values))
    return Jagged((base.values + error * signs).astype(np.float32), base.offsets)


@given(st.integers(2, 500), st.sets(st.integers(0, 500), max_size=30), st.integers(2, 200))
def test_rows_are_fixed_and_have_allowed_ids(
    vocab_size: int, excluded: set[int], max_length: int
) -> None:
    excluded = {each for each in excluded if each < vocab_size}
    if len(excluded) == vocab_size:
        return
    rows = probe_rows(vocab_size, excluded_ids=frozenset(excluded), max_length=max_length)
    assert rows.lengths.tolist() == [min(length, max_length) for length in (16, 32, 48)]
    assert rows.values.dtype == np.int32
    assert rows.values.min() >= 0 and rows.values.max() < vocab_size
    assert not set(rows.values.tolist()) & excluded
    again = probe_rows(vocab_size, excluded_ids=frozenset(excluded), max_length=max_length)
    assert np.array_equal(rows.values, again.values)


def test_rows_without_ids_or_length_are_refused() -> None:
    with pytest.raises(ValueError, match="no token id below 2"):
        probe_rows(2, excluded_ids=frozenset({0, 1}))
    with pytest.raises(ValueError, match="max_length is 1"):
        probe_rows(10, max_length=1)
    with pytest.raises(ValueError, match="no threshold for weights in float16"):
        LogprobCheck("float16")


@pytest.mark.parametrize(("dtype", "error"), [("float32", 5e-4), ("bfloat16", 0.25)])
def test_rounding_errors_pass_and_are_reported(dtype: str, error: float) -> None:
    check = LogprobCheck(dtype)
    for version in range(4):
        policy = logprobs(version)
        replicas = {0: policy, 1: shifted(policy, version, error)}
        values = metric_values(check.compare(policy, replicas, version))
        assert values["weight_sync/check_max_error"] == pytest.approx(error, rel=1e-2)
        assert 0 < values["weight_sync/check_mean_error"] < error


@given(st.floats(0, 1e-3), st.floats(0, 5e-4), st.integers(0, 100))
def test_an_update_of_any_size_is_no_false_alarm(change: float, noise: float, seed: int) -> None:
    check = LogprobCheck("float32")
    before = logprobs(seed)
    check.compare(before, {0: shifted(before, 1, noise)}, 1)
    after = shifted(before, 2, change)
    check.compare(after, {0: shifted(after, 3, noise)}, 2)


@pytest.mark.parametrize("change", [1e-4, 1.0])
def test_an_update_without_effect_is_recognized_below_the_threshold_too(change: float) -> None:
    check = LogprobCheck("float32")
    before = logprobs(0)
    check.compare(before, {0: before, 3: shifted(before, 1, 1e-6)}, 4)
    after = shifted(before, 2, change)
    with pytest.raises(WeightSyncError, match=r"replica 3 .* version 5: .* had no effect"):
        check.compare(after, {0: after, 3: shifted(before, 1, 1e-6)}, 5)
    # A replica that is restarted later gets the same version.
    check.compare(after, {3: after}, 5)


def test_stale_weights_are_named_with_the_largest_error() -> None:
    check = LogprobCheck("float32")
    policy = logprobs(0)
    with pytest.raises(
        WeightSyncError,
        match=r"replica 1 .* version 7: the largest difference of a log-prob is 0\.3 .*"
        r"limit of the largest difference is 0\.002.* All rows differ: .* stale or only partly",
    ):
        check.compare(policy, {0: policy, 1: shifted(policy, 1, 0.3)}, 7)
    check = LogprobCheck("bfloat16")
    with pytest.raises(WeightSyncError, match=r"mean difference is 0\.25.* All rows differ"):
        check.compare(policy, {0: shifted(policy, 1, 0.6)}, 7)


def test_a_difference_in_the_long_row_only_has_another_cause() -> None:
    policy = logprobs(0)
    wrong = Jagged(policy.values.copy(), policy.offsets)
    wrong[2][40:] -= 0.2
    with pytest.raises(WeightSyncError, match=r"Only some rows differ \(2\)"):
        LogprobCheck("float32").compare(policy, {0: wrong}, 1)


def test_values_that_are_not_finite_are_named() -> None:
    policy = logprobs(0)
    wrong = Jagged(policy.values.copy(), policy.offsets)
    wrong[1][3:5] = np.nan
    with pytest.raises(WeightSyncError, match=r"2 of 93 log-probs are not finite"):
        LogprobCheck("bfloat16").compare(policy, {0: wrong}, 1)
    with pytest.raises(WeightSyncError, match="the policy's log-probs of weight version 1"):
        LogprobCheck("bfloat16").compare(wrong, {0: policy}, 1)
    with pytest.raises(ValueError, match=r"replica 0 returned log-probs of lengths \[3\]"):
        LogprobCheck("float32").compare(
            policy, {0: Jagged.from_rows([[0.0, -1.0, -1.0]], np.float32)}, 1
        )
