"""A loss of unpacked rows on packed logits, with the names of NeMo RL.

The losses of this package work on packed tensors and do not need it. It runs a loss that was
written for NeMo RL, which sees rows of one padded batch, unchanged on the logits of packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

RowLoss = Callable[..., tuple[Tensor, Mapping[str, float | Tensor]]]
"""`loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks)` of [1, L, V] logits and
a batch of one row; returns its share of the loss, [], and its share of each metric.
"""


class SequencePackingLossWrapper:
    """Calls a loss once for each row of a pack, and adds the results.

    Example: rows of 3 and 2 tokens padded to 4 each have cu_seqlens [0, 3, 5] and padded ones
    [0, 4, 8]; the loss sees the logits 0 to 2 with the first row, and 4 to 5 with the second.
    """

    def __init__(
        self, loss_fn: RowLoss, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None
    ) -> None:
        """Wrap `loss_fn` for packed rows with these bounds, int [B + 1] each.

        `cu_seqlens_q` are the bounds of the rows without padding, `cu_seqlens_q_padded` where they
        are in the pack. Raises ValueError unless both have equally many rows.
        """
        bounds = cu_seqlens_q.tolist()
        places = bounds if cu_seqlens_q_padded is None else cu_seqlens_q_padded.tolist()
        if len(bounds) != len(places):
            raise ValueError(
                f"cu_seqlens_q has {len(bounds) - 1} rows and cu_seqlens_q_padded"
                f" {len(places) - 1}; give the bounds of the same rows"
            )
        self.loss_fn = loss_fn
        self.lengths = [stop - start for start, stop in pairwise(bounds)]
        self.starts = places[:-1]

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the sum of the losses of all rows, [], and their metrics.

        `next_token_logits` are [1, T, V] of the pack, the columns of `data` [B, ...]; those of
        shape [B, S, ...] with the S of `input_ids` are cut to the length of the row. The loss gets
        the global counts and `options` unchanged, and divides by the counts, so that the sum does
        not depend on the packing. Metrics are added, `*_min` and `*_max` are extremes. Raises
        ValueError for another number of rows.
        """
        width = data["input_ids"].shape[1]
        if len(data["input_ids"]) != len(self.lengths):
            raise ValueError(
                f"data has {len(data['input_ids'])} rows and cu_seqlens_q {len(self.lengths)}; give"
                " the rows of the pack, in its order"
            )
        losses = []
        metrics: dict[str, Any] = {}
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            logits = next_token_logits[:, start : start + length]
            own = {name: _row_of(values, row, length, width) for name, values in data.items()}
            loss, values = self.loss_fn(
                logits, own, global_valid_seqs, global_valid_toks, **options
            )
            losses.append(loss)
            for name, value in values.items():
                metrics[name] = _joined(name, metrics[name], value) if name in metrics else value
        return torch.stack(losses).sum(), metrics


def _row_of(values: Any, row: int, length: int, width: int) -> Any:
    """Return one row of a column, without its padding; values that are not rows as they are."""
    if not isinstance(values, Tensor | list | tuple):
        return values
    own = values[row : row + 1]
    if isinstance(own, Tensor) and own.ndim > 1 and own.shape[1] == width:
        return own[:, :length]
    return own


def _joined(name: str, first: Any, second: Any) -> Any:
    if name.endswith("_min"):
        return min(first, second)
    return max(first, second) if name.endswith("_max") else first + second
