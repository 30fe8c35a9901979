"""Checks of `validate` on the environment: a reset and a step on a row, and its observation."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import conversation, question
from nemo_like.data.observations import ObservationEncoder
from nemo_like.data.rows import Rows
from nemo_like.diagnostics.report import Diagnostics
from nemo_like.environments.environment import Conversation, EnvironmentFailure
from nemo_like.environments.environment_workers import EnvironmentWorker
from nemo_like.environments.steps import StepOutcome, StepTask

_POLL_S = 1.0


def check_environment(
    config: RunConfig, rows: Rows | None, encoder: ChatEncoder | None, diagnostics: Diagnostics
) -> None:
    """Import the environment; reset and step it with the first row's own answer.

    The answer of the row takes the place of the model's first turn; a row without one has an empty
    turn. The observation is encoded with the chat template.
    """
    if not config.generates or config.environment.path is None:
        return
    worker = diagnostics.check(lambda: EnvironmentWorker(None, config=config.environment))
    if worker is None:
        return
    try:
        if encoder is not None:
            # Of the role of a text, also where the first step ends the conversation.
            message = {"role": "user", "content": ""}
            diagnostics.check(lambda: ObservationEncoder(encoder).check([message]))
        if rows is not None:
            _check_step(config, worker, rows, encoder, diagnostics)
    finally:
        worker.close()


def check_conversation_prompts(
    config: RunConfig, rows: Rows, lengths: Mapping[int, int], diagnostics: Diagnostics
) -> None:
    """Check that prompts leave tokens for a turn within `environment.max_tokens`.

    `lengths` is row index -> tokens of the sampled prompts.
    """
    limit = config.environment.max_tokens
    if limit is None or not lengths:
        return
    longest = max(lengths, key=lambda index: lengths[index])
    if lengths[longest] >= limit:
        diagnostics.problems.append(
            f"the prompt of {rows.location(longest)} has {lengths[longest]} tokens, and"
            f" environment.max_tokens is {limit}, so there is no room for a turn of the model;"
            f" raise it above {lengths[longest]}"
        )


def _check_step(
    config: RunConfig,
    worker: EnvironmentWorker,
    rows: Rows,
    encoder: ChatEncoder | None,
    diagnostics: Diagnostics,
) -> None:
    sampled = question(rows[0])
    last_message = conversation(rows[0])[-1]
    completion = sampled.answer or ""
    if last_message["role"] == "assistant":
        completion = last_message.get("content") or ""
    turn = {"role": "assistant", "content": completion}
    task = StepTask(
        key=0,
        conversation=Conversation(messages=(*sampled.messages, turn), row=sampled.row),
        timeout_s=config.environment.timeout_s,
    )
    try:
        outcome = _outcome(worker, task)
        described = _described(config, outcome, encoder)
    except (EnvironmentFailure, ConfigError) as error:
        diagnostics.problems.append(f"{rows.location(0)}: {error}")
        return
    path = config.environment.path
    diagnostics.add_lines(
        "environment", f"{path}: {described} for the answer of {rows.location(0)} itself"
    )


def _outcome(worker: EnvironmentWorker, task: StepTask) -> StepOutcome:
    """Run a step, which has a time limit of its own unless it was turned off."""
    outcomes = worker.advance([task], _POLL_S)
    while not outcomes:
        outcomes = worker.advance([], _POLL_S)
    return outcomes[0]


def _described(config: RunConfig, outcome: StepOutcome, encoder: ChatEncoder | None) -> str:
    """Describe an outcome. Raises ConfigError if its observation cannot be encoded."""
    if outcome.is_timeout:
        raise ConfigError(
            f"the environment {config.environment.path} did not answer a turn within"
            f" environment.timeout_s {config.environment.timeout_s:g}; raise it"
        )
    text = f"reward {sum(outcome.rewards.values()):g}"
    if outcome.done:
        return f"{text}, and the end of the conversation"
    num_tokens = ""
    if encoder is not None:
        token_ids = ObservationEncoder(encoder).encode(outcome.observation, encoder.eos_token_id)
        num_tokens = f" of {len(token_ids)} tokens"
    return f"{text}, and an observation{num_tokens}"
