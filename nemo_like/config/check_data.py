"""Relations between the keys of `data` about training files and their columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.schema import MAIN_SET, DataConfig, RunConfig


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the training sets and their weights."""
    data = config.data
    for name in data.train_sets:
        if re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) is None or name == MAIN_SET:
            yield Problem(
                ("data.train_sets",),
                f"data.train_sets has the name {name!r}; use lower-case letters, digits and '_',"
                f" and not {MAIN_SET!r}, which is data.train_path",
            )
    yield from _weights(data)
    yield from _filters(config)


def _filters(config: RunConfig) -> Iterator[Problem]:
    """The filters of rows have an effect, and keep some."""
    data = config.data
    low = data.min_pass_rate
    high = data.max_pass_rate
    if low is not None and high is not None and low > high:
        yield Problem(
            ("data.min_pass_rate", "data.max_pass_rate"),
            f"data.min_pass_rate is {low:g} and data.max_pass_rate {high:g}, so no row is between;"
            " exchange them",
        )
    if data.max_prompt_tokens is not None and not config.generates:
        yield Problem(
            ("data.max_prompt_tokens",),
            f"data.max_prompt_tokens is {data.max_prompt_tokens}, but this run has no"
            " rollouts; set it to null, and policy.max_total_sequence_length with"
            " policy.oversize_rows=drop to leave out long rows",
        )


def _weights(data: DataConfig) -> Iterator[Problem]:
    """Every set has a weight if one has."""
    weights = data.train_weights
    if not weights:
        return
    names = [MAIN_SET, *data.train_sets]
    if sorted(weights) != sorted(names):
        yield Problem(
            ("data.train_weights",),
            f"data.train_weights has {_listed(weights)}, the training sets are {_listed(names)};"
            " give each of them a weight, or none",
        )
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            yield Problem(
                ("data.train_weights",),
                f"data.train_weights.{name} is {weight}; it must be a finite number above 0",
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
