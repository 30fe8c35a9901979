"""Spans of the assistant turns in the text that a chat template renders.

A span begins after the generation prompt and ends after the token that ends the turn. The exact
method renders the conversation several times per turn and compares the texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_template import ChatTemplate
from nemo_like.data.tools import Message, Tool

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""


def exact_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    full: str,
) -> list[Span]:
    """Find the span of each assistant turn in `full`, the rendered conversation, in order.

    Raises ConfigError for a turn that cannot be found.
    """
    spans: list[Span] = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            # A turn is searched after the previous one: equal texts may occur several times.
            _, behind = spans[-1] if spans else (0, 0)
            spans.append(_Turn(template, messages, tools, full, turn, behind).span())
    return spans


class _Turn:
    """One assistant turn of a rendered conversation."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        full: str,
        turn: int,
        behind: int,
    ) -> None:
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._full = full
        self._turn = turn
        self._behind = behind
        """End of the previous assistant turn in `full`."""

    def span(self) -> Span:
        """Return the span of the turn. Raises ConfigError if it cannot be found."""
        start = self._start()
        end = self._end(start)
        if not self._behind <= start < end:
            raise ConfigError(
                f"turn {self._turn} of the conversation cannot be found in what the chat template"
                f" renders; mark it in the "
                "template with {% generation %}, or set data.train_on=all"
            )
        return start, self._trimmed(start, end)

    def _start(self) -> int:
        """Find the end of the generation prompt before the turn, else the start of the turn's text.

        Some templates end the generation prompt with text that a finished turn does not have
        (`<think>` in DeepSeek-R1), or render earlier turns differently once there are later ones.
        Then the header is the common prefix with conversations that have another message here.
        """
        full = self._full
        turn = self._turn
        # Many templates cannot render an empty conversation.
        if turn:
            opening = self._template.render(self._messages[:turn], self._tools, opening=True)
            if full.startswith(opening):
                return len(opening)
        start = min(common_prefix(full, other) for other in self._with_other_messages())
        prompt = self._template.generation_prompt
        found = -1
        if prompt:
            # The text of the turn may begin like the prompt, so the last copy is taken.
            found = full.rfind(prompt, self._behind, start + len(prompt))
        return start if found < 0 else found + len(prompt)

    def _end(self, start: int) -> int:
        """Find the end of the turn, including the text that the template writes after it."""
        full = self._full
        up_to_turn = self._template.render(self._messages[: self._turn + 1], self._tools)
        if full.startswith(up_to_turn):
            return len(up_to_turn)
        # Some templates render a turn differently once it is not the last: they drop its reasoning.
        end = self._end_of_turn(start)
        if end is not None:
            return end
        # The text after the turn is read from a rendering in which the turn is the last, then
        # located in the full text.
        other = self._with_content("0", self._turn + 1)
        text_end = len(up_to_turn) - common_suffix(other, up_to_turn)
        behind = up_to_turn[text_end:]
        text_end = len(full) - common_suffix(self._with_content("0"), full)
        return text_end + common_prefix(full[text_end:], behind)

    def _end_of_turn(self, start: int) -> int | None:
        """Find the end of the first end-of-turn token; None if absent or ambiguous."""
        end_text = self._template.end_of_turn
        if end_text is None:
            return None
        # A message that contains the token itself would end too early.
        message = json.dumps(self._messages[self._turn], ensure_ascii=False, default=str)
        if end_text in message:
            return None
        found = self._full.find(end_text, start)
        return None if found < 0 else found + len(end_text)

    def _trimmed(self, start: int, end: int) -> int:
        """Exclude text after the end of the turn: a line break, or the end of the conversation."""
        trimmed = self._full[start:end].rstrip()
        end_of_turn = self._end_of_turn(start)
        # The text may end with another token that ends turns, which then belongs to it.
        ends_otherwise = trimmed.endswith(self._template.end_texts)
        if end_of_turn is not None and end_of_turn <= end and not ends_otherwise:
            return end_of_turn
        # White space after a control token belongs to the template; other white space is text.
        if trimmed.endswith(self._template.special_texts):
            return start + len(trimmed)
        return end

    def _with_other_messages(self) -> list[str]:
        """Render the conversation with two other texts in place of this turn.

        The texts begin differently, so at least one differs from this turn at its first character.
        """
        texts = []
        for letter in ("0", "1"):
            other = {"role": "assistant", "content": letter * 2}
            messages = [*self._messages[: self._turn], other, *self._messages[self._turn + 1 :]]
            try:
                texts.append(self._template.render(messages, self._tools))
            except ConfigError:
                # A tool's result may need the call before it.
                texts.append(self._with_content(letter))
        return texts

    def _with_content(self, letter: str, num_messages: int | None = None) -> str:
        """Render the first messages with a content whose first and last characters differ."""
        message = self._messages[self._turn]
        text = str(message.get("content", "")).strip()
        first = _other(text[:1], letter)
        last = _other(text[-1:], letter)
        messages = list(self._messages)
        # Other keys, such as calls, stay: a later message may refer to them.
        messages[self._turn] = {**message, "content": first + last}
        return self._template.render(messages[:num_messages], self._tools)


def common_prefix(left: str, right: str) -> int:
    """Length of the common prefix."""
    # Bisection over slices: comparing slices is much faster than a loop over characters.
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(left: str, right: str) -> int:
    """Length of the common suffix."""
    return common_prefix(left[::-1], right[::-1])


def _other(character: str, letter: str) -> str:
    """Return `letter`, or another one if it equals `character`."""
    if character != letter:
        return letter
    return "1" if letter == "0" else "0"
