"""Spans of the assistant turns in the text that a chat template renders.

A span begins after the generation prompt and ends after the token that ends the turn. The exact
method renders the conversation several times per turn and compares the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_template import ChatTemplate, common_prefix
from nemo_like.data.tools import Message, Tool

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""


def exact_spans(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None, full: str
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
        end = self._end()
        if not self._behind <= start < end:
            raise ConfigError(
                f"turn {self._turn} of the conversation cannot be found in what the chat template"
                f" renders; mark it in the "
                "template with {% generation %}, or set data.train_on=all"
            )
        return start, end

    def _start(self) -> int:
        """Find the end of the generation prompt before the turn, else the start of the turn's text.

        Some templates end the generation prompt with text that a finished turn does not have
        (`<think>` in DeepSeek-R1), or render earlier turns differently once there are later ones.
        Then the header is the common prefix with conversations that have another message here.
        """
        full = self._full
        turn = self._turn
        prompt = self._template.generation_prompt
        # Many templates cannot render an empty conversation.
        if turn:
            opening = self._template.render(self._messages[:turn], self._tools, opening=True)
            if full.startswith(opening):
                # Some templates write the header of a turn, but no prompt, after a tool's result.
                size = self._template.common_prefix(full[len(opening) :], prompt)
                is_header = not opening.endswith(prompt) and size > 0
                return len(opening) + (size if is_header else 0)
        start = min(self._template.common_prefix(full, other) for other in self._with_others())
        if not prompt:
            # A space that the prompt does not have is generated (Mistral).
            has_space = self._template.opening[-1:].isspace()
            return start if has_space else len(full[:start].rstrip())
        # The text of the turn may begin like the prompt, so the last copy is taken.
        found = full.rfind(prompt, self._behind, start + len(prompt))
        return start if found < 0 else found + len(prompt)

    def _end(self) -> int:
        """Find the end of the turn after its text, including the tokens that end it."""
        num_messages = self._turn + 1
        last = self._template.render(self._messages[:num_messages], self._tools)
        end = self._text_end(last, num_messages)
        tail = last[end:]
        if not self._full.startswith(last):
            # Some templates render a turn differently once it is not the last: they drop its
            # reasoning, or end it with another token.
            end = self._text_end(self._full, None)
            tail = tail[: self._template.common_prefix(tail, self._full[end:])]
        return end + self._template.end_of_tail(tail, self._messages[self._turn])

    def _text_end(self, rendered: str, num_messages: int | None) -> int:
        """Find the end of the turn's own text and calls in the rendering of the first messages."""
        return max(
            len(rendered) - common_suffix(rendered, self._with_text(letter, num_messages))
            for letter in ("0", "1")
        )

    def _with_others(self) -> list[str]:
        """Render the conversation with two other texts in place of this turn.

        The texts begin differently, so at least one differs from this turn at its first character.
        """
        texts = []
        before = self._messages[: self._turn]
        after = self._messages[self._turn + 1 :]
        # A result needs the call before it, so the messages up to the next question go as well.
        users = [index for index, message in enumerate(after) if message["role"] == "user"]
        for letter in ("0", "1"):
            other = {"role": "assistant", "content": letter * 2}
            try:
                texts.append(self._template.render([*before, other, *after], self._tools))
            except ConfigError:
                following = after[users[0] :] if users else []
                texts.append(self._template.render([*before, other, *following], self._tools))
        return texts

    def _with_text(self, letter: str, num_messages: int | None) -> str:
        """Render the first messages with another content and other arguments in this turn."""
        message = dict(self._messages[self._turn])
        calls = message.get("tool_calls")
        if message.get("content") or not calls:
            message["content"] = letter * 2
        if calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {letter: letter}}}
                for call in calls
            ]
        messages = [*self._messages[: self._turn], message, *self._messages[self._turn + 1 :]]
        return self._template.render(messages[:num_messages], self._tools)


def common_suffix(left: str, right: str) -> int:
    """Length of the common suffix."""
    return common_prefix(left[::-1], right[::-1])
