"""Log-probs and entropy of tokens from hidden states, one chunk of tokens at a time.

The logits of all T tokens never exist together: forward and backward each materialise the logits of
`chunk_size` tokens, and the backward recomputes them. Softmax and log are float32 whatever the
dtype of the hidden states is.

Where the vocabulary is sharded over ranks, each rank computes the logits of its own rows of the
output embedding and reduces them to three numbers per token (one more with entropy, and one with a
sampling filter). Those are all-gathered once, after the last chunk; the backward all-reduces the
hidden states' gradient once. No tensor of vocabulary size is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.config.errors import ConfigError
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.heads.logit_chunks import (
    ChunkLabels,
    EntropyGradient,
    KeptGradient,
    capped,
    capped_gradient,
    compiled,
    logits_gradient,
    projection_gradients,
    reduce_logits,
    scaled_logits,
    token_chunks,
)
from nemo_like.policy.inputs.model_inputs import ModelInputs, OutputEmbedding, TokenLogprobs
from nemo_like.policy.vocab_shard import VocabShard
from nemo_like.sampling_filter import SamplingFilter


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
    softcap: float | None = None,
    compile: bool = False,
) -> TokenLogprobs:
    """Return the log-prob of `labels` and, with `with_entropy`, the entropy; float32 [T] each.

    `hidden` [T, D] are the last hidden states, `labels` int64 [T], `weight` [V, D] and `bias` [V]
    the output embedding. The distribution is softmax(x) of x = (hidden @ weight.T + bias) /
    temperature, or with `softcap` softmax(softcap * tanh(x / softcap)).
    Both results have a gradient. Memory is of the order of chunk_size x V. `is_argmax` bool [T]
    compares two numbers per token that the log-prob needs anyway, and takes no pass of its own.

    With `vocab`, `weight` and `bias` are this rank's rows; `hidden` and the global `labels` are the
    same on all its ranks, and the results are bit-equal on them.

    With `token_filter`, `logprobs` refer to the filtered, renormalized distribution. The label
    is always kept, so its log-prob is finite. The set of kept tokens is a constant for the
    gradient. `unfiltered_logprobs` and `entropy` refer to the unfiltered distribution. This
    needs two to three more float32 [chunk_size, V].

    With `compile` the passes over the logits are compiled by torch.compile; the results are equal
    up to rounding.

    Raises ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    if token_filter is not None and not token_filter.is_active:
        token_filter = None
    logprobs, entropy, kept_logprobs, is_argmax = _ChunkedLogprobs.apply(
        hidden,
        weight,
        bias,
        labels,
        _Options(
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            vocab=vocab,
            token_filter=token_filter,
            softcap=softcap,
            is_compiled=compile,
        ),
    )
    entropy = entropy if with_entropy else None
    if token_filter is None:
        return TokenLogprobs(logprobs, entropy, is_argmax=is_argmax)
    return TokenLogprobs(kept_logprobs, entropy, logprobs, is_argmax)


def scatter_logprobs(outputs: TokenLogprobs, positions: Tensor, size: int) -> TokenLogprobs:
    """Scatter `outputs` [T] to [size], to the indices `positions` int64 [T]; 0 elsewhere."""

    def scatter(values: Tensor) -> Tensor:
        """Return [size] with `values` [T] at `positions`."""
        return values.new_zeros(size).index_copy(0, positions, values)

    entropy = outputs.entropy
    unfiltered = outputs.unfiltered_logprobs
    is_argmax = outputs.is_argmax
    return TokenLogprobs(
        scatter(outputs.logprobs),
        None if entropy is None else scatter(entropy),
        None if unfiltered is None else scatter(unfiltered),
        None if is_argmax is None else scatter(is_argmax),
    )


@dataclass(frozen=True)
class _Options:
    """Arguments of `token_logprobs` that are not tensors."""

    temperature: float
    chunk_size: int
    with_entropy: bool
    vocab: VocabShard | None
    token_filter: SamplingFilter | None
    softcap: float | None
    is_compiled: bool

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return consecutive slices of at most `chunk_size` tokens."""
        return list(token_chunks(num_tokens, self.chunk_size))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return float32 logits [chunk, V] of `hidden` [chunk, D] that the caller may overwrite."""
        logits = scaled_logits(hidden, weight, bias, self.temperature)
        return logits if self.softcap is None else capped(logits, self.softcap)

    def labels(self, labels: Tensor, num_rows: int) -> ChunkLabels:
        """Return the labels of a chunk, int64 [chunk], as rows of this rank's `num_rows`."""
        return ChunkLabels.of(labels, num_rows, is_sharded=self.vocab is not None)

    def run(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a function of `logit_chunks`, compiled if so configured.

        The result is [sums, chunk] of `reduce_logits`, or [chunk, V] of `logits_gradient`.
        """
        if self.is_compiled:
            return compiled(function)(*args, **kwargs, in_place=False)
        return function(*args, **kwargs, in_place=True)


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
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return l, H and l_f, float32 [T] each, and bool [T]: True where z[label] is max z.

        H and l_f are empty if they are not computed.
        """
        if options.vocab is not None:
            labels = labels - options.vocab.start
        is_filtered = options.token_filter is not None
        num_tokens = hidden.shape[0]
        num_sums = 3 + options.with_entropy + is_filtered
        sums = torch.empty((num_sums, num_tokens), dtype=torch.float32, device=hidden.device)
        thresholds = torch.empty_like(sums[0]) if is_filtered else None
        for chunk in options.chunks(num_tokens):
            logits = options.logits(hidden[chunk], weight, bias)
            chunk_labels = options.labels(labels[chunk], len(weight))
            is_removed = None
            if options.token_filter is not None and thresholds is not None:
                group = None if options.vocab is None else options.vocab.group
                thresholds[chunk] = options.token_filter.thresholds(logits, group)
                is_removed = chunk_labels.removed(logits, thresholds[chunk])
            sums[:, chunk] = options.run(
                reduce_logits, logits, chunk_labels, is_removed, with_entropy=options.with_entropy
            )
        gathered = _gather(sums, options.vocab)
        logprobs, logsumexp, entropy, is_argmax = _combine(gathered, options.with_entropy)
        kept_logprobs, log_inverse_mass = _combine_kept(
            gathered, logprobs, logsumexp, is_filtered=is_filtered
        )
        ctx.save_for_backward(
            hidden, weight, bias, labels, logsumexp, entropy, thresholds, log_inverse_mass
        )
        ctx.options = options
        # Outputs without gradient then give None in the backward, and their terms are skipped.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(is_argmax)
        return logprobs, entropy, kept_logprobs, is_argmax

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_kept: Tensor | None,
        grad_argmax: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` [T, D], `weight` [V, D] and `bias` [V]."""
        hidden, weight, bias, labels, *reduced = ctx.saved_tensors
        options: _Options = ctx.options
        if not options.with_entropy:
            grad_entropy = None
        # Divided as vectors [T], so that the gradient of the logits needs no pass for it.
        of_chunk = _ChunkGradients(
            _divided(grad_logprobs, options.temperature),
            _divided(grad_entropy, options.temperature),
            _divided(grad_kept, options.temperature),
            *reduced,
        )

        def gradient_of(_: int, part: slice) -> Tensor:
            """Return the gradient of the logits of a chunk, [chunk, V], as dtype of `hidden`."""
            logits = options.logits(hidden[part], weight, bias)
            # Before the logits are overwritten.
            cap = None if options.softcap is None else capped_gradient(logits, options.softcap)
            gradient = options.run(
                logits_gradient,
                logits,
                options.labels(labels[part], len(weight)),
                *of_chunk.of(part),
                dtype=hidden.dtype,
            )
            return gradient if cap is None else gradient * cap

        gradients = projection_gradients(
            hidden,
            weight,
            bias,
            ctx.needs_input_grad[:3],
            options.chunks(len(hidden)),
            gradient_of,
            options.vocab,
        )
        return *gradients, None, None


@dataclass(frozen=True)
class _ChunkGradients:
    """What the backward of a chunk reads besides the logits; float32 [T] each.

    Tensors that are not needed are None or empty.
    """

    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    grad_kept: Tensor | None
    logsumexp: Tensor
    entropy: Tensor
    thresholds: Tensor | None
    log_inverse_mass: Tensor

    def of(
        self, part: slice
    ) -> tuple[Tensor, Tensor | None, EntropyGradient | None, KeptGradient | None]:
        """Return the tensors [chunk] in the order of the arguments of `logits_gradient`."""
        entropy = None
        if self.grad_entropy is not None:
            entropy = EntropyGradient(self.grad_entropy[part], self.entropy[part])
        kept = None
        if self.grad_kept is not None and self.thresholds is not None:
            kept = KeptGradient(
                self.thresholds[part], self.grad_kept[part], self.log_inverse_mass[part]
            )
        grad_logprobs = None if self.grad_logprobs is None else self.grad_logprobs[part]
        return self.logsumexp[part], grad_logprobs, entropy, kept


def _divided(gradient: Tensor | None, divisor: float) -> Tensor | None:
    """Return `gradient` [T] / `divisor`; None for None."""
    return None if gradient is None else gradient / divisor


def _gather(sums: Tensor, vocab: VocabShard | None) -> Tensor:
    """All-gather [ranks, sums, T] from each rank's [sums, T]."""
    if vocab is None:
        return sums[None]
    gathered = gather_rows(vocab.group, sums)
    return gathered.unflatten(0, (-1, len(sums)))


def _combine(gathered: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the ranks' sums of `reduce_logits` to log-prob, log-sum-exp, entropy and argmax.

    `gathered` is [ranks, sums, T]. The results are float32 [T], without `with_entropy` the entropy
    is empty, and bool [T]: True where no logit is larger than the label's.
    """
    highests, picked, totals = gathered[:, :3].unbind(1)
    highest = highests.amax(dim=0)
    # Rescale each rank's sums from its own maximum to the global one.
    lag = highests - highest
    scale = lag.exp()
    total = (scale * totals).sum(dim=0)
    log_total = total.log()
    # Ranks without the label have -inf.
    label_logit = picked.amax(dim=0)
    # Exact: both are elements of the same logits.
    is_argmax = label_logit >= highest
    logprobs = label_logit - highest - log_total
    logsumexp = highest + log_total
    if not with_entropy:
        return logprobs, logsumexp, logprobs.new_empty(0), is_argmax
    # H = lse - sum p z on shifted logits: log(total) - sum(exp(s) s) / total.
    shifted_products = gathered[:, 3] + lag * totals
    product = (scale * shifted_products).sum(dim=0)
    entropy = log_total - product / total
    return logprobs, logsumexp, entropy, is_argmax


def _combine_kept(
    gathered: Tensor, logprobs: Tensor, logsumexp: Tensor, *, is_filtered: bool
) -> tuple[Tensor, Tensor]:
    """Return the filtered log-prob and lse(z) - lse(z of the kept tokens), float32 [T] each.

    Both are empty without a filter.
    """
    if not is_filtered:
        return logprobs.new_empty(0), logprobs.new_empty(0)
    highests = gathered[:, 0]
    kept_totals = gathered[:, -1]
    highest = highests.amax(dim=0)
    scale = (highests - highest).exp()
    kept_total = (scale * kept_totals).sum(dim=0)
    kept_logsumexp = highest + kept_total.log()
    log_inverse_mass = logsumexp - kept_logsumexp
    return logprobs + log_inverse_mass, log_inverse_mass


def label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    inputs: ModelInputs,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
    token_filter: SamplingFilter | None,
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    compile: bool = False,
) -> TokenLogprobs:
    """Log-prob of `inputs.labels`, float32 [T]; 0 where `inputs.label_mask` is False.

    `hidden` [T, D] are the last hidden states of all T positions of this rank, `weight` [V, D] and
    `bias` [V] this rank's rows of the output embedding. `scale` and `softcap` are those of
    `ModelSpec`, before the temperature. See `token_logprobs` for the rest. A head of the microbatch
    takes the place of all this; it raises ConfigError for a soft cap.
    """
    if inputs.head is not None:
        if softcap is not None:
            raise ConfigError(
                "policy.model_name has soft-capped logits, which losses of complete distributions"
                " (distillation) do not support; use a model without a soft cap"
            )
        if scale != 1.0:
            hidden = hidden * scale
            bias = None if bias is None else bias * scale
        embedding = OutputEmbedding(
            hidden=hidden, weight=weight, bias=bias, vocab=vocab, chunk_size=chunk_size
        )
        return inputs.head(embedding, inputs)
    # Only positions with a label meet the vocabulary: in RL most of a row is prompt.
    positions = inputs.label_positions
    outputs = token_logprobs(
        hidden.index_select(0, inputs.hidden_positions),
        weight,
        inputs.labels.index_select(0, positions),
        temperature=temperature / scale,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        bias=bias,
        vocab=vocab,
        token_filter=token_filter,
        softcap=None if softcap is None else softcap / temperature,
        compile=compile,
    )
    return scatter_logprobs(outputs, positions, len(inputs.labels))
