"""Configs of other tools: how they are recognized and refused, and the tables of their keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.registry import RUN_CONFIGS, detect_kind, job_schema, load_config
from nemo_like.cli import main
from nemo_like.config.build import build_config
from nemo_like.config.errors import ConfigError
from nemo_like.config.foreign import find_foreign, recognized_tool, unknown_text
from nemo_like.config.keys import Entry, Tool, child_types, tools, type_at

CONFIGS = Path(__file__).parent / "foreign"
YAML_TOOLS = {
    "nemo_rl_grpo": ("NeMo RL", "grpo"),
    "nemo_rl_async_grpo": ("NeMo RL", "grpo"),
    "nemo_rl_sft": ("NeMo RL", "sft"),
    "nemo_rl_rm": ("NeMo RL", "rm"),
    "verl_grpo": ("verl", "grpo"),
    "verl_async_grpo": ("verl", "grpo"),
    "verl_sft": ("verl", "sft"),
    "trl_grpo": ("TRL", "grpo"),
    "trl_async_grpo": ("TRL", "grpo"),
    "trl_sft": ("TRL", "sft"),
    "trl_rm": ("TRL", "rm"),
    "trl_gkd": ("TRL", "distill"),
    "cosmos_rl_sft": ("Cosmos-RL", "sft"),
    "axolotl": ("axolotl", "sft"),
    "axolotl_dpo": ("axolotl", "dpo"),
    "llama_factory": ("LLaMA-Factory", "sft"),
    "llama_factory_dpo": ("LLaMA-Factory", "dpo"),
    "openrlhf": ("OpenRLHF", "grpo"),
}
OUR_KEY = re.compile(
    r"\b(?:policy|grpo|sft|dpo|rm|distill|data|reward|cluster|parallel|checkpointing|logger|loss_fn)\.[a-z_0-9.]*[a-z_0-9]"
)


def leaves(values: Any, prefix: str = "") -> list[str]:
    """Every dotted key with a value; an empty mapping is a value."""
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [
        leaf
        for name, inner in values.items()
        for leaf in leaves(inner, f"{prefix}.{name}" if prefix else name)
    ]


def put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values.setdefault(name, value)


@pytest.mark.parametrize("name", YAML_TOOLS)
def test_a_config_of_another_tool_is_refused_with_its_name_and_the_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS / f"{name}.yaml"
    tool, kind = YAML_TOOLS[name]
    assert detect_kind(path) == kind
    assert main(["validate", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"is a config of {tool}: " in error
    assert f"nemo-like migrate {os.path.relpath(path)} --out NEW.yaml" in error
    assert "0 unknown" in error
    assert len(error.splitlines()) <= 4
    assert "delete" not in error


def test_a_config_of_an_unknown_tool_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("bf16: true\nuse_liger_kernel: true\nfirst: 1\nsecond: 2\nthird: 3\n")
    with pytest.raises(ConfigError, match="of no tool that `nemo-like migrate` knows") as error:
        load_config("sft", path)
    assert "axolotl" in str(error.value) and "use_liger_kernel" in str(error.value)
    assert main(["migrate", str(path)]) == 2
    assert "has the keys of no known tool" in capsys.readouterr().err


def test_single_keys_of_other_tools_in_an_own_config_are_single_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run_name: a\npolicy: {model_name: m}\ndata: {train_path: t, num_workers: 1}\n"
        "sft: {max_num_steps: 1}\n"
    )
    with pytest.raises(ConfigError, match="2 problems") as error:
        load_config("sft", path, ["trainer.nnodes=2"])
    text = str(error.value)
    assert "is a config of" not in text and "did you mean cluster.num_nodes" in text


def test_a_single_foreign_key_is_answered_with_the_right_hint() -> None:
    assert (
        unknown_text(job_schema("grpo"), "grpo.seed") == "unknown key grpo.seed; did you mean seed?"
    )
    assert "data.max_prompt_tokens" in unknown_text(job_schema("grpo"), "data.max_prompt_length")
    assert "no effect here" in unknown_text(job_schema("sft"), "logger.log_dir")
    for path in ("critic.optim.lr", "env.math.num_workers", "nothing.num_workers"):
        assert "did you mean" not in unknown_text(job_schema("grpo"), path), path


def test_every_entry_of_the_tables_fits_the_schema() -> None:
    for tool in tools():
        for path, entry in tool.entries.items():
            assert not is_key(path), path
            check_entry(tool, entry)
        for path, entry in tool.same_keys.items():
            assert is_key(path), path
            check_entry(tool, entry)
        for target in (*tool.computed, *tool.undecided):
            assert is_key(target), target
        for key in OUR_KEY.findall(str(tool.advice)):
            assert is_key(key) or key in tool.entries, key


def check_entry(tool: Tool, entry: Entry) -> None:
    """Every key that it names exists, and every value that it gives is legal."""
    text = f"{entry.note} {entry.when_null}"
    for key in OUR_KEY.findall(text):
        assert is_key(key), key
    if entry.kind == "renamed":
        targets = (*entry.targets, *([entry.sft] if entry.sft else []))
        assert targets and all(is_key(target) for target in targets)
        assert entry.switch is None or entry.switch in tool.entries
        assert entry.unless is None or entry.unless in tool.entries
        for switch, others in (entry.switched or {}).items():
            assert switch in tool.entries
            assert isinstance(others, dict) or all(is_key(target) for target in others)
        for further in (entry.also or {}).values():
            assert all(is_key(target) for target in further)
        for value in (entry.values or {}).values():
            if value in (None, "*") or "${" in value:
                continue
            items = yaml.safe_load(value)
            if isinstance(items, list) and len(items) == len(targets) > 1:
                # One value for each key.
                for target, item in zip(targets, items, strict=True):
                    assert is_known_value(target, item), item
            else:
                assert any(is_legal(target, value) for target in targets), value


def is_key(path: str) -> bool:
    if path in ("reward.functions", "reward.functions.NAME"):
        return True
    return any(type_at(config, path) is not None for config in RUN_CONFIGS.values())


def is_known_value(path: str, value: Any) -> bool:
    """Whether the type of the key has the value; other keys may have to fit it."""
    (annotation,) = {type_at(config, path) for config in RUN_CONFIGS.values()} - {None}
    return value in get_args(annotation) if isinstance(value, str) else annotation is type(value)


def is_legal(path: str, value: str) -> bool:
    """Whether the schema takes the value for the key."""
    kind = next(name for name, config in RUN_CONFIGS.items() if type_at(config, path) is not None)
    plain: dict[str, Any] = {}
    for key in ("run_name", "policy.model_name", "data.train_path"):
        put(plain, key, "x")
    if path.startswith("reward.models.model."):
        put(plain, "reward.models.model.model_name", "x")
    put(plain, path, yaml.safe_load(value))
    return not build_config(RUN_CONFIGS[kind], plain)[1]


TEXTS = ("0", "1", "-1", "grpo", "fsdp", "${seed}", "")
VALUES = st.sampled_from([None, True, False, *TEXTS, {}, {"enabled": False}, {"x": "1"}, ["1"]])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["sft", "grpo", "rm"]), tool=st.sampled_from(tools()))
def test_every_unknown_key_is_in_exactly_one_finding(
    data: st.DataObject, kind: str, tool: Any
) -> None:
    keys = st.sampled_from(sorted(tool.entries))
    chosen = data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=40))
    tree: dict[str, Any] = {}
    for path, value in chosen.items():
        if not any(
            path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in chosen
        ):
            put(tree, path.replace("NAME", "0"), value)
    found = find_foreign(job_schema(kind), tree, tool)
    for leaf in leaves(tree) if tree else []:
        if type_at(RUN_CONFIGS[kind], leaf) is not None:
            continue
        covering = [one for one in found if leaf == one.path or leaf.startswith(f"{one.path}.")]
        assert len(covering) == 1, leaf
        assert covering[0].text or covering[0].group in ("renamed", "unknown"), leaf
        for target in covering[0].targets:
            assert type_at(RUN_CONFIGS[kind], target) is not None
            assert child_types(type_at(RUN_CONFIGS[kind], target)) is None


def test_a_sign_belongs_to_one_tool() -> None:
    for tool in tools():
        for sign in tool.signs:
            is_known = any(f"{key}.".startswith(f"{sign}.") for key in tool.entries)
            assert is_known or any(f"{sign}.".startswith(f"{key}.") for key in tool.entries), sign
            tree: dict[str, Any] = {}
            put(tree, sign, 1)
            others = {each.name for each in tools() if each is not tool and sign in each.signs}
            assert not others, (sign, others)
            assert recognized_tool(tree) in (None, tool) or sign in ("env", "teacher"), sign
