from __future__ import annotations

import pytest

from nemo_like.config.constraints import parse_duration
from nemo_like.config.errors import ConfigError
from tests.recipe import Recipe


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("14100", 14100.0),
        ("0.5", 0.5),
        ("3:55:00", 14100.0),
        ("03:55:09", 14109.0),
        ("1-00:00:00", 86400.0),
    ],
)
def test_durations_are_seconds_or_a_clock(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00:00", "-5", "55:00", "3h", "3:60:00", "1e5", "nan"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it must be"):
        parse_duration(text)


def test_a_wrong_time_limit_names_its_key(recipe: Recipe) -> None:
    assert recipe.sft("cluster.time_limit=3:55:00").cluster.time_limit == "3:55:00"
    assert recipe.sft("cluster.time_limit=14100").cluster.time_limit == "14100"
    with pytest.raises(
        ConfigError, match=r"cluster.time_limit is '4h'; it must be seconds, \"H:MM:SS\""
    ):
        recipe.sft("cluster.time_limit=4h")
