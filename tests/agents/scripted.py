"""A codec of a tiny tokenizer, and a model that follows a script."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_like.agents.calls import Call, CallOptions, Episode, HistoryMode, Sampled
from nemo_like.agents.codec import ChatCodec, request_messages, with_text_arguments
from nemo_like.data.chat import ChatEncoder
from nemo_like.generation.requests import FinishReason
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import tiny_tokenizer

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
"""As Qwen3."""
END = "<|im_end|>"
EOS = "<|eos|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


def codec_of(template: str = QWEN) -> ChatCodec:
    return ChatCodec(ChatEncoder(tiny_tokenizer(template)), response_template=RESPONSE_TEMPLATE)


def tool_call(text: str = "I add.", **arguments: Any) -> str:
    """A turn with a call, with other white space than json.dumps."""
    body = json.dumps({"name": "add", "arguments": arguments or {"a": 2, "b": 2}})
    spaced = body.replace(": ", ":  ")
    return f"{text}\n<tool_call>\n{spaced}\n</tool_call>{END}"


def sampled_of(ids: np.ndarray, finish_reason: FinishReason = "stop") -> Sampled:
    logprobs = np.linspace(-2, -1, len(ids), dtype=np.float32)
    return Sampled(ids, logprobs, np.zeros(len(ids), dtype=np.int32), finish_reason)


class ScriptedModel:
    """Samples given texts, split into tokens at random places; keeps a log of prompt and sample."""

    def __init__(self, codec: ChatCodec, script: Sequence[str] | Callable[[str], str]) -> None:
        self._codec = codec
        self._script = script if callable(script) else None
        self._texts = [] if callable(script) else list(script)
        self._random = random.Random(0)
        self.log: list[tuple[np.ndarray, np.ndarray]] = []
        self.calls: list[Call] = []

    def sample(self, call: Call) -> Sampled:
        prompt = call.prompt_ids
        if self._script is not None:
            text = self._script(self._codec.full_text(prompt))
        else:
            text = self._texts.pop(0)
        ids: list[int] = []
        end = next((each for each in (END, EOS) if text.endswith(each)), "")
        body = text.removesuffix(end)
        while body:
            size = self._random.randint(1, 6)
            ids += self._codec.encoder.encode_continuation(body[:size]).tolist()
            body = body[size:]
        if end:
            ids += self._codec.encoder.encode_continuation(end).tolist()
        sampled = np.array(ids, dtype=np.int32)
        self.log.append((prompt, sampled))
        self.calls.append(call)
        return sampled_of(sampled, "stop" if end else "length")


class Conversation:
    """Requests of a program to one episode, answered by a scripted model."""

    def __init__(
        self, script: Sequence[str], template: str = QWEN, history: HistoryMode = "exact"
    ) -> None:
        codec = codec_of(template)
        self.model = ScriptedModel(codec, script)
        self.episode = Episode(codec, 1, max_total_tokens=100_000, history=history)

    def request(
        self, messages: Sequence[Any], tools: Any = None, *, is_trained: bool = True
    ) -> Call:
        cleaned = request_messages(messages)
        return self.episode.request((cleaned, tools), CallOptions(), is_trained=is_trained)

    def call(self, messages: Sequence[Any], tools: Any = None, **options: bool) -> dict[str, Any]:
        """The reply as a client of the API gets it."""
        call = self.request(messages, tools, **options)
        self.episode.answer(call, self.model.sample(call))
        return with_text_arguments(call.reply)


def assert_exact(episode: Episode, log: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Every sampled token is trained once, and every prompt and answer begins a row."""
    rows = episode.rows()
    assert_exact_rows([(row.token_ids, row.token_mask) for row in rows], log)
    for row in rows:
        assert len(row.token_ids) == len(row.token_mask) == len(row.logprobs)
        assert row.token_ids.dtype == np.int32 and row.logprobs.dtype == np.float32


def assert_exact_rows(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], log: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """As `assert_exact`, for token ids and token masks of rows."""
    for prompt, sampled in log:
        both = np.concatenate([prompt, sampled])
        assert any(np.array_equal(ids[: len(both)], both) for ids, _ in rows)
    assert sum(int(mask.sum()) for _, mask in rows) == sum(len(each) for _, each in log)
    trained = np.concatenate([ids[mask == 1] for ids, mask in rows])
    assert np.array_equal(np.sort(trained), np.sort(np.concatenate([each for _, each in log])))
