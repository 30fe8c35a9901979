"""Preference pairs: a prompt with a chosen and a rejected completion.

Formats: `prompt`, `chosen` and `rejected`, each a text or a list of messages; or `chosen` and
`rejected` alone, two conversations that begin with the same prompt: lists of messages, or texts
with turns of `Human:` and `Assistant:`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.column_names import column_guesses, shown_columns
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, RowSchema, turns
from nemo_like.data.images import RowImage
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.known_rows import known_row
from nemo_like.data.messages import MEANT, Message, is_trained, row_tools, unknown_roles
from nemo_like.data.row_files import Row, shown_json

_UNDERSTOOD = (
    "prompt + chosen + rejected (texts or lists of messages); chosen + rejected (lists of messages"
    " with the same prompt)"
)
_ROW_START = 2
"""Flag in the token mask of joined rows: the first token of the second row."""
_MAX_MARGIN = 1e6
"""Largest magnitude of a margin. Losses are float32; a much larger one makes them infinite."""


class PreferencePair(NamedTuple):
    """The two rows of a pair; `token_mask` is 1 on the tokens of the completion."""

    chosen: EncodedRow
    rejected: EncodedRow
    margin: float = 0.0
    """By how much the score of the chosen completion should be higher, in a reward model."""

    @property
    def rows(self) -> tuple[EncodedRow, EncodedRow]:
        """The chosen and the rejected row."""
        return self.chosen, self.rejected


class PreferenceTexts(NamedTuple):
    """A pair as messages. `chosen` and `rejected` follow `prompt`."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def preference(row: Row) -> PreferenceTexts:
    """Return the messages of a pair.

    Without a `prompt` column the prompt is the common beginning of both completions. So it is where
    they are complete conversations that begin with the turns of `prompt`, possibly after a system
    turn, as in UltraFeedback's binarized form.
    """
    prompt = [] if row.get("prompt") is None else turns(row, "prompt")
    chosen = turns(row, "chosen")
    rejected = turns(row, "rejected")
    # Turns are compared, not texts: two completions may begin with the same words.
    num_common = 0
    while num_common < min(len(chosen), len(rejected)):
        if chosen[num_common] != rejected[num_common]:
            break
        num_common += 1
    common = chosen[:num_common]
    if prompt and not _begins_with(common, prompt):
        return PreferenceTexts(prompt, chosen, rejected)
    return PreferenceTexts(common, chosen[num_common:], rejected[num_common:])


def _begins_with(messages: list[Message], prompt: list[Message]) -> bool:
    """Return True if `messages` begin with `prompt`, possibly after a system turn."""
    if messages[: len(prompt)] == prompt:
        return True
    has_system = bool(messages) and messages[0]["role"] == "system"
    return has_system and messages[1 : len(prompt) + 1] == prompt


def encode_preference(encoder: ChatEncoder, row: Row) -> PreferencePair:
    """Encode both rows of a pair; only the tokens of the completions are marked.

    Raises ConfigError if the template refuses or drops messages or tools.
    """
    texts = preference(row)
    tools = row_tools(row)
    # An assistant turn within the prompt is part of both rows and not of the comparison.
    num_prompt_tokens = 0
    last_answer = _last_answer(texts.prompt)
    if last_answer is not None:
        encoded_prompt = encoder.encode_sft(texts.prompt[: last_answer + 1], tools)
        num_prompt_tokens = int(encoded_prompt.token_mask.sum())
    rows = []
    for completion in (texts.chosen, texts.rejected):
        encoded = encoder.encode_sft([*texts.prompt, *completion], tools)
        # The template renders the prompt alike in both rows, so the trained tokens of its turns
        # are the first ones of each.
        mask = encoded.token_mask.copy()
        mask[np.flatnonzero(mask)[:num_prompt_tokens]] = 0
        encoded = EncodedRow(encoded.input_ids, mask)
        rows.append(encoded if encoder.images is None else encoder.images.expand(encoded, row))
    return PreferencePair(*rows)


def join_pair(pair: PreferencePair) -> EncodedRow:
    """Join the two rows to one, which can be stored and sent like any other encoded row."""
    mask = np.concatenate([pair.chosen.token_mask, pair.rejected.token_mask])
    mask[len(pair.chosen.token_mask)] |= _ROW_START
    ids = np.concatenate([pair.chosen.input_ids, pair.rejected.input_ids])
    later = _moved(pair.rejected.images, len(pair.chosen.input_ids))
    return EncodedRow(ids, mask, pair.chosen.images + later)


def split_pair(joined: EncodedRow) -> PreferencePair:
    """Return the two rows that `join_pair` joined."""
    start = int(np.flatnonzero(joined.token_mask & _ROW_START)[0])
    mask = joined.token_mask & ~np.uint8(_ROW_START)
    images = tuple(image for image in joined.images if image.start < start)
    chosen = EncodedRow(joined.input_ids[:start], mask[:start], images)
    later = _moved(joined.images[len(images) :], -start)
    rejected = EncodedRow(joined.input_ids[start:], mask[start:], later)
    return PreferencePair(chosen, rejected)


def _moved(images: Sequence[RowImage], num_tokens: int) -> tuple[RowImage, ...]:
    return tuple(image._replace(start=image.start + num_tokens) for image in images)


def _last_answer(messages: list[Message]) -> int | None:
    """Return the index of the last assistant turn; None if there is none."""
    indices = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    return indices[-1] if indices else None


def _check_preference(row: Row, columns: tuple[str, ...]) -> None:
    """Raise ConfigError for a pair without a prompt, completions or a preference."""
    for column in columns:
        messages = row[column] if isinstance(row[column], list) else []
        if not all(map(is_trained, messages)):
            raise ConfigError(
                f"a message of {column!r} has a flag that removes its loss, but all tokens of the"
                " completions are compared; remove the flag"
            )
        if "prompt" not in columns and not isinstance(row[column], list):
            guesses = column_guesses(row, [("prompt",)])
            mapping = f"set data.columns={shown_columns(guesses[0])}, or " if guesses else ""
            raise ConfigError(
                f"column {column!r} is a text, and there is no column 'prompt'; {mapping}add it, or"
                " write the conversation as a list of messages"
            )
    texts = preference(row)
    if not texts.prompt:
        raise ConfigError(
            "'chosen' and 'rejected' do not begin with the same turn, so there is no prompt"
        )
    for column, completion in (("chosen", texts.chosen), ("rejected", texts.rejected)):
        if not completion or completion[-1]["role"] != "assistant":
            unknown = unknown_roles(message["role"] for message in completion)
            raise ConfigError(
                f"column {column!r} does not end with an assistant turn after the prompt"
                + (f": {unknown}" if unknown else "")
            )
        if completion[0]["role"] in ("system", "user") and texts.prompt[-1]["role"] == "user":
            raise ConfigError(
                f"column {column!r} begins with a turn of the {completion[0]['role']}, which does"
                " not follow the turns of 'prompt'; give complete conversations that begin with"
                " the same turns as 'prompt', or only the turns after it"
            )
    if texts.chosen == texts.rejected:
        raise ConfigError(
            "'chosen' and 'rejected' are equal, so there is no preference; remove the row"
        )


def _check_margin(row: Row, columns: tuple[str, ...]) -> None:
    """Raise ConfigError for a bad pair with an optional column `margin`."""
    pair_margin(row)
    _check_preference(row, columns)


def pair_margin(row: Row) -> float:
    """Return the margin of a pair of a reward model; 0 without one.

    A CSV file has numbers as texts, and an empty one where a row has none. Raises ConfigError for
    another value.
    """
    margin = row.get("margin")
    if margin is None or margin == "":
        return 0.0
    if isinstance(margin, int | float | str) and not isinstance(margin, bool):
        with suppress(ValueError, OverflowError):
            # False for NaN too.
            if abs(float(margin)) <= _MAX_MARGIN:
                return float(margin)
    raise ConfigError(
        f"column 'margin' is {shown_json(margin)}, not a finite number from {-_MAX_MARGIN:g} to"
        f" {_MAX_MARGIN:g}"
    )


PREFERENCE_ROWS = RowSchema(
    (("prompt", "chosen", "rejected"), ("chosen", "rejected")), _UNDERSTOOD, _check_preference
)
"""Pairs of a chosen and a rejected completion of one prompt."""
MARGIN_ROWS = RowSchema(
    PREFERENCE_ROWS.formats, f"{_UNDERSTOOD}; each optionally with margin (a number)", _check_margin
)
"""Preference pairs of a reward model: optionally with the column `margin`."""


def job_of_row(row: Row, columns: Mapping[str, str]) -> str:
    """Return the job that a row is for, with the names of `data.columns`.

    A row that could be a prompt is one for SFT if it has a completion under another name, or a turn
    of the assistant with another role. It is `sft` for a row that no job can use, whose error then
    names what is wrong.
    """
    schemas = {"dpo": PREFERENCE_ROWS, "sft": SFT_ROWS, "grpo": PROMPT_ROWS}
    possible = [kind for kind, schema in schemas.items() if _is_usable(row, columns, schema)]
    if possible[:1] in (["dpo"], ["sft"]):
        return possible[0]
    if PREFERENCE_ROWS.guess(row) is not None:
        return "dpo"
    has_completion = "completion" in {*row, *(SFT_ROWS.guess(row) or {})}
    with suppress(ConfigError, KeyError):
        roles = [turn["role"] for turn in turns(known_row(row, columns), "messages")]
        has_completion |= any(MEANT.get(role.strip().lower()) == "assistant" for role in roles)
    return "sft" if has_completion else (*possible, "sft")[0]


def _is_usable(row: Row, columns: Mapping[str, str], schema: RowSchema) -> bool:
    with suppress(ConfigError):
        known = known_row(row, columns)
        schema.check(known, schema.recognize(known))
        return True
    return False
