"""Token ids between two turns of a model: the end of a turn, observations, and the next opening.

In a rollout of several turns the token ids of the model are never tokenized again, because another
split into tokens would be off-policy. What comes between two of its turns is text of the chat
template around the observation. It is the difference of two texts: the rendering of a conversation
whose last turns are a probe answer and the observation, and its part up to the probe answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.messages import Message

_USER: Message = {"role": "user", "content": "qzuserzq"}
PROBE_ANSWERS = ("qzfirstzq", "Another, longer qzsecondzq")
"""Probe answers; texts that no template contains."""
_NO_NAME = "qznamezq"
_CHARACTERS_PER_TOKEN = 16
"""More than texts have on average."""
_MARGIN = 64
_WAY_OUT = (
    "observations of a conversation cannot be appended to its token ids; give a"
    " policy.chat_template that renders every turn alike"
)


class ObservationEncoder:
    r"""Encodes the observations of one tokenizer's chat template.

    Example with ChatML: after a turn that ended with `<|im_end|>` the observation "higher" of role
    user is `\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n`.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder
        self._template = encoder.template
        self._checked: dict[tuple[int, tuple[str, ...]], bool] = {}
        """Whether the probe has the calls, by number of calls and roles of messages."""
        self._need_calls: set[tuple[str, ...]] = set()
        """Roles of messages that the template renders after tool calls only."""

    def encode(
        self,
        messages: Sequence[Message],
        last_token_id: int,
        max_tokens: int | None = None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        """Return the token ids that follow a turn of the model, int32 [L].

        They are the end of the turn, unless `last_token_id` is a token that ends turns, then the
        `messages`, and the generation prompt. Texts of control tokens are removed from the
        messages, so that an observation cannot end its own turn or begin one of the model. Of
        observations with many more than `max_tokens` tokens only the beginning is encoded, which
        has more than `max_tokens` as well. `calls` are the tool calls of the turn: some templates
        refuse a result without the call, or write the name of its function. Without them such a
        template gets calls with the `name` and `tool_call_id` of the results; nothing of them is
        encoded. Raises ConfigError if the template has no fixed text between two turns, or refuses
        or drops the messages.
        """
        calls = self.without_control_texts(list(calls))
        if not calls and self._needs_calls(messages):
            messages, calls = _with_calls(messages)
        calls = calls if self.check(messages, calls) else []
        if max_tokens is not None:
            # Encoding megabytes, which nobody would use, takes minutes.
            max_characters = _CHARACTERS_PER_TOKEN * (max_tokens + _MARGIN)
            if sum(len(str(message["content"])) for message in messages) > max_characters:
                beginning = _beginning(messages, max_characters)
                token_ids = self._encode(beginning, last_token_id, calls)
                # The end of the beginning may have been split into other tokens.
                if len(token_ids) > max_tokens + _MARGIN:
                    return token_ids
        return self._encode(messages, last_token_id, calls)

    def _encode(
        self, messages: Sequence[Message], last_token_id: int, calls: Sequence[Any]
    ) -> np.ndarray:
        plain = self.without_control_texts(list(messages))
        text = self._after_turn(plain, PROBE_ANSWERS[0], calls, num_exchanges=1)
        if _NO_NAME in text:
            raise ConfigError(
                f"the chat template of {self._encoder.tokenizer.name_or_path!r} writes the name of"
                " the function before its result: give observations of role tool a name"
            )
        if last_token_id in self._template.end_token_ids:
            text = self._without_end(text)
        return self._encoder.encode_continuation(text)

    def _needs_calls(self, messages: Sequence[Message]) -> bool:
        """Return whether the messages are rendered after tool calls, and not without them."""
        roles = tuple(str(message["role"]) for message in messages)
        if "tool" in roles and (0, roles) not in self._checked and roles not in self._need_calls:
            try:
                self.check(messages)
            except ConfigError as error:
                with_ids, calls = _with_calls(messages)
                try:
                    self._check(with_ids, calls)
                except ConfigError:
                    # It explains more than that of calls which nobody gave.
                    raise error from None
                self._need_calls.add(roles)
        return roles in self._need_calls

    def check(self, messages: Sequence[Message], calls: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Return whether results are rendered after a turn with `calls`; False without results.

        Raises ConfigError unless the template has a fixed text around messages of these roles: it
        must not depend on the text of the model's turn before it, or on the number of turns.
        """
        roles = tuple(str(message["role"]) for message in messages)
        key = (len(calls), roles)
        if key not in self._checked:
            has_calls = bool(calls) and "tool" in roles
            try:
                self._check(messages, calls if has_calls else ())
            except ConfigError:
                if not has_calls:
                    raise
                has_calls = False
                self._check(messages, ())
            self._checked[key] = has_calls
        return self._checked[key]

    def _check(self, messages: Sequence[Message], calls: Sequence[Any]) -> None:
        probes: list[Message] = []
        for index, message in enumerate(messages):
            probes.append({**message, "content": f"qz{index}observationzq"})
        expected = self._after_turn(probes, PROBE_ANSWERS[0], calls, num_exchanges=1)
        for answer in PROBE_ANSWERS:
            for num_exchanges in (1, 2):
                text = self._after_turn(probes, answer, calls, num_exchanges=num_exchanges)
                if text != expected:
                    raise ConfigError(
                        f"the chat template of {self._encoder.tokenizer.name_or_path!r} renders the"
                        " text after a turn of the model differently for another turn or another"
                        f" number of turns ({expected!r} and {text!r}), so {_WAY_OUT}"
                    )
        for message, probe in zip(messages, probes, strict=True):
            if probe["content"] not in expected:
                raise ConfigError(
                    f"the chat template of {self._encoder.tokenizer.name_or_path!r} drops the"
                    f" content of an observation of role {message['role']!r}; use another role, or"
                    " give a policy.chat_template that renders it"
                )

    def _after_turn(
        self, messages: Sequence[Message], answer: str, calls: Sequence[Any], *, num_exchanges: int
    ) -> str:
        """Render `messages` after a number of exchanges; return what follows the last turn."""
        exchange = [_USER, {"role": "assistant", "content": answer}]
        history = exchange * num_exchanges
        if calls:
            history[-1] = {**history[-1], "tool_calls": calls}
        text = self._encoder.render_prompt([*history, *messages])
        if calls:
            return self._after_calls(text, history)
        # After one exchange it is the first: an observation may have the same text.
        _, found, after = text.partition(answer) if num_exchanges == 1 else text.rpartition(answer)
        if not found:
            raise ConfigError(
                f"the chat template of {self._encoder.tokenizer.name_or_path!r} does not render the"
                f" text of an assistant turn before an observation, so {_WAY_OUT}"
            )
        return after

    def _after_calls(self, text: str, history: Sequence[Message]) -> str:
        """Return the part of `text` that follows the calls of the last turn of `history`."""
        alone = self._template.render(history) if self._template.exists else ""
        turn = alone[: self._template.common_prefix(alone, text)]
        name = str(history[-1]["tool_calls"][-1]["function"]["name"])
        start = turn.rfind(name)
        if start < 0:
            raise ConfigError(
                f"the chat template of {self._encoder.tokenizer.name_or_path!r} does not render the"
                f" tool calls of an assistant turn before an observation, so {_WAY_OUT}"
            )
        end = max((turn.rfind(each) for each in self._template.ends), default=-1)
        # Without an end token the white space between the turns is part of the observation.
        return text[end:] if end > start else text[len(turn.rstrip()) :]

    def _without_end(self, text: str) -> str:
        """Remove the end of the model's turn, which the turn itself has already."""
        for end in self._template.ends:
            before, found, after = text.partition(end)
            # White space before the end token was not sampled and is left out.
            if found and not before.strip():
                return after
        return text

    @cached_property
    def _control_texts(self) -> re.Pattern[str]:
        # Longer texts first: one may be the beginning of another.
        texts = sorted(self._template.control_texts, key=len, reverse=True)
        return re.compile("|".join(re.escape(text) for text in texts if text))

    def without_control_texts(self, value: Any) -> Any:
        """Return a JSON value without texts that the tokenizer converts to control tokens."""
        if isinstance(value, dict):
            pairs = value.items()
            without = self.without_control_texts
            return {without(name): without(item) for name, item in pairs}
        if isinstance(value, list | tuple):
            return [self.without_control_texts(item) for item in value]
        if not isinstance(value, str):
            return value
        num_removed = 1
        # Again, because a removal may join the two halves of another one.
        while num_removed:
            value, num_removed = self._control_texts.subn("", value)
        return value


def _with_calls(messages: Sequence[Message]) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return messages whose results have ids, and a call for each result."""
    with_ids: list[Message] = []
    calls = []
    for message in messages:
        with_id = message
        if message["role"] == "tool":
            # Nine characters, which some chat templates require.
            call_id = message.get("tool_call_id") or f"{len(calls):09d}"
            with_id = {**message, "tool_call_id": call_id}
            function = {"name": message.get("name") or _NO_NAME, "arguments": {}}
            calls.append({"id": call_id, "type": "function", "function": function})
        with_ids.append(with_id)
    return with_ids, calls


def _beginning(messages: Sequence[Message], max_characters: int) -> list[Message]:
    """Return messages with `max_characters` characters of content in all."""
    beginning: list[Message] = []
    for message in messages:
        content = str(message["content"])[:max_characters]
        max_characters -= len(content)
        beginning.append({**message, "content": content})
    return beginning
