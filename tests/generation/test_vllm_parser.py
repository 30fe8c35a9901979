"""vLLM's parsers give the replies of agents."""

from __future__ import annotations

import importlib.util

import pytest

from nemo_like.agents.codec import ChatCodec
from nemo_like.data.chat import ChatEncoder
from nemo_like.generation.vllm_parser import turn_parser
from tests.agents.scripted import END, TOOLS, tool_call
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import tiny_tokenizer

pytestmark = [
    # The import of vLLM takes 25 seconds of a core.
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_calls_are_parsed_and_malformed_ones_stay_text() -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    codec = ChatCodec(encoder, turn_parser(encoder.tokenizer, "hermes"))
    reply = codec.reply(encoder.encode_continuation(tool_call()), TOOLS)
    (call,) = reply["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert reply["content"].strip() == "I add."
    for text in ("plain", '<tool_call>\n{"name": "add", "arg'):
        reply = codec.reply(encoder.encode_continuation(f"{text}{END}"), TOOLS)
        assert reply["content"] == text and "tool_calls" not in reply
