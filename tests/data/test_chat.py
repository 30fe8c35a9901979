"""Chat encoding: the same text for every template, and loss on exactly what the assistant
writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import processors

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.formats import SFT_ROWS, conversation, question
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.loader import RowLoader
from nemo_like.data.messages import Message
from nemo_like.data.row_order import RowOrder
from nemo_like.data.rows import load_rows
from tests.data.lazy_rows import LazyRows
from tests.data.tiny_tokenizer import (
    CHATML,
    ENDS_CONVERSATION,
    GENERATION_BLOCKS,
    NO_END_OF_TURN,
    OPENS_THINKING,
    REFUSES_SYSTEM,
    TEMPLATES,
    THINKING,
    marked_text,
    space_marking_tokenizer,
    tiny_tokenizer,
)

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ASSISTANT = (
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "The answer is four."},
)
TWO_TURNS = [
    USER,
    ASSISTANT,
    {"role": "user", "content": "And 1 + 2?"},
    {"role": "assistant", "content": "1 + 2 = 3"},
]


def trained_parts(encoder: ChatEncoder, messages: list[Message]) -> list[str]:
    text = marked_text(encoder, encoder.encode_sft(messages))
    return [part.split("⟧")[0] for part in text.split("⟦")[1:]]


@pytest.mark.parametrize("name", [*TEMPLATES, "plain"])
def test_every_template_trains_what_the_assistant_writes(name: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer(TEMPLATES.get(name)))
    end = {
        "llama": "<|eot|>",
        "opens_thinking": "<|eos|>",
        "no_end_of_turn": "\n",
        "plain": "<|eos|>",
    }.get(name, "<|im_end|>")
    last = {"no_end_of_turn": "\n<|eos|>"}.get(name, end)
    thought = "<think>\n\n</think>\n\n" if name == "thinking" else ""
    assert trained_parts(encoder, TWO_TURNS) == [
        f"The answer is four.{end}",
        f"{thought}1 + 2 = 3{last}",
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_row_is_what_the_template_renders(
    name: str, train_on: Literal["assistant", "all"]
) -> None:
    """Up to the end of the last turn: nothing is added or lost but line breaks behind it."""
    tokenizer = tiny_tokenizer(TEMPLATES[name])
    row = ChatEncoder(tokenizer, train_on=train_on).encode_sft([SYSTEM, *TWO_TURNS])
    rendered = str(tokenizer.apply_chat_template([SYSTEM, *TWO_TURNS], tokenize=False))
    expected = rendered + "<|eos|>" if name == "no_end_of_turn" else rendered.rstrip()
    assert tokenizer.decode(row.input_ids.tolist()) == expected
    assert row.input_ids.dtype == np.int32 and row.token_mask.dtype == np.uint8
    assert row.token_mask[-1] == 1
    assert bool(row.token_mask.all()) == (train_on == "all")


@pytest.mark.parametrize("name", ["chatml", "thinking", "opens_thinking", "generation_blocks"])
def test_turns_between_special_tokens_are_tokenised_as_the_template_does(name: str) -> None:
    tokenizer = tiny_tokenizer(TEMPLATES[name])
    row = ChatEncoder(tokenizer).encode_sft([SYSTEM, *TWO_TURNS])
    rendered = tokenizer.apply_chat_template([SYSTEM, *TWO_TURNS], tokenize=True, return_dict=False)
    assert row.input_ids.tolist() == rendered[: len(row.input_ids)]


@pytest.mark.parametrize(
    "name", [*(name for name in TEMPLATES if name != "opens_thinking"), "plain"]
)
def test_a_row_begins_with_its_prompt(name: str) -> None:
    """What SFT puts before the loss is what a rollout starts from, token by token."""
    encoder = ChatEncoder(tiny_tokenizer(TEMPLATES.get(name)))
    row = encoder.encode_sft([SYSTEM, USER, ASSISTANT])
    prompt = encoder.encode_prompt([SYSTEM, USER])
    assert prompt.dtype == np.int32
    assert np.flatnonzero(row.token_mask)[0] == len(prompt)
    assert row.input_ids[: len(prompt)].tolist() == prompt.tolist()


@pytest.mark.parametrize("opening", ["assistant:", "assistant: ", "assistant:\n"])
def test_no_space_is_put_where_an_answer_begins(opening: str) -> None:
    template = (
        "{% for message in messages %}{{ 'OPENING' if message.role == 'assistant' else 'user: '"
        " }}{{ message.content }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'OPENING' }}{% endif %}"
    )
    tokenizer = space_marking_tokenizer(template.replace("OPENING", opening.replace("\n", "\\n")))
    encoder = ChatEncoder(tokenizer)
    messages = [
        USER,
        {"role": "assistant", "content": " four"},
        USER,
        {"role": "assistant", "content": "four"},
    ]
    row = encoder.encode_sft(messages)
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    for encoded in (row, ChatEncoder(tokenizer, train_on="all").encode_sft(messages)):
        tokens = "".join(tokenizer.convert_ids_to_tokens(encoded.input_ids.tolist()))
        assert tokens.replace("▁", " ") == " " + rendered
    prompt = encoder.encode_prompt(messages[:1])
    assert row.input_ids[: len(prompt)].tolist() == prompt.tolist()
    assert np.flatnonzero(row.token_mask)[0] == len(prompt)


def test_a_prompt_may_open_more_than_a_finished_turn_shows() -> None:
    encoder = ChatEncoder(tiny_tokenizer(OPENS_THINKING))
    assert str(encoder.tokenizer.decode(encoder.encode_prompt([USER]))).endswith(
        "<|Assistant|><think>\n"
    )
    assert trained_parts(encoder, [USER, ASSISTANT]) == ["The answer is four.<|eos|>"]


@pytest.mark.parametrize("text", ["<answer>4</answer>", "<think>4", "<", "0", "1", "four"])
def test_the_mask_covers_the_answer_where_the_prompt_opens_more(text: str) -> None:
    """The answer and the generation prompt may begin alike by chance; nothing of the answer is
    taken for the prompt.
    """
    encoder = ChatEncoder(tiny_tokenizer(OPENS_THINKING))
    answer = {"role": "assistant", "content": text}
    for messages in ([USER, answer], [USER, answer, USER, answer], [answer, USER, answer]):
        parts = trained_parts(encoder, messages)
        assert (
            parts == [f"{text}<|eos|>"] * len(parts)
            and len(parts) == len(messages) // 2 + len(messages) % 2
        )
    row = encoder.encode_sft([USER, answer])
    start = np.flatnonzero(row.token_mask)[0]
    assert row.input_ids[start:].tolist() == [*encoder.tokenizer.encode(text), encoder.eos_token_id]


def test_an_answer_that_goes_on_where_the_prompt_ends_is_trained_from_there() -> None:
    template = OPENS_THINKING.replace("message.content.split('</think>')[-1]", "message.content")
    encoder = ChatEncoder(tiny_tokenizer(template))
    answer = {"role": "assistant", "content": "<think>\n1 + 1\n</think>four"}
    assert trained_parts(encoder, [USER, answer]) == ["1 + 1\n</think>four<|eos|>"]
    assert encoder.prompt_difference([USER, answer]) is None
    assert encoder.prompt_difference([USER, ASSISTANT]) is not None


def test_a_difference_between_rollouts_and_training_is_described() -> None:
    for name in (*TEMPLATES, "plain"):
        encoder = ChatEncoder(tiny_tokenizer(TEMPLATES.get(name)))
        difference = encoder.prompt_difference([SYSTEM, *TWO_TURNS])
        assert (difference is None) == (name != "opens_thinking"), (name, difference)
        assert (encoder.prompt_difference() is None) == (name != "opens_thinking")
    difference = ChatEncoder(tiny_tokenizer(OPENS_THINKING)).prompt_difference([USER, ASSISTANT])
    assert difference is not None
    assert "a rollout ends with" in difference and "<|Assistant|><think>\\n'" in difference
    assert difference.endswith("<|Assistant|>'")


def test_the_token_that_ends_the_conversation_is_not_trained_behind_the_end_of_the_turn() -> None:
    encoder = ChatEncoder(tiny_tokenizer(ENDS_CONVERSATION))
    assert trained_parts(encoder, TWO_TURNS) == ["The answer is four.<|eot|>", "1 + 2 = 3<|eot|>"]
    assert marked_text(encoder, encoder.encode_sft(TWO_TURNS)).endswith("⟧")


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, {"<|eos|>", "<|im_end|>"}),
        (THINKING, {"<|eos|>", "<|im_end|>"}),
        (GENERATION_BLOCKS, {"<|eos|>", "<|im_end|>"}),
        (ENDS_CONVERSATION, {"<|eos|>", "<|eot|>"}),
        (OPENS_THINKING, {"<|eos|>"}),
        (NO_END_OF_TURN, {"<|eos|>"}),
        (None, {"<|eos|>"}),
    ],
)
def test_end_tokens_are_those_of_tokenizer_and_template(
    template: str | None, ends: set[str]
) -> None:
    encoder = ChatEncoder(tiny_tokenizer(template))
    assert set(encoder.tokenizer.convert_ids_to_tokens(sorted(encoder.end_token_ids))) == ends


def test_a_turn_that_changes_once_it_is_not_the_last() -> None:
    """The reasoning of earlier turns is dropped by the template, and the loss covers what is left
    of them.
    """
    thinking = [
        USER,
        {"role": "assistant", "content": "<think>\n1 + 1\n</think>\n\nfour"},
        *TWO_TURNS[2:],
    ]
    encoder = ChatEncoder(tiny_tokenizer(THINKING))
    assert trained_parts(encoder, thinking) == [
        "four<|im_end|>",
        "<think>\n\n</think>\n\n1 + 2 = 3<|im_end|>",
    ]


@pytest.mark.parametrize("text", ["", "0", " spaced ", "\n", "0 and 0"])
def test_odd_texts(text: str) -> None:
    for template in (CHATML, THINKING):
        parts = trained_parts(
            ChatEncoder(tiny_tokenizer(template)),
            [USER, {"role": "assistant", "content": text}, *TWO_TURNS[2:]],
        )
        assert parts[0] == (text.lstrip("\n") if template == THINKING else text) + "<|im_end|>"
        assert len(parts) == 2


def test_turns_after_the_last_answer_carry_nothing_and_are_left_out() -> None:
    for template in (CHATML, GENERATION_BLOCKS, None):
        encoder = ChatEncoder(tiny_tokenizer(template))
        shorter = encoder.encode_sft(TWO_TURNS[:2])
        longer = encoder.encode_sft(TWO_TURNS[:3])
        assert longer.input_ids.tolist() == shorter.input_ids.tolist()
        assert longer.token_mask.tolist() == shorter.token_mask.tolist()


def test_a_conversation_may_begin_with_the_assistant() -> None:
    assert (
        trained_parts(ChatEncoder(tiny_tokenizer(CHATML)), [ASSISTANT, USER, ASSISTANT])
        == ["The answer is four.<|im_end|>"] * 2
    )


def test_system_prompt_and_prompt_template() -> None:
    encoder = ChatEncoder(
        tiny_tokenizer(CHATML), system_prompt="Think.", prompt_template="Solve: {prompt} {{}}"
    )
    text = str(encoder.tokenizer.decode(encoder.encode_prompt([USER])))
    assert text == (
        "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\nSolve: What is two plus two?"
        " {}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = str(encoder.tokenizer.decode(encoder.encode_prompt([SYSTEM, USER])))
    assert "Be brief." in own and "Think." not in own
    assert "Solve: What is two" in marked_text(encoder, encoder.encode_sft([USER, ASSISTANT]))


def test_plain_rule_puts_the_beginning_token_the_tokenizer_puts() -> None:
    tokenizer = tiny_tokenizer()
    encoder = ChatEncoder(tokenizer)
    assert (
        marked_text(encoder, encoder.encode_sft([USER, ASSISTANT]))
        == "What is two plus two?\n⟦The answer is four.<|eos|>⟧"
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    encoder = ChatEncoder(tokenizer)
    assert encoder.encode_prompt([USER])[0] == tokenizer.bos_token_id
    assert (encoder.encode_prompt([USER]) == tokenizer.bos_token_id).sum() == 1


def test_padding_falls_back_on_the_end_token() -> None:
    assert ChatEncoder(tiny_tokenizer(CHATML)).pad_token_id == tiny_tokenizer().eos_token_id
    padded = ChatEncoder(tiny_tokenizer(CHATML, pad_token="<|bos|>"))
    assert padded.pad_token_id == padded.tokenizer.bos_token_id != padded.eos_token_id


def test_what_cannot_be_encoded_is_named() -> None:
    with pytest.raises(ConfigError, match="has no eos token, so no row could end"):
        ChatEncoder(tiny_tokenizer(CHATML, eos_token=None))
    with pytest.raises(
        ConfigError, match=r"refuses turns of \['system', 'user'\]: System role not supported"
    ):
        ChatEncoder(tiny_tokenizer(REFUSES_SYSTEM), system_prompt="Think.").encode_prompt([USER])
    for template in (CHATML, None):
        with pytest.raises(ConfigError, match="there is no assistant turn to learn from"):
            ChatEncoder(tiny_tokenizer(template)).encode_sft([USER])
    with pytest.raises(ConfigError, match=r"mark no token of this conversation"):
        ChatEncoder(tiny_tokenizer(GENERATION_BLOCKS)).encode_sft([USER])
    silent = (
        "{% for message in messages %}"
        "{% if message.role == 'user' %}{{ message.content }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match="drops the content of a message of role 'assistant' in a conversation"
    ):
        ChatEncoder(tiny_tokenizer(silent)).encode_sft([USER, ASSISTANT])


@pytest.mark.parametrize("template", ["{{ ''|xmlattr }}", "{{ messages[9].content[1:]['x'] + 1 }}"])
def test_any_exception_of_a_template_is_a_refusal(template: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer("{% if messages|length > 1 %}" + template + "{% endif %}"))
    messages = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(ConfigError, match=r"refuses turns of \['user', 'assistant'\]: \w+"):
        encoder.encode_sft(messages)
    assert encoder.end_token_ids == (encoder.eos_token_id,)


def test_real_gsm8k_from_file_to_batch() -> None:
    folder = os.environ.get("NEMO_LIKE_DATA")
    if folder is None:
        pytest.skip("NEMO_LIKE_DATA is not set, so there is no GSM8K here")
    rows = load_rows(Path(folder) / "gsm8k" / "train.jsonl", SFT_ROWS, max_rows=64)
    encoder = ChatEncoder(tiny_tokenizer(NO_END_OF_TURN))
    encoded = LazyRows(rows, lambda row: encoder.encode_sft(conversation(row)))
    loader = RowLoader(encoded, RowOrder(len(encoded), seed=1), batch_size=16)
    for _ in range(4):
        batch: list[EncodedRow] = next(loader)
        columns = collate(batch)
        assert columns["length"].tolist() == [len(row.input_ids) for row in batch]  # type: ignore[union-attr]
    answer = question(rows[0]).answer
    assert answer is not None
    assert marked_text(encoder, encoder.encode_sft(conversation(rows[0]))).endswith(
        f"#### {answer}\n<|eos|>⟧"
    )


def test_a_role_is_one_of_four_or_one_that_the_template_names() -> None:
    """ChatML writes every role, so any other one would be trained as text without a message."""
    developer = {"role": "developer", "content": "Be brief."}
    for template in (CHATML, None):
        encoder = ChatEncoder(tiny_tokenizer(template))
        for encode in (encoder.encode_sft, encoder.encode_prompt, encoder.encode_conversation):
            with pytest.raises(ConfigError, match=r"unknown role 'developer' \(write system\)"):
                encode([developer, USER, ASSISTANT])
    naming = CHATML.replace("message.role +", "(message.role if 'developer' else 'system') +")
    encoder = ChatEncoder(tiny_tokenizer(naming))
    assert "developer" in marked_text(encoder, encoder.encode_sft([developer, USER, ASSISTANT]))
    with pytest.raises(ConfigError, match=r"unknown roles 'gpt' .write assistant., 'narrator';"):
        encoder.encode_sft([{**USER, "role": "gpt"}, {**USER, "role": "narrator"}, ASSISTANT])


OPEN_BLOCKS = GENERATION_BLOCKS.replace(
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
    "{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
)
"""Blocks without the end of the turn."""


def test_the_end_of_a_turn_behind_a_generation_block_is_trained() -> None:
    expected = [f"{turn['content']}<|im_end|>" for turn in TWO_TURNS[1::2]]
    encoder = ChatEncoder(tiny_tokenizer(OPEN_BLOCKS))
    assert trained_parts(encoder, TWO_TURNS) == expected
    inside = ChatEncoder(tiny_tokenizer(GENERATION_BLOCKS)).encode_sft(TWO_TURNS)
    row = encoder.encode_sft(TWO_TURNS)
    assert row.input_ids.tolist() == inside.input_ids.tolist()
    assert row.token_mask.tolist() == inside.token_mask.tolist()
    # A template without any end.
    without = OPEN_BLOCKS.replace("{% endgeneration %}{{ '<|im_end|>' }}", "{% endgeneration %}")
    encoder = ChatEncoder(tiny_tokenizer(without))
    assert trained_parts(encoder, TWO_TURNS[:2]) == [f"{ASSISTANT['content']}<|eos|>"]


OPTIONAL_THOUGHT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
"""As Qwen3.5: the prompt opens a thought, unless a variable of the template closes it."""


def test_variables_of_the_template_apply_to_prompts_and_rows() -> None:
    tokenizer = tiny_tokenizer(OPTIONAL_THOUGHT)
    encoder = ChatEncoder(tokenizer, chat_template_kwargs={"enable_thinking": False})
    rendered = tokenizer.apply_chat_template(
        [USER], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    expected = tokenizer(str(rendered), add_special_tokens=False)["input_ids"]
    assert encoder.encode_prompt([USER]).tolist() == expected
    row = encoder.encode_sft([USER, ASSISTANT])
    assert row.input_ids[: len(expected)].tolist() == expected
    assert trained_parts(encoder, [USER, ASSISTANT]) == [f"{ASSISTANT['content']}<|im_end|>"]
    assert list(encoder.sft_warnings()) == []
    (warning,) = ChatEncoder(tokenizer).sft_warnings()
    assert "close it at once ('\\n</think>\\n\\n')" in warning
    marked = GENERATION_BLOCKS.replace("{{ message.content", "{{ prefix + message.content")
    encoder = ChatEncoder(tiny_tokenizer(marked), chat_template_kwargs={"prefix": "12 "})
    assert trained_parts(encoder, [USER, ASSISTANT]) == [f"12 {ASSISTANT['content']}<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("enable_thinkin", "does not use"),
        ("add_generation_prompt", "gets from nemo_like"),
        ("messages", "gets from nemo_like"),
        ("eos_token", "gets from nemo_like"),
    ],
)
def test_variables_that_a_template_does_not_have_are_named(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"data.chat_template_kwargs has '{name}', .*{problem}"):
        ChatEncoder(tiny_tokenizer(OPTIONAL_THOUGHT), chat_template_kwargs={name: 1})


def test_a_template_that_ends_only_the_last_answer_is_named() -> None:
    template = (
        "{% for message in messages %}{{ '<|' + message.role.capitalize() + '|>' +"
        " message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    )
    encoder = ChatEncoder(tiny_tokenizer(template))
    assert trained_parts(encoder, TWO_TURNS)[0] == ASSISTANT["content"]
    (warning,) = encoder.sft_warnings()
    assert "ends only the last answer of a conversation with a token" in warning
    for name in ("chatml", "llama", "generation_blocks"):
        assert not list(ChatEncoder(tiny_tokenizer(TEMPLATES[name])).sft_warnings())


def test_named_templates_have_their_own_roles_and_generation_blocks() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    tool_use = "{{ tools | tojson }}" + GENERATION_BLOCKS
    default = CHATML.replace(
        "message.role +", "('system' if message.role == 'developer' else message.role) +"
    )
    named: Any = {"default": default, "tool_use": tool_use}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = named
    encoder = ChatEncoder(tokenizer)
    messages = [{"role": "developer", "content": "Be brief."}, USER, ASSISTANT]
    same = ChatEncoder(tiny_tokenizer(default))
    for tools, single in ((None, same), ([tool], ChatEncoder(tiny_tokenizer(tool_use)))):
        turns = messages if tools is None else messages[1:]
        expected = single.encode_sft(turns, tools)
        row = encoder.encode_sft(turns, tools)
        assert row.input_ids.tolist() == expected.input_ids.tolist()
        assert row.token_mask.tolist() == expected.token_mask.tolist()
