"""The examples load, their keys fit together, and they stay as short as an example should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.config.check import derivation
from nemo_like.config.schema import DynamicBatchingConfig, SequencePackingConfig

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
NAMES = {path.stem for path in CONFIGS.glob("*.yaml")}
EXAMPLES = sorted(name for name in NAMES if not name.startswith("_"))


def test_the_examples_are_those_that_are_promised() -> None:
    assert set(EXAMPLES) >= {
        "demo_sft",
        "demo_grpo",
        "sft_gsm8k_smollm2",
        "sft_gsm8k_pool",
        "sft_gsm8k_online",
        "sft_gsm8k_token_budget",
        "sft_gsm8k_dyn_bsz",
        "grpo_gsm8k_smollm2",
        "grpo_math_1B",
        "grpo_math_8B_dynamic",
        "grpo_math_8B_megatron",
        "sft_8B",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_loads_and_its_keys_fit_together(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    kind = detect_kind(path)
    config = load_config(kind, path)
    has_own_name = name in ("demo_calculator", "demo_guessing", "demo_environments_sft")
    is_member = name in ("demo_dapo", "demo_gspo", "demo_cispo", "demo_rloo", "demo_reinforce_pp")
    assert kind in name or has_own_name or (is_member and kind == "grpo")
    assert config.run_name == name
    expected = "rows per step" if config.has_fixed_batches else "in microbatches of at most"
    assert expected in derivation(config)


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short_and_builds_on_the_shared_base(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert 15 <= len(lines) <= 50
    assert lines[0].startswith("# "), "the first line states its purpose"
    assert any(line.startswith("  - _base") for line in lines)


def test_packing_and_dynamic_batching_as_people_know_them() -> None:
    packed = load_config("grpo", CONFIGS / "grpo_math_1B.yaml").policy
    assert packed.sequence_packing == SequencePackingConfig(
        enabled=True,
        train_mb_tokens=16384,
        logprob_mb_tokens=32768,
        algorithm="modified_first_fit_decreasing",
        sequence_length_round=64,
    )
    assert not packed.dynamic_batching.enabled
    dynamic = load_config("grpo", CONFIGS / "grpo_math_8B_dynamic.yaml").policy
    assert dynamic.dynamic_batching == DynamicBatchingConfig(
        enabled=True, train_mb_tokens=16384, logprob_mb_tokens=32768, sequence_length_round=64
    )
    assert not dynamic.sequence_packing.enabled


@pytest.mark.parametrize("name", ["sft_gsm8k_smollm2", "grpo_gsm8k_smollm2"])
def test_real_data_is_found_through_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = CONFIGS / f"{name}.yaml"
    monkeypatch.delenv("NEMO_LIKE_DATA", raising=False)
    assert load_config(detect_kind(path), path).data.train_path == "data/gsm8k/train.jsonl"
    monkeypatch.setenv("NEMO_LIKE_DATA", "/datasets")
    assert load_config(detect_kind(path), path).data.train_path == "/datasets/gsm8k/train.jsonl"


def test_the_demo_hands_its_model_on() -> None:
    sft = load_config("sft", CONFIGS / "demo_sft.yaml")
    grpo = load_config("grpo", CONFIGS / "demo_grpo.yaml")
    assert sft.checkpointing.export_hf
    assert grpo.policy.model_name == f"{sft.output_dir}/{sft.run_name}/hf"
    assert grpo.data.validation_path == sft.data.validation_path


def test_one_override_turns_an_example_to_another_algorithm_and_nothing_else() -> None:
    path = CONFIGS / "demo_grpo.yaml"
    config = load_config("grpo", path)
    changed = load_config("grpo", path, ["policy.sequence_packing.algorithm=first_fit_shuffle"])
    packing = replace(config.policy.sequence_packing, algorithm="first_fit_shuffle")
    assert changed == replace(config, policy=replace(config.policy, sequence_packing=packing))
