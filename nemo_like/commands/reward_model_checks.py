"""Checks of `validate` on reward models: their files, and the encoding of a row with each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import counted
from nemo_like.data.datasets import conversation, question
from nemo_like.data.rows import Rows
from nemo_like.diagnostics.report import Diagnostics
from nemo_like.environments.reward import RewardSample
from nemo_like.rollout.conversations import scored_conversation

if TYPE_CHECKING:
    from nemo_like.training.rollout_workers import RewardModelFiles


def check_reward_models(config: RunConfig, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Open the files of each reward model and encode the first row's own answer with it."""
    if not config.generates:
        return
    for name in config.reward.models:
        diagnostics.check(partial(_check, config, name, rows, diagnostics))


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


def _check(config: RunConfig, name: str, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Describe one reward model. Raises ConfigError if its files or the row cannot be used."""
    # The module imports torch, which a config without reward models does not need.
    from nemo_like.training.rollout_workers import open_reward_model

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
