"""Checks of `validate` on encoded rows: encoding errors, lengths, token budgets, vocabulary.

Not every row is encoded, so that the checks take seconds: the longest rows of each source by text,
where the longest row by tokens is, the first rows of each set of roles, and a random sample of the
others.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from nemo_like.config.check import batching_section, padding_multiples
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import MESSAGE_COLUMNS, question
from nemo_like.data.encoded_rows import ROW_ERRORS, row_error_text
from nemo_like.data.row_files import Row
from nemo_like.data.rows import MAX_LISTED, BadRows, Rows
from nemo_like.diagnostics.report import Diagnostics
from nemo_like.run.progress import Progress

NUM_SAMPLES = 3
"""Rows that are shown decoded."""
_NUM_LONGEST = 512
_NUM_RANDOM = 256
_MIN_PER_SOURCE = 64
_MAX_ROLE_SETS = 64

Value = TypeVar("Value")


def encode_sample(
    rows: Rows, encode: Callable[[Row], Value], diagnostics: Diagnostics
) -> dict[int, Value]:
    """Encode a sample of the rows; return index -> result.

    All rows that cannot be encoded become one problem, which lists the first.
    """
    chosen: list[int] = []
    for indices in rows.sources.values():
        chosen += _chosen_rows(rows, indices, len(rows.sources))
    encoded: dict[int, Value] = {}
    bad = BadRows()
    with Progress(sys.stderr).phase("encoding rows", len(chosen)) as phase:
        for index in chosen:
            try:
                encoded[index] = encode(rows[index])
            # Any other exception is a bug, and not a property of the row.
            except ROW_ERRORS as error:
                bad.add(rows.location(index), row_error_text(error))
            phase.advance()
    if bad.num_rows:
        diagnostics.problems.append(bad.text(f" of the {len(chosen)} rows sampled"))
    return encoded


def _chosen_rows(rows: Rows, indices: range, num_sources: int) -> list[int]:
    """Return the indices of the rows of one source to encode, ascending."""
    sizes = []
    # An unknown role may be in a single row.
    by_roles: dict[frozenset[str], list[int]] = {}
    for index in indices:
        row = rows[index]
        # The number of characters is cheap, and close to proportional to the number of tokens.
        sizes.append(len(str(row)))
        roles = _roles(row)
        same = by_roles.get(roles, [])
        if len(same) < MAX_LISTED and (same or len(by_roles) < _MAX_ROLE_SETS):
            by_roles[roles] = [*same, index]
    first_of_roles = [index for same in by_roles.values() for index in same]
    num_longest = max(_NUM_LONGEST // num_sources, _MIN_PER_SOURCE)
    by_size = sorted(indices, key=lambda index: -sizes[index - indices.start])
    # A fixed seed: the same rows are checked in every call.
    num_random = max(_NUM_RANDOM // num_sources, _MIN_PER_SOURCE)
    others = random.Random(0).sample(indices, min(len(indices), num_random))
    return sorted({*by_size[:num_longest], *others, *first_of_roles, *indices[:NUM_SAMPLES]})


def _roles(row: Row) -> frozenset[str]:
    """Return the roles of all messages of a row."""
    columns = (row.get(name) for name in MESSAGE_COLUMNS)
    lists = (column for column in columns if isinstance(column, list))
    return frozenset(message["role"] for messages in lists for message in messages)


def encode_prompt_of(encoder: ChatEncoder, row: Row) -> np.ndarray:
    """Return the token ids of a row's prompt, int [L]."""
    prompt = question(row)
    return encoder.encode_prompt(prompt.messages, prompt.tools)


def check_lengths(
    config: RunConfig, rows: Rows, lengths: Mapping[int, int], diagnostics: Diagnostics
) -> None:
    """Check rows against `max_total_sequence_length` and the token budgets.

    `lengths` is row index -> tokens of the sampled rows.
    """
    if not lengths:
        return
    diagnostics.add_lines("lengths", _describe_lengths(rows, lengths, "rows"))
    limit = config.policy.max_total_sequence_length
    policy = config.policy.oversize_rows
    max_length = max(lengths.values())
    above = [index for index in lengths if lengths[index] > limit]
    if above:
        location = rows.location(_longest(above, lengths))
        text = (
            f"{len(above)} of the {len(lengths):,} rows sampled are above"
            f" policy.max_total_sequence_length {limit}, the longest with {max_length} tokens"
            f" ({location})"
        )
        outcomes = {
            "truncate": "their ends are removed",
            "drop": "they are left out",
            "singleton": "they are kept in full",
        }
        if policy == "error":
            diagnostics.problems.append(
                f"{text}; raise it to {max_length}, or set policy.oversize_rows to truncate (remove"
                " the end), drop or singleton"
            )
        else:
            diagnostics.warnings.append(
                f"{text}; policy.oversize_rows is {policy}, so {outcomes[policy]}"
            )
    is_limited = policy in ("truncate", "drop")
    _check_budget(config, min(max_length, limit) if is_limited else max_length, diagnostics)


def check_prompts(
    config: RunConfig, rows: Rows, lengths: Mapping[int, int], diagnostics: Diagnostics
) -> None:
    """Check that prompts leave tokens for a completion, and rows against the token budgets.

    `lengths` is row index -> tokens of the sampled prompts.
    """
    if not lengths:
        return
    diagnostics.add_lines("lengths", _describe_lengths(rows, lengths, "prompts"))
    limit = config.policy.max_total_sequence_length
    max_new_tokens = config.policy.generation.max_new_tokens
    max_length = max(lengths.values())
    above = [index for index in lengths if lengths[index] >= limit]
    if above:
        _add_long_prompts(config, rows, above, lengths, diagnostics)
        return
    needed = max_length + max_new_tokens
    if needed > limit:
        num_short = sum(length + max_new_tokens > limit for length in lengths.values())
        diagnostics.warnings.append(
            f"{num_short} of the {len(lengths):,} prompts sampled leave less than"
            f" policy.generation.max_new_tokens {max_new_tokens} for the completion;"
            f" policy.max_total_sequence_length {needed} would fit them all"
        )
    _check_budget(config, min(needed, limit), diagnostics)


def _add_long_prompts(
    config: RunConfig,
    rows: Rows,
    above: list[int],
    lengths: Mapping[int, int],
    diagnostics: Diagnostics,
) -> None:
    """Add the problem or warning about the prompts `above` the sequence length."""
    longest = _longest(above, lengths)
    text = (
        f"{len(above)} of the {len(lengths):,} prompts sampled leave no tokens for a completion"
        f" within policy.max_total_sequence_length {config.policy.max_total_sequence_length}, the"
        f" longest with {lengths[longest]} tokens ({rows.location(longest)})"
    )
    outcomes = {"truncate": "their beginnings are removed", "drop": "they are left out"}
    policy = config.policy.oversize_rows
    if policy in outcomes:
        diagnostics.warnings.append(
            f"{text}; policy.oversize_rows is {policy}, so {outcomes[policy]}"
        )
    else:
        diagnostics.problems.append(
            f"{text}; raise it above {lengths[longest]}, or set policy.oversize_rows to truncate"
            " (remove the beginning) or drop (leave the rows out)"
        )


def _longest(indices: list[int], lengths: Mapping[int, int]) -> int:
    return max(indices, key=lambda index: lengths[index])


def _describe_lengths(rows: Rows, lengths: Mapping[int, int], noun: str) -> str:
    longest = _longest(list(lengths), lengths)
    if len(lengths) == len(rows):
        which = f"all {len(rows):,}"
    else:
        which = f"{len(lengths):,} sampled of {len(rows):,}"
    return (
        f"{noun} ({which}): the longest has {lengths[longest]:,} tokens ({rows.location(longest)})"
    )


def _check_budget(config: RunConfig, max_length: int, diagnostics: Diagnostics) -> None:
    """Check the longest row against the token budgets of the batching mode that is enabled."""
    mode = batching_section(config)
    if mode is None:
        return
    name, section = mode
    multiples = padding_multiples(config, section)
    for key, budget in (
        ("train_mb_tokens", section.train_mb_tokens),
        ("logprob_mb_tokens", section.logprob_mb_tokens),
    ):
        needed = config.rows_per_example * multiples.tokens_of_row(max_length)
        if needed <= budget:
            diagnostics.add_lines(
                "lengths",
                f"{name}.{key} {budget:,} fits {budget // needed} of the longest {config.example}"
                f" ({needed:,} tokens)",
            )
        elif config.policy.oversize_rows != "error":
            # With `error` the rows are a problem of `check_lengths` or `config.check` already.
            diagnostics.warnings.append(
                f"the longest {config.example} takes {needed} tokens, more than {name}.{key}"
                f" {budget};"
                f" policy.oversize_rows is {config.policy.oversize_rows}"
            )
