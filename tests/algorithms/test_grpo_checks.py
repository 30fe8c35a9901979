"""Combinations of GRPO keys that are not defined are rejected with the reason."""

from __future__ import annotations

import pytest

from nemo_like.algorithms.grpo.config import asynchronous_warnings
from nemo_like.config.errors import ConfigError
from tests.recipe import Recipe

_BREVITY = "reward.functions.brevity.path=tests.algorithms.rewards.digit_share"
_KL_IN_REWARD = "loss_fn.reference_policy_kl_in=reward"

REJECTED = [
    (["grpo.num_generations_per_prompt=1"], "it must be at least 2"),
    (
        ["grpo.advantage.baseline=none"],
        "normalize is group_std, but grpo.advantage.baseline is none",
    ),
    (
        ["grpo.dynamic_sampling.enabled=true", "grpo.max_staleness=1", "cluster.backend=ray"],
        "belong to later steps, whose rollouts have already started",
    ),
    (
        [
            "grpo.dynamic_sampling.enabled=true",
            "grpo.advantage.baseline=none",
            "grpo.advantage.normalize=none",
        ],
        "so there is no reason to drop it",
    ),
    (
        [
            "grpo.prompt_selection.enabled=true",
            "grpo.advantage.baseline=none",
            "grpo.advantage.normalize=none",
        ],
        "so there is no reason to skip its prompt",
    ),
    (["grpo.prompt_selection.exploration=0"], "grpo.prompt_selection.exploration"),
    (["grpo.overlong.penalty_buffer=24"], "so every completion would get a penalty"),
    (
        ["grpo.reference_update_period=2", "loss_fn.reference_policy_kl_penalty=0"],
        "there is no reference to update",
    ),
    (
        ["grpo.reference_update_period=2", "policy.lora.enabled=true"],
        "the reference shares the frozen weights",
    ),
    ([_KL_IN_REWARD, "loss_fn.reference_policy_kl_penalty=0"], "so there is no KL"),
    ([_KL_IN_REWARD, "grpo.advantage.whiten=rows"], "each token has its own advantage"),
    ([_KL_IN_REWARD, "loss_fn.surrogate=gspo"], "set the surrogate to gspo_token"),
    (
        ["grpo.num_epochs_per_rollout=2", "loss_fn.surrogate=reinforce"],
        "later passes would be off-policy",
    ),
    (
        [
            "environment.path=nemo_like.environments.included.Calculator",
            "reward.functions.environment_bonus.path=tests.algorithms.rewards.digit_share",
        ],
        "choose another name",
    ),
    ([_KL_IN_REWARD, "policy.generation.top_p=0.9"], "or remove policy.generation.top_p"),
    ([_KL_IN_REWARD, "policy.generation.top_k=5"], "or remove policy.generation.top_k"),
    ([_KL_IN_REWARD, "policy.generation.min_p=0.1"], "or remove policy.generation.min_p"),
]


@pytest.mark.parametrize(("overrides", "reason"), REJECTED)
def test_a_combination_is_rejected_with_its_reason(
    recipe: Recipe, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe.grpo(*overrides)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        # REINFORCE++ with and without a baseline, GDPO, and TRL's batch scaling.
        [
            "grpo.advantage.baseline=none",
            "grpo.advantage.normalize=none",
            "grpo.advantage.whiten=tokens",
            "grpo.num_generations_per_prompt=1",
            "grpo.num_prompts_per_step=16",
            _KL_IN_REWARD,
        ],
        ["grpo.advantage.normalize=none", "grpo.advantage.whiten=tokens"],
        ["grpo.advantage.components=separate", "grpo.advantage.whiten=rows", _BREVITY],
        ["grpo.advantage.normalize=batch_std"],
    ],
)
def test_the_published_combinations_are_accepted(recipe: Recipe, overrides: list[str]) -> None:
    recipe.grpo(*overrides)


def test_the_arithmetic_counts_epochs_and_refills(recipe: Recipe) -> None:
    lines = recipe.grpo(
        "grpo.num_epochs_per_rollout=3", "grpo.dynamic_sampling.enabled=true"
    ).needs.batch.lines
    assert "2 optimizer steps x 3 epochs per rollout = 6 optimizer steps per step" in lines
    assert "4 steps = 24 optimizer steps over 128 rows" in lines
    assert any(line.startswith("dynamic sampling: up to 4 x 8 prompts per step") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["policy.train_global_batch_size=32"], "with one optimizer step per rollout nothing"),
        ([], None),
        (["loss_fn.surrogate=reinforce"], "which has no ratio, nothing corrects the gradient"),
        (
            [
                "policy.train_global_batch_size=32",
                "loss_fn.reference_policy_kl_penalty=0",
                "loss_fn.path=tests.losses.test_custom.SquaredLoss",
            ],
            None,
        ),
    ],
)
def test_completions_of_older_weights_without_a_correction_are_a_warning(
    recipe: Recipe, overrides: list[str], reason: str | None
) -> None:
    options = ("cluster.backend=ray", "cluster.generation_workers=1", "grpo.max_staleness=1")
    warnings = asynchronous_warnings(recipe.grpo(*options, *overrides))
    assert len(warnings) == (reason is not None)
    assert reason is None or reason in warnings[0]
