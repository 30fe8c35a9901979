"""Logits of one chunk of tokens: the product with the output embedding, its reduction per token,
and its gradient.

`logprobs` and `divergence` combine the chunks; each computes the logits of a chunk in the forward
and again in the backward. The reduction and the gradient are elementwise passes over [chunk, V],
limited by memory bandwidth. Eager code overwrites the logits in these passes. Compiled code
(`policy.compile`) fuses them and allocates its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.policy.outputs import OutputEmbedding

LOWEST = torch.finfo(torch.float32).min / 4
"""Replaces -inf where a difference is taken: its exp is 0 too, and -inf - -inf would be NaN."""


class ChunkLabels(NamedTuple):
    """Labels of a chunk as rows of this rank's vocabulary shard."""

    row: Tensor
    """int64 [chunk, 1]: the label's local row; 0 where the label is on another rank."""
    mask: Tensor | None
    """bool [chunk, 1]: True where the label is on this rank; None if all are."""

    @classmethod
    def of(cls, labels: Tensor, num_rows: int, *, is_sharded: bool) -> ChunkLabels:
        """Build from `labels` [chunk], which are relative to the first of this rank's rows."""
        labels = labels[:, None]
        if not is_sharded:
            return cls(labels, None)
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
        """Add `values` [chunk] to the labels' entries of `gradient` [chunk, V], which eager code
        overwrites.
        """
        if gradient.shape[1] == 0:
            return gradient
        values = values[:, None]
        if self.mask is not None:
            values = values.where(self.mask, 0.0)
        if torch.compiler.is_compiling():
            # A comparison is fused with what follows; a scatter would need its own buffer.
            columns = torch.arange(gradient.shape[1], device=gradient.device)
            return gradient + values.where(columns == self.row, 0.0)
        return gradient.scatter_add_(1, self.row, values)


class EntropyGradient(NamedTuple):
    """Inputs of the gradient of the entropy, float32 [chunk] each."""

    grad: Tensor
    value: Tensor
    """The entropy itself."""


class KeptGradient(NamedTuple):
    """Inputs of the gradient of filtered log-probs, float32 [chunk] each."""

    thresholds: Tensor
    grad: Tensor
    log_inverse_mass: Tensor


class UpstreamGradients(NamedTuple):
    """What the gradient of the logits of a chunk needs besides the logits."""

    logsumexp: Tensor
    """float32 [chunk]."""
    logprobs: Tensor | None
    """float32 [chunk]: gradient of the log-probs."""
    entropy: EntropyGradient | None
    kept: KeptGradient | None


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Overwrite `logits` x [chunk, V] with softcap * tanh(x / softcap) and return them."""
    return logits.div_(softcap).tanh_().mul_(softcap)


def capped_gradient(capped_logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of `capped` [chunk, V] where its results are `capped_logits`."""
    return capped_logits.div(softcap).square_().neg_().add_(1.0)


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    """Return float32 logits [chunk, V], a new tensor that the caller may overwrite.

    `hidden` is [chunk, D], `weight` [V, D] and `bias` [V]. On CUDA the float32 sums of a product in
    half precision are returned as they are; elsewhere they are rounded to the dtype of `hidden`.
    """
    if hidden.dtype != torch.float32 and has_float32_products(hidden.device.type):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        if bias is not None:
            logits.add_(bias)
    else:
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if temperature == 1.0:
        return logits
    return logits.div_(temperature)


def reduce_logits(
    logits: Tensor,
    labels: ChunkLabels,
    is_removed: Tensor | None,
    *,
    with_entropy: bool,
    in_place: bool,
) -> Tensor:
    """Return [sums, chunk]: the sums over `logits` [chunk, V], overwritten if `in_place`.

    With s = z - max z over this rank's rows: max z, z[label], sum exp(s), with entropy
    sum exp(s) s, and last with `is_removed` [chunk, V] sum exp(s) of the tokens that are kept.
    """
    picked = labels.pick(logits)
    if logits.shape[1] == 0:
        highest = torch.full_like(picked, LOWEST)
    else:
        highest = torch.amax(logits, dim=1).clamp(min=LOWEST)
    buffer = logits if in_place else None
    shifted = torch.sub(logits, highest[:, None], out=buffer)
    # The entropy needs the logits again, and therefore a second [chunk, V].
    exponentials = torch.exp(shifted, out=None if with_entropy else buffer)
    sums = [highest, picked, exponentials.sum(dim=1)]
    kept = None
    if is_removed is not None:
        kept = exponentials.masked_fill(is_removed, 0.0).sum(dim=1)
    if with_entropy:
        products = torch.mul(exponentials, shifted, out=exponentials if in_place else None)
        # The limit of exp(s) s for s -> -inf is 0, but 0 * -inf is NaN.
        products = torch.nan_to_num(products, nan=0.0, out=products if in_place else None)
        sums.append(products.sum(dim=1))
    if kept is not None:
        sums.append(kept)
    return torch.stack(sums)


def logits_gradient(
    logits: Tensor,
    labels: ChunkLabels,
    upstream: UpstreamGradients,
    *,
    dtype: torch.dtype,
    in_place: bool,
) -> Tensor:
    """Return the gradient of `logits` [chunk, V], in `dtype`; `in_place` overwrites the logits.

    See `logprobs` for the formulas.
    """
    logsumexp, grad_logprobs, entropy, kept = upstream
    # Before the logits are overwritten.
    is_removed = None if kept is None else labels.removed(logits, kept.thresholds)
    buffer = logits if in_place else None
    log_probs = torch.sub(logits, logsumexp[:, None], out=buffer)
    scale = grad_logprobs
    if scale is None:
        scale = torch.zeros_like(logsumexp)
    if entropy is None and kept is None:
        # (p - onehot) times -gl, so that the product and the conversion are one pass.
        probs = torch.exp(log_probs, out=buffer)
        difference = labels.add_to(probs, -torch.ones_like(scale))
        return _product_as(difference, -scale[:, None], dtype)
    probs = torch.exp(log_probs)
    # The factor of -p. All terms are negated as vectors [chunk], which needs no pass.
    if entropy is None:
        inner = (-scale)[:, None].expand_as(log_probs)
    else:
        # gl + gH (log p + H); a probability of exactly 0 has log p = -inf and contributes 0.
        inner = torch.clamp(log_probs, min=LOWEST, out=buffer)
        inner = torch.add(inner, entropy.value[:, None], out=buffer)
        inner = torch.mul(inner, -entropy.grad[:, None], out=buffer)
        inner = torch.sub(inner, scale[:, None], out=buffer)
    if kept is not None and is_removed is not None:
        # p_f = p exp(lse(z) - lse(z of the kept tokens)).
        kept_scale = -kept.grad * kept.log_inverse_mass.exp()
        scaled = kept_scale[:, None].expand_as(log_probs)
        inner = torch.add(inner, scaled.masked_fill(is_removed, 0.0), out=buffer)
        scale = scale + kept.grad
    gradient = torch.mul(inner, probs, out=buffer)
    return labels.add_to(gradient, scale).to(dtype)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `reduce_logits` or `logits_gradient` compiled, once per process.

    torch.compile specializes on the vocabulary and makes the number of tokens dynamic after the
    first two sizes: a full chunk and the last one.
    """
    return torch.compile(function)


def add_weight_gradient(
    total: Tensor | None, gradient: Tensor, hidden: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `total` plus gradient.T [V, chunk] @ hidden [chunk, D], [V, D] of `dtype`.

    `total` is overwritten; None is zero.
    """
    transposed = gradient.t()
    if dtype == gradient.dtype:
        if total is None:
            return torch.mm(transposed, hidden)
        return total.addmm_(transposed, hidden)
    if has_float32_products(hidden.device.type):
        if total is None:
            return torch.mm(transposed, hidden, out_dtype=dtype)
        return torch.addmm(total, transposed, hidden, out_dtype=dtype, out=total)
    product = torch.mm(transposed, hidden)
    if total is None:
        return product.to(dtype)
    return total.add_(product)


def finished_gradient(weight: Tensor, total: Tensor | None) -> Tensor:
    """Return the sum `total` of `add_weight_gradient` over all chunks in the dtype of `weight`.

    Both are [V, D]; None, the sum without a chunk, is zero.
    """
    return torch.zeros_like(weight) if total is None else total.to(weight.dtype)


@cache
def has_float32_products(device_type: str) -> bool:
    """Return True if products in half precision can be returned and summed in float32.

    CUDA has them from PyTorch 2.8 on, with other restrictions in each release; tried once.
    """
    if device_type != "cuda" or "dtype" not in torch.ops.aten.addmm.overloads():
        return False
    generator = torch.Generator().manual_seed(0)
    left, right, first = torch.randn(3, 16, 16, generator=generator).bfloat16().to(device_type)
    total = first.float()
    # Products of bfloat16 values and their sums of 16 are nearly exact in float32.
    expected = left.double() @ right.double() + first.double()
    try:
        torch.mm(left, right, out_dtype=torch.float32)
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return torch.allclose(total.double(), expected, rtol=1e-5, atol=1e-5)


def _product_as(values: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` [chunk, V] times `factors` [chunk, 1] in `dtype`; eager code overwrites
    `values` if it has this dtype.
    """
    if torch.compiler.is_compiling():
        return (values * factors).to(dtype)
    if values.dtype == dtype:
        return values.mul_(factors)
    return torch.mul(values, factors, out=torch.empty_like(values, dtype=dtype))


class ProjectionGradients(NamedTuple):
    """Gradients of `hidden` [T, D], `weight` [V, D] and `bias` [V]; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def projection_gradients(
    embedding: OutputEmbedding,
    needs: Sequence[bool],
    logits_gradient: Callable[[int, slice], Tensor],
) -> ProjectionGradients:
    """Return the gradients of the inputs of the product that `needs` names, in this order.

    `logits_gradient(index, part)` returns the gradient of the logits [chunk, V] of the tokens
    `embedding.chunks()[index]`, in float32 or in the dtype of the hidden states.
    """
    hidden, weight, bias = embedding.hidden, embedding.weight, embedding.bias
    vocab = embedding.options.vocab
    chunks = embedding.chunks()
    needs_hidden, needs_weight, needs_bias = needs
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_bias = None
    if needs_bias and bias is not None:
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    # Several chunks are summed in float32; a single chunk needs no such buffer.
    sum_dtype = weight.dtype if len(chunks) <= 1 else torch.float32
    grad_weight = None
    for index, part in enumerate(chunks):
        gradient = logits_gradient(index, part)
        if grad_bias is not None:
            grad_bias += gradient.sum(dim=0, dtype=torch.float32)
        gradient = gradient.to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(gradient, weight, out=grad_hidden[part])
        if needs_weight:
            grad_weight = add_weight_gradient(grad_weight, gradient, hidden[part], sum_dtype)
        # Freed before the logits of the next chunk are computed.
        del gradient
    # Each rank has the gradient from its own vocabulary rows.
    if grad_hidden is not None and vocab is not None and not vocab.partial_hidden_grad:
        dist.all_reduce(grad_hidden, group=vocab.group)
    if needs_weight:
        grad_weight = finished_gradient(weight, grad_weight)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return ProjectionGradients(grad_hidden, grad_weight, grad_bias)
