"""torch.compile of decoder layers, and the number of graphs that it compiles.

Each layer is compiled by itself. All layers of a kind share their graphs, which take any number of
tokens, so compilation takes as long as for one layer. Attention that reads the bounds of the rows
on the host (packed rows without a kernel for them) is left out by `torch.compiler.disable`: such a
layer becomes several graphs, or with activation checkpointing, which cannot be interrupted, none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters as torch_counters

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
