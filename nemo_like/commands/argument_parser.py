"""The parser of each command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Accepts positional arguments after an option where `is_intermixed` is set.

    Example: `replay RUN --step 3 KEY=VALUE`. argparse assigns all positional arguments at the first
    of them otherwise, so that those after an option would be unknown.
    """

    is_intermixed = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the arguments and those that are unknown."""
        if not self.is_intermixed:
            return super().parse_known_args(args, namespace)
        # `parse_known_intermixed_args` calls this method for each of its passes.
        self.is_intermixed = False
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.is_intermixed = True
