"""The schema stays small, and an unknown key is answered with the one that was meant."""

from __future__ import annotations

import pytest

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import RUN_CONFIGS, job_schema
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.keys import (
    all_keys,
    general,
    section_references,
    suggest_keys,
    type_at,
    unknown_key_text,
)
from nemo_like.config.rollout import RewardFunctionConfig

MAX_KEYS = 262


def test_there_are_at_most_so_many_keys() -> None:
    keys = {
        reference.key
        for config in (SftRunConfig, GrpoRunConfig)
        for section in section_references(config)
        for reference in section.keys
    }
    assert len(keys) <= MAX_KEYS


def test_every_key_has_a_type_and_others_have_none() -> None:
    for config in RUN_CONFIGS.values():
        for key, annotation in all_keys(config):
            assert type_at(config, key) == annotation
    assert type_at(SftRunConfig, "reward.functions.any_name") is RewardFunctionConfig
    assert type_at(SftRunConfig, "reward.functions.any_name.weight") is float
    for key in ("grpo", "policy.lr", "seed.x", "policy.optimizer.lr.x", "reward.functions.a.b"):
        assert type_at(SftRunConfig, key) is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("policy.model_nam", ["policy.model_name"]),
        ("policy.seqence_packing", ["policy.sequence_packing"]),
        ("policy.lr", ["policy.optimizer.lr"]),
        ("policy.learning_rate", ["policy.optimizer.lr"]),
        ("policy.lerning_rate", ["policy.optimizer.lr"]),
        ("policy.micro_batch_sise", ["policy.train_micro_batch_size"]),
        ("policy.optimizer.learning_rate", ["policy.optimizer.lr"]),
        ("grpo.kl_coef", ["loss_fn.reference_policy_kl_penalty"]),
        ("grpo.num_generations", ["grpo.num_generations_per_prompt"]),
        ("max_steps", ["grpo.max_num_steps"]),
        (
            "policy.max_tokens_per_microbatch",
            ["policy.sequence_packing.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens"],
        ),
        ("checkpointing.save_steps", ["checkpointing.save_period"]),
        ("logger.wandb", ["logger.wandb_project"]),
        ("zzz", []),
    ],
)
def test_what_was_meant(written: str, meant: list[str]) -> None:
    assert suggest_keys(GrpoRunConfig, written) == meant


def test_where_nothing_is_like_it_the_keys_of_the_section_are_listed() -> None:
    assert unknown_key_text(job_schema("sft"), "policy.optimizer.zzz") == (
        "unknown key policy.optimizer.zzz; policy.optimizer has name, lr, weight_decay, beta1,"
        " beta2, eps, muon_lr"
    )
    assert "the top level has output_dir, run_name" in unknown_key_text(
        job_schema("sft"), "zzz.lrr"
    )


def test_a_key_of_another_job_is_sent_there() -> None:
    assert "it belongs to `nemo-like grpo`" in unknown_key_text(
        job_schema("sft"), "grpo.max_num_steps"
    )
    assert "it belongs to `nemo-like sft`" in unknown_key_text(
        job_schema("grpo"), "sft.max_num_epochs"
    )


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    keys = [key for config in RUN_CONFIGS.values() for key, _ in all_keys(config)]
    for foreign, ours in general()["names"].items():
        assert any(key == ours or key.endswith(f".{ours}") for key in keys), (foreign, ours)
        assert type_at(GrpoRunConfig, foreign) is None, foreign
