"""What both engines do with decoder layers: recomputation, torch.compile, frozen weights.

Activation checkpointing of decoder layers, for both engines: what is saved and what recomputed.

`full` saves the input of a layer and computes the layer again in the backward pass. `selective`
also saves the results of matrix products and of attention, which take nearly all of the time, and
computes the rest again: norms, rotary embedding, activation functions and copies. Collectives
inside a layer (tensor and context parallelism) run again in both cases.

torch.compile of decoder layers, and the number of graphs that it compiles.

Each layer is compiled by itself. All layers of a kind share their graphs, which take any number of
tokens, so compilation takes as long as for one layer. Attention that reads the bounds of the rows
on the host (packed rows without a kernel for them) is left out by `torch.compiler.disable`: such a
layer becomes several graphs, or with activation checkpointing, which cannot be interrupted, none.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters as torch_counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nemo_like.models.layout_check import frozen_weights

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


logger = logging.getLogger(__name__)

MAX_GRAPHS = 64
"""Compiled graphs of a process above which there is a warning."""
_RECOMPILE_LIMIT = 16
"""Graphs per function. Above it PyTorch runs the function without compilation."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer on its first call; called after activation checkpointing is applied and
    before FSDP.
    """
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    for layer in layers:
        layer.compile(dynamic=True)


def has_c_compiler() -> bool:
    """Return True if there is a C compiler, which Triton needs for its kernels."""
    return any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))


class CompilationCounter:
    """Counts the graphs compiled in this process, from its creation on."""

    def __init__(self) -> None:
        self._first = _num_graphs()
        self._previous = self._first
        self._has_warned = False

    def pop(self) -> int:
        """Return the number of graphs compiled since the last call.

        Logs one warning when more than MAX_GRAPHS have been compiled.
        """
        total = _num_graphs()
        num_new = total - self._previous
        self._previous = total
        num_graphs = total - self._first
        if num_graphs > MAX_GRAPHS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "policy.compile has compiled %d graphs and still compiles new ones, which takes"
                " longer than it saves; set policy.compile=none, or find the cause with"
                " TORCH_LOGS=recompiles",
                num_graphs,
            )
        return num_new


def _num_graphs() -> int:
    return torch_counters["stats"]["unique_graphs"]


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
