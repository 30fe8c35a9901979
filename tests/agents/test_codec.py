"""Parsers of replies that tokenizers do not name."""

from __future__ import annotations

import pytest

from nemo_like.agents.codec import ChatCodec
from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from tests.agents.scripted import TOOLS, codec_of, tool_call
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize("turn", [tool_call(), tool_call(a=1), "plain", tool_call()[:40]])
def test_calls_of_the_template_of_qwen_need_no_parser(turn: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    ids = encoder.encode_continuation(turn)
    assert ChatCodec(encoder).reply(ids, TOOLS) == codec_of().reply(ids, TOOLS)


def test_tools_without_a_parser_are_refused() -> None:
    codec = ChatCodec(ChatEncoder(tiny_tokenizer(CHATML)))
    assert len(codec.prompt_ids(MESSAGES, None)) > 0
    with pytest.raises(ConfigError, match=r"has tools.* set environment\.tool_parser"):
        codec.prompt_ids(MESSAGES, TOOLS)
