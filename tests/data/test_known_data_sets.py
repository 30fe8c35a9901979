"""Data sets that are often used: the job and the names of the columns, by their cards."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, conversation
from nemo_like.data.known_rows import known_row
from nemo_like.data.preferences import PREFERENCE_ROWS, job_of_row, preference

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
OTHER = [TURNS[0], {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PARTS = [{"type": "text", "text": "q"}]
MATH = {"problem": "q", "solution": "a"}

# Name -> (row, job, columns to name; None if the row is understood as it is).
DATA_SETS: dict[str, tuple[dict[str, Any], str, dict[str, str] | None]] = {
    "UltraChat": ({"prompt": "q", "prompt_id": "1", "messages": TURNS}, "sft", None),
    "Tulu 3": ({"id": "1", "messages": TURNS, "source": "s"}, "sft", None),
    "No Robots": ({"prompt": "q", "messages": TURNS, "category": "c"}, "sft", None),
    "OpenHermes": ({"conversations": SHAREGPT, "source": "s", "category": None}, "sft", None),
    "OpenThoughts": ({"system": "", "conversations": SHAREGPT}, "sft", None),
    "Magpie": ({"instruction": "x", "response": "y", "conversations": SHAREGPT}, "sft", None),
    "Alpaca": ({"instruction": "q", "input": "", "output": "a", "text": "t"}, "sft", None),
    "WizardLM": ({"instruction": "q", "output": "a"}, "sft", None),
    "CodeAlpaca": ({"prompt": "q", "completion": "a"}, "sft", None),
    "content in parts": ({"messages": [{"role": "user", "content": PARTS}, TURNS[1]]}, "sft", None),
    "Dolly": (
        {"instruction": "q", "context": "", "response": "a", "category": "c"},
        "sft",
        {"completion": "response", "input": "context"},
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "", "question": "q", "response": "a"},
        "sft",
        {"prompt": "question", "completion": "response", "system": "system_prompt"},
    ),
    "MetaMathQA": (
        {"type": "t", "query": "q", "original_question": "o", "response": "a"},
        "sft",
        {"prompt": "query", "completion": "response"},
    ),
    "prompt and response": ({"prompt": "q", "response": "a"}, "sft", {"completion": "response"}),
    "HelpSteer": (
        {"prompt": "q", "response": "a", "helpfulness": 4},
        "sft",
        {"completion": "response"},
    ),
    "NuminaMath-CoT": ({**MATH, "source": "s", "messages": TURNS}, "sft", None),
    "NuminaMath-1.5": (
        {**MATH, "answer": "2", "problem_type": "t", "question_type": "u"},
        "sft",
        {"prompt": "problem", "completion": "solution"},
    ),
    "OpenR1-Math": ({**MATH, "answer": "2", "generations": ["g"], "messages": TURNS}, "sft", None),
    "MATH": (
        {**MATH, "level": "1", "type": "t"},
        "sft",
        {"prompt": "problem", "completion": "solution"},
    ),
    "MATH-500": (
        {**MATH, "answer": "2", "subject": "s", "level": 1, "unique_id": "u"},
        "sft",
        {"prompt": "problem", "completion": "solution"},
    ),
    "OpenMathInstruct": (
        {"problem": "q", "generated_solution": "a", "expected_answer": "2", "problem_source": "s"},
        "sft",
        {"prompt": "problem", "completion": "generated_solution"},
    ),
    "Magicoder": (
        {**MATH, "lang": "py", "raw_index": 1, "seed": "s"},
        "sft",
        {"prompt": "problem", "completion": "solution"},
    ),
    "LIMO": (
        {"question": "q", "solution": "a", "answer": "2"},
        "sft",
        {"prompt": "question", "completion": "solution"},
    ),
    "KodCode": (
        {"style": "s", "question": "q", "solution": "a", "test": "t"},
        "sft",
        {"prompt": "question", "completion": "solution"},
    ),
    "GSM8K": ({"question": "q", "answer": "a #### 2"}, "sft", None),
    "DAPO-Math": (
        {
            "data_source": "s",
            "prompt": [TURNS[0]],
            "ability": "m",
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "extra_info": {"index": "i"},
        },
        "grpo",
        {"answer": "reward_model.ground_truth"},
    ),
    "prompts": ({"prompt": "q", "source": "s"}, "grpo", None),
    "UltraFeedback": (
        {"prompt": "q", "chosen": TURNS, "rejected": OTHER, "messages": TURNS, "score_chosen": 1.0},
        "dpo",
        None,
    ),
    "HH-RLHF": (
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        "dpo",
        None,
    ),
    "Skywork": ({"chosen": TURNS, "rejected": OTHER, "source": "s"}, "dpo", None),
    "Orca pairs": (
        {"system": "", "question": "q", "chosen": "a", "rejected": "b"},
        "dpo",
        {"prompt": "question"},
    ),
    "instruction with responses": (
        {"instruction": "q", "chosen_response": "a", "rejected_response": "b"},
        "dpo",
        {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    ),
}
SCHEMAS = {"sft": SFT_ROWS, "grpo": PROMPT_ROWS, "dpo": PREFERENCE_ROWS}


@pytest.mark.parametrize(("role", "job"), [("gpt", "sft"), (" Assistant", "sft"), ("user", "grpo")])
def test_turns_of_the_assistant_with_other_roles_are_for_sft(role: str, job: str) -> None:
    row = {"messages": [{"role": "human", "content": "q"}, {"role": role, "content": "a"}]}
    assert job_of_row(row, {}) == job


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_job_and_the_columns_of_a_data_set(name: str) -> None:
    row, job, columns = DATA_SETS[name]
    assert job_of_row(row, {}) == job
    schema = SCHEMAS[job]
    known = known_row(row, {})
    if columns is None or job == "grpo":
        schema.check(known, schema.recognize(known))
    else:
        shown = ", ".join(f"{meaning}: {column}" for meaning, column in columns.items())
        with pytest.raises(ConfigError) as error:
            schema.check(known, schema.recognize(known))
        # Alpaca's `instruction` is known as the prompt.
        shown = shown.replace("prompt: instruction, ", "")
        assert f"data.columns={{{shown}}}" in str(error.value)
    # With the columns that are named the row has the texts of the card.
    used = known_row(row, columns or {})
    if job == "dpo":
        texts = preference(used)
        assert [texts.prompt, texts.chosen, texts.rejected] == [TURNS[:1], TURNS[1:], OTHER[1:]]
    elif name == "DAPO-Math":
        assert used["answer"] == "2"
    elif job == "sft" and name != "GSM8K":
        assert conversation(used) == TURNS
