"""What is trained with templates of unusual structure, by renderings that are written out."""

from __future__ import annotations

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.messages import Message
from tests.data.chat_templates import (
    ALWAYS_OPEN,
    COMMAND,
    COMMAND_TOOLS,
    GPT_OSS,
    HEADER_AFTER_RESULT,
    MISTRAL_TOOLS,
    QWEN,
    TEXT_AFTER_RESULT,
)
from tests.data.tiny_tokenizer import marked_text, tiny_tokenizer

Q1, Q2 = ({"role": "user", "content": content} for content in ("q1", "q2"))
A1, A2 = ({"role": "assistant", "content": content} for content in ("a1", "a2"))
R1, R2 = ({"role": "tool", "content": content} for content in ("r1", "r2"))


def call(number: int, content: str = "") -> Message:
    function = {"name": "add", "arguments": {"x": number}}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return {**message, "content": content}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TOOL_TEXT = '{"type": "function", "function": {"name": "add", "parameters": {}}}'
SYSTEM, USER, MODEL = (f"<|start|>{role}<|/start|>" for role in ("system", "user", "assistant"))
RESULT = "<|start|>tool<|/start|>"
ACTION = f"{SYSTEM}Write an action.<|eot|>"

CASES: dict[str, tuple[str, list[Message], bool, str]] = {
    "command": (
        COMMAND,
        [Q1, A1, Q2, A2],
        False,
        (
            f"<|bos|>{USER}q1<|eos|>{MODEL}<|im_start|>⟦a1<|im_end|><|eos|>⟧{USER}q2<|eos|>"
            f"{MODEL}<|im_start|>⟦a2<|im_end|><|eos|>⟧"
        ),
    ),
    "an instruction after the last turn": (
        COMMAND_TOOLS,
        [Q1, A1],
        False,
        f"<|bos|>{USER}q1<|eot|>{MODEL}⟦a1<|eot|>⟧{ACTION}",
    ),
    "a call without an end": (
        COMMAND_TOOLS,
        [Q1, call(4, "c1"), R1, A2],
        True,
        (
            f'<|bos|>{TOOL_TEXT}{USER}q1<|eot|>{MODEL}⟦c1\nAction: add{{"x": 4}}\n⟧'
            f"{RESULT}r1<|eot|>{MODEL}⟦a2<|eot|>⟧{ACTION}"
        ),
    ),
    "a prompt after the last turn": (
        ALWAYS_OPEN,
        [Q1, call(4), R1, A1, Q2, A2],
        True,
        (
            f"<|bos|>{TOOL_TEXT}{USER}q1<|eos|>\n"
            f'{MODEL}⟦<|im_start|>add{{"x": 4}}<|im_end|><|eos|>⟧\n{RESULT}r1<|eos|>\n'
            f"{MODEL}⟦a1<|eot|><|eos|>⟧\n{USER}q2<|eos|>\n{MODEL}⟦a2<|eot|><|eos|>⟧\n{MODEL}"
        ),
    ),
    # A generation ends with the token of the last turn, so that of an earlier one is not trained.
    "gpt-oss": (
        GPT_OSS,
        [Q1, A1, Q2, A2],
        False,
        (
            "<|start|>user final<|/start|>q1<|eot|><|start|>assistant⟦ final<|/start|>a1⟧<|eot|>"
            "<|start|>user final<|/start|>q2<|eot|><|start|>assistant⟦ final<|/start|>a2<|eos|>⟧"
        ),
    ),
    "gpt-oss, text and call": (
        GPT_OSS,
        [Q1, call(4, "c1"), R1, A1, Q2, call(5, "c2")],
        True,
        (
            f"{TOOL_TEXT}<|start|>user final<|/start|>q1<|eot|>"
            '<|start|>assistant⟦ to=add<|/start|>{"x": 4}<|im_end|>⟧'
            "<|start|>tool final<|/start|>r1<|eot|><|start|>assistant⟦ final<|/start|>a1⟧<|eot|>"
            "<|start|>user final<|/start|>q2<|eot|><|start|>assistant⟦ analysis<|/start|>c2<|eot|>"
            '<|start|>assistant to=add<|/start|>{"x": 5}<|im_end|>⟧'
        ),
    ),
    "a header after a result": (
        HEADER_AFTER_RESULT,
        [Q1, call(4, "c1"), R1, call(5), R2, A1],
        False,
        (
            '<|bos|><|User|>q1<|Assistant|>⟦c1call:add{"x": 4}<|eos|>⟧<result>r1</result>'
            '<|Assistant|>⟦call:add{"x": 5}<|eos|>⟧<result>r2</result>⟦a1<|eos|>⟧'
        ),
    ),
    "a result within a turn": (
        TEXT_AFTER_RESULT,
        [Q1, A1, Q2, call(4, "c1")],
        False,
        (
            "<|bos|><|start|>user\nq1<|eot|>\n<|start|>assistant\n⟦a1<|eot|>⟧\n"
            '<|start|>user\nq2<|eot|>\n<|start|>model\n⟦call:add{"x": 4}c1<|eot|>⟧\n'
        ),
    ),
    "mistral": (
        MISTRAL_TOOLS,
        [Q1, call(4), R1, A1, Q2, A2],
        True,
        (
            '<|bos|>[INST] q1 [/INST]⟦[CALLS] {"name": "add", "arguments": {"x": 4}}<|eos|>⟧'
            f"[RESULT] r1[/RESULT]⟦ a1<|eos|>⟧[TOOLS] [{TOOL_TEXT}][/TOOLS]"
            "[INST] q2 [/INST]⟦ a2<|eos|>⟧"
        ),
    ),
    # Thoughts of the turns before the last question are dropped.
    "qwen": (
        QWEN,
        [
            Q1,
            {**A1, "reasoning_content": "t1"},
            Q2,
            {**call(4, "c1"), "reasoning_content": "t2"},
            R1,
            {**A2, "reasoning_content": "t3"},
        ],
        False,
        (
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n⟦a1<|im_end|>⟧\n"
            "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n⟦<think>\nt2\n</think>\n\nc1\n"
            '<tool_call>\n{"name": "add", "arguments": {"x": 4}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\nr1\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nt3\n</think>\n\na2<|im_end|>⟧\n"
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_marked_parts_of_a_rendering_are_trained(name: str) -> None:
    template, messages, has_tools, expected = CASES[name]
    tools = [TOOL] if has_tools else None
    tokenizer = tiny_tokenizer(template)
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)  # type: ignore[arg-type]
    assert rendered == expected.replace("⟦", "").replace("⟧", "")
    encoder = ChatEncoder(tokenizer)
    encoded = marked_text(encoder, encoder.encode_sft(messages, tools))
    assert encoded == expected[: expected.rindex("⟧") + 1]


@pytest.mark.parametrize(
    ("template", "end_tokens"),
    [
        (COMMAND, {"<|eos|>"}),
        (COMMAND_TOOLS, {"<|eos|>", "<|eot|>"}),
        (ALWAYS_OPEN, {"<|eos|>"}),
        # The token after a thought, `<|eot|>`, does not end a generation.
        (GPT_OSS, {"<|eos|>", "<|im_end|>"}),
    ],
)
def test_a_generation_ends_with_the_last_token_of_a_turn(
    template: str, end_tokens: set[str]
) -> None:
    encoder = ChatEncoder(tiny_tokenizer(template))
    tokens = encoder.tokenizer.convert_ids_to_tokens(list(encoder.end_token_ids))
    assert set(tokens) == end_tokens


def test_a_result_within_a_turn_is_refused_and_not_trained() -> None:
    messages = [Q1, call(4, "c1"), R1, A1]
    with pytest.raises(ConfigError, match="role 'tool' into another turn"):
        ChatEncoder(tiny_tokenizer(TEXT_AFTER_RESULT)).encode_sft(messages)
    row = ChatEncoder(tiny_tokenizer(TEXT_AFTER_RESULT), train_on="all").encode_sft(messages)
    assert row.token_mask.all()
