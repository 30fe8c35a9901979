"""Finds the call whose reply the messages of a request continue.

Clients return replies in other forms than they got them: other white space, `null` for an empty
text, arguments with other key order, no reasoning, no ids. Such a copy is the same reply.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from nemo_like.data.messages import Message, Tool

Reason = Literal["first", "new_root", "edited", "template"]
"""Why a call does not continue another one: it is the `first` of its episode, or a `new_root`, a
conversation with another beginning; the program `edited` an earlier turn; the chat `template`
writes earlier turns differently than they were sampled, or has no fixed text for the new messages.
"""

CallT = TypeVar("CallT")


class History(Generic[CallT]):
    """The replies of one episode by the conversations that they end."""

    def __init__(self) -> None:
        self._replies: dict[bytes, CallT] = {}
        self._requests: set[bytes] = set()

    def find(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[CallT | None, Sequence[Message], Reason | None]:
        """Return the call that the request continues, the messages after its reply, and None.

        Without such a call return None, all messages and the reason. The messages are those of
        `nemo_like.data.messages.clean_message`. The longest conversation that ends with a reply is
        continued if no turn of the model follows it. The request is remembered.
        """
        digests = _digests(messages, tools)
        is_first = not self._requests
        # Before this request is one of them.
        extends = any(digest in self._requests for digest in digests[1:-1])
        self._requests.add(digests[-1])
        for length in range(len(messages), 0, -1):
            parent = self._replies.get(digests[length])
            if parent is None:
                continue
            new_messages = messages[length:]
            if any(message["role"] == "assistant" for message in new_messages):
                break
            return parent, new_messages, None
        reason: Reason = "edited" if extends else "new_root"
        return None, messages, "first" if is_first else reason

    def add(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, reply: Message, call: CallT
    ) -> None:
        """Remember the reply to a request. Of equal replies the last one is continued."""
        self._replies[_digests([*messages, reply], tools)[-1]] = call


def canonical(message: Mapping[str, Any]) -> str:
    """Return a text that is equal for all forms in which clients return a message.

    It has the role, the text without white space around it, and the names and parsed arguments of
    the tool calls.
    """
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        calls.append([function["name"], function["arguments"]])
    text = str(message.get("content") or "").strip()
    # JavaScript writes 2.0 as 2.
    normal = json.loads(json.dumps(calls), parse_float=_number)
    return json.dumps([message["role"], text, normal], sort_keys=True)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _digests(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[bytes]:
    """Return the digests of the conversations of the first 0, 1, 2, ... messages."""
    digests = [_digest(b"", json.dumps(tools or [], sort_keys=True))]
    for message in messages:
        digests.append(_digest(digests[-1], canonical(message)))
    return digests


def _digest(before: bytes, text: str) -> bytes:
    # Lone surrogates are possible in JSON texts.
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(before + encoded, digest_size=16).digest()
