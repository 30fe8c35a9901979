"""Log-probs and entropy of tokens from hidden states, one chunk of tokens at a time.

The logits of all T tokens never exist together: forward and backward each materialise those of
`chunk_size` tokens, and the backward recomputes them. Softmax and log are float32 whatever the
dtype of the hidden states is.

Where the vocabulary is sharded over ranks, each rank computes the logits of its own rows of the
output embedding and reduces them to four numbers per token (five with a sampling filter). Those are
all-gathered once, after the last chunk; the backward all-reduces the hidden states' gradient once.
No tensor of vocabulary size is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.engine import TokenLogprobs
from nemo_like.sampling_filter import SamplingFilter

_LOWEST = torch.finfo(torch.float32).min / 4
"""Replaces -inf where a difference is taken: its exp is 0 too, and -inf - -inf would be NaN."""


@dataclass(frozen=True)
class VocabShard:
    """Rows of the output embedding on this rank; each row is on one rank of `group`.

    Shards may differ in size and may be empty.
    """

    group: dist.ProcessGroup
    start: int
    """First vocabulary row of this rank."""
    partial_hidden_grad: bool = False
    """Do not all-reduce the gradient of the hidden states, because the caller does: the backward of
    sequence parallelism reduce-scatters it.
    """


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
    token_filter: SamplingFilter | None = None,
) -> TokenLogprobs:
    """Return the log-prob of `labels` and, with `with_entropy`, the entropy; float32 [T] each.

    `hidden` [T, D] are the last hidden states, `labels` int64 [T], `weight` [V, D] and `bias` [V]
    the output embedding. The distribution is softmax((hidden @ weight.T + bias) / temperature).
    Both results have a gradient. Memory is of the order of chunk_size x V.

    With `vocab`, `weight` and `bias` are this rank's rows; `hidden` and the global `labels` are the
    same on all its ranks, and the results are bit-equal on them.

    With `token_filter`, `logprobs` are those of the filtered, renormalized distribution. The label
    is always kept, so its log-prob is finite. The set of kept tokens is a constant for the
    gradient. `unfiltered_logprobs` and `entropy` are those of the unfiltered distribution. This
    needs two to three more float32 [chunk_size, V].

    Raises ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    if token_filter is not None and not token_filter.is_active:
        token_filter = None
    logprobs, entropy, kept_logprobs = _ChunkedLogprobs.apply(
        hidden,
        weight,
        bias,
        labels,
        temperature,
        chunk_size,
        with_entropy,
        vocab,
        token_filter,
    )
    entropy = entropy if with_entropy else None
    if token_filter is None:
        return TokenLogprobs(logprobs, entropy)
    return TokenLogprobs(kept_logprobs, entropy, logprobs)


def scatter_logprobs(
    outputs: TokenLogprobs,
    positions: Tensor,
    size: int,
) -> TokenLogprobs:
    """Scatter `outputs` [T] to [size], to the indices `positions` int64 [T]; 0 elsewhere."""

    def scatter(values: Tensor) -> Tensor:
        """Return [size] with `values` [T] at `positions`."""
        return values.new_zeros(size).index_copy(0, positions, values)

    entropy = outputs.entropy
    unfiltered = outputs.unfiltered_logprobs
    return TokenLogprobs(
        scatter(outputs.logprobs),
        None if entropy is None else scatter(entropy),
        None if unfiltered is None else scatter(unfiltered),
    )


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-prob l, entropy H and filtered log-prob l_f, with recomputation in the backward.

    With z = logits / temperature: l = z[label] - lse(z), H = lse(z) - sum p z;
    dl/dz = onehot(label) - p and dH/dz = -p (log p + H).

    Filtered: l_f = z[label] - lse(z of the kept tokens) and dl_f/dz = onehot(label) - p_f, where
    p_f is p exp(lse(z) - lse(z of the kept tokens)) for a kept token and 0 for another.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        vocab: VocabShard | None,
        token_filter: SamplingFilter | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return l, H and l_f, float32 [T] each; those that are not computed are empty."""
        num_tokens = hidden.shape[0]
        if vocab is not None:
            labels = labels - vocab.start
        num_sums = 4 if token_filter is None else 5
        sums = torch.empty((num_sums, num_tokens), dtype=torch.float32, device=hidden.device)
        thresholds = None if token_filter is None else torch.empty_like(sums[0])
        for start in range(0, num_tokens, chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = _scaled_logits(
                hidden[chunk],
                weight,
                bias,
                temperature,
            )
            local_labels = _LocalLabels.of(labels[chunk], vocab, weight)
            is_removed = None
            if token_filter is not None and thresholds is not None:
                group = None if vocab is None else vocab.group
                thresholds[chunk] = token_filter.thresholds(logits, group)
                is_removed = local_labels.removed(logits, thresholds[chunk])
            _reduce(
                logits,
                local_labels,
                sums[:, chunk],
                with_entropy,
                is_removed,
            )
        gathered = _gather(sums, vocab)
        logprobs, logsumexp, entropy = _combine(gathered, with_entropy)
        kept_logprobs, log_inverse_mass = _combine_kept(
            gathered,
            logprobs,
            logsumexp,
            is_filtered=thresholds is not None,
        )
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            labels,
            logsumexp,
            entropy,
            thresholds,
            log_inverse_mass,
        )
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        ctx.with_entropy = with_entropy
        ctx.vocab = vocab
        # Outputs without gradient then give None in the backward, and their terms are skipped.
        ctx.set_materialize_grads(False)
        return logprobs, entropy, kept_logprobs

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_kept: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` [T, D], `weight` [V, D] and `bias` [V]."""
        hidden, weight, bias, labels, logsumexp, entropy, thresholds, log_inverse_mass = (
            ctx.saved_tensors
        )
        if not ctx.with_entropy:
            grad_entropy = None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        num_tokens = hidden.shape[0]
        chunk_size = ctx.chunk_size
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Several chunks are summed in float32; a single chunk needs no such buffer.
        sum_dtype = weight.dtype if num_tokens <= chunk_size else torch.float32
        grad_weight = None
        if needs_weight:
            grad_weight = torch.zeros(weight.shape, dtype=sum_dtype, device=weight.device)
        grad_bias = None
        if needs_bias:
            grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            entropy_part = None
            if grad_entropy is not None:
                entropy_part = (grad_entropy[part], entropy[part])
            kept_part = None
            if grad_kept is not None and thresholds is not None:
                kept_part = _KeptGradient(
                    thresholds[part],
                    grad_kept[part],
                    log_inverse_mass[part],
                )
            gradient = _logits_gradient(
                _scaled_logits(
                    hidden[part],
                    weight,
                    bias,
                    ctx.temperature,
                ),
                _LocalLabels.of(labels[part], ctx.vocab, weight),
                logsumexp[part],
                None if grad_logprobs is None else grad_logprobs[part],
                entropy_part,
                kept_part,
            )
            # With respect to the logits before the temperature.
            gradient = gradient.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight, gradient, hidden[part])
        vocab = ctx.vocab
        # Each rank has the gradient from its own vocabulary rows.
        if grad_hidden is not None and vocab is not None and not vocab.partial_hidden_grad:
            dist.all_reduce(grad_hidden, group=vocab.group)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _LocalLabels(NamedTuple):
    """Labels of a chunk as rows of this rank's vocabulary shard."""

    row: Tensor
    """int64 [chunk, 1]: the label's local row; 0 where the label is on another rank."""
    mask: Tensor | None
    """bool [chunk, 1]: True where the label is on this rank; None if all are."""

    @classmethod
    def of(
        cls,
        labels: Tensor,
        vocab: VocabShard | None,
        weight: Tensor,
    ) -> _LocalLabels:
        """Build from `labels` [chunk], which are relative to this rank's first row."""
        labels = labels[:, None]
        if vocab is None:
            return cls(labels, None)
        num_rows = weight.shape[0]
        mask = (labels >= 0) & (labels < num_rows)
        return cls(labels.where(mask, 0), mask)

    def pick(self, logits: Tensor) -> Tensor:
        """Return the label's logit [chunk], -inf where another rank has it."""
        if logits.shape[1] == 0:
            return logits.new_full((len(logits),), float("-inf"))
        picked = logits.gather(1, self.row)
        if self.mask is not None:
            picked = picked.where(self.mask, float("-inf"))
        return picked.squeeze(1)

    def removed(self, logits: Tensor, thresholds: Tensor) -> Tensor:
        """Return bool [chunk, V]: True for tokens below the threshold [chunk], except the label."""
        is_removed = logits < thresholds[:, None]
        if logits.shape[1] == 0:
            return is_removed
        label_is_removed = torch.zeros_like(self.row, dtype=torch.bool)
        if self.mask is not None:
            # Index 0 stands for a label of another rank; local token 0 keeps its own value there.
            is_removed_at_row = is_removed.gather(1, self.row)
            label_is_removed = is_removed_at_row & ~self.mask
        return is_removed.scatter_(1, self.row, label_is_removed)

    def add_to(self, gradient: Tensor, values: Tensor) -> Tensor:
        """Add `values` [chunk] in place to the labels' entries of `gradient` [chunk, V]."""
        if gradient.shape[1] == 0:
            return gradient
        values = values[:, None]
        if self.mask is not None:
            values = values.where(self.mask, 0.0)
        return gradient.scatter_add_(1, self.row, values)


def _scaled_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return float32 logits [chunk, V], a new tensor that the caller may overwrite."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.float()
    if temperature == 1.0:
        return logits
    return logits.div_(temperature)


def _reduce(
    logits: Tensor,
    labels: _LocalLabels,
    sums: Tensor,
    with_entropy: bool,
    is_removed: Tensor | None,
) -> None:
    """Write to `sums` [4 or 5, chunk] the sums over `logits` [chunk, V], which are overwritten.

    With s = z - max z over this rank's rows: max z, z[label], sum exp(s), with entropy
    sum exp(s) s, and with `is_removed` sum exp(s) of the tokens that are kept.
    """
    highest, picked, total, product = sums[:4]
    picked.copy_(labels.pick(logits))
    if logits.shape[1] == 0:
        highest.fill_(_LOWEST)
    else:
        torch.amax(logits, dim=1, out=highest).clamp_(min=_LOWEST)
    # exp in place: no second [chunk, V] buffer unless the entropy needs the logits again.
    shifted = logits.sub_(highest[:, None])
    exponentials = shifted.exp() if with_entropy else shifted.exp_()
    torch.sum(exponentials, dim=1, out=total)
    if is_removed is not None:
        kept = exponentials.masked_fill(is_removed, 0.0)
        torch.sum(kept, dim=1, out=sums[4])
    if with_entropy:
        # The limit of exp(s) s for s -> -inf is 0, but 0 * -inf is NaN.
        products = exponentials.mul_(shifted).nan_to_num_(nan=0.0)
        torch.sum(products, dim=1, out=product)


def _gather(sums: Tensor, vocab: VocabShard | None) -> Tensor:
    """All-gather [ranks, 4 or 5, T] from each rank's [4 or 5, T]."""
    if vocab is None:
        return sums[None]
    gathered = gather_rows(vocab.group, sums)
    return gathered.unflatten(0, (-1, len(sums)))


def _combine(gathered: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' sums of `_reduce` to log-prob, log-sum-exp and entropy, float32 [T] each.

    Without `with_entropy` the entropy is empty.
    """
    highests, picked, totals, products = gathered[:, :4].unbind(1)
    highest = highests.amax(dim=0)
    # Rescale each rank's sums from its own maximum to the global one.
    lag = highests - highest
    scale = lag.exp()
    total = (scale * totals).sum(dim=0)
    log_total = total.log()
    # Ranks without the label have -inf.
    label_logit = picked.amax(dim=0)
    logprobs = label_logit - highest - log_total
    logsumexp = highest + log_total
    if not with_entropy:
        return logprobs, logsumexp, logprobs.new_empty(0)
    # H = lse - sum p z on shifted logits: log(total) - sum(exp(s) s) / total.
    shifted_products = products + lag * totals
    product = (scale * shifted_products).sum(dim=0)
    entropy = log_total - product / total
    return logprobs, logsumexp, entropy


def _combine_kept(
    gathered: Tensor,
    logprobs: Tensor,
    logsumexp: Tensor,
    *,
    is_filtered: bool,
) -> tuple[Tensor, Tensor]:
    """Return the filtered log-prob and lse(z) - lse(z of the kept tokens), float32 [T] each.

    Both are empty without a filter.
    """
    if not is_filtered:
        return logprobs.new_empty(0), logprobs.new_empty(0)
    highests = gathered[:, 0]
    kept_totals = gathered[:, 4]
    highest = highests.amax(dim=0)
    scale = (highests - highest).exp()
    kept_total = (scale * kept_totals).sum(dim=0)
    kept_logsumexp = highest + kept_total.log()
    log_inverse_mass = logsumexp - kept_logsumexp
    return logprobs + log_inverse_mass, log_inverse_mass


class _KeptGradient(NamedTuple):
    """Inputs of the gradient of filtered log-probs, float32 [chunk] each."""

    thresholds: Tensor
    grad: Tensor
    log_inverse_mass: Tensor


def _logits_gradient(
    logits: Tensor,
    labels: _LocalLabels,
    logsumexp: Tensor,
    grad_logprobs: Tensor | None,
    entropy: tuple[Tensor, Tensor] | None,
    kept: _KeptGradient | None,
) -> Tensor:
    """Return the gradient of the scaled logits, float32 [chunk, V]; `logits` are overwritten.

    `entropy` is (gradient, value) of the entropy. See `_ChunkedLogprobs` for the formulas.
    """
    # Before the logits are overwritten.
    is_removed = None if kept is None else labels.removed(logits, kept.thresholds)
    log_probs = logits.sub_(logsumexp[:, None])
    scale = grad_logprobs
    if scale is None:
        scale = torch.zeros_like(logsumexp)
    if entropy is None and kept is None:
        gradient = log_probs.exp_().mul_(-scale[:, None])
        return labels.add_to(gradient, scale)
    probs = log_probs.exp()
    if entropy is None:
        inner = log_probs.copy_(scale[:, None].expand_as(log_probs))
    else:
        grad_entropy, value = entropy
        # -p (gl + gH (log p + H)); a probability of exactly 0 has log p = -inf and contributes 0.
        inner = log_probs.clamp_(min=_LOWEST).add_(value[:, None])
        inner.mul_(grad_entropy[:, None]).add_(scale[:, None])
    if kept is not None and is_removed is not None:
        # p_f = p exp(lse(z) - lse(z of the kept tokens)).
        kept_scale = kept.grad * kept.log_inverse_mass.exp()
        scaled = kept_scale[:, None].expand_as(inner)
        inner.add_(scaled.masked_fill(is_removed, 0.0))
        scale = scale + kept.grad
    gradient = inner.mul_(probs).neg_()
    return labels.add_to(gradient, scale)


def _accumulate(
    total: Tensor,
    gradient: Tensor,
    hidden: Tensor,
) -> None:
    """Add gradient.T [V, chunk] @ hidden [chunk, D] to `total` [V, D], in place."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(torch.mm(gradient.t(), hidden))
