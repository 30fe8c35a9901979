"""Weights that are not trained, selected by patterns on their Hugging Face names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from nemo_like.config.errors import ConfigError

_KEY = "policy.freeze"


def frozen_weights(patterns: Sequence[str], names: Mapping[str, str]) -> frozenset[str]:
    """Return the weights that match one of `patterns`, by the name of the distinct weight.

    `names` has every name of a weight and that of the distinct weight: for a tied output embedding
    `{"lm_head.weight": "model.embed_tokens.weight", ...}`, so that either name freezes both. In a
    pattern `*` stands for any text, `?` for one character and `[0-7]` for one of several.

    Raises ConfigError for a pattern that matches nothing, and if nothing is left to be trained.
    """
    frozen = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"{_KEY}: {pattern!r} matches no weight of the model; {_nearest(pattern, names)}"
            )
        frozen |= {names[name] for name in matching}
    if frozen == set(names.values()):
        raise ConfigError(
            f"{_KEY} matches all {len(frozen)} weights of the model, so nothing would be trained;"
            " remove a pattern, or train adapters (policy.lora.enabled)"
        )
    return frozenset(frozen)


def _nearest(pattern: str, names: Mapping[str, str]) -> str:
    """Return names that are similar to `pattern`, or a pattern that matches, in words."""
    # A pattern often lacks the first or the last part of the names.
    for other in (f"model.{pattern}", f"{pattern}.*", f"{pattern}*", f"*.{pattern}*"):
        if any(fnmatchcase(name, other) for name in names):
            return (
                f"a pattern is a complete name, in which * matches any text: {other!r} is possible"
            )
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    return f"names of weights are e.g. {', '.join(nearest or list(names)[:3])}"
