"""Layers with a state along the positions (convolutions, linear attention) on packed rows.

Attention gets the bounds of the rows. The state of these layers has to be reset at each of them:
the layer computes the rows of a packed microbatch as a rectangle of right-padded rows. That is
exact, because the layers are causal, and costs as much as padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError


def reset_states_between_rows(model: nn.Module) -> int:
    """Change each layer of `model` that has a convolution; it must return one tensor.

    Returns the number of these layers.
    """
    num_layers = 0
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_compute_by_rows, module.forward)
            num_layers += 1
    return num_layers


def _compute_by_rows(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: Any,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    cp_group: Any = None,
    exchange: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a layer on `hidden_states`, [1, T, D] with `cu_seqlens` [R + 1], else [B, S, D]."""
    if cp_group is not None or exchange is not None:
        raise ConfigError(
            "policy.model_name has convolutions or linear attention, which need all positions of a"
            " row in order: set parallel.context to 1 and policy.shared_prefix to false"
        )
    if cu_seqlens is None:
        return forward(hidden_states, *args, **kwargs)
    bounds = cu_seqlens.long()
    device = hidden_states.device
    # The last position stands for the padding behind a row.
    last = bounds[1:] - 1
    columns = torch.arange(max_seqlen, device=device)
    rectangle = torch.minimum(bounds[:-1, None] + columns, last[:, None])
    out = forward(hidden_states[0, rectangle.clamp(min=0)], *args, **kwargs)
    positions = torch.arange(hidden_states.shape[1], device=device)
    rows = torch.searchsorted(bounds, positions, right=True) - 1
    return out[rows, positions - bounds[rows]][None]
