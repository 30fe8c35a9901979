"""Sets environment variables of a worker's process."""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_variables(environment: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes a variable."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
