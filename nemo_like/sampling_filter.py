"""Top-k, top-p and min-p filters of the tokens that may be sampled.

The sampler and the policy's log-probs both use this module, so that both see one distribution.
A filter is expressed as one threshold per position: a token is kept if its logit is at least that.
Tokens with equal logits are therefore kept or removed together, and the result does not depend on
a sort order or on how the vocabulary is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.config.rollout import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class SamplingFilter:
    """Filters in the order in which vLLM applies them, after the temperature.

    First `min_p`, then `top_k` of what is left, then the nucleus of mass `top_p` of what is left
    then (renormalized). The most likely token is always kept.

    Example: with probabilities [0.5, 0.3, 0.15, 0.05], `top_k=3, top_p=0.8` keeps the first two:
    0.5 / 0.95 = 0.53 is below 0.8, and 0.8 / 0.95 = 0.84 is not.
    """

    top_k: int | None = None
    """Keep the k most likely tokens, and every token as likely as the k-th; None, 0 or -1 is
    off.
    """
    top_p: float = 1.0
    """Keep the fewest tokens with at least this mass, in (0, 1]; 1 is off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability, in [0, 1]; 0 is off."""

    @classmethod
    def from_config(cls, config: GenerationConfig) -> SamplingFilter | None:
        """Return the filter of training rollouts; None without filters or with greedy sampling."""
        if config.temperature == 0:
            return None
        token_filter = cls(top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)
        return token_filter if token_filter.is_active else None

    @property
    def is_active(self) -> bool:
        """True if any token can be removed."""
        return self.has_top_k or self.top_p < 1 or self.min_p > 0

    @property
    def has_top_k(self) -> bool:
        """True if `top_k` is on."""
        return self.top_k is not None and self.top_k > 0

    def thresholds(self, logits: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return a threshold of each position, float32 [T]: logits from it up are kept.

        It is halfway between the smallest kept and the largest removed logit, and -inf if all are
        kept.

        `logits` is float32 [T, V] after the temperature and is not modified. With `group`,
        `logits` belong to this rank's vocabulary shard, of any size; all ranks of the group call
        with the same T and get the same result. No tensor of vocabulary size is communicated:
        top-k and top-p each sum one number per position, 32 times.
        """
        highest = _highest(logits, group)
        threshold = torch.full_like(highest, -torch.inf)
        if self.min_p > 0:
            # p >= min_p * p_max, in logits: z >= z_max + log(min_p).
            threshold = highest + math.log(self.min_p)
        if self.top_k is not None and self.has_top_k:
            threshold = torch.maximum(threshold, _kth_largest(logits, highest, self.top_k, group))
        if self.top_p < 1:
            threshold = _nucleus_threshold(logits, highest, threshold, self.top_p, group)
        return _halfway(logits, threshold, group)


def filter_logits(logits: Tensor, token_filter: SamplingFilter) -> Tensor:
    """Set the logits of removed tokens to -inf; `logits` [T, V] itself if nothing is filtered.

    Logits that are NaN stay NaN.
    """
    if not token_filter.is_active:
        return logits
    thresholds = token_filter.thresholds(logits)
    return logits.masked_fill(logits < thresholds[:, None], -torch.inf)


def _highest(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the largest logit of each position over all ranks, [T]."""
    # amax is an error for an empty vocabulary shard.
    highest = logits.new_full((len(logits),), -torch.inf)
    if logits.shape[1]:
        highest = logits.amax(dim=1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def _kth_largest(
    logits: Tensor, highest: Tensor, k: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the k-th largest logit of each position over all ranks, [T]; -inf if fewer exist."""
    lowest = torch.full_like(highest, -torch.inf)
    if group is None:
        if k > logits.shape[1]:
            return lowest
        return logits.topk(k, dim=1).values[:, -1]

    def count_from(threshold: Tensor) -> Tensor:
        """Count the logits of each position from `threshold` [T] up, over all ranks: int64 [T]."""
        return _sum((logits >= threshold[:, None]).sum(dim=1), group)

    return _largest_threshold(count_from, torch.full_like(highest, k), lowest, highest)


def _nucleus_threshold(
    logits: Tensor, highest: Tensor, lowest: Tensor, top_p: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the largest t [T] with sum(exp(z) for z >= t) >= `top_p` * the sum for z >= `lowest`.

    The tokens above t alone have less than this mass, so t is the smallest logit of the nucleus.
    """
    # Relative to the largest logit, so that exp does not overflow.
    weights = (logits - highest[:, None]).exp_()

    def mass_from(threshold: Tensor) -> Tensor:
        """Sum the weights of the logits from `threshold` [T] up, over all ranks: float64 [T]."""
        is_below = logits < threshold[:, None]
        # float64, so that the order of the sum does not change the result.
        return _sum(weights.masked_fill(is_below, 0.0).sum(dim=1, dtype=torch.float64), group)

    return _largest_threshold(mass_from, top_p * mass_from(lowest), lowest, highest)


def _halfway(logits: Tensor, threshold: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the threshold [T] halfway from `threshold` down to the largest removed logit.

    It keeps the same tokens. The backward of log-probs computes the logits again, and a matrix
    product may round differently then: with the smallest kept logit itself as the threshold, that
    token would be removed in the backward.
    """
    is_kept = logits >= threshold[:, None]
    removed = _highest(logits.masked_fill(is_kept, -torch.inf), group)
    middle = (threshold + removed) / 2
    # Between consecutive floats there is no middle.
    middle = torch.where(middle > removed, middle, threshold)
    return torch.where(removed == -torch.inf, removed, middle)


def _largest_threshold(
    measure: Callable[[Tensor], Tensor], target: Tensor, lowest: Tensor, highest: Tensor
) -> Tensor:
    """Return the largest t [T] in [lowest, highest] with measure(t) >= target, else `lowest`.

    `measure` does not increase with t.
    """
    low = _ordinal(lowest)
    high = _ordinal(highest)
    # Bisection over the float32 numbers in their order: there are at most 2^32 of them.
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        is_enough = measure(_from_ordinal(middle)) >= target
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle - 1)
    return _from_ordinal(low)


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `values` [T] over the ranks, in place."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def _ordinal(values: Tensor) -> Tensor:
    """Map `values` float32 [T] to ordinals int64 [T] of the same order.

    Those of consecutive floats are consecutive.
    """
    # The bits of a negative float32 decrease with its value, so they are flipped except the sign.
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_ordinal(ordinals: Tensor) -> Tensor:
    """Invert `_ordinal`: int64 [T] to float32 [T]."""
    bits = torch.where(ordinals >= 0, ordinals, ordinals ^ 0x7FFFFFFF)
    return bits.to(torch.int32).view(torch.float32)
