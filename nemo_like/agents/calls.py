"""Calls of an episode, and the training rows that they become.

    call 1   [system, question] reply_1
    call 2   [system, question] reply_1 [result] reply_2      continues call 1
    call 3   [system, summary] reply_3                        the program compacted its history

become two rows: the tokens of call 2, in which both replies are trained, and those of call 3. If
another call continues call 1 as well, it is a third row in which reply_1 is context only. Rows of a
group share their common beginnings in training, so a branch costs the tokens that are new in it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.history import History, Reason
from nemo_like.config.errors import ConfigError
from nemo_like.data.messages import Message, Tool

Request = tuple[Sequence[Message], Sequence[Tool] | None] | str
"""Messages and tools, or the text of a prompt."""
HistoryMode = Literal["exact", "template"]
"""`exact` continues the sampled token ids, whatever the template does with earlier turns.
`template` renders every request completely, as a server without a record does; a row ends where
that changes earlier turns."""


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Sampling options of a request; None is the option of the run."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Sampled:
    """One sampled turn of L tokens."""

    token_ids: np.ndarray
    """int32 [L], with the end token if it was sampled."""
    logprobs: np.ndarray
    """float32 [L], under the distribution that each token was drawn from."""
    weight_versions: np.ndarray
    """int32 [L]."""
    finish_reason: Literal["stop", "length"] = "stop"


@dataclass(eq=False)
class Call:
    """One sampled answer, or the request for it."""

    given: np.ndarray
    """int32 [L]: the prompt, or with a parent what follows the tokens of the parent."""
    parent: Call | None
    seed: int
    """Seed of the sampling stream; see `Episode`."""
    options: CallOptions
    request: Request | None
    """None for a prompt of token ids, and once it is answered."""
    is_trained: bool = True
    reason: Reason | None = None
    """Why the call has no parent."""
    sampled: Sampled | None = None
    reply: Message = field(default_factory=dict)
    is_delivered: bool = True
    """False for an answer that the program has not received. It is not trained."""
    episode: int = 0
    """Number of the episode."""

    @property
    def path(self) -> list[Call]:
        """The calls that this one continues, the first of them in front, and itself."""
        calls: list[Call] = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]

    @property
    def prompt_ids(self) -> np.ndarray:
        """Token ids that the answer follows, int32 [L]."""
        parts = [] if self.parent is None else [self.parent.token_ids]
        return np.concatenate([*parts, self.given])

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and answer, int32 [L]."""
        parts = []
        for call in self.path:
            assert call.sampled is not None, "only an answered call is continued"
            parts += [call.given, call.sampled.token_ids]
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class Row:
    """A training row of L tokens: given and sampled tokens of consecutive calls, alternately."""

    calls: tuple[Call, ...]
    is_trained: tuple[bool, ...]
    """Whether the row trains the sampled tokens of each call; otherwise they are context."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [L]."""
        return self.calls[-1].token_ids

    @property
    def token_mask(self) -> np.ndarray:
        """1 for the tokens that this row trains, uint8 [L]."""
        parts = []
        for call, is_trained in zip(self.calls, self.is_trained, strict=True):
            assert call.sampled is not None
            parts.append(np.zeros(len(call.given), dtype=np.uint8))
            parts.append(np.full(len(call.sampled.token_ids), is_trained, dtype=np.uint8))
        return np.concatenate(parts)

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probs of the sampler, 0 for given tokens, float32 [L]."""
        parts = []
        for call in self.calls:
            assert call.sampled is not None
            parts.append(np.zeros(len(call.given), dtype=np.float32))
            parts.append(call.sampled.logprobs)
        return np.concatenate(parts)


class Episode:
    """The calls of one run of a program on one row of data.

    The seed of a call depends on the seed of the episode, on the prompt and on the number of
    earlier calls with this prompt, so that calls may come in any order. Not thread-safe.
    """

    def __init__(
        self,
        codec: ChatCodec,
        seed: int,
        *,
        max_total_tokens: int,
        history: HistoryMode = "exact",
        number: int = 0,
    ) -> None:
        """`max_total_tokens` is the limit of a row."""
        self.number = number
        self.messages: list[Message] = []
        """Messages and reply of the last answered call that is trained and has messages."""
        self.codec = codec
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.calls: list[Call] = []
        """Answered calls, in the order of their answers."""
        self.reasons: Counter[Reason] = Counter()
        """Number of answered calls that continue no other, by reason."""
        self._mode: HistoryMode = history
        self._history: History[Call] = History()
        self._texts: list[tuple[str, Call]] = []
        """Prompt and answer of calls without messages."""
        self._num_equal: Counter[bytes] = Counter()

    def request(
        self, content: Request | np.ndarray, options: CallOptions, *, is_trained: bool = True
    ) -> Call:
        """Return the call for a request.

        `content` are cleaned messages and tools, or a prompt without messages: a text, or token ids
        int32 [L]. The program writes the control tokens of such a prompt itself. Raises ConfigError
        if the chat template refuses or drops a part of the messages.
        """
        reason: Reason | None = "new_root" if self._num_equal else "first"
        if isinstance(content, tuple):
            parent, given, reason = self._place(*content)
        elif isinstance(content, str):
            parent, given = self._place_text(content)
        else:
            parent, given = self._split(self.codec.encoder.checked_ids(content.tolist()))
        request = None if isinstance(content, np.ndarray) else content
        return self._call(Call(given, parent, 0, options, request, is_trained, reason))

    def _place(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[Call | None, np.ndarray, Reason | None]:
        """Return the call that a request continues, the other tokens, and why there is none."""
        parent, new_messages, reason = self._history.find(messages, tools)
        if parent is not None:
            # The program has it, whatever became of the connection.
            parent.is_delivered = True
            reason = "template"
            if self._mode == "exact":
                given = self._continuation(parent, new_messages)
                if given is not None:
                    return parent, given, None
        return *self._split(self.codec.prompt_ids(messages, tools)), reason

    def _place_text(self, prompt: str) -> tuple[Call | None, np.ndarray]:
        """Return the call whose prompt and answer begin a text, and the tokens of the rest."""
        encoder = self.codec.encoder
        known = [each for each in self._texts if prompt.startswith(each[0])]
        if known:
            text, parent = max(known, key=lambda each: len(each[0]))
            return parent, encoder.encode_continuation(prompt[len(text) :])
        tokens: Any = encoder.tokenizer(prompt)["input_ids"]
        return self._split(encoder.checked_ids(tokens))

    def sibling(self, call: Call) -> Call:
        """Return a call for another answer to the same request."""
        return self._call(replace(call))

    def answer(self, call: Call, sampled: Sampled) -> None:
        """Record the answer to a call, and set its reply."""
        call.sampled = sampled
        self.calls.append(call)
        if call.reason is not None:
            self.reasons[call.reason] += 1
        request = call.request
        call.request = None
        if isinstance(request, tuple):
            messages, tools = request
            call.reply = self.codec.reply(sampled.token_ids, tools, call.options.stop)
            for index, tool_call in enumerate(call.reply.get("tool_calls", ())):
                # Nine characters, which some chat templates require.
                tool_call["id"] = f"{len(self.calls):06d}{index:03d}"
            self._history.add(messages, tools, call.reply, call)
            if call.is_trained:
                self.messages = [*messages, call.reply]
            return
        call.reply = {"role": "assistant", "content": self.codec.text(sampled.token_ids)}
        # Its end token as well, which the program writes itself where the text continues.
        if isinstance(request, str):
            self._texts.append((request + self.codec.full_text(sampled.token_ids), call))

    def rows(self) -> list[Row]:
        """Return the training rows, in an order that does not depend on the order of answers.

        Every sampled token of a trained call is trained in exactly one row: the first that has it.
        """
        trained = [call for call in self.calls if call.is_trained and call.is_delivered]
        continued: set[int] = set()
        for call in trained:
            continued |= {id(each) for each in call.path[:-1]}
        paths = [call.path for call in trained if id(call) not in continued]
        paths.sort(key=lambda path: [call.seed for call in path])
        rows = []
        known: set[int] = set()
        for path in paths:
            is_new = []
            for call in path:
                is_new.append(call.is_trained and call.is_delivered and id(call) not in known)
                known.add(id(call))
            rows.append(Row(tuple(path), tuple(is_new)))
        return rows

    def _call(self, call: Call) -> Call:
        """Set the seed of a new call, and remove the reason of one that continues another."""
        if call.parent is not None:
            call.reason = None
        call.episode = self.number
        digest = hashlib.blake2b(call.prompt_ids.tobytes(), digest_size=16).digest()
        entropy = (self.seed, int.from_bytes(digest), self._num_equal[digest])
        self._num_equal[digest] += 1
        call.seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        return call

    def _continuation(self, parent: Call, messages: Sequence[Message]) -> np.ndarray | None:
        """Encode the messages after a reply; None if the template has no fixed text for them."""
        assert parent.sampled is not None
        last_token_id = int(parent.sampled.token_ids[-1])
        try:
            return self.codec.continuation_ids(
                messages, last_token_id, parent.reply, self.max_total_tokens
            )
        except ConfigError:
            return None

    def _split(self, prompt_ids: np.ndarray) -> tuple[Call | None, np.ndarray]:
        """Return the longest call whose prompt and answer begin a prompt, and the other tokens."""
        best = None
        length = 0
        for call in self.calls:
            token_ids = call.token_ids
            if length < len(token_ids) < len(prompt_ids):
                # Most calls differ from it at the last of their tokens.
                is_equal = token_ids[-1] == prompt_ids[len(token_ids) - 1]
                if is_equal and np.array_equal(token_ids, prompt_ids[: len(token_ids)]):
                    best, length = call, len(token_ids)
        return best, prompt_ids[length:]
