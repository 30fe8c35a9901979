"""Keys of `environment`: rollouts of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt

from nemo_like.config.constraints import IMPORT_PATH
from nemo_like.config.errors import Problem


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Rollouts of several turns: a class that answers each turn of the model."""

    path: Annotated[str | None, IMPORT_PATH] = None
    """Import path of a class with the methods of `Environment`, e.g.
    `nemo_like.environments.calculator.Calculator`; null for one completion per prompt."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: Annotated[int, Ge(1)] = 8
    """Max turns of the model in one conversation. `policy.generation.max_new_tokens` limits each
    turn."""
    max_tokens: Annotated[int | None, Ge(2)] = None
    """Max tokens of one conversation, prompt and observations included; null is
    `policy.max_total_sequence_length`."""
    timeout_s: Annotated[float | None, Gt(0)] = 60.0
    """Max seconds of the environment's steps in one conversation together. The conversation ends
    at this limit; others are not affected. null sets no limit."""
    num_workers: Annotated[int, Ge(1)] = 1
    """Processes that run the environment; each runs the steps of many conversations at the same
    time."""
    max_restarts: Annotated[int, Ge(0)] = 10
    """Number of processes of the environment that are restarted in a run after they died or hung.
    No conversation is lost; the next failure stops the run."""

    def conversation_limit(self, max_total_length: int) -> int:
        """Return the max tokens of a conversation, given `policy.max_total_sequence_length`."""
        if self.max_tokens is None:
            return max_total_length
        return min(self.max_tokens, max_total_length)


def environment_problems(
    config: EnvironmentConfig, max_total_length: int, *, generates: bool
) -> Iterator[Problem]:
    """Yield the problems of `environment`.

    `max_total_length` is that of the policy; `generates` is True if the run samples completions.
    """
    if config.path is not None and not generates:
        yield Problem(
            ("environment.path",),
            f"environment.path is {config.path}, which has no effect: this run samples no"
            " completions. Set it to null",
        )
    if config.path is None and config.options:
        yield Problem(
            ("environment.options", "environment.path"),
            "environment.options is set, but environment.path is null, so no environment reads it:"
            " set environment.path, or remove the options",
        )
    if config.path is None and config.max_tokens is not None:
        yield Problem(
            ("environment.max_tokens", "environment.path"),
            f"environment.max_tokens is {config.max_tokens}, which has no effect while"
            " environment.path is null: set environment.path, or max_tokens to null",
        )
    if config.max_tokens is not None and config.max_tokens > max_total_length:
        yield Problem(
            ("environment.max_tokens", "policy.max_total_sequence_length"),
            f"environment.max_tokens is {config.max_tokens}, above"
            f" policy.max_total_sequence_length {max_total_length}, which limits every row: lower"
            " the first, or raise the second",
        )
