"""What follows the end of an episode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nemo_like.agents.statuses import Status, attempt_seed, outcome_of

OPTIONS: dict[str, Any] = {"retries": 2, "on_failure": "drop", "on_limit": "score"}
LIMITS = [Status.LIMIT_TURNS, Status.LIMIT_TOKENS, Status.LIMIT_TIME]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_a_result(limit: Status) -> None:
    assert outcome_of(limit, 0, **OPTIONS) == "train"
    assert outcome_of(limit, 0, **{**OPTIONS, "on_limit": "zero"}) == "zero"
    assert outcome_of(limit, 0, **{**OPTIONS, "on_limit": "drop"}) == "drop"


def test_a_failure_is_retried_and_then_follows_on_failure() -> None:
    for status in (Status.FAILED_PROGRAM, Status.FAILED_INFRA):
        found = [outcome_of(status, attempt, **OPTIONS) for attempt in range(4)]
        assert found == ["retry", "retry", "drop", "drop"]
    for on_failure in ("zero", "stop"):
        options = {**OPTIONS, "on_failure": on_failure}
        assert outcome_of(Status.FAILED_PROGRAM, 2, **options) == on_failure
        assert outcome_of(Status.FAILED_INFRA, 2, **options) == "drop"


def test_every_status_has_one_outcome() -> None:
    for status, attempt in itertools.product(Status, range(4)):
        found = outcome_of(status, attempt, **OPTIONS)
        assert (found == "retry") <= status.is_failure
        assert not (status.is_failure and status.is_limit)
    assert outcome_of(Status.DONE, 0, **OPTIONS) == "train"
    assert outcome_of(Status.CANCELLED, 0, **OPTIONS) == "drop"


def test_attempts_have_different_seeds() -> None:
    seeds = {attempt_seed(seed, attempt) for seed in (1, 2) for attempt in range(3)}
    assert len(seeds) == 6 and attempt_seed(7, 0) == 7
