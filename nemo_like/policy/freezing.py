"""The weights of a Hugging Face model that `policy.freeze` excludes from training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nemo_like.models.freezing import frozen_weights


def frozen_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names of the distinct weights of `model` that match a pattern.

    A tied weight has the name of the input embedding, and every name of it is compared. Raises
    ConfigError as `frozen_weights` does.
    """
    name_of = {weight: name for name, weight in model.named_parameters()}
    names = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[name] = name_of[weight]
    return frozen_weights(patterns, names)
