"""Log-probs and entropy of tokens, straight from hidden states, a chunk of tokens at a time.

The logits of all T tokens never exist together: forward and backward each hold those of `chunk_size` tokens, and the
backward computes them again. Softmax and log are float32 whatever the hidden states are.

Where the vocabulary is spread over ranks, each keeps the logits of its own rows of the output embedding and reduces them
to four numbers per token. Those are gathered once, after the last chunk; the backward sums the hidden states' gradient
once. Nothing of the size of the vocabulary travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.policy.collectives import gather_rows

_LOWEST = torch.finfo(torch.float32).min / 4
"""Stands for -inf where a difference is taken: its exp is 0 all the same, and no NaN comes of it."""


@dataclass(frozen=True)
class VocabShard:
    """This rank holds the output embedding's rows from `start` on; the ranks of `group` together hold each row once.

    Shards may differ in size and be empty. With `partial_hidden_grad` the gradient of the hidden states stays this
    rank's part of it, for a caller that sums the parts itself (the backward of sequence parallelism does).
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
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `labels` [T] and, if asked, the entropy of each distribution, both float32 [T], both with gradient.

    `hidden` [T, D] are the last hidden states, `weight` [V, D] and `bias` [V] the output embedding; the distribution is
    softmax((hidden @ weight.T + bias) / temperature). Memory is of the order of chunk_size x V.

    With `vocab`, `weight` and `bias` are this rank's rows; `hidden` and the global `labels` are the same on all its
    ranks, and so are the results, to the bit.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, labels, temperature, chunk_size, with_entropy, vocab)
    return logprobs, entropy if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature: l = z[label] - lse(z), H = lse(z) - sum p z;
    dl/dz = onehot(label) - p and dH/dz = -p (log p + H)."""

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
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        labels = labels if vocab is None else labels - vocab.start
        sums = torch.empty((4, num_tokens), dtype=torch.float32, device=hidden.device)
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[part], weight, bias, temperature)
            _reduce(logits, _Owned.of(labels[part], vocab, weight), sums[:, part], with_entropy)
        logprobs, logsumexp, entropy = _combine(_gather(sums, vocab), with_entropy)
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy, ctx.vocab = temperature, chunk_size, with_entropy, vocab
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, logsumexp, entropy = ctx.saved_tensors
        if not ctx.with_entropy:
            grad_entropy = None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        num_tokens, chunk_size = hidden.shape[0], ctx.chunk_size
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in float32; a single chunk needs no second buffer.
        sum_dtype = weight.dtype if num_tokens <= chunk_size else torch.float32
        grad_weight = torch.zeros(weight.shape, dtype=sum_dtype, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            gradient = _logits_gradient(
                _scaled_logits(hidden[part], weight, bias, ctx.temperature),
                _Owned.of(labels[part], ctx.vocab, weight),
                logsumexp[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else (grad_entropy[part], entropy[part]),
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
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


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

    def add_to(self, gradient: Tensor, values: Tensor) -> Tensor:
        """Add `values` [chunk] in place where the labels' logits are."""
        if gradient.shape[1] == 0:
            return gradient
        values = values[:, None]
        return gradient.scatter_add_(1, self.index, values if self.mask is None else values.where(self.mask, 0.0))


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """float32 [chunk, V], a fresh tensor that the caller may overwrite."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _reduce(logits: Tensor, owned: _Owned, sums: Tensor, with_entropy: bool) -> None:
    """Write to `sums` [4, chunk] what all of `logits` [chunk, V] comes to; the logits are overwritten.

    With s = z - max z over the rows here: max z, z[label], sum exp(s) and, if asked, sum exp(s) s.
    """
    highest, picked, total, product = sums
    picked.copy_(owned.pick(logits))
    if logits.shape[1] == 0:
        highest.fill_(_LOWEST)
    else:
        torch.amax(logits, dim=1, out=highest).clamp_(min=_LOWEST)
    # exp in place: no second [chunk, V] buffer unless the entropy needs the logits again.
    shifted = logits.sub_(highest[:, None])
    exponentials = shifted.exp() if with_entropy else shifted.exp_()
    torch.sum(exponentials, dim=1, out=total)
    if with_entropy:
        # exp(-inf) * -inf is 0 here.
        torch.sum(exponentials.mul_(shifted).nan_to_num_(nan=0.0), dim=1, out=product)


def _gather(sums: Tensor, vocab: VocabShard | None) -> Tensor:
    """[ranks, 4, T] from each rank's [4, T]."""
    return sums[None] if vocab is None else gather_rows(vocab.group, sums).unflatten(0, (-1, len(sums)))


def _combine(gathered: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, log-sum-exp and entropy [T] (or []) of the whole vocabulary from what `_reduce` wrote on each rank."""
    highests, picked, totals, products = gathered.unbind(1)
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


def _logits_gradient(
    logits: Tensor,
    owned: _Owned,
    logsumexp: Tensor,
    grad_logprobs: Tensor | None,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """[chunk, V] gradient of the scaled logits, written over `logits` where nothing else needs them."""
    log_probs = logits.sub_(logsumexp[:, None])
    scale = torch.zeros_like(logsumexp) if grad_logprobs is None else grad_logprobs
    if entropy is None:
        gradient = log_probs.exp_().mul_(-scale[:, None])
    else:
        grad_entropy, value = entropy
        probs = log_probs.exp()
        # -p (gl + gH (log p + H)); a probability of exactly 0 has log p = -inf and contributes nothing.
        inner = log_probs.clamp_(min=_LOWEST).add_(value[:, None])
        gradient = inner.mul_(grad_entropy[:, None]).add_(scale[:, None]).mul_(probs).neg_()
    return owned.add_to(gradient, scale)


def _accumulate(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total [V, D] += gradient.T [V, chunk] @ hidden [chunk, D]."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(torch.mm(gradient.t(), hidden))
