"""vLLM's parsers give the replies of agents."""

from __future__ import annotations

import importlib.util

import pytest

from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.vllm_parser import turn_parser
from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.data.chat import ChatEncoder
from tests.agents.scripted import END, TOOLS
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import tiny_tokenizer

pytestmark = [
    # The import of vLLM takes 25 seconds of a core.
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

_JSON = '{"name": "add", "arguments": {"a": 2, "b": 2}}'
_XML = "<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 2, "b": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
_GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
_MINIMAX = (
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
    '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>'
)
CALLS = {
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "granite4": f"<tool_call>\n{_JSON}\n</tool_call>",
    "ernie45": f"<tool_call>\n{_JSON}\n</tool_call>\n",
    "granite": f"<tool_call>[{_JSON}]",
    "hunyuan_a13b": f"<tool_calls>[{_JSON}]</tool_calls>",
    "phi4_mini_json": f"functools[{_JSON}]",
    "xlam": f"[{_JSON}]",
    "pythonic": "[add(a=2, b=2)]",
    "olmo3": "<function_calls>add(a=2, b=2)</function_calls>",
    "qwen3_coder": f"<tool_call>\n{_XML}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{_XML}\n</seed:tool_call>",
    "kimi_k2": _KIMI,
    "glm45": _GLM,
    "minimax_m2": _MINIMAX,
}
"""A call of `TOOLS` by parser, as the models write it."""


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_parsed_and_those_that_are_cut_off_stay_text(name: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    config = EnvironmentConfig(kind="program", tool_parser=name)
    codec = ChatCodec(encoder, turn_parser(encoder.tokenizer, config))
    text = CALLS[name]
    reply = codec.reply(encoder.encode_continuation(f"{text}{END}"), TOOLS)
    [call] = reply["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
    first = text.index("2")
    for cut in ("plain", text[:first], text[: first + 1]):
        cut_reply = codec.reply(encoder.encode_continuation(f"{cut}{END}"), TOOLS)
        assert cut_reply == {"role": "assistant", "content": cut}
    # A complete call before it may be returned.
    both = f"{text}\n{text[: first + 1]}"
    cut_reply = codec.reply(encoder.encode_continuation(f"{both}{END}"), TOOLS)
    assert cut_reply in (reply, {"role": "assistant", "content": both})


def test_the_parser_that_is_used_without_vllm_returns_the_same() -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    config = EnvironmentConfig(kind="program", tool_parser="hermes")
    codec = ChatCodec(encoder, turn_parser(encoder.tokenizer, config))
    call = CALLS["hermes"]
    for turn in (
        call,
        f"I add.\n{call}",
        f"{call}\n{call}",
        "plain",
        call[:30],
        f"{call}{call[:30]}",
    ):
        ids = encoder.encode_continuation(f"{turn}{END}")
        replies = [each.reply(ids, TOOLS) for each in (ChatCodec(encoder), codec)]
        for reply in replies:
            reply["content"] = reply["content"].strip()
        assert replies[0] == replies[1]


def test_reasoning_is_parsed() -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    config = EnvironmentConfig(kind="program", tool_parser="hermes", reasoning_parser="granite")
    codec = ChatCodec(encoder, turn_parser(encoder.tokenizer, config))
    thought = "Here is my thought process: sum Here is my response: "
    turn = f"{thought}{CALLS['hermes']}{END}"
    reply = codec.reply(encoder.encode_continuation(turn), TOOLS)
    assert reply["reasoning_content"].strip() == "sum"
    assert len(reply["tool_calls"]) == 1


def test_parsers_that_vllm_does_not_have_are_refused() -> None:
    tokenizer = tiny_tokenizer(QWEN)
    given = {
        "tool_parser": EnvironmentConfig(kind="program", tool_parser="mine"),
        "reasoning_parser": EnvironmentConfig(kind="program", reasoning_parser="mine"),
    }
    for key, config in given.items():
        with pytest.raises(ConfigError, match=rf"environment\.{key} is 'mine', not one of .*qwen3"):
            turn_parser(tokenizer, config)
    # Its marks are tokens that this tokenizer does not have.
    config = EnvironmentConfig(kind="program", tool_parser="deepseek_v3")
    with pytest.raises(ConfigError, match=r"cannot be used with this tokenizer: .*DeepSeek"):
        turn_parser(tokenizer, config)
