"""Tools and tool calls: given to the template, trained, and refused where the template drops
them.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, conversation, question
from nemo_like.data.messages import row_tools
from nemo_like.data.rows import load_rows
from tests.data.chat_templates import LLAMA_TOOLS, MISTRAL, QWEN, R1_TOOLS
from tests.data.test_chat import trained_parts
from tests.data.tiny_tokenizer import (
    CHATML,
    GENERATION_BLOCKS,
    OPENS_THINKING,
    THINKING,
    marked_text,
    tiny_tokenizer,
)

USER = {"role": "user", "content": "What is two plus two?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
ARGUMENTS = {"left": 2, "right": [2, 'é "quoted"\n']}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}],
}
RESULT = {"role": "tool", "content": '{"sum": 4,   "text": "<four>"}'}
ANSWER = {"role": "assistant", "content": "four"}
ROW = {"messages": [USER, CALL, RESULT, ANSWER], "tools": TOOLS}


def encode(template: str, row: dict[str, Any]) -> tuple[list[str], str]:
    """The trained text, and the complete text."""
    encoder = ChatEncoder(tiny_tokenizer(template))
    messages, tools = conversation(row), row_tools(row)
    encoded = encoder.encode_sft(messages, tools)
    parts = marked_text(encoder, encoded).split("⟦")[1:]
    return [part.split("⟧")[0] for part in parts], str(
        encoder.tokenizer.decode(encoded.input_ids.tolist())
    )


def test_calls_are_trained_and_results_are_not() -> None:
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    qwen, rendered = encode(QWEN, ROW)
    assert qwen == [
        f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nfour<|im_end|>",
    ]
    assert json.dumps(TOOLS[0], ensure_ascii=False) in rendered
    llama, rendered = encode(LLAMA_TOOLS, ROW)
    assert llama == [f'{{"name": "add", "parameters": {text}}}<|eot|>', "four<|eot|>"]
    assert json.dumps(RESULT["content"]) in rendered
    r1, _ = encode(R1_TOOLS, {"messages": ROW["messages"]})
    assert r1 == [f"call:add\n```json\n{text}\n```<|eos|>", "four<|eos|>"]


@pytest.mark.parametrize("template", [QWEN, LLAMA_TOOLS])
def test_every_form_of_a_call_is_the_same_row(template: str) -> None:
    expected = encode(template, ROW)
    flat = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
    for calls in (
        [{"function": flat}],
        [flat],
        json.dumps([flat]),
        [{"id": None, "type": "function", "function": {**flat, "arguments": ARGUMENTS}}],
    ):
        call = {"role": "assistant", "content": None, "tool_calls": calls}
        row = {
            "messages": [{**USER, "tool_calls": None}, call, RESULT, ANSWER],
            "tools": json.dumps(TOOLS),
        }
        assert encode(template, row) == expected


def test_a_prompt_has_the_tools_too(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = [{"prompt": "2+2", "answer": "4", "tools": TOOLS}, {"prompt": "1", "answer": 1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    rows = load_rows(path, PROMPT_ROWS)
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    texts = []
    for row in rows:
        prompt = question(row)
        texts.append(
            str(
                encoder.tokenizer.decode(
                    encoder.encode_prompt(prompt.messages, prompt.tools).tolist()
                )
            )
        )
    assert json.dumps(TOOLS[0]) in texts[0] and "# Tools" not in texts[1]
    with pytest.raises(ConfigError, match="drops the row's tools"):
        ChatEncoder(tiny_tokenizer(CHATML)).encode_prompt([USER], TOOLS)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, {"messages": [USER, ANSWER], "tools": TOOLS}, "drops the row's tools"),
        (GENERATION_BLOCKS, {"messages": [USER, ANSWER], "tools": TOOLS}, "drops the row's tools"),
        (
            None,
            {"messages": [USER, ANSWER], "tools": TOOLS},
            "has no chat template, so tools and tool calls",
        ),
        (None, {"messages": [USER, CALL]}, "has no chat template, so tools and tool calls"),
        (CHATML, {"messages": [USER, {**CALL, "content": "I add."}]}, "drops a tool call"),
        (
            LLAMA_TOOLS,
            {"messages": [USER, {**CALL, "content": "I add."}]},
            "drops the content of a message of role 'assistant'",
        ),
        (
            OPENS_THINKING,
            {"messages": [USER, RESULT, {**ANSWER, "content": "<think>so</think>4"}]},
            "drops the reasoning of the last assistant turn",
        ),
        (
            CHATML,
            {"messages": [USER, {**ANSWER, "reasoning_content": "so"}]},
            "drops the reasoning of the last assistant turn",
        ),
        (
            MISTRAL,
            {"messages": [USER, RESULT, ANSWER]},
            "drops the content of a message of role 'tool'",
        ),
        # The dropped text also stands elsewhere.
        (
            MISTRAL,
            {"messages": [USER, {"role": "tool", "content": "four"}, ANSWER]},
            "drops the content of a message of role 'tool'",
        ),
        (
            MISTRAL,
            {"messages": [USER, {"role": "tool", "content": "INST"}, ANSWER]},
            "drops the content of .* role 'tool'",
        ),
    ],
)
def test_what_the_template_drops_is_refused_with_its_place(
    tmp_path: Path, template: str | None, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n" + json.dumps(row) + "\n")
    rows = load_rows(path, SFT_ROWS)
    encoder = ChatEncoder(tiny_tokenizer(template))
    encoded = EncodedRows(rows, lambda row: encoder.encode_sft(conversation(row), row_tools(row)))
    encoded.fetch([0])
    with pytest.raises(ConfigError, match=message) as error:
        encoded.fetch([1])
    assert str(error.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize("template", [QWEN, THINKING])
def test_what_templates_rewrite_is_accepted(template: str) -> None:
    thinking = {"role": "assistant", "content": "<think>\nso\n</think>\n\n  four\n\n\nor 4 "}
    later = [{**USER, "content": "  And\tnow? "}, {"role": "assistant", "content": "\n\nfive"}]
    parts = trained_parts(ChatEncoder(tiny_tokenizer(template)), [USER, thinking, *later])
    assert len(parts) == 2 and "so" not in parts[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [USER, ANSWER], "tools": "[{"},
            "column 'tools' is not a list of JSON schemas",
        ),
        ({"messages": [USER, ANSWER], "tools": {"name": "add"}}, "but dict"),
        (
            {"messages": [USER, ANSWER], "tools": [{"type": "function"}]},
            r"tools\[0\] has no function name",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": "no"}]},
            r"messages\[1\]\.tool_calls is text that is not JSON",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": {"a": 1}}]},
            "is of type dict, not a list",
        ),
        ({"messages": [{**CALL, "role": "user"}, ANSWER]}, "only an assistant calls tools"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            r"tool_calls\[0\] has no function name",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": 1}]},
                ]
            },
            "neither an object nor",
        ),
        (
            {"messages": [USER, {**CALL, "content": ["x"]}]},
            r"messages\[1\]\.content\[0\] is .*, not a part with a text",
        ),
    ],
)
def test_malformed_tools_and_calls_are_named(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message) as error:
        load_rows(path, SFT_ROWS)
    assert str(error.value).startswith(f"{path}:1: ")


def test_columnar_files_fill_in_no_keys(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    other = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "sub", "arguments": {"from": 1}}}],
    }
    plain_call = {
        **CALL,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"left": 2}}}],
    }
    rows = [{"messages": [USER, plain_call]}, {"messages": [USER, other]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = load_rows(tmp_path / "rows.parquet", SFT_ROWS)
    assert [conversation(row) for row in loaded] == [row["messages"] for row in rows]


def test_an_encoder_can_be_sent_to_another_process() -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    before = encoder.encode_sft(conversation(ROW), TOOLS)
    after = pickle.loads(pickle.dumps(encoder)).encode_sft(conversation(ROW), TOOLS)
    assert before.input_ids.tolist() == after.input_ids.tolist()
    assert before.token_mask.tolist() == after.token_mask.tolist()
