"""What a loss sees and what it returns: sums and counts, so that the split into microbatches cannot
change a gradient.

A loss never divides by what it sees. It returns the sum over its microbatch; the worker divides by
`GlobalCounts`, which are known before the first backward of the optimizer step. Packing, microbatch
size, row order and dp size then cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_like.metrics import Mean, Metrics

Normalization = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One microbatch, flat over its T predicting positions; R rows.

    Example: two rows of 3 and 2 tokens, packed, T = 5; the last position of each row predicts
    nothing, so with every token trained `token_mask` is [1, 1, 0, 1, 0], `row_ids` [0, 0, 0, 1, 1]
    and `row_num_tokens` [2, 1].
    """

    policy_logprobs: Tensor
    """float32 [T], with gradient: log-prob of the next token under the policy at the sampling
    temperature, in the distribution after top-k, top-p and min-p where sampling uses them."""
    token_mask: Tensor
    """bool [T]: positions that carry loss."""
    row_ids: Tensor
    """int64 [T]: row of each position, 0 on padding."""
    row_num_tokens: Tensor
    """float32 [R]: trained tokens of each whole row, also where this rank holds only a part of
    it.
    """
    columns: Mapping[str, Tensor]
    """float32 [T] each: `advantages`, `prev_logprobs`, `generation_logprobs`,
    `reference_logprobs`.
    """
    entropy: Tensor | None = None
    """float32 [T] of the policy's whole distribution, with gradient if the loss needs it."""
    unfiltered_logprobs: Tensor | None = None
    """float32 [T], with gradient: `policy_logprobs` in the whole distribution; None where nothing
    is filtered.
    """


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss_sum` (scalar, with gradient) is divided by `GlobalCounts.denominator` in one place: the
    worker.
    """

    loss_sum: Tensor
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Over every microbatch of every dp rank of one optimizer step. Example: 8 rows, 512 trained
    tokens.
    """

    num_tokens: float
    num_rows: float

    def denominator(self, normalization: Normalization) -> float:
        """What the summed loss is divided by; 1 where a step trains nothing, so that its gradient
        is 0 and not NaN.
        """
        return max(self.num_tokens if normalization == "token" else self.num_rows, 1.0)


def token_weights(inputs: LossInputs, normalization: Normalization) -> Tensor:
    """float32 [T]: weight of each token in the sum. `token`: 1. `sequence`: 1 / trained tokens of
    its row, so a row sums to 1.
    """
    weights = inputs.token_mask.to(torch.float32)
    if normalization == "token":
        return weights
    return weights / inputs.row_num_tokens.clamp(min=1.0)[inputs.row_ids]


def mean_metrics(values: Mapping[str, Tensor], mask: Tensor) -> Metrics:
    """Token means of [T] tensors as exact sums, fetched from the device in one transfer."""
    if not values:
        return {}
    weight = mask.to(torch.float32)
    # where() and not a product: an infinity at a masked position must not become NaN.
    sums = [torch.where(mask, value.detach().float(), 0.0).sum() for value in values.values()]
    *totals, count = torch.stack([*sums, weight.sum()]).tolist()
    return {name: Mean(total, count) for name, total in zip(values, totals, strict=True)}
