"""`nemo-like migrate`: each tool end to end, and nothing is left out silently."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_like.algorithms.registry import RUN_CONFIGS, detect_kind, load_config
from nemo_like.cli import main
from nemo_like.config.foreign import key_paths, value_at
from nemo_like.config.foreign_source import read_source
from nemo_like.config.keys import JobSchema
from nemo_like.config.migrate import Migration, migrate
from nemo_like.config.schema import RunConfig
from tests.config.test_foreign import CONFIGS, YAML_TOOLS

JOB = JobSchema("sft", RUN_CONFIGS)
SCRIPTS = {
    "verl_grpo.sh": ("verl", "grpo"),
    "trl_sft.sh": ("TRL", "sft"),
    "openrlhf_grpo.sh": ("OpenRLHF", "grpo"),
    "openrlhf_sft.sh": ("OpenRLHF", "sft"),
    "prime_rl.toml": ("prime-rl", "grpo"),
    "prime_rl_sft.toml": ("prime-rl", "sft"),
}
CASES = {**{f"{name}.yaml": case for name, case in YAML_TOOLS.items()}, **SCRIPTS}
NEEDED = {
    "data.train_path": "t.jsonl",
    "data.validation_path": "v.jsonl",
    "policy.model_name": "m",
    "reward.functions.answer.path": "nemo_like.environments.math.answer_reward",
}
OPEN = {
    "policy.train_global_batch_size": "32",
    "policy.max_total_sequence_length": "4096",
    "policy.scheduler.warmup_steps": "0",
    "grpo.num_prompts_per_step": "8",
    "grpo.num_generations_per_prompt": "4",
    "grpo.max_num_steps": "10",
    "grpo.advantage.baseline": "group_mean",
    "sft.max_num_steps": "10",
}
"""Values of keys that must be set where the tool counts otherwise."""
TO_CHANGE = {
    # One completion per prompt, as of PPO with a value model.
    "openrlhf.yaml": ["grpo.num_generations_per_prompt=2"]
}


def migrated(name: str) -> Migration:
    return migrate(RUN_CONFIGS, CONFIGS / name, num_processes=1)


def written(text: str, name: str, folder: Path) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def loaded(path: Path, kind: str, *overrides: str) -> RunConfig:
    """The config of a migrated file, with what its user must set."""
    result = yaml.safe_load(path.read_text())
    needed = [
        f"{key}={value}"
        for key, value in NEEDED.items()
        if f"{key.rpartition('.')[2]}: ???" in path.read_text() or key not in set(key_paths(result))
    ]
    needed += [f"{key}={value}" for key, value in OPEN.items() if value_at(result, key) == "???"]
    if kind != "grpo" or "models" in result.get("reward", {}):
        needed = [each for each in needed if not each.startswith("reward.")]
    return load_config(kind, path, [*needed, *overrides])


@pytest.mark.parametrize("name", CASES)
def test_a_migrated_config_loads_and_every_key_has_its_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, kind = CASES[name]
    new = tmp_path / "new.yaml"
    command = ["migrate", str(CONFIGS / name), "--out", str(new), "--num-processes", "1"]
    assert main(command) == 0
    report = capsys.readouterr().out
    assert f"is a config of {tool} for `{kind}`" in report
    assert f"nemo-like validate --config {new}" in report
    result = migrated(name)
    assert (result.tool.name, result.job.kind) == (tool, kind)
    lists = [list(result.carried), [one.path for one in result.dropped + result.unknown]]
    for leaf in key_paths(read_source(JOB, CONFIGS / name).tree):
        covering = [path for each in lists for path in each if f"{leaf}.".startswith(f"{path}.")]
        assert len(covering) == 1, (leaf, covering)
    for one in result.dropped:
        assert one.text, one.path
    text = new.read_text()
    for path in lists[0] + lists[1]:
        assert path in text, path
    assert detect_kind(new) == kind
    assert result.problems == []
    config = loaded(new, kind, *TO_CHANGE.get(name, []))
    for key, value in result.values.items():
        at: Any = config
        for part in key.split("."):
            at = at[part] if isinstance(at, dict) else getattr(at, part)
        if not (isinstance(value, str) and "${" in value) and name not in TO_CHANGE:
            assert at == (tuple(value) if isinstance(value, list) else value), key


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("axolotl.yaml", {"rank": 32, "alpha": 16, "quantization": "nf4"}),
        ("axolotl_dpo.yaml", {"rank": 32, "alpha": 16, "target_modules": ["all-linear"]}),
        ("llama_factory.yaml", {"rank": 8, "alpha": 16, "target_modules": ["all-linear"]}),
        ("llama_factory_dpo.yaml", {"rank": 8, "target_modules": ["q_proj", "v_proj"]}),
        ("trl_sft.yaml", {"rank": 8, "alpha": 64, "use_rslora": True, "quantization": "nf4"}),
        ("trl_sft.sh", {"rank": 32, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
        ("verl_grpo.sh", {"rank": 64, "alpha": 32}),
        ("openrlhf_grpo.sh", {"rank": 16, "alpha": 32}),
        ("prime_rl.toml", {"rank": 8, "alpha": 16}),
        ("nemo_rl_grpo.yaml", {"enabled": True}),
    ],
)
def test_adapters_are_carried_over(name: str, expected: dict[str, Any]) -> None:
    values = migrated(name).values
    for key, value in {"enabled": True, **expected}.items():
        assert values[f"policy.lora.{key}"] == value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "verl_grpo.sh",
            {
                # verl counts prompts, and the value in rows is needed here.
                "policy.train_global_batch_size": 1280,
                "policy.max_total_sequence_length": 1536,
                "policy.precision": "bfloat16",
                "data.train_path": "data/sums/a.parquet",
                "data.train_sets.set1": "data/sums/b.parquet",
                "data.validation_path": "data/val.parquet",
                "grpo.num_generations_per_prompt": 5,
                "cluster.gpus_per_node": 8,
            },
        ),
        (
            "trl_sft.sh",
            {
                "data.train_path": "hf://room/chats?split=train",
                # A batch counts packed sequences.
                "policy.train_global_batch_size": None,
                "policy.optimizer.lr": 2e-5,
                "sft.max_num_epochs": 3,
                "sft.val_period": 100,
                "output_dir": "small-sft",
            },
        ),
        (
            "openrlhf_grpo.sh",
            {
                "loss_fn.ratio_clip_min": 0.2,
                "loss_fn.ratio_clip_max": 0.27,
                "loss_fn.reference_policy_kl_in": "reward",
                # Up to the total length.
                "policy.generation.max_new_tokens": 2047,
                "policy.sequence_packing.train_mb_tokens": 2048,
            },
        ),
        (
            "prime_rl.toml",
            {
                "grpo.num_prompts_per_step": 8,
                "cluster.gpus_per_node": 2,
                "cluster.generation_workers": 6,
            },
        ),
        (
            "axolotl_dpo.yaml",
            {
                "policy.train_global_batch_size": 8,
                "data.train_path": "hf://room/pairs?split=train",
                "data.train_sets.set1": "data/more.jsonl",
                "data.columns.prompt": "conversation",
                "loss_fn.beta": 0.2,
            },
        ),
        (
            "trl_gkd.yaml",
            {
                # Defaults of TRL.
                "distill.divergence": "jsd",
                "distill.divergence_weight": 0.5,
                "distill.on_policy_fraction": 0.5,
                "policy.generation.temperature": 0.9,
                "policy.generation.max_new_tokens": 64,
            },
        ),
        ("llama_factory_dpo.yaml", {"loss_fn.kind": "simpo", "dpo.max_num_epochs": 3}),
        (
            "nemo_rl_grpo.yaml",
            {"grpo.advantage.normalize": "leave_one_out_std", "parallel.tensor": 1},
        ),
        ("trl_grpo.yaml", {"grpo.num_prompts_per_step": 4, "policy.train_global_batch_size": 32}),
    ],
)
def test_values_have_the_same_meaning(name: str, expected: dict[str, Any]) -> None:
    values = migrated(name).values
    assert {key: values.get(key) for key in expected} == expected


def test_adapters_of_a_run_without_adapters_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "freeze.yaml"
    text = (CONFIGS / "llama_factory_dpo.yaml").read_text()
    path.write_text(text.replace("finetuning_type: lora", "finetuning_type: freeze"))
    assert path.read_text() != text
    result = migrate(RUN_CONFIGS, path)
    assert not [key for key in result.values if key.startswith("policy.lora")]
    assert "finetuning_type" in [one.path for one in result.dropped]


def test_keys_of_images_are_carried_over(tmp_path: Path) -> None:
    path = tmp_path / "vision.yaml"
    keys = {
        "image_max_pixels": 262144,
        "image_min_pixels": 1024,
        "media_dir": "data/images",
        "freeze_vision_tower": "false",
        "freeze_multi_modal_projector": "false",
    }
    lines = "".join(f"\n{name}: {value}" for name, value in keys.items())
    path.write_text((CONFIGS / "llama_factory.yaml").read_text() + lines + "\n")
    result = migrate(RUN_CONFIGS, path)
    assert result.values["policy.vision.max_pixels"] == 262144
    assert result.values["policy.vision.min_pixels"] == 1024
    assert result.values["data.image_root"] == "data/images"
    assert result.values["policy.vision.train"] == "all"
    dropped = {one.path: one.text for one in result.dropped}
    assert "policy.vision.train" in dropped["freeze_multi_modal_projector"]


def test_the_size_of_images_in_axolotl_is_a_limit_of_pixels(tmp_path: Path) -> None:
    path = tmp_path / "vision.yaml"
    text = (CONFIGS / "axolotl.yaml").read_text()
    lines = "\nprocessor_type: AutoProcessor\nimage_resize_algorithm: bilinear\nimage_size: "
    path.write_text(f"{text}{lines}512\n")
    result = migrate(RUN_CONFIGS, path)
    assert result.values["policy.vision.max_pixels"] == 512 * 512
    assert "bicubic" in {one.path: one.text for one in result.dropped}["image_resize_algorithm"]
    assert any("policy.vision.train" in note for note in result.notes)
    # Of two sides.
    path.write_text(f"{text}{lines}[512, 256]\n")
    result = migrate(RUN_CONFIGS, path)
    assert "policy.vision.max_pixels" not in result.values
    assert "image_size" in str(result)


def test_what_a_script_does_not_say_is_not_carried_over() -> None:
    result = migrated("verl_grpo.sh")
    dropped = {one.path: one.text for one in result.dropped}
    assert dropped["trainer.nnodes"] == ("its value $NUM_NODES is not known; set cluster.num_nodes")
    # Two GPUs for one replica need workers that only generate.
    assert (
        "cluster.generation_workers"
        in dropped["actor_rollout_ref.rollout.tensor_model_parallel_size"]
    )
    assert dropped["trainer.new_key"] == "this setting of the trainer has no counterpart"
    assert "not those of verl" in " ".join(result.notes)
    assert "cluster.generation_workers" not in migrated("openrlhf_grpo.sh").values


def test_workers_for_generation_are_left_out_of_jobs_without_generation() -> None:
    assert migrated("prime_rl.toml").values["policy.generation.backend"] == "vllm"
    assert "cluster.generation_workers" not in migrated("prime_rl_sft.toml").values


def test_default_files_of_hydra_are_named_as_unknown(tmp_path: Path) -> None:
    path = written(
        "defaults:\n- actor@actor_rollout_ref.actor: dp_actor\n"
        "actor_rollout_ref: {rollout: {n: 4}}\nalgorithm: {adv_estimator: grpo}\n",
        "a.yaml",
        tmp_path,
    )
    result = migrate(RUN_CONFIGS, path)
    assert result.notes[0].startswith("only the keys of this file are known")
    assert result.values["grpo.num_generations_per_prompt"] == 4


def test_inherited_files_and_references_are_resolved(tmp_path: Path) -> None:
    written("grpo: {seed: 7, normalize_rewards: true}\n", "base.yaml", tmp_path)
    path = written(
        "defaults: base.yaml\npolicy:\n  max_total_sequence_length: 512\n  dtensor_cfg:"
        " {enabled: true}\n  sequence_packing: {train_mb_tokens: '${mul:${..max_total_sequence_"
        "length},4}'}\n",
        "a.yaml",
        tmp_path,
    )
    values = migrate(RUN_CONFIGS, path).values
    assert (values["seed"], values["policy.sequence_packing.train_mb_tokens"]) == (7, 2048)


def test_a_value_that_is_not_legal_here_is_dropped_with_the_reason(tmp_path: Path) -> None:
    path = written(
        "base_model: m\nsequence_len: 1024\nnum_epochs: 0.5\nlr_scheduler: rex\n",
        "a.yaml",
        tmp_path,
    )
    dropped = {one.path: one.text for one in migrate(RUN_CONFIGS, path).dropped}
    assert "sft.max_num_epochs is 0.5" in dropped["num_epochs"]
    assert dropped["lr_scheduler"].startswith("policy.scheduler.kind: of its values")


def test_the_job_is_required_where_it_is_not_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written("stage: kto\nfinetuning_type: lora\ncutoff_len: 9\n", "a.yaml", tmp_path)
    assert main(["migrate", str(path)]) == 2
    assert "pass --kind JOB" in capsys.readouterr().err
    assert main(["migrate", str(path), "--kind", "dpo"]) == 0
    assert "\ndpo:\n" in capsys.readouterr().out


def test_a_command_is_read_from_the_standard_input_and_the_yaml_is_the_only_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "trl grpo --model_name_or_path m --dataset_name a/b --num_generations=4 --use_peft"
    monkeypatch.setattr("sys.stdin", io.StringIO(command))
    assert main(["migrate", "-"]) == 0
    output = capsys.readouterr()
    content = yaml.safe_load(output.out)
    assert content["grpo"]["num_generations_per_prompt"] == 4
    assert content["policy"]["lora"]["enabled"] is True
    assert "4 keys carried over" in output.err


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = written("mine\n", "new.yaml", tmp_path)
    assert main(["migrate", str(CONFIGS / "axolotl.yaml"), "--out", str(new)]) == 2
    assert "exists already" in capsys.readouterr().err and new.read_text() == "mine\n"
    assert main(["migrate", str(tmp_path / "missing.toml")]) == 2
