"""Checks of `validate` on rewards: functions, reward models and environment, on the first row."""

from __future__ import annotations

from functools import partial

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import counted
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import conversation, question
from nemo_like.data.observations import ObservationEncoder
from nemo_like.data.rows import Rows
from nemo_like.environments.environment import Conversation, EnvironmentFailure
from nemo_like.environments.environment_workers import EnvironmentWorker
from nemo_like.environments.reward import RewardError, RewardProblem, RewardSample
from nemo_like.environments.reward_calls import BadReward, score_each
from nemo_like.environments.reward_worker import load_reward_functions
from nemo_like.environments.steps import StepOutcome, StepTask
from nemo_like.training.diagnostics import Diagnostics
from nemo_like.training.model_files import RewardModelFiles, open_reward_model

_POLL_S = 1.0


def answered_sample(rows: Rows) -> RewardSample:
    """Return the first row with its own answer in the place of a completion; empty without one."""
    sampled = question(rows[0])
    last_message = conversation(rows[0])[-1]
    completion = ""
    if last_message["role"] == "assistant":
        completion = last_message.get("content") or ""
    return RewardSample(
        prompt=sampled.text, completion=completion, answer=sampled.answer, row=sampled.row
    )


def check_reward_functions(config: RunConfig, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Import the reward functions and score the first row's own answer with each of them.

    The functions are called as in a run, so a function that raises is a problem here as well.
    """
    functions = diagnostics.check(lambda: load_reward_functions(config.reward.functions))
    if not functions or rows is None:
        return
    sample = answered_sample(rows)
    for name, function in functions.items():
        path = config.reward.functions[name].path
        score = score_each(function, [sample], name)[0]
        if isinstance(score, BadReward):
            problem = RewardProblem(name, path, score.kind, score.text)
            diagnostics.problems.append(str(RewardError.from_problem(problem, sample)))
        else:
            diagnostics.add_lines(
                "rewards", f"{name} ({path}): {score:g} for the answer of {rows.location(0)} itself"
            )


def check_reward_models(config: RunConfig, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Open the files of each reward model and encode the first row's own answer with it."""
    if not config.generates:
        return
    for name in config.reward.models:
        diagnostics.check(partial(_check_model, config, name, rows, diagnostics))


def _check_model(config: RunConfig, name: str, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Describe one reward model. Raises ConfigError if its files or the row cannot be used."""
    model = config.reward.models[name]
    files = open_reward_model(name, model)
    workers = counted(model.num_workers, "worker") if model.num_workers else "the policy's workers"
    text = f"{name} ({model.model_name}): {files.spec.model_type} on {workers}"
    if rows is not None:
        num_tokens = _num_tokens(config, name, files, rows)
        text += f"; {num_tokens} tokens for the answer of {rows.location(0)} itself"
        limit = files.max_length
        if limit is not None and num_tokens > limit and model.oversize_rows == "error":
            diagnostics.warnings.append(
                f"reward.models.{name} scores conversations of at most {limit} tokens, and that of"
                f" {rows.location(0)} with its own answer has {num_tokens}: raise"
                f" reward.models.{name}.max_length, or set reward.models.{name}.oversize_rows to"
                " truncate, which removes the beginning"
            )
    diagnostics.add_lines("rewards", text)


def _num_tokens(config: RunConfig, name: str, files: RewardModelFiles, rows: Rows) -> int:
    """Return the tokens of the first row with its answer. Raises ConfigError if it has none."""
    # Imported here: it imports torch, which a config without reward models does not need.
    from nemo_like.rollout.conversations import scored_conversation

    conversation_of_row = scored_conversation(answered_sample(rows), config.data)
    try:
        encoded = files.encoder.encode_sft(conversation_of_row.messages, conversation_of_row.tools)
    except ConfigError as error:
        raise ConfigError(
            f"reward.models.{name} cannot score the answer of {rows.location(0)}: {error}"
        ) from error
    largest = int(encoded.input_ids.max())
    if largest >= files.spec.vocab_size:
        raise ConfigError(
            f"reward.models.{name}: its tokenizer gives the token id {largest} for"
            f" {rows.location(0)}, but the model has a vocabulary of {files.spec.vocab_size}; set"
            f" reward.models.{name}.tokenizer_name to the tokenizer that the model was trained with"
        )
    return len(encoded.input_ids)


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


def _check_step(
    config: RunConfig,
    worker: EnvironmentWorker,
    rows: Rows,
    encoder: ChatEncoder | None,
    diagnostics: Diagnostics,
) -> None:
    sample = answered_sample(rows)
    messages = question(rows[0]).messages
    completion = sample.completion or sample.answer or ""
    turn = {"role": "assistant", "content": completion}
    task = StepTask(
        key=0,
        conversation=Conversation(messages=(*messages, turn), row=sample.row),
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
