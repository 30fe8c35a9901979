"""The interface of a loss: sums and counts, independent of the split into microbatches.

A loss never divides by the counts of its microbatch. It returns the sum over the microbatch; the
worker divides by `GlobalCounts`, which are known before the first backward of the optimizer step.
Packing, microbatch size, row order and dp size therefore cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from nemo_like.losses.tensor_metrics import LossMetrics, fetch_metrics
from nemo_like.metrics import Metrics

Normalization = Literal["token", "sequence"]


def _identity(values: Tensor) -> Tensor:
    """Return `values`, such as the sums [R] of rows, unchanged."""
    return values


@dataclass(frozen=True, kw_only=True)
class HostRows:
    """Values of the R rows of a microbatch in host memory, where reading them does not wait."""

    num_tokens: np.ndarray
    """float32 [R]: `LossInputs.row_num_tokens`."""
    columns: Mapping[str, np.ndarray]
    """[R, ...] each: `LossInputs.row_columns`."""


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
    """bool [T]: True for positions whose label is trained."""
    row_ids: Tensor
    """int64 [T]: row of each position, 0 on padding."""
    row_num_tokens: Tensor
    """float32 [R]: trained tokens of each row over all context-parallel ranks."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 [T] each: columns per token, such as `prev_logprobs` and `reference_logprobs`."""
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[R] each: columns per row, such as `advantages`."""
    host_rows: HostRows | None = None
    """The values per row in host memory, where they are known."""
    entropy: Tensor | None = None
    """float32 [T]: entropy of the policy's unfiltered distribution, with gradient if the loss needs
    it.
    """
    unfiltered_logprobs: Tensor | None = None
    """float32 [T], with gradient: `policy_logprobs` under the unfiltered distribution; None where
    nothing is filtered.
    """
    is_argmax: Tensor | None = None
    """bool [T]: True where no token is more probable than the next token of the row."""
    row_scores: Tensor | None = None
    """float32 [R], with gradient: the score of each row, of a model with a score head;
    `policy_logprobs` are 0 then."""
    sum_over_cp: Callable[[Tensor], Tensor] = _identity
    """All-reduces partial sums over the context-parallel ranks; the backward is the identity."""

    def per_token(self, name: str) -> Tensor:
        """Return a column as float32 [T]; the values of a row column are repeated per token."""
        if name in self.columns:
            return self.columns[name]
        return self.row_columns[name].float()[self.row_ids]

    def rows_on_host(self, *names: str) -> HostRows:
        """Return the row columns `names` and the number of tokens [R] in host memory.

        Waits for the device if `host_rows` does not have them.
        """
        known = self.host_rows
        if known is not None and all(name in known.columns for name in names):
            return known
        columns = {name: self.row_columns[name].cpu().numpy() for name in names}
        return HostRows(num_tokens=self.row_num_tokens.cpu().numpy(), columns=columns)

    def sum_over_row(self, values: Tensor) -> Tensor:
        """Sum `values` [T] over the trained tokens of each row, [R], over all cp ranks.

        A loss may be any function of the result. Every context-parallel rank then computes the
        same loss, and its backward reaches the rank's own tokens, so that the gradients of the
        ranks add up to that of the loss.
        """
        masked = torch.where(self.token_mask, values, 0.0)
        sums = masked.new_zeros(len(self.row_num_tokens)).index_add(0, self.row_ids, masked)
        return self.sum_over_cp(sums)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Result of a loss. The worker alone divides `loss_sum` by `Loss.denominator`."""

    loss_sum: Tensor
    """float32 [], with gradient."""
    metrics: LossMetrics
    """Numbers of a microbatch; as tensors, so that the host does not wait for the device."""

    def fetch_metrics(self) -> Metrics:
        """Return the metrics as numbers; waits for the device."""
        return fetch_metrics([self.metrics])[0]


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Counts over every microbatch of every dp rank of one optimizer step.

    Example: 8 rows, 512 trained tokens.
    """

    num_tokens: float
    """Trained tokens."""
    num_rows: float
    """Rows with at least one trained token."""

    def denominator(self, normalization: Normalization) -> float:
        """Return the divisor of the summed loss, at least 1."""
        count = self.num_tokens if normalization == "token" else self.num_rows
        # At least 1, so that the gradient of a step without trained tokens is 0 and not NaN.
        return max(count, 1.0)


class Loss(Protocol):
    """A function of a microbatch that returns sums; it never divides by counts of its microbatch.

    Instances are sent to the workers, so a loss is a small picklable value.
    """

    @property
    def uses_sampling_distribution(self) -> bool:
        """True if `policy_logprobs` are at the sampling temperature and with its filters."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """True if the loss reads `LossInputs.entropy`."""
        ...

    @property
    def entropy_gradient(self) -> bool:
        """True if the gradient of the entropy is needed."""
        ...

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the divisor of the summed loss of an optimizer step, above 0."""
        ...

    def coupled_rows(self, inputs: LossInputs) -> Tensor | None:
        """Return group ids int64 [R] of rows whose loss is not a sum over rows; None for a sum."""
        ...

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the loss of one microbatch, summed, and its metrics."""
        ...


def token_weights(inputs: LossInputs, normalization: Normalization) -> Tensor:
    """Return the weight of each token in the sum, float32 [T]; 0 for tokens not trained.

    `token`: 1. `sequence`: 1 / trained tokens of the row, so that the weights of a row sum to 1.
    """
    weights = inputs.token_mask.to(torch.float32)
    if normalization == "token":
        return weights
    # Padding has row 0, and rows without trained tokens have weight 0 anyway.
    row_num_tokens = inputs.row_num_tokens.clamp(min=1.0)
    return weights / row_num_tokens[inputs.row_ids]
