"""Migrated configs have the batch size, learning rate, steps, lengths and clips of the original.

The expected values are computed in `foreign_values`, from what each tool documents.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.registry import RUN_CONFIGS
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.config.foreign import value_at
from nemo_like.config.load import schema_defaults
from nemo_like.config.migrate import Migration, migrate
from tests.config.foreign_values import READERS
from tests.config.test_foreign import put

# Keys of a tool -> values of the test, where None leaves the key out.
ACCUMULATION = (None, 1, 2, 8)
TRANSFORMERS = {
    "per_device_train_batch_size": (None, 1, 4, 16),
    "gradient_accumulation_steps": ACCUMULATION,
    "learning_rate": (None, 3e-6),
    "max_steps": (None, -1, 64),
    "lr_scheduler_type": (None, "cosine_with_min_lr"),
}
FIXED_CLIPS = {"epsilon": (None, 0.1), "epsilon_high": (None, 0.3)}
LEVEL = (None, "token", "sequence")
DEFAULT_CLIPS = {
    "ppo": {"loss_fn.ratio_clip_min": 0.2, "loss_fn.ratio_clip_max": 0.2},
    "gspo": {"loss_fn.ratio_clip_min": 3e-4, "loss_fn.ratio_clip_max": 4e-4},
    "cispo": {"loss_fn.ratio_clip_max": 4.0},
}
"""What null means here, by `loss_fn.surrogate`."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "trl_sft": (
        "TRL",
        {"dataset_name": "a/b", "use_peft": False, "lr_scheduler_kwargs.min_lr_rate": 0.1},
        {**TRANSFORMERS, "max_length": (None, 512), "num_train_epochs": (None, 2)},
    ),
    "trl_grpo": (
        "TRL",
        {"dataset_name": "a/b", "reward_funcs": ["x"], "lr_scheduler_kwargs.min_lr": 1e-7},
        {
            **TRANSFORMERS,
            **FIXED_CLIPS,
            "importance_sampling_level": LEVEL,
            "num_generations": (None, 2, 4),
            "steps_per_generation": (None, 8, 16),
            "num_iterations": (None, 1, 2),
            "max_completion_length": (None, 64),
        },
    ),
    "axolotl": (
        "axolotl",
        {"base_model": "m", "sequence_len": 2048, "learning_rate": 1e-5, "num_epochs": 2},
        {
            "micro_batch_size": (None, 1, 2, 8),
            "gradient_accumulation_steps": ACCUMULATION,
            "max_steps": (None, 50),
        },
    ),
    "axolotl_grpo": (
        "axolotl",
        {"base_model": "m", "sequence_len": 2048, "rl": "grpo", "learning_rate": 1e-5}
        | {"trl.max_completion_length": 64},
        {
            "micro_batch_size": (None, 1, 8, 16),
            "gradient_accumulation_steps": ACCUMULATION,
            "trl.num_generations": (None, 2, 8),
            "trl.epsilon": (None, 0.1),
            "trl.epsilon_high": (None, 0.3),
            "trl.importance_sampling_level": LEVEL,
        },
    ),
    "llama_factory": (
        "LLaMA-Factory",
        {"stage": "sft", "template": "qwen", "lr_scheduler_kwargs.min_lr": 1e-6},
        {**TRANSFORMERS, "cutoff_len": (None, 256), "num_train_epochs": (None, 1, 4)},
    ),
    "verl_grpo": (
        "verl",
        {"algorithm.adv_estimator": "grpo", "data.train_files": "a.parquet"},
        {
            "actor_rollout_ref.actor.ppo_mini_batch_size": (None, 64),
            "actor_rollout_ref.rollout.n": (None, 1, 2, 8),
            "data.train_batch_size": (None, 128),
            "actor_rollout_ref.actor.optim.lr": (None, 3e-6),
            "data.max_prompt_length": (None, 100),
            "data.max_response_length": (None, 100),
            "trainer.total_training_steps": (None, 10),
            "actor_rollout_ref.actor.clip_ratio": (None, 0.1),
            "actor_rollout_ref.actor.clip_ratio_high": (None, 0.3),
            "actor_rollout_ref.actor.policy_loss.loss_mode": (None, "gspo", "cispo"),
        },
    ),
    "verl_async_grpo": (
        "verl",
        {"algorithm.adv_estimator": "grpo", "data.train_batch_size": 0, "rollout.n": 2}
        | {"async_training.staleness_threshold": 0.5},
        {
            "actor_rollout_ref.actor.ppo_mini_batch_size": (None, 64),
            "async_training.require_batches": (1, 2),
            "async_training.trigger_parameter_sync_step": (None, 1, 8),
        },
    ),
    "nemo_rl_grpo": (
        "NeMo RL",
        {"grpo.normalize_rewards": True, "policy.dtensor_cfg.enabled": True},
        {
            "grpo.num_prompts_per_step": (8, 16),
            "grpo.num_generations_per_prompt": (2, 8),
            "grpo.max_num_steps": (None, 7),
            "policy.train_global_batch_size": (16, 32),
            "policy.optimizer.kwargs.lr": (None, 3e-6),
            "policy.max_total_sequence_length": (None, 512),
            "loss_fn.ratio_clip_min": (None, 0.1),
            "loss_fn.ratio_clip_max": (None, 0.3),
        },
    ),
    "openrlhf_grpo": (
        "OpenRLHF",
        {"actor.model_name_or_path": "m", "data.prompt_dataset": "a/b"},
        {
            "train.batch_size": (None, 64),
            "rollout.batch_size": (None, 64),
            "rollout.n_samples_per_prompt": (None, 1, 2, 8),
            "actor.adam.lr": (None, 3e-6),
            "data.max_len": (None, 512),
            "actor.eps_clip_low_high": (None, [0.1, 0.3]),
            "actor.policy_loss_type": (None, "ppo", "gspo"),
            "actor_learning_rate": (None, 4e-6),
        },
    ),
    "prime_rl": (
        "prime-rl",
        {"orchestrator.group_size": 4, "trainer.model.name": "m"},
        {
            "orchestrator.batch_size": (32, 64),
            "trainer.optim.lr": (None, 3e-6),
            "seq_len": (None, 512),
            "max_steps": (None, 5),
        },
    ),
    "cosmos_rl_sft": (
        "Cosmos-RL",
        {"train.train_policy.type": "sft", "train.max_num_steps": 40},
        {
            "train.train_batch_per_replica": (None, 1, 32),
            "train.optm_lr": (None, 3e-6),
            "train.epoch": (None, 3),
            "train.sequence_packing": (None, False, True),
            "policy.model_max_length": (None, 512),
            "train.train_policy.enable_dp_load_balancing": (None, False, True),
            "train.train_policy.load_balanced_pool_size": (16, 64),
            "train.train_policy.load_balanced_max_tokens_for_batch": (4096, 65536),
            "train.train_policy.load_balanced_batches_per_optimizer_step": ACCUMULATION,
        },
    ),
    "cosmos_rl_grpo": (
        "Cosmos-RL",
        {"train.train_policy.type": "grpo", "policy.model_name_or_path": "m"},
        {
            "train.train_batch_per_replica": (32, 64),
            "rollout.n_generation": (None, 2, 8),
            "rollout.max_response_length": (None, 64),
            "train.train_policy.batch_size_per_optimize": (None, 16),
            "train.train_policy.epsilon_low": (None, 0.1),
            "train.train_policy.epsilon_high": (None, 0.3),
            "train.train_policy.variant": (None, "grpo", "gspo"),
        },
    ),
}


def migrated(tree: dict[str, Any], kind: str | None = None) -> Migration:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(yaml.safe_dump(tree))
        return migrate(RUN_CONFIGS, path, kind, num_processes=1)


def is_same(value: Any, expected: Any) -> bool:
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-9)
    return value == expected


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_migrated_config_means_the_same(case: str, data: st.DataObject) -> None:
    name, fixed, choices = CASES[case]
    tree: dict[str, Any] = {}
    for key, value in fixed.items():
        put(tree, key, value)
    for key, values in choices.items():
        value = data.draw(st.sampled_from(values), label=key)
        if value is not None:
            put(tree, key, value)
    result = migrated(tree)
    assert result.tool.name == name
    assert not result.unknown
    defaults = schema_defaults(result.job.run_config)
    reported = " ".join([*result.notes, *map(str, result.problems)])
    for key, expected in READERS[name](tree, result.job.kind).items():
        if expected is None:
            assert key not in result.values, key
            continue
        value = result.values.get(key, value_at(defaults, key))
        if key.startswith("loss_fn.ratio_clip") and value is None:
            value = DEFAULT_CLIPS[result.values.get("loss_fn.surrogate", "ppo")].get(key)
        # A number of prompts that is no whole number is left out with a note.
        is_note = isinstance(expected, float) and expected % 1 and key in reported
        assert is_same(value, expected) or (key.startswith("grpo.") and is_note), (key, value)


@pytest.mark.parametrize(
    ("key", "tree"),
    [
        ("lr_scheduler_kwargs", {"stage": "sft", "template": "x", "learning_rate": 1e-5}),
        ("lr_scheduler_kwargs", {"base_model": "m", "sequence_len": 64, "learning_rate": 1e-5}),
        ("lr_scheduler_kwargs", {"dataset_name": "a/b", "use_peft": False, "learning_rate": 1e-5}),
    ],
)
def test_a_key_is_carried_over_or_dropped(key: str, tree: dict[str, Any]) -> None:
    result = migrated({**tree, key: {"min_lr": 1e-6}}, "sft")
    assert result.values["policy.scheduler.min_ratio"] == pytest.approx(0.1)
    assert key not in {one.path for one in result.dropped}
    result = migrated({**tree, key: {"min_lr": 1e-6, "other": 1}}, "sft")
    assert {one.path for one in result.dropped if one.path.startswith(key)} == {f"{key}.other"}
    assert f"{key}.min_lr" in result.carried


def test_notes_are_about_the_job_and_the_values() -> None:
    trl = {"per_device_train_batch_size": 2, "generation_batch_size": 16, "num_generations": 4}
    sampled = migrated({"reward_funcs": ["x"], **trl})
    # 16 completions of all processes are 4 prompts, of however many processes.
    assert sampled.values["grpo.num_prompts_per_step"] == 4
    plain = {"dataset_name": "a/b", "use_peft": False, "assistant_only_loss": True}
    for tree in (
        plain,
        {"base_model": "m", "sequence_len": 64},
        {"train": {"train_policy": {"type": "sft"}}, "policy": {"model_max_length": 64}},
    ):
        notes = " ".join(migrated(tree, "sft").notes)
        assert "grpo." not in notes and "GRPO" not in notes
        assert "LoRA" not in notes and "packed" not in notes and "validation" not in notes
    assert "LoRA" in " ".join(migrated({**plain, "use_peft": True}, "sft").notes)


def test_the_budget_of_load_balancing_is_that_of_the_layout() -> None:
    policy = {"enable_dp_load_balancing": True, "load_balanced_max_tokens_for_batch": 4096}
    policy |= {"load_balanced_batching_strategy": "prefer_first"}
    tree: dict[str, Any] = {"train": {"max_num_steps": 5, "epoch": 3, "train_policy": policy}}
    padded = migrated(tree, "sft")
    assert padded.values["policy.dynamic_batching.enabled"] is True
    assert padded.values["policy.dynamic_batching.train_mb_tokens"] == 4096
    assert padded.values["data.batching.strategy"] == "prefer_first"
    assert not any(key.startswith("policy.sequence_packing") for key in padded.values)
    assert [one.path for one in padded.dropped] == ["train.epoch", "num_processes"]
    tree["train"]["sequence_packing"] = True
    packed = migrated(tree, "sft").values
    assert packed["policy.sequence_packing.enabled"] is True
    assert packed["policy.sequence_packing.train_mb_tokens"] == 4096
    assert not any(key.startswith("policy.dynamic_batching") for key in packed)


def test_unknown_keys_of_the_training_and_the_rollout_are_unknown() -> None:
    tree = {"train": {"optm_lr": 1e-6, "new": 1, "train_policy": {"type": "sft", "other": 1}}}
    result = migrated({**tree, "rollout": {"third": 1}})
    unknown = {one.path for one in result.unknown}
    assert unknown == {"train.new", "train.train_policy.other", "rollout.third"}


def test_distillation_is_a_job_of_its_own() -> None:
    tree = {
        "train": {"train_policy": {"type": "grpo"}, "train_batch_per_replica": 16},
        "distillation": {"enable": True, "model_name_or_path": "teacher"},
    }
    result = migrated(tree)
    assert result.job.kind == "distill"
    assert result.values["distill.teacher"] == "teacher"
    assert result.values["policy.train_global_batch_size"] == 16


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"train": {"sequence_packing": True}}, ("Cosmos-RL", "policy.sequence_packing.enabled")),
        ({"lora_rank": 4, "cutoff_len": 64}, ("LLaMA-Factory", "policy.lora.rank")),
        (
            {"policy": {"make_sequence_length_divisible_by": 8, "max_grad_norm": 0.5}},
            ("NeMo RL", "policy.max_grad_norm"),
        ),
    ],
)
def test_a_fragment_needs_the_job(tree: dict[str, Any], expected: tuple[str, str]) -> None:
    result = migrated(tree, "sft")
    assert result.tool.name == expected[0]
    assert expected[1] in result.values
    with pytest.raises(ConfigError, match="no known tool"):
        migrated({"first": 1, "second": {"third": 2}}, "sft")


@pytest.mark.parametrize("tool", ["TRL", "LLaMA-Factory", "axolotl"])
def test_noise_of_embeddings_is_reported(tool: str) -> None:
    trees: dict[str, dict[str, Any]] = {
        "TRL": {"dataset_name": "a/b", "use_peft": False},
        "LLaMA-Factory": {"stage": "sft", "template": "x"},
        "axolotl": {"base_model": "m", "sequence_len": 64},
    }
    result = migrated({**trees[tool], "neftune_noise_alpha": 5})
    assert "neftune_noise_alpha" in {one.path for one in result.dropped}


KWARGS = {"enable_thinking": False, "style": "short"}


@pytest.mark.parametrize(
    "tree",
    [
        {"data": {"apply_chat_template_kwargs": KWARGS, "train_files": "a"}}
        | {"algorithm": {"adv_estimator": "grpo"}},
        {"policy": {"tokenizer": {"name": "m", "chat_template_kwargs": KWARGS}}}
        | {"grpo": {"seed": 1}},
        {"reward_funcs": ["x"], "num_generations": 4, "chat_template_kwargs": KWARGS},
        {"base_model": "m", "sequence_len": 64, "chat_template_kwargs": KWARGS},
    ],
)
def test_variables_of_the_chat_template_are_carried_over(tree: dict[str, Any]) -> None:
    result = migrated(tree)
    assert value_at(result.tree(), "data.chat_template_kwargs") == KWARGS
    llama = migrated({"stage": "sft", "template": "x", "enable_thinking": False})
    assert value_at(llama.tree(), "data.chat_template_kwargs") == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("path", "tree"),
    [
        ("grpo.max_rollout_turns", {"grpo": {"seed": 1, "normalize_rewards": True}}),
        (
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
            {"algorithm": {"adv_estimator": "grpo"}, "data": {"train_files": "a"}},
        ),
    ],
)
def test_rollouts_of_several_turns_name_the_environment(path: str, tree: dict[str, Any]) -> None:
    put(tree, path, 8)
    (found,) = [one for one in migrated(tree).dropped if path.startswith(one.path)]
    assert "environment.path" in found.text and "environment.max_turns" in found.text


@pytest.mark.parametrize(("steps", "expected"), [(200, 20), (None, None)])
def test_a_warmup_below_one_is_a_share_of_the_steps(
    steps: int | None, expected: int | None
) -> None:
    tree: dict[str, Any] = {"train": {"train_policy": {"type": "sft"}, "optm_warmup_steps": 0.1}}
    if steps is not None:
        tree["train"]["max_num_steps"] = steps
    result = migrated(tree, "sft")
    assert result.values.get("policy.scheduler.warmup_steps") == expected
    if expected is None:
        dropped = {one.path: one.text for one in result.dropped}
        assert "share of the steps" in dropped["train.optm_warmup_steps"]


def test_arguments_in_a_variable_and_removed_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'n=4\nrm -rf my_reward.py\nROLLOUT="actor_rollout_ref.rollout.n=$n \\\n'
        '  actor_rollout_ref.actor.ppo_mini_batch_size=8"\n'
        "python3 -m verl.trainer.main_ppo $ROLLOUT algorithm.adv_estimator=grpo\n"
    )
    assert main(["migrate", str(script)]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["policy"]["train_global_batch_size"] == 32
    assert content["grpo"]["num_generations_per_prompt"] == 4
