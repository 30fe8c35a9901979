"""Log-probs and entropy of tokens, straight from hidden states, a chunk of tokens at a time.

The logits of all T tokens never exist together: forward and backward each hold those of
`chunk_size` tokens, and the backward computes them again. Softmax and log are float32 whatever the
hidden states are.

Where the vocabulary is sharded over ranks, each keeps the logits of its own rows of the output
embedding and reduces them to four numbers per token (five with a sampling filter). Those are
gathered once, after the last chunk; the backward sums the hidden states' gradient once. No tensor
of vocabulary size is communicated.
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
"""Stands for -inf where a difference is taken: its exp is 0 all the same, and no NaN comes of
it.
"""


@dataclass(frozen=True)
class VocabShard:
    """This rank holds the output embedding's rows from `start` on; the ranks of `group` together
    hold each row once.

    Shards may differ in size and be empty. With `partial_hidden_grad` the gradient of the hidden
    states stays this rank's part of it, for a caller that sums the parts itself (the backward of
    sequence parallelism does).
    """

    group: dist.ProcessGroup
    start: int
    partial_hidden_grad: bool = False


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
    """Log-prob of `labels` [T] and, with `with_entropy`, the entropy of each distribution; float32
    [T], with gradient.

    `hidden` [T, D] are the last hidden states, `weight` [V, D] and `bias` [V] the output embedding;
    the distribution is softmax((hidden @ weight.T + bias) / temperature). Memory is of the order of
    chunk_size x V.

    With `vocab`, `weight` and `bias` are this rank's rows; `hidden` and the global `labels` are the
    same on all its ranks, and so are the results, to the bit.

    With `token_filter`, `logprobs` are those of the filtered, renormalized distribution. The label
    is always kept, so its log-prob is finite. Which tokens are kept is a constant for the gradient.
    `unfiltered_logprobs` and `entropy` are those of the whole distribution. This needs two to three
    more float32 [chunk_size, V].
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    if token_filter is not None and not token_filter.is_active:
        token_filter = None
    logprobs, entropy, kept_logprobs = _ChunkedLogprobs.apply(
        hidden, weight, bias, labels, temperature, chunk_size, with_entropy, vocab, token_filter
    )
    entropy = entropy if with_entropy else None
    if token_filter is None:
        return TokenLogprobs(logprobs, entropy)
    return TokenLogprobs(kept_logprobs, entropy, logprobs)


def scatter_logprobs(outputs: TokenLogprobs, positions: Tensor, size: int) -> TokenLogprobs:
    """`outputs` of T positions as [size], each at its index in `positions` [T] and 0 elsewhere."""

    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.new_zeros(size).index_copy(0, positions, values)

    logprobs = spread(outputs.logprobs)
    assert logprobs is not None
    return TokenLogprobs(logprobs, spread(outputs.entropy), spread(outputs.unfiltered_logprobs))


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature: l = z[label] - lse(z), H = lse(z) - sum p z;
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
        num_tokens = hidden.shape[0]
        labels = labels if vocab is None else labels - vocab.start
        num_sums = 4 if token_filter is None else 5
        sums = torch.empty((num_sums, num_tokens), dtype=torch.float32, device=hidden.device)
        thresholds = None if token_filter is None else torch.empty_like(sums[0])
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[part], weight, bias, temperature)
            owned = _Owned.of(labels[part], vocab, weight)
            is_cut = None
            if token_filter is not None and thresholds is not None:
                thresholds[part] = token_filter.thresholds(
                    logits, None if vocab is None else vocab.group
                )
                is_cut = owned.cut(logits, thresholds[part])
            _reduce(logits, owned, sums[:, part], with_entropy, is_cut)
        gathered = _gather(sums, vocab)
        logprobs, logsumexp, entropy = _combine(gathered, with_entropy)
        kept_logprobs, log_inverse_mass = _combine_kept(
            gathered, logprobs, logsumexp, is_filtered=thresholds is not None
        )
        ctx.save_for_backward(
            hidden, weight, bias, labels, logsumexp, entropy, thresholds, log_inverse_mass
        )
        ctx.temperature, ctx.chunk_size, ctx.with_entropy, ctx.vocab = (
            temperature,
            chunk_size,
            with_entropy,
            vocab,
        )
        ctx.set_materialize_grads(False)
        return logprobs, entropy, kept_logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_kept: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy, thresholds, log_inverse_mass = (
            ctx.saved_tensors
        )
        if not ctx.with_entropy:
            grad_entropy = None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        num_tokens, chunk_size = hidden.shape[0], ctx.chunk_size
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in float32; a single chunk needs no second buffer.
        sum_dtype = weight.dtype if num_tokens <= chunk_size else torch.float32
        grad_weight = (
            torch.zeros(weight.shape, dtype=sum_dtype, device=weight.device)
            if needs_weight
            else None
        )
        grad_bias = (
            torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        )
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            gradient = _logits_gradient(
                _scaled_logits(hidden[part], weight, bias, ctx.temperature),
                _Owned.of(labels[part], ctx.vocab, weight),
                logsumexp[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else (grad_entropy[part], entropy[part]),
                None
                if grad_kept is None or thresholds is None
                else _KeptGradient(thresholds[part], grad_kept[part], log_inverse_mass[part]),
            ).div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight, gradient, hidden[part])
        if grad_hidden is not None and ctx.vocab is not None and not ctx.vocab.partial_hidden_grad:
            dist.all_reduce(grad_hidden, group=ctx.vocab.group)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _Owned(NamedTuple):
    """Which labels of a chunk are among this rank's rows of the vocabulary."""

    index: Tensor
    """int64 [chunk, 1]: the label's row here, some row where it has none."""
    mask: Tensor | None
    """bool [chunk, 1]; None if all are."""

    @classmethod
    def of(cls, labels: Tensor, vocab: VocabShard | None, weight: Tensor) -> _Owned:
        labels = labels[:, None]
        if vocab is None:
            return cls(labels, None)
        mask = (labels >= 0) & (labels < weight.shape[0])
        return cls(labels.where(mask, 0), mask)

    def pick(self, logits: Tensor) -> Tensor:
        """[chunk]: the label's logit, -inf where another rank has it."""
        if logits.shape[1] == 0:
            return logits.new_full((len(logits),), float("-inf"))
        picked = logits.gather(1, self.index)
        return (picked if self.mask is None else picked.where(self.mask, float("-inf"))).squeeze(1)

    def cut(self, logits: Tensor, thresholds: Tensor) -> Tensor:
        """bool [chunk, V]: tokens below their position's threshold, except the label."""
        is_cut = logits < thresholds[:, None]
        if logits.shape[1] == 0:
            return is_cut
        label_is_cut = torch.zeros_like(self.index, dtype=torch.bool)
        if self.mask is not None:  # the index of a label of another rank is that of some token here
            label_is_cut = is_cut.gather(1, self.index) & ~self.mask
        return is_cut.scatter_(1, self.index, label_is_cut)

    def add_to(self, gradient: Tensor, values: Tensor) -> Tensor:
        """Add `values` [chunk] in place where the labels' logits are."""
        if gradient.shape[1] == 0:
            return gradient
        values = values[:, None]
        return gradient.scatter_add_(
            1, self.index, values if self.mask is None else values.where(self.mask, 0.0)
        )


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    """float32 [chunk, V], a fresh tensor that the caller may overwrite."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _reduce(
    logits: Tensor, owned: _Owned, sums: Tensor, with_entropy: bool, is_cut: Tensor | None
) -> None:
    """Write to `sums` [4 or 5, chunk] the sums over `logits` [chunk, V]; the logits are
    overwritten.

    With s = z - max z over the rows here: max z, z[label], sum exp(s), with entropy sum exp(s) s,
    and with `is_cut` sum exp(s) of the tokens that are not cut.
    """
    highest, picked, total, product = sums[:4]
    picked.copy_(owned.pick(logits))
    if logits.shape[1] == 0:
        highest.fill_(_LOWEST)
    else:
        torch.amax(logits, dim=1, out=highest).clamp_(min=_LOWEST)
    # exp in place: no second [chunk, V] buffer unless the entropy needs the logits again.
    shifted = logits.sub_(highest[:, None])
    exponentials = shifted.exp() if with_entropy else shifted.exp_()
    torch.sum(exponentials, dim=1, out=total)
    if is_cut is not None:
        torch.sum(exponentials.masked_fill(is_cut, 0.0), dim=1, out=sums[4])
    if with_entropy:
        # exp(-inf) * -inf is 0 here.
        torch.sum(exponentials.mul_(shifted).nan_to_num_(nan=0.0), dim=1, out=product)


def _gather(sums: Tensor, vocab: VocabShard | None) -> Tensor:
    """[ranks, 4 or 5, T] from each rank's [4 or 5, T]."""
    return (
        sums[None]
        if vocab is None
        else gather_rows(vocab.group, sums).unflatten(0, (-1, len(sums)))
    )


def _combine(gathered: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, log-sum-exp and entropy [T] (or []) of the whole vocabulary from what `_reduce`
    wrote on each rank.
    """
    highests, picked, totals, products = gathered[:, :4].unbind(1)
    highest = highests.amax(dim=0)
    lag = highests - highest
    scale = lag.exp()
    total = (scale * totals).sum(dim=0)
    log_total = total.log()
    logprobs = picked.amax(dim=0) - highest - log_total
    if not with_entropy:
        return logprobs, highest + log_total, logprobs.new_empty(0)
    # H = lse - sum p z on shifted logits: log(total) - sum(exp(s) s) / total.
    product = (scale * (products + lag * totals)).sum(dim=0)
    return logprobs, highest + log_total, log_total - product / total


def _combine_kept(
    gathered: Tensor, logprobs: Tensor, logsumexp: Tensor, *, is_filtered: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob under the filtered distribution, and lse(z) - lse(z of the kept tokens); both [T],
    or [] unfiltered.
    """
    if not is_filtered:
        return logprobs.new_empty(0), logprobs.new_empty(0)
    highests, kept_totals = gathered[:, 0], gathered[:, 4]
    highest = highests.amax(dim=0)
    kept = ((highests - highest).exp() * kept_totals).sum(dim=0).log()
    log_inverse_mass = logsumexp - (highest + kept)
    return logprobs + log_inverse_mass, log_inverse_mass


class _KeptGradient(NamedTuple):
    """What the gradient of filtered log-probs needs, each float32 [chunk]."""

    thresholds: Tensor
    grad: Tensor
    log_inverse_mass: Tensor


def _logits_gradient(
    logits: Tensor,
    owned: _Owned,
    logsumexp: Tensor,
    grad_logprobs: Tensor | None,
    entropy: tuple[Tensor, Tensor] | None,
    kept: _KeptGradient | None,
) -> Tensor:
    """[chunk, V] gradient of the scaled logits, written over `logits` where nothing else needs
    them.
    """
    is_cut = None if kept is None else owned.cut(logits, kept.thresholds)
    log_probs = logits.sub_(logsumexp[:, None])
    scale = torch.zeros_like(logsumexp) if grad_logprobs is None else grad_logprobs
    if entropy is None and kept is None:
        gradient = log_probs.exp_().mul_(-scale[:, None])
        return owned.add_to(gradient, scale)
    probs = log_probs.exp()
    if entropy is None:
        inner = log_probs.copy_(scale[:, None].expand_as(log_probs))
    else:
        grad_entropy, value = entropy
        # -p (gl + gH (log p + H)); a probability of exactly 0 has log p = -inf and contributes
        # nothing.
        inner = log_probs.clamp_(min=_LOWEST).add_(value[:, None])
        inner.mul_(grad_entropy[:, None]).add_(scale[:, None])
    if kept is not None and is_cut is not None:
        scaled = (kept.grad * kept.log_inverse_mass.exp())[:, None].expand_as(inner)
        inner.add_(scaled.masked_fill(is_cut, 0.0))
        scale = scale + kept.grad
    return owned.add_to(inner.mul_(probs).neg_(), scale)


def _accumulate(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total [V, D] += gradient.T [V, chunk] @ hidden [chunk, D]."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(torch.mm(gradient.t(), hidden))
