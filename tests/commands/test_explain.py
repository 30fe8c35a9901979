"""`nemo-like explain loss`: formula and keys without effect of every member."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nemo_like.cli import main
from nemo_like.commands.explain import explain_loss
from tests.recipe import Recipe

ROOT = Path(__file__).parents[2]
MEMBERS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "ppo": (
        ("loss_fn.ratio_clip_max=0.28", "loss_fn.ratio_clip_c=3"),
        [
            "loss = 1/N sum over trained tokens t of loss_t",
            "loss_t = S_t + 0.01 KL_t",
            "S_t = max(-A r_t, -A clip(r_t, 0.8, 1.28)) (ppo)",
            "S_t is at most -3 A where A < 0 (dual clip)",
            "r_t = exp(l_t - l_prev,t)",
        ],
    ),
    "gspo": (
        ("loss_fn.surrogate=gspo", "loss_fn.importance_correction.kind=sequence_mask"),
        [
            "loss = 1/R sum over rows i of 1/n_i sum over trained tokens t of row i of loss_t",
            "loss_t = w_t S_t + 0.01 KL_t",
            "clip(s_i, 0.9997, 1.0004)) (gspo)",
            "s_i = exp(1/n_i sum over the trained tokens of row i of (l_t - l_prev,t))",
            "is in [0.999, 1.002], else 0",
        ],
    ),
    "gspo_token": (
        ("loss_fn.surrogate=gspo_token", "loss_fn.importance_correction.kind=bypass"),
        ["r_t = sg(s_i) exp(l_t - sg(l_t))", "of (l_t - l_gen,t))"],
    ),
    "cispo": (
        ("loss_fn.surrogate=cispo", "loss_fn.importance_correction.kind=token_truncate"),
        [
            "S_t = -sg(clip(r_t, none, 5)) A l_t (cispo)",
            "w_t = clip(exp(l_prev,t - l_gen,t), none, 2)",
        ],
    ),
    "reinforce": (
        (
            "loss_fn.surrogate=reinforce",
            "loss_fn.normalization=constant",
            "loss_fn.entropy_coefficient=0.1",
        ),
        [
            "loss = 1/(R x 24) sum over trained tokens t of loss_t",
            "loss_t = S_t + 0.01 KL_t - 0.1 H_t",
            "S_t = -A l_t (reinforce)",
        ],
    ),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_the_formula_is_that_of_the_config(name: str, recipe: Recipe) -> None:
    overrides, expected = MEMBERS[name]
    config = recipe.grpo("loss_fn.reference_policy_kl_type=k2", *overrides)
    text = explain_loss(config)
    for line in expected:
        assert line in text, text


def unused(text: str) -> str:
    return text.partition("keys of loss_fn without effect:")[2]


def test_keys_without_effect_have_a_reason(recipe: Recipe) -> None:
    text = unused(explain_loss(recipe.grpo("loss_fn.reference_policy_kl_penalty=0")))
    assert "reference_policy_kl_type: reference_policy_kl_penalty is 0" in text
    assert "constant_length: normalization is token" in text
    assert "importance_correction.upper: kind none has no weights to bound" in text
    assert "options: path is null" in text
    assert "ratio_clip" not in text, "there are two optimizer steps per rollout"
    one_step = recipe.grpo("policy.train_global_batch_size=32")
    reason = "each rollout has one optimizer step, so that every ratio is 1"
    assert f"ratio_clip_max: {reason}" in unused(explain_loss(one_step))
    epochs = recipe.grpo("policy.train_global_batch_size=32", "grpo.num_epochs_per_rollout=2")
    assert "ratio_clip" not in unused(explain_loss(epochs)), "two optimizer steps per rollout"
    assert "l_prev,t = l_t" in explain_loss(one_step)
    assert "l_prev,t = l_t" not in explain_loss(epochs)
    bypass = recipe.grpo(
        "policy.train_global_batch_size=32", "loss_fn.importance_correction.kind=bypass"
    )
    assert "ratio_clip_max" not in unused(explain_loss(bypass))
    reinforce = unused(explain_loss(recipe.grpo("loss_fn.surrogate=reinforce")))
    assert "ratio_clip_min: surrogate reinforce has no ratio" in reinforce


def test_a_kl_in_the_reward_is_part_of_the_advantage(recipe: Recipe) -> None:
    options = ("loss_fn.reference_policy_kl_in=reward", "grpo.advantage.whiten=tokens")
    text = explain_loss(recipe.grpo(*options))
    assert "A = A_row - 0.01 sum over trained tokens s >= t" in text
    assert "(l_old,s - l_ref,s)" in text
    assert "reference_policy_kl_type: the KL in the reward is k1" in unused(text)
    bypass = explain_loss(recipe.grpo(*options, "loss_fn.importance_correction.kind=bypass"))
    assert "(l_gen,s - l_ref,s)" in bypass and "l_old" not in bypass


def test_a_loss_of_the_user_is_named(recipe: Recipe) -> None:
    options = ("loss_fn.path=tests.losses.test_custom.SquaredLoss", "loss_fn.options={scale: 2}")
    text = explain_loss(recipe.grpo("loss_fn.reference_policy_kl_penalty=0", *options))
    assert "the loss is tests.losses.test_custom.SquaredLoss, called with {'scale': 2}" in text
    assert "all keys but path, options and logprobs" in text


def test_the_command(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.grpo()
    config = str(recipe.folder / "grpo.yaml")
    assert main(["explain", "loss", "--config", config, "loss_fn.surrogate=cispo"]) == 0
    assert "(cispo)" in capsys.readouterr().out
    recipe.sft()
    assert main(["explain", "loss", "--config", str(recipe.folder / "sft.yaml")]) == 2
    assert "explains the loss of a grpo config" in capsys.readouterr().err


def test_the_output_in_the_documentation_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    shown = re.search(
        r"```bash\nnemo-like (explain .*?)\n```\n\n```text\n(.*?)```", text, re.DOTALL
    )
    assert shown is not None
    arguments = shlex.split(shown[1].replace("\\\n", " "))
    config = arguments.index("--config") + 1
    arguments[config] = str(ROOT / arguments[config])
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown[2]
