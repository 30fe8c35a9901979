"""Which assistant turns of a conversation carry the loss: by flags of messages, or the last only.

A message may have `train` (true or false) or `weight` (1 or 0, as in OpenAI's format).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.collate import EncodedRow

FLAGS = ("train", "weight")
TrainOn = Literal["assistant", "all", "last"]


def flags_problem(message: Mapping[str, Any]) -> str | None:
    """Describe the problem of the loss flag of a message, or return None."""
    train = message.get("train")
    weight = message.get("weight")
    if train is not None and not isinstance(train, bool):
        return f"train is {train!r}; give true or false"
    # A bool is an int, but OpenAI's format has numbers.
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        return f"weight is {weight!r}; give 1 (loss on this turn) or 0 (no loss)"
    if train is not None and weight is not None and train != bool(weight):
        return f"train is {train} and weight is {weight}; give one of them"
    if message.get("role") != "assistant" and (train or weight):
        return "the loss is on the assistant's turns only; remove the flag"
    return None


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return False for an assistant turn whose flag removes its loss."""
    flags = [message.get(name) for name in FLAGS]
    return not any(flag is not None and not flag for flag in flags)


def trained_turns(messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> list[bool] | None:
    """Return for each assistant turn whether it carries the loss; None if all do.

    Raises ConfigError if a flag contradicts `train_on`, or no turn is left.
    """
    turns = [is_trained(message) for message in messages if message["role"] == "assistant"]
    if train_on == "all" and not all(turns):
        raise ConfigError(
            "a message has a flag that removes its loss, but data.train_on is all; set it to"
            " assistant or last, or remove the flag"
        )
    if train_on == "last":
        turns[:-1] = [False] * len(turns[:-1])
    if turns and not any(turns):
        raise ConfigError(
            f"no assistant turn is left to learn from: the flags of the messages remove all, with"
            f" data.train_on={train_on}"
        )
    return None if all(turns) else turns


def mask_turns(encoded: EncodedRow, turns: Sequence[bool]) -> EncodedRow:
    """Return the row with loss on some of its assistant turns, up to the end of the last of them.

    `turns` has one entry per assistant turn. Raises ConfigError if the turns cannot be told apart.
    """
    # Runs of trained tokens: the edges are where the mask changes, both ends included.
    padded = np.concatenate([[0], encoded.token_mask, [0]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded)).reshape(-1, 2)
    if len(edges) != len(turns):
        raise ConfigError(
            f"the chat template renders {len(turns)} assistant turns as {len(edges)} separate parts"
            " with loss, so single turns cannot be selected; set data.train_on=assistant and remove"
            " the flags of the messages, or merge consecutive assistant turns"
        )
    mask = np.zeros_like(encoded.token_mask)
    for (start, end), has_loss in zip(edges.tolist(), turns, strict=True):
        if has_loss:
            mask[start:end] = 1
    end = int(np.flatnonzero(mask)[-1]) + 1
    return EncodedRow(encoded.input_ids[:end], mask[:end])
