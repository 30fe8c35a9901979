"""One step of GRPO with each surrogate, and with a loss of the user."""

from __future__ import annotations

import math

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from tests.recipe import Recipe

ONE_STEP = (
    "grpo.max_num_steps=1",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "data.validation_path=null",
    "checkpointing.enabled=false",
    "loss_fn.reference_policy_kl_penalty=0",
)


@pytest.mark.parametrize(
    ("options", "has_pass", "has_ratio"),
    [
        (("loss_fn.surrogate=gspo",), True, True),
        (("loss_fn.surrogate=cispo",), True, True),
        (("loss_fn.surrogate=reinforce", "loss_fn.normalization=constant"), False, False),
        (
            (
                "loss_fn.path=tests.losses.test_custom.SquaredLoss",
                "loss_fn.options={scale: 0.5}",
                "loss_fn.logprobs=[prev_logprobs]",
            ),
            True,
            False,
        ),
    ],
    ids=["gspo", "cispo", "reinforce", "custom"],
)
def test_a_step_of_two_optimizer_steps(
    recipe: Recipe, options: tuple[str, ...], has_pass: bool, has_ratio: bool
) -> None:
    last = run_grpo(recipe.grpo(*ONE_STEP, *options)).last
    assert math.isfinite(last["policy/loss"]) and last["policy/grad_norm"] > 0
    assert ("timing/logprobs_s" in last) == has_pass
    assert ("policy/ratio_mean" in last) == has_ratio
