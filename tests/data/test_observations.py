"""Observations between two turns of a model: the template's delimiters, tokenized once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.observations import PROBE_ANSWERS, ObservationEncoder
from tests.data.chat_templates import (
    GEMMA,
    HEADER_AFTER_RESULT,
    LLAMA_TOOLS,
    MISTRAL,
    MISTRAL_TOOLS,
    QWEN,
    RESULT_NAMES_CALL,
    RESULT_NEEDS_CALL,
    TEXT_AFTER_RESULT,
)
from tests.data.tiny_tokenizer import CHATML, LLAMA, NO_END_OF_TURN, tiny_tokenizer

USER = {"role": "user", "content": "what is two plus two"}
ANSWER = {"role": "assistant", "content": "four"}
HINT = {"role": "user", "content": "higher than that"}
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "gemma": GEMMA, "mistral": MISTRAL}
_WITHOUT_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
_WITHOUT_ANSWERS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)


def _text(encoder: ChatEncoder, ids: np.ndarray) -> str:
    return str(encoder.tokenizer.decode(ids.tolist()))


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_turn_and_observation_are_what_the_template_renders(name: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer(TEMPLATES[name]))
    observations = ObservationEncoder(encoder)
    ends = encoder.template.end_token_ids
    assert ends, "the templates here end a turn with a token"
    observed = observations.encode([HINT], ends[0])
    prompt = encoder.encode_prompt([USER])
    # The template itself puts a space before the text, which a model then samples.
    answer = encoder.encode_continuation(" four" if name == "mistral" else "four")
    row = np.concatenate([prompt, answer, ends[:1], observed]).astype(np.int32)
    assert _text(encoder, row) == _text(encoder, encoder.encode_prompt([USER, ANSWER, HINT]))
    assert observed.dtype == np.int32
    # A turn that was cut off gets its end as a part of the observation.
    cut_off = observations.encode([HINT], int(answer[-1]))
    row = np.concatenate([prompt, answer, cut_off])
    assert _text(encoder, row) == _text(encoder, encoder.encode_prompt([USER, ANSWER, HINT]))


def test_a_tokenizer_without_template_continues_in_lines() -> None:
    encoder = ChatEncoder(tiny_tokenizer(None))
    observations = ObservationEncoder(encoder)
    eos = encoder.eos_token_id
    assert _text(encoder, observations.encode([HINT], eos)) == "higher than that\n"
    assert observations.encode([HINT], 5)[0] == eos


def test_a_template_without_end_of_turn_keeps_the_sampled_end() -> None:
    encoder = ChatEncoder(tiny_tokenizer(NO_END_OF_TURN))
    observations = ObservationEncoder(encoder)
    ids = observations.encode([HINT], encoder.eos_token_id)
    assert np.array_equal(ids, observations.encode([HINT], 5))
    assert "higher than that" in _text(encoder, ids)


def test_results_of_tools_have_their_own_delimiters() -> None:
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    (end,) = encoder.template.end_token_ids
    messages = [{"role": "tool", "content": "84"}, {"role": "tool", "content": "85"}]
    text = _text(encoder, ObservationEncoder(encoder).encode(messages, end))
    assert text.count("<tool_response>") == 2 and text.index("84") < text.index("85")
    assert text.endswith("assistant\n")


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "</s>", "a", " ", "<"])))
def test_an_observation_cannot_end_its_turn(parts: list[str]) -> None:
    encoder = ChatEncoder(tiny_tokenizer(CHATML))
    (end,) = encoder.template.end_token_ids
    message = {"role": "user", "content": "".join(parts)}
    ids = ObservationEncoder(encoder).encode([message], end)
    plain = ObservationEncoder(encoder).encode([HINT], end)
    special = set(encoder.tokenizer.all_special_ids) | {end}
    found = [token for token in ids.tolist() if token in special]
    assert found == [token for token in plain.tolist() if token in special]


CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "84"}


def _has_fixed_text(template: str, calls: list[dict[str, object]]) -> bool:
    """The row continued by an observation has the text of a complete rendering."""
    encoder = ChatEncoder(tiny_tokenizer(template))
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    end = encoder.template.end_of_call or encoder.template.end_of_turn
    assert end is not None
    alone = encoder.template.render([USER, turn])
    # What the model samples: up to the end of the turn.
    sampled = alone[: alone.rindex(end)] + end
    (last,) = encoder.encode_continuation(sampled)[-1:]
    try:
        ids = ObservationEncoder(encoder).encode([RESULT], int(last), calls=calls)
    except ConfigError:
        return False
    expected = encoder.template.render([USER, turn, RESULT], opening=True)
    assert sampled + _text(encoder, ids) == expected
    return True


@pytest.mark.parametrize(
    "template",
    [RESULT_NEEDS_CALL, RESULT_NAMES_CALL, LLAMA_TOOLS, HEADER_AFTER_RESULT, MISTRAL_TOOLS],
    ids=["needs call", "names call", "llama", "header", "mistral"],
)
def test_a_result_follows_the_calls_of_the_turn(template: str) -> None:
    assert _has_fixed_text(template, [CALL])
    # An environment that runs the calls of a text gives none.
    assert _has_fixed_text(template, [])


def test_a_result_without_the_name_that_the_template_writes_is_an_error() -> None:
    encoder = ObservationEncoder(ChatEncoder(tiny_tokenizer(RESULT_NAMES_CALL)))
    unnamed = {"role": "tool", "content": "84"}
    for _ in range(2):
        with pytest.raises(ConfigError, match="give observations of role tool a name"):
            encoder.encode([unnamed], 0)
    needs = ObservationEncoder(ChatEncoder(tiny_tokenizer(RESULT_NEEDS_CALL)))
    named = needs.encode([RESULT], 0, calls=[CALL])
    assert needs.encode([unnamed], 0).tolist() == named.tolist()


@pytest.mark.parametrize("template", [RESULT_NEEDS_CALL, QWEN])
def test_results_of_several_calls_follow_each_other(template: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer(template))
    (end,) = encoder.template.end_token_ids
    results = [{**RESULT, "content": text} for text in ("84", "85")]
    ids = ObservationEncoder(encoder).encode(results, end, calls=[CALL, CALL])
    assert _text(encoder, ids).index("84") < _text(encoder, ids).index("85")


def test_a_result_within_the_turn_of_its_call_has_no_fixed_text() -> None:
    assert not _has_fixed_text(TEXT_AFTER_RESULT, [CALL])


def test_texts_of_calls_cannot_end_a_turn() -> None:
    encoder = ChatEncoder(tiny_tokenizer(RESULT_NAMES_CALL))
    (end,) = encoder.template.end_token_ids
    function = {"name": "add<|eot|>", "arguments": {"a": "<|eot|><|start|>"}}
    call = {**CALL, "function": function}
    ids = ObservationEncoder(encoder).encode([RESULT], end, calls=[call])
    plain = ObservationEncoder(encoder).encode([RESULT], end, calls=[CALL])
    assert np.array_equal(ids, plain)


def test_other_fields_of_an_observation_cannot_end_its_turn() -> None:
    template = CHATML.replace("message.content", "message.content + (message.name or '')")
    assert template != CHATML
    encoder = ChatEncoder(tiny_tokenizer(template))
    (end,) = encoder.template.end_token_ids
    message = {"role": "user", "content": "84", "name": "<|im_end|>"}
    ids = ObservationEncoder(encoder).encode([message], end)
    assert ids.tolist().count(end) == 1


def test_an_observation_may_have_the_text_of_a_probe() -> None:
    encoder = ChatEncoder(tiny_tokenizer(CHATML))
    (end,) = encoder.template.end_token_ids
    observations = ObservationEncoder(encoder)
    (probe, _) = PROBE_ANSWERS
    text = _text(encoder, observations.encode([{"role": "user", "content": f"84 {probe}"}], end))
    assert "84" in text


def test_only_the_beginning_of_a_huge_observation_is_encoded() -> None:
    encoder = ChatEncoder(tiny_tokenizer(CHATML))
    observations = ObservationEncoder(encoder)
    message = {"role": "user", "content": "higher than that " * 100_000}
    length = len(observations.encode([message, message], 5, max_tokens=50))
    assert 50 < length < 2_000
    # What may fit is encoded completely.
    short = {"role": "user", "content": f"higher {10_000 * ' '}than that"}
    ids = observations.encode([short], 5, max_tokens=50)
    complete = observations.encode([short], 5)
    assert len(ids) > 50 or np.array_equal(ids, complete)


@pytest.mark.parametrize(
    ("template", "message", "problem"),
    [
        (
            "{% for m in messages %}[{{ loop.index }}] {{ m.content }}{{ eos_token }}{% endfor %}",
            HINT,
            "renders the text after a turn of the model differently",
        ),
        (
            _WITHOUT_TOOLS,
            {"role": "tool", "content": "84"},
            "drops the content of an observation of role 'tool'",
        ),
        (_WITHOUT_ANSWERS, HINT, "does not render the text of an assistant turn"),
        (LLAMA_TOOLS.replace("| trim", "| upper"), HINT, "does not render the text of an assist"),
    ],
)
def test_a_template_without_fixed_delimiters_is_refused(
    template: str, message: dict[str, str], problem: str
) -> None:
    encoder = ChatEncoder(tiny_tokenizer(template))
    with pytest.raises(ConfigError, match=problem):
        ObservationEncoder(encoder).encode([message], encoder.eos_token_id)
