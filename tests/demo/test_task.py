"""The demo's data and model: right sums, disjoint splits, rows of uneven length, the same files for
the same seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.demo.task import (
    NUM_GRPO_ROWS,
    NUM_SFT_ROWS,
    NUM_VALIDATION_ROWS,
    WORKED_SHARE,
    Problem,
    build_demo,
)
from nemo_like.environments.math import answer_reward, format_reward
from nemo_like.environments.reward import RewardSample


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    build_demo(directory, seed=3)
    return directory


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@settings(max_examples=100, deadline=None)
@given(left=st.integers(0, 9999), right=st.integers(0, 9999))
def test_worked_completions_add_up(left: int, right: int) -> None:
    problem = Problem(left, right)
    *steps, last = problem.completion(is_worked=True).splitlines()
    assert last == f"#### {left + right}" == problem.completion(is_worked=False)
    digits = []
    for step in steps:
        terms, total = step.split("=")
        assert sum(map(int, terms.split("+"))) == int(total)
        digits.append(total[1])
    carried = steps[-1].split("=")[1][0]
    assert int(carried + "".join(reversed(digits))) == left + right


def test_the_example_of_the_docstring() -> None:
    assert Problem(607, 58).completion(is_worked=True) == "7+8+0=15\n0+5+1=06\n6+0+0=06\n#### 665"


def test_the_splits_are_complete_disjoint_and_answerable(directory: Path) -> None:
    sft, grpo, validation = (
        _rows(directory / f"{name}.jsonl") for name in ("sft_train", "grpo_train", "validation")
    )
    assert (len(sft), len(grpo), len(validation)) == (
        NUM_SFT_ROWS,
        NUM_GRPO_ROWS,
        NUM_VALIDATION_ROWS,
    )
    held_out = {row["prompt"] for row in validation}
    assert len(held_out) == NUM_VALIDATION_ROWS
    assert held_out.isdisjoint(row["prompt"] for row in sft + grpo)
    for row in validation:
        assert row["answer"] == str(sum(map(int, row["prompt"].split("+"))))
        sample = RewardSample(
            prompt=row["prompt"], completion=row["completion"], answer=row["answer"]
        )
        assert answer_reward(sample) == format_reward(sample) == 1.0
    share = sum("=" in row["completion"] for row in sft) / len(sft)
    assert share == pytest.approx(WORKED_SHARE, abs=0.02)


def test_rows_are_of_uneven_length(directory: Path) -> None:
    lengths = sorted(
        len(row["prompt"]) + len(row["completion"]) for row in _rows(directory / "sft_train.jsonl")
    )
    assert lengths[-1] > 4 * lengths[len(lengths) // 10]


def test_the_model_loads_and_the_tokenizer_gives_every_text_back(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    assert model.config.vocab_size == len(tokenizer) and model.num_parameters() < 1_000_000
    opening = ""
    for row in _rows(directory / "sft_train.jsonl")[:200]:
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        opening = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, tokenize=False
        )
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text == f"{opening}{row['completion']}{tokenizer.eos_token}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["prompt"] + row["completion"]
    ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()


def test_the_same_seed_gives_the_same_files_and_leaves_the_global_generator_alone(
    directory: Path, tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    build_demo(tmp_path, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in (
        "sft_train.jsonl",
        "grpo_train.jsonl",
        "validation.jsonl",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes(), name
    build_demo(tmp_path, seed=4)
    for name in ("sft_train.jsonl", "model/model.safetensors"):
        assert (tmp_path / name).read_bytes() != (directory / name).read_bytes(), name
