"""Patterns of frozen weights: what they match, and the errors."""

from __future__ import annotations

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.models.layout_check import frozen_weights

EMBEDDING = "model.embed_tokens.weight"
LAYERS = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(12)]
NAMES = {name: name for name in (EMBEDDING, *LAYERS, "model.norm.weight")}
TIED = {**NAMES, "lm_head.weight": EMBEDDING}


def test_patterns_select_weights_by_complete_names():
    assert frozen_weights(["model.layers.[0-7].*"], NAMES) == set(LAYERS[:8])
    assert frozen_weights(["*.1?.mlp.*", "model.norm.weight"], NAMES) == {
        *LAYERS[10:],
        "model.norm.weight",
    }
    assert frozen_weights(["lm_head.*"], TIED) == frozen_weights(["model.embed_*"], TIED)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.3.*", "'model.layers.3.*' is possible"),
        ("model.layers.3", "'model.layers.3.*' is possible"),
        ("embed_tokens", "'*.embed_tokens*' is possible"),
        ("model.embed_token.weight", f"names of weights are e.g. {EMBEDDING}"),
        ("*.wte.*", "names of weights are e.g."),
    ],
)
def test_a_pattern_without_a_match_is_one_error_with_near_names(pattern, hint):
    with pytest.raises(ConfigError) as error:
        frozen_weights([EMBEDDING, pattern], NAMES)
    assert str(error.value).startswith(f"policy.freeze: {pattern!r} matches no weight")
    assert hint in str(error.value)


def test_something_must_be_left_to_train():
    with pytest.raises(ConfigError, match="matches all 14 weights of the model"):
        frozen_weights(["model.*"], TIED)
