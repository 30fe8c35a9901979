"""Rotary embeddings whose frequencies depend on the length: by row, not by microbatch.

LongRoPE has two sets of factors, below and above the original length; dynamic NTK has frequencies
of its own for each length above it. transformers chooses them by the largest position of a call,
and keeps dynamic ones for later calls. Here every row has those that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError
from nemo_like.policy.inputs.model_inputs import ModelInputs


class RowRope:
    """Changes the rotary embeddings of a model, if their frequencies depend on the length."""

    def __init__(self, model: nn.Module, threshold: int | None) -> None:
        """`threshold` is `ModelSpec.rope_threshold`.

        Raises ConfigError for a model whose embeddings cannot be found.
        """
        self._threshold = threshold
        self._lengths: tuple[int, ...] = ()
        self._row_lengths = torch.empty(0)
        if threshold is None:
            return
        # Layers of one model may have different types, by the kind of their attention.
        found = [module for module in model.modules() if hasattr(module, "rope_type")]
        for module in found:
            module.forward = partial(self._by_row, module, module.forward)
        if not found:
            raise ConfigError(
                "policy.model_name has rotary frequencies that depend on the length of a row, in"
                f" code of {type(model).__name__} that does not show where: set"
                f" policy.max_total_sequence_length to {threshold} or less and rope_type in its"
                " config.json to default, or use another model"
            )

    def set(self, inputs: ModelInputs) -> None:
        """Use the rows of `inputs` until the next call.

        Raises ConfigError for rows of different frequencies that share a prefix.
        """
        self._lengths = tuple(sorted({self._shown(length) for length in inputs.lengths}))
        self._row_lengths = inputs.row_lengths
        if inputs.exchange is not None and len(self._lengths) > 1:
            raise ConfigError(
                "the rows of a microbatch share prefixes, and their rotary frequencies depend on"
                " the length of a row: set policy.shared_prefix=false"
            )

    def _shown(self, length: int) -> int:
        """Return `length`, or 1 for all lengths without frequencies of their own."""
        return length if self._threshold is not None and length > self._threshold else 1

    def _by_row(
        self,
        module: Any,
        forward: Callable[..., Any],
        x: Tensor,
        position_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute cosines and sines, [..., S, D], of positions [..., S] by the lengths of rows."""
        row_lengths = self._row_lengths
        # Padding must not count as a longer row.
        positions = position_ids.minimum((row_lengths - 1).clamp(min=0))
        kind = args[0] if args else kwargs.get("layer_type")
        rows_above = row_lengths > (self._threshold or 0)
        outputs: Any = None
        result: tuple[Tensor, ...] = ()
        for length in self._lengths or (1,):
            is_own = row_lengths == length if length > 1 else ~rows_above
            # With the last position of the row, which another context-parallel rank may have.
            last = positions.new_full((*positions.shape[:-1], 1), length - 1)
            own = torch.cat((positions * is_own, last), dim=-1)
            _forget_growth(module, kind)
            outputs = forward(x, own, *args, **kwargs)
            found = tuple(part[..., :-1, :] for part in _parts(outputs))
            if result:
                pairs = zip(found, result, strict=True)
                found = tuple(torch.where(is_own[..., None], new, old) for new, old in pairs)
            result = found
        return result if isinstance(outputs, tuple) else next(iter(result))


def _parts(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _forget_growth(module: Any, kind: str | None) -> None:
    """Restore the frequencies of short rows, which dynamic NTK replaces by those of a longer one.

    `kind` is the type of the layers whose frequencies are computed next.
    """
    prefix = "" if kind is None else f"{kind}_"
    rope_type = module.rope_type if kind is None else module.rope_type[kind]
    if "dynamic" in rope_type:
        setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
