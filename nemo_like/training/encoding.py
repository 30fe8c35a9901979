"""Encodes rows to token ids, ahead of the steps, and applies `policy.oversize_rows`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nemo_like.config.batching import StreamableDataConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import DataConfig, RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import (
    SFT_ROWS,
    Row,
    Rows,
    conversation,
    flagged_conversation,
    question,
)
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.encoding_pool import Receive, RowPool
from nemo_like.data.messages import TrainOn, mask_turns, row_tools, trained_turns
from nemo_like.data.token_rows import encode_text, encode_token_row
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress

EncodeRow = Callable[[ChatEncoder, RunConfig, Row], EncodedRow | None]
"""Encodes one row of a file. None drops the row; raises ConfigError for a bad row."""

_WORKER_MODULE = "nemo_like.algorithms.encoding_worker"
"""Program of the encoding processes. It finds the `EncodeRow` of a job by the name of the job."""
_POLICY_KEYS = (
    "model_name",
    "tokenizer_name",
    "chat_template",
    "max_total_sequence_length",
    "oversize_rows",
)
MAX_ROWS_AWAITED = 200_000
"""Rows from which the first step waits only briefly: their encoding takes minutes."""
_LARGE_TIMEOUT_S = 10.0


def encode_conversation(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """Encode one SFT row; return None if it is too long and `policy.oversize_rows` is drop.

    Raises ConfigError if it is too long and `policy.oversize_rows` is error.
    """
    return fit_row(encode_sft_row(encoder, config.data.train_on, row), config)


def encode_sft_row(encoder: ChatEncoder, train_on: TrainOn, row: Row) -> EncodedRow:
    """Encode one SFT row of any format and length; see `data.train_on`.

    Raises ConfigError for loss flags that contradict `train_on` or leave nothing to learn.
    """
    if row.get("input_ids") is not None and SFT_ROWS.recognize(row, "row") == ("input_ids",):
        return encode_token_row(encoder, row)
    if row.get("text") is not None and SFT_ROWS.recognize(row, "row") == ("text",):
        return encode_text(encoder, row["text"])
    turns = trained_turns(flagged_conversation(row), train_on)
    encoded = encoder.encode_sft(conversation(row), row_tools(row))
    return encoded if turns is None else mask_turns(encoded, turns)


def fit_row(encoded: EncodedRow, config: RunConfig) -> EncodedRow | None:
    """Apply `policy.oversize_rows` to a row: return it, its beginning, or None to drop it.

    Raises ConfigError if it is too long and `policy.oversize_rows` is error.
    """
    length = len(encoded.input_ids)
    limit = config.policy.max_total_sequence_length
    # The planner gives a singleton a microbatch of its own.
    if length <= limit or config.policy.oversize_rows == "singleton":
        return encoded
    if config.policy.oversize_rows == "truncate":
        return EncodedRow(encoded.input_ids[:limit], encoded.token_mask[:limit])
    if config.policy.oversize_rows == "drop":
        return None
    raise ConfigError(
        f"the row has {length} tokens, policy.max_total_sequence_length is {limit}; raise it, or"
        " set policy.oversize_rows to truncate (remove the end), drop (skip the row) or singleton"
        " (a separate microbatch)"
    )


def encode_question(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """Encode the prompt of one row, with a token mask of zeros.

    Returns None for a prompt above `data.max_prompt_tokens`. For one that leaves no room for a
    completion, `policy.oversize_rows` decides: truncate removes its beginning, so that
    `max_new_tokens` fit behind it; drop returns None; the other values raise ConfigError.
    """
    prompt = question(row)
    token_ids = encoder.encode_prompt(prompt.messages, prompt.tools)
    policy = config.policy
    length = len(token_ids)
    max_tokens = config.data.max_prompt_tokens
    if max_tokens is not None and length > max_tokens:
        return None
    limit = policy.max_total_sequence_length
    if length >= limit:
        if policy.oversize_rows == "drop":
            return None
        if policy.oversize_rows != "truncate":
            raise ConfigError(
                f"the prompt has {length} tokens, policy.max_total_sequence_length is {limit}, so"
                " there is no room for a completion; raise it, or set policy.oversize_rows to"
                " truncate (remove the beginning) or drop (skip the row)"
            )
        # The end of a prompt has the question and the opening of the assistant turn.
        num_kept = max(limit - policy.generation.max_new_tokens, 1)
        token_ids = token_ids[-num_kept:]
    return EncodedRow(token_ids, np.zeros(len(token_ids), dtype=np.uint8))


class PromptRows:
    """Encoded rows as prompts; a `loader.FetchableRows`."""

    def __init__(self, rows: Rows, encoded: EncodedRows) -> None:
        self._rows = rows
        self._encoded = encoded
        self.digests = rows.digests

    def fetch(self, rows: Sequence[int]) -> list[Prompt | None]:
        """Return the prompts of `rows`, None for a dropped row; see `loader.FetchableRows`."""
        prompts: list[Prompt | None] = []
        for row, encoded in zip(rows, self._encoded.fetch(rows), strict=True):
            if encoded is None:
                prompts.append(None)
                continue
            fields = question(self._rows[row])
            prompt = Prompt(
                token_ids=encoded.input_ids, text=fields.text, answer=fields.answer, row=fields.row
            )
            prompts.append(prompt)
        return prompts

    def location(self, row: int) -> str:
        """Return the file and line of a row; see `loader.FetchableRows`."""
        return self._encoded.location(row)


def encoding_setup(config: RunConfig, vocab_size: int | None) -> dict[str, Any]:
    """Return what the encoding of a row depends on, as JSON values."""
    # A job can have further keys in its section, which no encoding depends on.
    data_keys = [field.name for field in dataclasses.fields(DataConfig)]
    return {
        "kind": config.encoded_as,
        "vocab_size": vocab_size,
        "policy": {key: getattr(config.policy, key) for key in _POLICY_KEYS},
        "max_new_tokens": config.policy.generation.max_new_tokens,
        # JSON, because the encoding processes get the setup through a pipe.
        "data": {key: getattr(config.data, key) for key in data_keys},
    }


def open_training_rows(
    config: RunConfig, encoder: ChatEncoder, rows: Rows, encode: EncodeRow
) -> EncodedRows:
    """Return the training rows, encoded on demand or by `data.num_encoding_workers` processes.

    Raises ConfigError if `data.encoding_backend=ray_data` needs a package that is not installed.
    """
    setup = encoding_setup(config, encoder.vocab_size)
    start_pool = None
    if encodes_on_cluster(config):
        # Imported on demand: a run without Ray Data does not need Ray here.
        from nemo_like.distributed.ray.ray_data import check_ray_data

        check_ray_data("data.encoding_backend=ray_data")
        start_pool = partial(_start_ray_data, setup, config.data.num_encoding_workers)
    return EncodedRows(
        rows,
        partial(encode, encoder, config),
        module=_WORKER_MODULE,
        setup=setup,
        num_processes=config.data.num_encoding_workers,
        start_pool=start_pool,
    )


def encodes_on_cluster(config: RunConfig) -> bool:
    """Return True if rows are encoded on the cluster, so not before this process joined it."""
    data = config.data
    return isinstance(data, StreamableDataConfig) and data.encoding_backend == "ray_data"


def _start_ray_data(
    setup: dict[str, Any], num_actors: int | None, rows: Sequence[Row], receive: Receive
) -> RowPool:
    """Start the actors that encode `rows`; an `encoding_pool.StartPool`."""
    from nemo_like.distributed.ray.ray_data import RayDataPool

    return RayDataPool(_WORKER_MODULE, setup, rows, receive, num_actors=num_actors)


def leaves_out_rows(config: RunConfig) -> bool:
    """Return True if the encoding of a row can decide to leave it out."""
    return config.policy.oversize_rows == "drop" or config.data.max_prompt_tokens is not None


def decides_during_training(config: RunConfig, num_rows: int) -> bool:
    """Return True if rows are left out when they are reached, so that the first step need not wait.

    This is so for large files in batches of a fixed size. The number of steps must then be given,
    because the number of rows that are left is not known.
    """
    if not config.has_fixed_batches or num_rows <= MAX_ROWS_AWAITED:
        return False
    return leaves_out_rows(config) and getattr(config, config.kind).max_num_steps is not None


def start_encoding(
    config: RunConfig, rows: EncodedRows, order: np.ndarray, num_needed: int
) -> None:
    """Start to encode the rows that the run visits: the first `num_needed` of `order`.

    `order` is int64 [n], rows in the order of their first visit. If the number of steps depends on
    the rows that are left out, every row of the file is encoded when this returns. Raises
    ConfigError for a bad row that is found at once.
    """
    if not leaves_out_rows(config) or decides_during_training(config, len(rows)):
        rows.start(order[:num_needed])
        return
    is_missing = np.ones(len(rows), dtype=bool)
    is_missing[order] = False
    rows.start(np.concatenate([order, np.flatnonzero(is_missing)]))
    progress = Progress()
    if len(rows) > MAX_ROWS_AWAITED:
        progress.print_line(
            f"all {len(rows):,} rows are encoded before the first step, because the number of"
            f" steps depends on the rows that are left out; with {config.kind}.max_num_steps"
            " training starts at once"
        )
    finish_encoding(config, rows, progress)


def finish_encoding(config: RunConfig, rows: EncodedRows, progress: Progress) -> None:
    """Wait for the rows that `start_encoding` started, at most `data.encoding_timeout_s`.

    Reports dropped rows, and rows that are not encoded yet. Raises ConfigError for a bad row.
    """
    if rows.is_finished:
        return
    timeout_s: float | None = config.data.encoding_timeout_s
    if rows.num_started > MAX_ROWS_AWAITED:
        timeout_s = min(config.data.encoding_timeout_s, _LARGE_TIMEOUT_S)
    # Without a limit: the number of steps must be known before the first one.
    if leaves_out_rows(config) and not decides_during_training(config, len(rows)):
        timeout_s = None
    with progress.phase("encoding rows", rows.num_started) as phase:
        is_done = rows.finish(phase.advance, timeout_s)
    if not is_done:
        progress.print_line(
            f"{rows.num_encoded:,} of {rows.num_started:,} rows are encoded after {timeout_s:g} s"
            " (data.encoding_timeout_s); the others are encoded and checked during training"
        )
    dropped = np.flatnonzero(~rows.is_kept)
    num_known = len(rows) if is_done else rows.num_encoded
    if len(dropped) and config.data.max_prompt_tokens is not None:
        progress.print_line(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} leaves out {len(dropped):,} of"
            f" {num_known:,} rows; the first is {rows.location(int(dropped[0]))}"
        )
    elif len(dropped):
        progress.print_line(
            f"policy.oversize_rows=drop skips {len(dropped):,} of {num_known:,} rows; the first is"
            f" {rows.location(int(dropped[0]))}: longer than policy.max_total_sequence_length"
            f" {config.policy.max_total_sequence_length}"
        )
