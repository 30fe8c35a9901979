"""The examples and their variants load, their keys fit together, and they stay short."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nemo_like.algorithms.registry import ALGORITHMS, detect_kind, load_config
from nemo_like.config.check import derivation
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import DynamicBatchingConfig, RunConfig, SequencePackingConfig

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
NAMES = {path.stem for path in CONFIGS.glob("*.yaml")}
EXAMPLES = sorted(name for name in NAMES if not name.startswith("_"))


PAGE = (CONFIGS / "README.md").read_text(encoding="utf-8")


class Variant(NamedTuple):
    """A line of the tables of variants."""

    base: str
    overrides: list[str]

    @property
    def run_name(self) -> str:
        return self.overrides[0].removeprefix("run_name=")


def variants() -> list[Variant]:
    """Return every line of the tables; a table belongs to the config in the heading above it."""
    found = []
    for section in PAGE.partition("## Variants\n")[2].split("\n### ")[1:]:
        heading = re.match(r"`(\w+)\.yaml`\n", section)
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        assert heading and rows, f"no config or no table in: {section}"
        for row in rows:
            overrides = re.search(r"\| `(run_name=[^`|]+)` \|$", row)
            assert overrides, f"no overrides in: {row}"
            found.append(Variant(heading[1], overrides[1].split()))
    return found


VARIANTS = variants()


def load(base: str, overrides: Sequence[str] = ()) -> RunConfig:
    path = CONFIGS / f"{base}.yaml"
    return load_config(detect_kind(path), path, overrides)


def test_there_is_one_config_per_job_and_engine_and_the_readme_lists_them() -> None:
    listed = re.findall(r"^\| `(\w+)\.yaml` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {name: detect_kind(CONFIGS / f"{name}.yaml") for name in EXAMPLES} == dict(listed)
    assert {kind for _, kind in listed} == set(ALGORITHMS)
    configs = [load(name) for name in EXAMPLES]
    assert {config.policy.engine for config in configs} == {"dtensor", "megatron"}
    assert len(EXAMPLES) <= 15, "a variant is a line in a table of README.md"


def check(config: RunConfig) -> None:
    """Check the relations between the keys as a run does before it starts."""
    expected = "rows per step" if config.needs.batch.is_fixed else "in microbatches of at most"
    layout = policy_layout(config.parallel, config.cluster)
    assert expected in derivation(config.policy, config.cluster, config.needs, layout)


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_loads_and_its_keys_fit_together(name: str) -> None:
    config = load(name)
    assert config.kind in name or name == "demo_calculator"
    assert config.run_name == name
    check(config)


def value_at(config: RunConfig, key: str) -> Any:
    """Return the value of a key; None for an entry that a mapping does not have."""
    value: Any = config
    for part in key.split("."):
        if value is None:
            return None
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
    return value


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.run_name)
def test_a_variant_loads_and_each_of_its_overrides_counts(variant: Variant) -> None:
    config = load(variant.base, variant.overrides)
    assert config.run_name == variant.run_name
    check(config)
    base = load(variant.base)
    keys = [override.partition("=")[0].lstrip("+~") for override in variant.overrides]
    assert [key for key in keys if value_at(config, key) == value_at(base, key)] == []


def test_every_variant_is_there_once() -> None:
    names = [variant.run_name for variant in VARIANTS]
    assert len(names) == 23
    assert len({*names, *EXAMPLES}) == len(names) + len(EXAMPLES)


def test_commands_of_the_documentation_are_lines_of_the_tables() -> None:
    lines = {variant.run_name: variant for variant in VARIANTS}
    num_shown = 0
    for page in (CONFIGS.parents[1] / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for base, name, rest in re.findall(r"configs/(\w+)\.yaml run_name=(\w+)(.*)", text):
            if name in lines:
                num_shown += 1
                assert base == lines[name].base, page
                assert set(rest.split()) >= set(lines[name].overrides[1:]), page
    assert num_shown > 0


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
    [line] = [variant for variant in VARIANTS if variant.run_name == "grpo_math_8B_dynamic"]
    dynamic = load(line.base, line.overrides).policy
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
