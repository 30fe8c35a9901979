"""One rendering per conversation gives the tokens and masks of the exact method, for any
conversation and template.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.chat import ChatEncoder
from nemo_like.data.chat_structure import Structures, exact_spans
from nemo_like.data.messages import Message
from tests.data.chat_templates import GEMMA, LLAMA_TOOLS, MISTRAL, QWEN, R1_TOOLS
from tests.data.tiny_tokenizer import (
    CHATML,
    ENDS_CONVERSATION,
    GENERATION_BLOCKS,
    LLAMA,
    OPENS_THINKING,
    THINKING,
    tiny_tokenizer,
)

TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "thinking": THINKING,
    "llama": LLAMA,
    "llama_tools": LLAMA_TOOLS,
    "r1": OPENS_THINKING,
    "r1_tools": R1_TOOLS,
    "r1_keeps": OPENS_THINKING.replace("message.content.split('</think>')[-1]", "message.content"),
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": ENDS_CONVERSATION,
}
ENCODERS = {name: ChatEncoder(tiny_tokenizer(template)) for name, template in TEMPLATES.items()}
STRUCTURES = {name: Structures(encoder.template) for name, encoder in ENCODERS.items()}
PIECES = [
    *(
        "four",
        "0",
        "1",
        " ",
        "\n",
        "\n\n",
        "<",
        "é",
        "assistant\n",
        "<think>\n",
        "</think>",
        "</think>\n\n",
        "<answer>",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|eot|>",
        "<|Assistant|>",
        "<|eos|>",
        "[/INST]",
        " [/INST]",
        "<tool_call>",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES[:13]), max_size=4).map("".join)
ODD_TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn, with_tools: bool) -> list[Message]:
    texts = draw(st.sampled_from([TEXTS, ODD_TEXTS]))
    messages: list[Message] = (
        [{"role": "system", "content": draw(texts)}] if with_tools and draw(st.booleans()) else []
    )
    if draw(st.integers(0, 9)) == 0:
        messages.append({"role": "assistant", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(texts)})
        if with_tools and draw(st.integers(0, 3)) == 0:
            arguments = {"key": draw(texts)}
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            message: Message = {"role": "assistant", "tool_calls": [call]}
            messages += [message, {"role": "tool", "content": draw(texts)}]
        reasoning = (
            {"reasoning_content": draw(texts)}
            if with_tools and draw(st.integers(0, 5)) == 0
            else {}
        )
        messages.append({"role": "assistant", "content": draw(texts), **reasoning})
    if draw(st.integers(0, 5)) == 0:
        messages.append({"role": "user", "content": draw(texts)})
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_rendering_gives_what_the_exact_method_gives(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(with_tools=name in ("qwen", "llama_tools", "r1_tools")))
    template = ENCODERS[name].template
    frame = STRUCTURES[name].facts(messages, None).frame
    if frame is None:
        return
    full = template.render(messages)
    found = frame.spans(messages, None, full)
    assert found is None or found == exact_spans(template, messages, None, full)


def dialogue(num_turns: int) -> list[Message]:
    return [
        message
        for turn in range(num_turns)
        for message in (
            {"role": "user", "content": f"Question {turn}?"},
            {"role": "assistant", "content": f"Answer {turn}."},
        )
    ]


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama_tools", "r1", "gemma", "mistral", "phi"])
def test_a_long_dialogue_is_rendered_once(name: str) -> None:
    tokenizer: Any = tiny_tokenizer(TEMPLATES[name])
    render = tokenizer.apply_chat_template
    renderings = []

    def counted(*args: object, **options: object) -> object:
        renderings.append(args)
        return render(*args, **options)

    tokenizer.apply_chat_template = counted
    encoder = ChatEncoder(tokenizer)
    encoder.encode_sft(dialogue(5))
    renderings.clear()
    for num_turns in (6, 20):
        encoder.encode_sft(dialogue(num_turns))
    assert len(renderings) == 2


def test_marked_turns_are_those_of_transformers() -> None:
    tokenizer = tiny_tokenizer(GENERATION_BLOCKS)
    for messages in (
        dialogue(3),
        [
            *dialogue(1),
            {"role": "user", "content": " é\n"},
            {"role": "assistant", "content": "\né "},
        ],
    ):
        row = ChatEncoder(tokenizer).encode_sft(messages)
        expected = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        num_tokens = len(row.input_ids)
        assert row.input_ids.tolist() == expected["input_ids"][:num_tokens]  # type: ignore[index]
        assert row.token_mask.tolist() == expected["assistant_masks"][:num_tokens]  # type: ignore[index]
        assert not any(expected["assistant_masks"][num_tokens:])  # type: ignore[index]
