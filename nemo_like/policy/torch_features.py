"""Names and keywords that differ between releases of a library, chosen by what is installed.

Supported are torch 2.11 to 2.13. Names are tested and not versions, so that nightly builds work as
well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def first_available(module: Any, *names: str) -> Any:
    """Return the attribute of `module` with the first of `names` that it has.

    Raises AttributeError if it has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(
        f"{module.__name__} {getattr(module, '__version__', '')} has none of {', '.join(names)};"
        " install torch 2.11 to 2.13"
    )


def keyword_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of `function` that can be passed by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)
