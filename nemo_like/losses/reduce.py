"""Sums and counts of losses and metrics over the tokens and rows of a microbatch, and their
normalization by global counts.

A loss never divides by the counts of its microbatch. It returns the sum over the microbatch; the
worker divides by `GlobalCounts`, which are known before the first backward of the optimizer step.
Packing, microbatch size, row order and dp size therefore cannot change the gradient.

Metrics stay on the device until they are fetched, all in one transfer: reading a number in each
microbatch would make the host wait for the device, which then has nothing to do until the host has
queued the next microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.loss import LossNormalization
from nemo_like.device_transfer import fetch_scalars
from nemo_like.metrics import Max, Mean, Metric, Metrics, Sum

Normalization = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class TensorMean:
    """A `Mean` whose sum, and usually its weight, are tensors [] on the device."""

    total: Tensor
    weight: Tensor | float
    is_optional: bool = False
    """Leave the metric out where its weight is 0."""


@dataclass(frozen=True, slots=True)
class TensorMax:
    """A `Max` whose value is a tensor [] on the device."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class TensorSum:
    """A `Sum` whose value is a tensor [] on the device."""

    value: Tensor


LossMetric = Metric | TensorMean | TensorMax | TensorSum
LossMetrics = Mapping[str, LossMetric]
"""Metrics of one microbatch by name."""


def fetch_metrics(parts: Sequence[LossMetrics]) -> list[Metrics]:
    """Return the metrics of several microbatches as numbers, fetched in one transfer."""
    scalars: list[Tensor] = []
    for part in parts:
        for metric in part.values():
            scalars.extend(_scalars(metric))
    values = iter(fetch_scalars(scalars))
    fetched: list[Metrics] = []
    for part in parts:
        metrics: Metrics = {}
        for name, metric in part.items():
            number = _with_values(metric, [next(values) for _ in _scalars(metric)])
            is_optional = isinstance(metric, TensorMean) and metric.is_optional
            if is_optional and isinstance(number, Mean) and number.weight == 0:
                continue
            metrics[name] = number
        fetched.append(metrics)
    return fetched


def mean_metrics(
    values: Mapping[str, Tensor], mask: Tensor, weight: float = 1.0
) -> dict[str, LossMetric]:
    """Return token means of `values`, [T] each, where `mask`, bool [T], is True.

    Each token has the same `weight` in a mean over several ranks.
    """
    if not values:
        return {}
    count = mask.to(torch.float32).sum() * weight
    metrics: dict[str, LossMetric] = {}
    for name, value in values.items():
        # where() and not a product: an infinity at a masked position must not become NaN.
        masked = torch.where(mask, value.detach().float(), 0.0)
        metrics[name] = TensorMean(masked.sum() * weight, count)
    return metrics


def _scalars(metric: LossMetric) -> list[Tensor]:
    """Return the tensors [] of a metric; none for one that is a number already."""
    if isinstance(metric, TensorMean):
        weight = [metric.weight] if isinstance(metric.weight, Tensor) else []
        return [metric.total, *weight]
    if isinstance(metric, TensorMax | TensorSum):
        return [metric.value]
    return []


def _with_values(metric: LossMetric, values: Sequence[float]) -> Metric:
    """Return `metric` with `values` in place of the tensors of `_scalars`."""
    if isinstance(metric, TensorMean):
        weight = values[1] if isinstance(metric.weight, Tensor) else metric.weight
        return Mean(values[0], weight)
    if isinstance(metric, TensorMax):
        return Max(values[0])
    if isinstance(metric, TensorSum):
        return Sum(values[0])
    return metric


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
    episode_num_tokens: Tensor | None = None
    """float32 [R]: trained tokens of the episode of each row, over all its rows in all microbatches
    and ranks; None: every row is an episode of its own."""
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
    row_weight: float = 1.0
    """Weight of a row in the metrics of rows, which every context-parallel rank of the row has: 1
    over their number where it differs between microbatches."""

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

        The sum is over the row even if its episode has several rows: ratios and importance
        weights of sequences (GSPO, sequence masks) belong to the row, not to the episode, and so
        depend on how an episode is split. Divide it by `row_num_tokens` for the mean.

        A loss may be any function of the result. Every context-parallel rank then computes the
        same loss, and its backward reaches the rank's own tokens, so that the gradients of the
        ranks add up to the gradient of the loss.
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
    """Rows with at least one trained token; of a batch with the column `episode`, episodes."""

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
    With `episode_num_tokens` it is 1 / trained tokens of the episode, so that the weights of an
    episode sum to 1, however it is split into rows.
    """
    weights = inputs.token_mask.to(torch.float32)
    if normalization == "token":
        return weights
    # Padding has row 0, and rows without trained tokens have weight 0 anyway.
    num_tokens = inputs.episode_num_tokens
    if num_tokens is None:
        num_tokens = inputs.row_num_tokens
    return weights / num_tokens.clamp(min=1.0)[inputs.row_ids]


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """Divides the summed loss by tokens, by rows, or by rows x a constant number of tokens.

    Where a batch has the column `episode`, the rows of an episode count as one row.

    Sources: token mean as in DAPO (Yu et al. 2025); sequence mean as in GRPO (Shao et al. 2024);
    the constant of Dr. GRPO (Liu et al. 2025), which keeps the weight of a token independent of
    the length of its row.
    """

    kind: LossNormalization
    constant_length: int | None = None
    """Tokens per row of the kind `constant`."""

    def __post_init__(self) -> None:
        if self.kind == "constant" and self.constant_length is None:
            raise ValueError(
                "the normalization is constant, but constant_length is None; pass the number of"
                " tokens per row, e.g. policy.generation.max_new_tokens"
            )

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the divisor of the summed loss of an optimizer step, at least 1."""
        if self.kind == "constant":
            return counts.denominator("sequence") * self._length
        return counts.denominator(self.kind)

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return the weight of each token in the sum, float32 [T]; 0 for tokens not trained."""
        return token_weights(inputs, "sequence" if self.kind == "sequence" else "token")

    def count(self, inputs: LossInputs) -> Tensor:
        """Return what the microbatch adds to the denominator, float32 [].

        With context parallelism it is this rank's part; the parts of the ranks add up.
        """
        if self.kind == "constant":
            return token_weights(inputs, "sequence").sum() * self._length
        return self.weights(inputs).sum()

    @property
    def _length(self) -> int:
        assert self.constant_length is not None, "checked by __post_init__"
        return self.constant_length
