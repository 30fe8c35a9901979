"""Configs in the form NeMo RL writes them: inheritance by path, and arithmetic in
interpolations.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.build import register_arithmetic
from nemo_like.config.errors import ConfigError

BASE = """
run_name: base
seed: 1
policy:
  model_name: model
  max_total_sequence_length: 512
  train_micro_batch_size: 4
  logprob_batch_size: ${div:${policy.train_micro_batch_size},2}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${..max_total_sequence_length}, ${..logprob_batch_size}}
data: {train_path: rows.jsonl}
sft: {max_num_steps: "${add:${mul:2,3},1}"}
"""


def write(folder: Path, **files: str) -> Path:
    """Write `name.yaml` for every name, `__` standing for `/`; the path of the last one."""
    path = folder
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    "defaults",
    ["../base.yaml", "../base", "[../base.yaml]", "{folder}/base.yaml", "[{folder}/base.yaml]"],
)
def test_a_file_inherits_by_a_path_relative_to_itself_or_absolute(tmp_path: Path, defaults: str):
    child = (
        f"defaults: {defaults.format(folder=tmp_path)}\n"
        "run_name: child\n"
        "policy: {train_micro_batch_size: 8}\n"
    )
    path = write(tmp_path, base=BASE, folder__child=child)
    config = load_config(SftRunConfig, path)
    assert detect_kind(path) == "sft"
    assert (config.run_name, config.seed, config.sft.max_num_steps) == ("child", 1, 7)
    assert config.policy.logprob_batch_size == 4
    assert config.policy.sequence_packing.train_mb_tokens == 512 * 8
    assert config.policy.sequence_packing.logprob_mb_tokens == 512 * 4
    assert isinstance(config.policy.sequence_packing.train_mb_tokens, int)


def test_later_files_come_over_earlier_ones_through_several_levels(tmp_path: Path):
    path = write(
        tmp_path,
        base=BASE,
        a="defaults: base.yaml\nseed: 2\nrun_name: a\n",
        b="seed: 3\npolicy: {precision: bfloat16}\n",
        child="defaults: [a.yaml, b.yaml]\noutput_dir: out\n",
    )
    config = load_config(SftRunConfig, path, ["policy.train_micro_batch_size=2"])
    assert (config.run_name, config.seed, config.output_dir, config.policy.precision) == (
        "a",
        3,
        "out",
        "bfloat16",
    )
    assert config.policy.sequence_packing.train_mb_tokens == 1024


def test_a_config_with_a_list_of_names_can_be_inherited(tmp_path: Path):
    files = {"base": BASE, "inner": "defaults: [base, _self_]\nseed: 5\n"}
    path = write(tmp_path, **files, other__child="defaults: ../inner.yaml\nrun_name: child\n")
    config = load_config(SftRunConfig, path)
    assert (config.seed, config.run_name) == (5, "child")


def test_the_examples_can_be_inherited_by_an_absolute_path(tmp_path: Path):
    examples = Path(__file__).parents[2] / "examples" / "configs"
    path = write(
        tmp_path,
        mine=f"defaults: {examples}/demo_grpo.yaml\nrun_name: mine\ngrpo: {{max_num_steps: 3}}\n",
    )
    config, original = (
        load_config(GrpoRunConfig, path),
        load_config(GrpoRunConfig, examples / "demo_grpo.yaml"),
    )
    assert (config.run_name, config.grpo.max_num_steps) == ("mine", 3)
    assert config.policy == original.policy and config.reward == original.reward


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"child": "run_name: x\ndefaults: bsae.yaml\n"},
            ("child.yaml:2", "bsae.yaml", "did you mean", "base.yaml"),
        ),
        ({"child": "defaults: /nowhere/base.yaml\n"}, ("child.yaml:1", "/nowhere/base.yaml")),
        ({"child": "defaults: child.yaml\n"}, ("circle", "child.yaml")),
        ({"a": "defaults: child.yaml\n", "child": "defaults: a.yaml\n"}, ("circle", "a.yaml")),
        (
            {"a": "defaults: [{policy: x}]\n", "child": "defaults: a.yaml\n"},
            ("a.yaml:1", "config groups"),
        ),
        (
            {"child": "defaults: base.yaml\nsft: {max_num_steps: '${div:4,0}'}\n"},
            ("sft.max_num_steps", "divides by zero", "child.yaml:2"),
        ),
        (
            {"child": "defaults: base.yaml\nseed: ${mul:a,2}\n"},
            ("seed", "'a'", "two finite numbers", "child.yaml:2"),
        ),
        (
            {"child": "defaults: base.yaml\nseed: ${add:true,2}\n"},
            ("seed", "'True'", "child.yaml:2"),
        ),
        (
            {"child": "defaults: base.yaml\nseed: ${mul:2}\n"},
            ("seed", "1 arguments", "child.yaml:2"),
        ),
        (
            {"child": "defaults: base.yaml\nseed: ${div:3,2}\n"},
            ("seed", "1.5", "integer", "child.yaml:2"),
        ),
        (
            {"child": "defaults: base.yaml\nseed: ${mul:${policy.nowhere},2}\n"},
            ("seed", "policy.nowhere", "child.yaml:2"),
        ),
    ],
)
def test_what_is_wrong_is_one_message_with_key_and_line(
    tmp_path: Path, files: dict[str, str], words: tuple[str, ...]
):
    path = write(tmp_path, base=BASE, **files)
    with pytest.raises(ConfigError) as raised:
        load_config(SftRunConfig, path)
    for word in words:
        assert word in str(raised.value)
    assert len(str(raised.value)) < 700


NUMBERS = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, allow_subnormal=False)


@settings(deadline=None)
@given(left=NUMBERS, right=NUMBERS)
def test_arithmetic_is_exact_on_integers_and_keeps_them_integers(left, right):
    register_arithmetic()
    config = OmegaConf.create(
        {
            "a": left,
            "b": right,
            "add": "${add:${a},${b}}",
            "mul": "${mul:${a}, ${b}}",
            "div": "${div:${a},${b}}",
        }
    )
    are_integers = isinstance(left, int) and isinstance(right, int)
    assert config.add == left + right and config.mul == left * right
    assert isinstance(config.add, int) == isinstance(config.mul, int) == are_integers
    # A quotient of a tiny divisor overflows, which is an error of its own.
    if right != 0 and math.isfinite(left / right):
        assert config.div == left / right
        has_no_remainder = are_integers and Fraction(left, right).denominator == 1
        assert isinstance(config.div, int) == has_no_remainder
