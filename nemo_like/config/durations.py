"""Durations as users write them."""

from __future__ import annotations

import re

DURATION_FORMS = 'seconds, "H:MM:SS" or "D-HH:MM:SS", for example 14100 or "3:55:00"'

_SECONDS = re.compile(r"\d{1,9}(\.\d{1,3})?")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)")


def parse_duration(text: str) -> float:
    """Seconds of a duration. Raises ValueError for another form and for 0.

    Example: `parse_duration("3:55:00")` is 14100.0, `parse_duration("1-00:00:00")` is 86400.0.
    """
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        # Days are optional, so their group may be None.
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        num_hours = days * 24 + hours
        num_minutes = num_hours * 60 + minutes
        total = float(num_minutes * 60 + seconds)
    elif _SECONDS.fullmatch(text):
        total = float(text)
    else:
        raise ValueError(f"it must be {DURATION_FORMS}")
    if total <= 0:
        raise ValueError("it must be above 0")
    return total
