"""The keys of `loss_fn`: defaults by surrogate, and the combinations that have no meaning."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_config
from nemo_like.config.load import to_yaml
from nemo_like.config.loss import ImportanceCorrectionConfig, PolicyGradientLossConfig, Surrogate
from tests.recipe import Recipe


def problems(**keys: Any) -> list[str]:
    return [problem.text for problem in PolicyGradientLossConfig(**keys).problems()]


def correction(**keys: Any) -> dict[str, Any]:
    return {"importance_correction": ImportanceCorrectionConfig(**keys)}


def test_every_surrogate_has_legal_defaults_of_its_own() -> None:
    expected = {
        "ppo": ((0.8, 1.2), "token"),
        "gspo": ((1 - 3e-4, 1 + 4e-4), "sequence"),
        "gspo_token": ((1 - 3e-4, 1 + 4e-4), "sequence"),
        "cispo": ((None, 5.0), "token"),
        "reinforce": ((None, None), "token"),
    }
    assert expected.keys() == set(get_args(Surrogate))
    for surrogate, (bounds, divisor) in expected.items():
        config = PolicyGradientLossConfig(surrogate=surrogate)  # type: ignore[arg-type]
        assert problems(surrogate=surrogate) == []
        assert config.ratio_bounds == bounds
        assert config.divisor == divisor
    dapo = PolicyGradientLossConfig(ratio_clip_max=0.28)
    assert dapo.ratio_bounds == (0.8, 1.28)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"surrogate": "reinforce", "ratio_clip_min": 0.1},
            "ratio_clip_min is 0.1, but loss_fn.surrogate reinforce has no ratio to clip",
        ),
        ({"surrogate": "reinforce", "ratio_clip_max": 0.2}, "has no ratio to clip: set"),
        ({"surrogate": "reinforce", "ratio_clip_c": 3.0}, "reinforce has no ratio: set"),
        ({"surrogate": "cispo", "ratio_clip_c": 3.0}, "that ratio_clip_max limits already"),
        (
            {"surrogate": "gspo", "ratio_clip_max": 0.28},
            "is the geometric mean over the tokens of a row",
        ),
        ({"surrogate": "gspo_token", "ratio_clip_min": 0.2}, "or to at most 0.1"),
        (
            {"surrogate": "gspo", "normalization": "token"},
            "gspo has one loss per row, which it would multiply by the row's number of tokens",
        ),
        (
            {"surrogate": "gspo", "normalization": "constant"},
            "set it to sequence or null, or loss_fn.surrogate to gspo_token",
        ),
        ({"constant_length": 100}, "constant_length is 100, but loss_fn.normalization is token"),
        (
            {"surrogate": "gspo", **correction(kind="token_truncate")},
            "is token_truncate, which weights tokens, but loss_fn.surrogate gspo has one ratio",
        ),
        ({"surrogate": "gspo", **correction(kind="token_mask")}, "one weight per row"),
        (
            {"surrogate": "reinforce", **correction(kind="bypass")},
            "is bypass, which corrects in the ratio, but loss_fn.surrogate reinforce has no",
        ),
        (correction(kind="none", upper=2.0), "kind none has no weights to bound"),
        ({"options": {"a": 1}}, "loss_fn.options is set, but loss_fn.path is null"),
        ({"logprobs": ("prev_logprobs",)}, "loss_fn.logprobs is set, but loss_fn.path is null"),
        (
            {"path": "my_losses.Mine", "surrogate": "cispo"},
            "loss_fn.surrogate is set, but loss_fn.path my_losses.Mine replaces the loss",
        ),
        (
            {"path": "my_losses.Mine", "reference_policy_kl_penalty": 0.1},
            "loss_fn.reference_policy_kl_penalty is set, but loss_fn.path",
        ),
        (
            {"path": "my_losses.Mine", **correction(kind="token_mask")},
            "loss_fn.importance_correction is set, but loss_fn.path",
        ),
    ],
)
def test_combinations_without_meaning_are_refused_with_the_reason(keys, expected) -> None:
    found = problems(**keys)
    assert any(expected in text for text in found), found


def test_the_columns_of_a_log_prob_pass() -> None:
    def names(**keys: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        config = PolicyGradientLossConfig(**keys)
        return config.logprob_names(is_single_step=True), config.logprob_names(is_single_step=False)

    assert names() == ((), ("prev_logprobs",))
    assert names(surrogate="reinforce") == ((), ())
    weighted = correction(kind="token_truncate")
    assert names(surrogate="reinforce", **weighted) == ((), ("prev_logprobs",))
    assert names(**correction(kind="bypass")) == ((), ())
    reference = ("reference_logprobs",)
    assert names(surrogate="reinforce", reference_policy_kl_penalty=0.1) == (reference, reference)
    custom = {"path": "my_losses.Mine", "logprobs": ("reference_logprobs", "prev_logprobs")}
    both = ("prev_logprobs", "reference_logprobs")
    assert names(**custom) == (both, both)
    assert PolicyGradientLossConfig(**custom).needs_reference  # type: ignore[arg-type]
    assert not PolicyGradientLossConfig(path="my_losses.Mine").needs_reference
    in_reward = {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_in": "reward"}
    config = PolicyGradientLossConfig(path="my_losses.Mine", **in_reward)  # type: ignore[arg-type]
    assert config.needs_reference and list(config.problems()) == []


def test_a_run_config_reports_them_with_the_key(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match=r"reinforce has no ratio to clip"):
        recipe.grpo("loss_fn.surrogate=reinforce", "loss_fn.ratio_clip_max=0.3")
    with pytest.raises(ValueError, match=r"logprobs is .*a list of names among prev_logprobs"):
        recipe.grpo("loss_fn.path=my.Loss", "loss_fn.logprobs=[prev]")
    config = recipe.grpo(
        "loss_fn.reference_policy_kl_penalty=0",
        "loss_fn.path=my.Loss",
        "loss_fn.options={scale: 1e-3, names: [a, b], nested: {depth: 2}}",
        "loss_fn.options.flag=true",
        "loss_fn.logprobs=[reference_logprobs]",
    )
    assert config.loss_fn.options == {
        "scale": 1e-3,
        "names": ["a", "b"],
        "nested": {"depth": 2},
        "flag": True,
    }
    assert config.needs.reference and config.needs.logprob_pass


def test_an_option_that_looks_like_a_number_stays_a_text(recipe: Recipe) -> None:
    """PyYAML writes `1e-5` without quotes, and OmegaConf would read a number."""
    keys = ("loss_fn.reference_policy_kl_penalty=0", "loss_fn.path=my.Loss")
    config = recipe.grpo(*keys, "loss_fn.options={text: '1e-5', number: 1e-5}")
    assert config.loss_fn.options == {"text": "1e-5", "number": 1e-5}
    path = recipe.folder / "written.yaml"
    path.write_text(to_yaml(config))
    assert load_config(GrpoRunConfig, path, []).loss_fn.options == config.loss_fn.options
