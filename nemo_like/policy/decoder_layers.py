"""What both engines do with decoder layers: recomputation, torch.compile, frozen weights.

Recomputation (`policy.activation_checkpointing`): `full` saves the input of a layer and computes
the layer again in the backward pass. `selective` also saves the results of matrix products and of
attention, which take nearly all of the time, and computes the rest again: norms, rotary embedding,
activation functions and copies. Collectives inside a layer (tensor and context parallelism) run
again in both cases.

Compilation: each layer is compiled by itself. All layers of a kind share their graphs, which take
any number of tokens, so compilation takes as long as for one layer. Attention that reads the bounds
of the rows on the host (packed rows without a kernel for them) is left out by
`torch.compiler.disable`: such a layer becomes several graphs, or with activation checkpointing,
which cannot be interrupted, none.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters as torch_counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nemo_like.config.schema import PolicyConfig
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

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64
"""Compiled graphs of a process above which there is a warning."""

_RECOMPILE_LIMIT = 16
"""Graphs per function. Above it PyTorch runs the function without compilation."""

_VARIABLE_ARGUMENTS = r"L(\['kwargs'\])?\['(cu_seqlens|exchange|hidden_|max_seqlen|position_)"
"""What is variable in a graph: sizes and numbers in the arguments of a layer with these names.

With `dynamic=True` the numbers of modules in FSDP are variable too, such as the head dimension. The
kernels of the rotary embedding then divide by it for every element, in 64 bits.
"""


def checkpoint_layers(layers: Iterable[nn.Module], kind: Literal["selective", "full"]) -> None:
    """Replace the forward of each layer by one with activation checkpointing."""
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward, kind == "selective")


def _checkpointed(
    forward: Callable[..., Any],
    is_selective: bool,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `forward` with activation checkpointing.

    torch.compile traces this function and with it the checkpoint. It would leave out a call of
    `checkpoint` itself, with all that is called inside.
    """
    options: dict[str, Any] = {}
    if is_selective and torch.compiler.is_compiling():
        # The compiler reads the decisions, and needs the contexts of torch for that.
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    elif is_selective:
        options["context_fn"] = _selective_contexts
    # Nothing draws random numbers, so the generator states need not be saved.
    options.update(use_reentrant=False, preserve_rng_state=False)
    return checkpoint(forward, hidden_states, *args, **options, **kwargs)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for one call of `operator`, an OpOverload or a higher-order operator."""
    return CheckpointPolicy.MUST_SAVE if _is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and schema.name in SAVED_OPERATORS


def _selective_contexts() -> tuple[_SaveResults, _ReuseResults]:
    """Return the contexts of the forward pass and of the recomputation.

    Those of torch also count the calls of all other operators, which differ where FSDP gathers the
    weights of experts inside a layer, and refuse results that are changed in place, such as by the
    bias of experts.
    """
    saved = _SaveResults()
    return saved, _ReuseResults(saved.results)


class _SaveResults(TorchDispatchMode):
    """Saves the results of `SAVED_OPERATORS`, as they are before any change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, deque[Any]] = defaultdict(deque)
        """By operator, in the order of the calls: the tensors of a result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._copy_changed(func, args, kwargs)
        out = func(*args, **kwargs)
        if _is_saved(func):
            leaves, structure = tree_flatten(out)
            leaves = [each.detach() if isinstance(each, Tensor) else each for each in leaves]
            self.results[func].append((leaves, structure))
        return out

    def _copy_changed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy the saved results that `func` changes in place."""
        changed = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                changed |= {_storage(each) for each in tree_leaves(value)}
        for leaves, _ in chain(*self.results.values()):
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and _storage(leaf) in changed:
                    leaves[index] = leaf.clone()


class _ReuseResults(TorchDispatchMode):
    """Returns saved results in the place of calls of `SAVED_OPERATORS`."""

    def __init__(self, results: dict[Any, deque[Any]]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_saved(func):
            return tree_unflatten(*self._results[func].popleft())
        return func(*args, **(kwargs or {}))


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer on its first call; called after activation checkpointing is applied and
    before FSDP.
    """
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    torch.compiler.config.dynamic_sources = _VARIABLE_ARGUMENTS
    for layer in layers:
        layer.compile()


def layers_are_compiled(config: PolicyConfig, device_type: str, *, is_dense: bool) -> bool:
    """Return True if a worker compiles its layers; see `PolicyConfig.compiles_layers`.

    With `policy.compile=auto` this needs the C compiler with which Triton builds its kernels.
    """
    is_compiled = config.compiles_layers(device_type, is_dense=is_dense)
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    if is_compiled and config.compile == "auto" and not any(map(shutil.which, names)):
        logger.warning(
            "no C compiler was found, so the layers are not compiled and steps take longer: install"
            " gcc, or set policy.compile=none"
        )
        return False
    return is_compiled


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
