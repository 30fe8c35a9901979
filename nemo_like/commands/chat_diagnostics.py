"""What `validate` finds out about the texts of the rows and the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from nemo_like.commands.diagnostics import Findings
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import Message, Row, Rows, conversation, question
from nemo_like.data.tools import row_tools

_NUM_PROMPTS_COMPARED = 64


def check_texts(
    encoder: ChatEncoder, rows: Rows, findings: Findings, *, trains_answers: bool
) -> None:
    """Warn about control tokens in the texts of `rows`, all of them.

    The tokenizer turns such a text into the control token itself: in a user's text it ends the turn
    or begins another, and in an answer that already has the token that ends it the rendered turn
    has two. `trains_answers`: rows are conversations to learn from, not questions.
    """
    ends = list(dict.fromkeys((*encoder.template.end_texts, str(encoder.tokenizer.eos_token))))
    control = re.compile(
        "|".join(re.escape(text) for text in encoder.template.control_texts if text)
    )
    read: Callable[[Row], Sequence[Message]] = conversation if trains_answers else _questions
    ended: list[int] = []
    forged: list[tuple[int, str]] = []
    for index, row in enumerate(rows):
        messages = read(row)
        if any(end in text for text in _texts(messages, assistant=True) for end in ends):
            ended.append(index)
        found = next(
            (
                match
                for text in _texts(messages, assistant=False)
                if (match := control.search(text))
            ),
            None,
        )
        if found is not None:
            forged.append((index, found.group()))
    if ended:
        findings.warnings.append(
            f"{_count(ended, rows)} contain the end token ({' or '.join(ends)}) in an assistant's"
            f" text already, e.g."
            f" {rows.locations[ended[0]]}; the rendered turn contains it twice, so remove it from the"
            f" text"
        )
    if forged:
        index, token = forged[0]
        findings.warnings.append(
            f"{_count(forged, rows)} contain special tokens in a text that is not the assistant's,"
            f" e.g. {token!r} in"
            f" {rows.locations[index]}; the tokenizer makes control tokens of them, so remove or"
            f" rewrite them"
        )


def check_prompts_agree(encoder: ChatEncoder, rows: Rows | None, findings: Findings) -> None:
    """Warn where rollouts and SFT rows put different tokens before an answer; `rows` are
    conversations.
    """
    looked_at = [] if rows is None else rows[:_NUM_PROMPTS_COMPARED]
    differences = [
        encoder.prompt_difference(conversation(row), row_tools(row)) for row in looked_at
    ]
    differences = differences or [encoder.prompt_difference()]
    found = [index for index, difference in enumerate(differences) if difference is not None]
    if found:
        where = "" if rows is None else f" (e.g. {rows.locations[found[0]]})"
        findings.warnings.append(
            f"the chat template makes rollouts and SFT rows differ{where}: {differences[found[0]]};"
            f" a template given as"
            " policy.chat_template that renders both alike avoids it"
        )


def _questions(row: Row) -> Sequence[Message]:
    return question(row).messages


def _texts(messages: Sequence[Message], *, assistant: bool) -> Iterator[str]:
    for message in messages:
        if (message["role"] == "assistant") == assistant and isinstance(
            message.get("content"), str
        ):
            yield message["content"]


def _count(found: Sequence[object], rows: Rows) -> str:
    return f"{len(found):,} of the {len(rows):,} rows"
