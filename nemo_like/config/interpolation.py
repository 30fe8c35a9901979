"""Interpolations: `${other.key}`, `${oc.env:NAME,default}`, and `${add:a,b}`, `${mul:a,b}` and
`${div:a,b}`, which NeMo RL's configs use; arguments may be nested.

Sums and products of integers are integers, and so is a quotient without remainder.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.errors import ConfigError, Location
from nemo_like.config.text import shortened

Number = int | float
_ARITHMETIC = re.compile(r"\$\{(add|mul|div):")
_PREFIX = re.compile(r"^(Key|Value)Error raised while resolving interpolation: ")


def resolve_interpolations(
    tree: Mapping[str, Any], locate: Callable[[str], Location | None]
) -> dict[str, Any]:
    """Return the nested values without interpolations. Raises ConfigError for one that fails."""
    register_arithmetic()
    try:
        plain = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "the config")
        problem = _PREFIX.sub("", str(error).strip().partition("\n")[0]).strip('"')
        hint = ""
        if problem.startswith("Environment variable"):
            hint = "; set it, or write ${oc.env:NAME,default}"
        elif not _ARITHMETIC.match(problem):
            hint = "; for a literal ${ write \\${"
        place = locate(key)
        location = f" ({place})" if place else ""
        text = f"{key} cannot be resolved: {shortened(problem, 400)}{hint}{location}"
        raise ConfigError(text) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def register_arithmetic() -> None:
    """Make `add`, `mul` and `div` known to OmegaConf; calling it again changes nothing."""
    for name, operation in (("add", operator.add), ("mul", operator.mul), ("div", _quotient)):
        OmegaConf.register_new_resolver(name, _resolver(name, operation), replace=True)


def _resolver(name: str, operation: Callable[[Any, Any], Number]) -> Callable[..., Number]:
    def resolve(*arguments: Any) -> Number:
        shown = f"${{{name}:{','.join(map(str, arguments))}}}"
        if len(arguments) != 2:
            raise ValueError(f"{shown} has {len(arguments)} arguments, and takes two numbers")
        for argument in arguments:
            # bool is a subclass of int, and `true` is not a number for a user.
            if type(argument) not in (int, float) or not math.isfinite(argument):
                raise ValueError(f"{shown} takes two finite numbers, and not '{argument}'")
        if name == "div" and arguments[1] == 0:
            raise ValueError(f"{shown} divides by zero")
        return operation(*arguments)

    return resolve


def _quotient(left: Number, right: Number) -> Number:
    # An integer key such as a batch size would refuse the float 4.0.
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right
