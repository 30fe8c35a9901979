"""Log-probs and entropy of tokens, straight from hidden states, a chunk of tokens at a time.

The logits of all T tokens never exist together: forward and backward each hold those of `chunk_size` tokens, and the
backward computes them again. Softmax and log are float32 whatever the hidden states are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `labels` [T] and, if asked, the entropy of each distribution, both float32 [T], both with gradient.

    `hidden` [T, D] are the last hidden states, `weight` [V, D] and `bias` [V] the output embedding; the distribution is
    softmax((hidden @ weight.T + bias) / temperature). Memory is of the order of chunk_size x V.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, labels, temperature, chunk_size, with_entropy)
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
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        logprobs = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        logsumexp = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[part], weight, bias, temperature)
            picked = logits.gather(1, labels[part, None]).squeeze(1)
            # exp in place: no second [chunk, V] buffer unless the entropy needs the logits again.
            highest = logits.amax(dim=1)
            shifted = logits.sub_(highest[:, None])
            exponentials = shifted.exp() if with_entropy else shifted.exp_()
            total = exponentials.sum(dim=1)
            logsumexp[part] = highest + total.log()
            logprobs[part] = picked - logsumexp[part]
            if with_entropy:
                # H = lse - sum p z, on shifted logits: log(total) - sum(exp(s) s) / total. exp(-inf) * -inf is 0 here.
                product = exponentials.mul_(shifted).nan_to_num_(nan=0.0)
                entropy[part] = total.log() - product.sum(dim=1) / total
        ctx.save_for_backward(hidden, weight, bias, labels, logsumexp, entropy)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy = temperature, chunk_size, with_entropy
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
            logits = _scaled_logits(hidden[part], weight, bias, ctx.temperature)
            gradient = _logits_gradient(
                logits,
                labels[part],
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
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """float32 [chunk, V], a fresh tensor that the caller may overwrite."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _logits_gradient(
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    grad_logprobs: Tensor | None,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """[chunk, V] gradient of the scaled logits, written over `logits` where nothing else needs them."""
    log_probs = logits.sub_(logsumexp[:, None])
    if entropy is None:
        probs = log_probs.exp_()
        scale = torch.zeros_like(logsumexp) if grad_logprobs is None else grad_logprobs
        gradient = probs.mul_(-scale[:, None])
    else:
        grad_entropy, value = entropy
        scale = torch.zeros_like(logsumexp) if grad_logprobs is None else grad_logprobs
        probs = log_probs.exp()
        # -p (gl + gH (log p + H)); a probability of exactly 0 has log p = -inf and contributes nothing.
        inner = log_probs.clamp_(min=torch.finfo(torch.float32).min / 4).add_(value[:, None])
        gradient = inner.mul_(grad_entropy[:, None]).add_(scale[:, None]).mul_(probs).neg_()
    return gradient.scatter_add_(1, labels[:, None], scale[:, None])


def _accumulate(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total [V, D] += gradient.T [V, chunk] @ hidden [chunk, D]."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(torch.mm(gradient.t(), hidden))
