"""Checks of `validate` on the texts of the rows and on the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import conversation, question
from nemo_like.data.messages import Message, row_tools
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.diagnostics.report import Diagnostics

_NUM_PROMPTS_COMPARED = 64


def check_texts(
    encoder: ChatEncoder,
    rows: Rows,
    messages_of: Callable[[Row], Sequence[Message]],
    diagnostics: Diagnostics,
) -> None:
    """Warn about control tokens in the texts of `rows`; all rows are read.

    The tokenizer converts such a text into the control token itself: in a user's text it ends the
    turn or begins another, and an answer that already contains the end token is rendered with two.
    `messages_of` returns the messages of a row that the model sees.
    """
    template = encoder.template
    ends = list(dict.fromkeys((*template.end_texts, str(encoder.tokenizer.eos_token))))
    # One pattern for all control texts, because every row is searched.
    control = re.compile("|".join(re.escape(text) for text in template.control_texts if text))
    ended: list[int] = []
    forged: list[tuple[int, str]] = []
    for index, row in enumerate(rows):
        messages = messages_of(row)
        # Joined by a character of no control text, so that none is found across messages.
        answers = "\0".join(_texts(messages, assistant=True))
        if any(end in answers for end in ends):
            ended.append(index)
        for text in _texts(messages, assistant=False):
            found = control.search(text)
            if found is not None:
                # One text is enough: rows are counted, not texts.
                forged.append((index, found.group()))
                break
    if ended:
        diagnostics.warnings.append(
            f"{_count(ended, rows)} contain the end token ({' or '.join(ends)}) in an assistant's"
            f" text already, e.g. {rows.location(ended[0])}; the rendered turn contains it twice,"
            " so remove it from the text"
        )
    if forged:
        index, token = forged[0]
        diagnostics.warnings.append(
            f"{_count(forged, rows)} contain special tokens in a text that is not the assistant's,"
            f" e.g. {token!r} in {rows.location(index)}; the tokenizer makes control tokens of"
            " them, so remove or rewrite them"
        )


def check_prompts_agree(encoder: ChatEncoder, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Warn if rollouts and SFT rows have different tokens before an answer.

    The first conversations of `rows` are compared; without rows, a built-in example is.
    """
    compared = [] if rows is None else rows[:_NUM_PROMPTS_COMPARED]
    differences = []
    for row in compared:
        messages = conversation(row)
        # Raw text and token ids are not rendered with the template.
        if all(message["role"] == "assistant" for message in messages):
            continue
        # Tools change the template's output, so they are passed on.
        differences.append(encoder.prompt_difference(messages, row_tools(row)))
    if not differences:
        differences = [encoder.prompt_difference()]
    for index, difference in enumerate(differences):
        if difference is None:
            continue
        where = "" if rows is None else f" (e.g. {rows.location(index)})"
        diagnostics.warnings.append(
            f"the chat template makes rollouts and SFT rows differ{where}: {difference};"
            " a template given as policy.chat_template that renders both alike avoids it"
        )
        # The cause is the template, so the other rows would give the same warning.
        return


def prompt_messages(row: Row) -> Sequence[Message]:
    """Return the messages of a row that a rollout begins with."""
    return question(row).messages


def _texts(messages: Sequence[Message], *, assistant: bool) -> Iterator[str]:
    """Yield the texts of the assistant's messages, or of all others."""
    for message in messages:
        is_assistant = message["role"] == "assistant"
        # A message that only calls tools has no text.
        content = message.get("content")
        if is_assistant == assistant and isinstance(content, str):
            yield content


def _count(found: Sequence[object], rows: Rows) -> str:
    return f"{len(found):,} of the {len(rows):,} rows"
