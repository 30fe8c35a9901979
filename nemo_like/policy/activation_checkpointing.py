"""Activation checkpointing of decoder layers, for both engines: what is saved and what recomputed.

`full` saves the input of a layer and computes the layer again in the backward pass. `selective`
also saves the results of matrix products and of attention, which take nearly all of the time, and
computes the rest again: norms, rotary embedding, activation functions and copies. Collectives
inside a layer (tensor and context parallelism) run again in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

SAVED_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        # Attention of one segment on CPU, and its kernels on CUDA.
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        # Attention over packed rows.
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
    }
)
"""Operators whose results `selective` saves, by name without overload."""


def checkpoint_layers(layers: Iterable[nn.Module], kind: Literal["selective", "full"]) -> None:
    """Replace the forward of each layer by one with activation checkpointing."""
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward, options)


def _checkpointed(
    forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` with activation checkpointing.

    torch.compile traces this function and with it the checkpoint. It would leave out a call of
    `checkpoint` itself, with all that is called inside.
    """
    # Nothing draws random numbers, so the generator states need not be saved.
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs
    )


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for one call of `operator`, an OpOverload or a higher-order operator."""
    schema = getattr(operator, "_schema", None)
    if schema is not None and schema.name in SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
