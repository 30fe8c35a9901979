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

import dataclasses
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
    UpstreamGradients,
    capped,
    capped_gradient,
    compiled,
    logits_gradient,
    projection_gradients,
    reduce_logits,
    scaled_logits,
)
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.outputs import (
    PLAIN,
    LogitOptions,
    OutputEmbedding,
    TokenDistribution,
    TokenLogprobs,
    VocabShard,
)
from nemo_like.sampling_filter import SamplingFilter


def token_logprobs(
    embedding: OutputEmbedding, labels: Tensor, distribution: TokenDistribution = PLAIN
) -> TokenLogprobs:
    """Return the log-prob of `labels` and, if `distribution` has it, the entropy; float32 [T] each.

    `labels` are int64 [T], one for each of the T hidden states of `embedding`. The distribution is
    softmax(x) of x = (hidden @ weight.T + bias) * scale / temperature, or with a soft cap c
    softmax(c / temperature * tanh((hidden @ weight.T + bias) * scale / c)).
    Both results have a gradient. Memory is of the order of chunk_size x V. `is_argmax` bool [T]
    compares two numbers per token that the log-prob needs anyway, and takes no pass of its own.

    With a sharded vocabulary, `labels` are global; hidden states and labels are the same on all
    ranks of the vocabulary, and the results are bit-equal on them.

    With a token filter, `logprobs` refer to the filtered, renormalized distribution. The label
    is always kept, so its log-prob is finite. The set of kept tokens is a constant for the
    gradient. `unfiltered_logprobs` and `entropy` refer to the unfiltered distribution. This
    needs two to three more float32 [chunk_size, V].
    """
    call = _Call(distribution, embedding.options)
    logprobs, entropy, kept_logprobs, is_argmax = _ChunkedLogprobs.apply(
        embedding.hidden, embedding.weight, embedding.bias, labels, call
    )
    entropy = entropy if distribution.with_entropy else None
    if call.token_filter is None:
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
class _Call:
    """Arguments of `token_logprobs` without the tensors, which autograd has to save itself."""

    distribution: TokenDistribution
    options: LogitOptions

    @property
    def token_filter(self) -> SamplingFilter | None:
        """The filter; None if it keeps every token."""
        token_filter = self.distribution.token_filter
        return None if token_filter is None or not token_filter.is_active else token_filter

    @property
    def temperature(self) -> float:
        """Divisor of the product of hidden states and weight."""
        return self.distribution.temperature / self.options.scale

    @property
    def softcap(self) -> float | None:
        """Soft cap of the logits after the division by the temperature."""
        softcap = self.options.softcap
        return None if softcap is None else softcap / self.distribution.temperature

    def logits(self, embedding: OutputEmbedding, part: slice) -> Tensor:
        """Return float32 logits [chunk, V] of a chunk that the caller may overwrite."""
        hidden = embedding.hidden[part]
        logits = scaled_logits(hidden, embedding.weight, embedding.bias, self.temperature)
        return logits if self.softcap is None else capped(logits, self.softcap)

    def labels(self, labels: Tensor, num_rows: int) -> ChunkLabels:
        """Return the labels of a chunk, int64 [chunk], as rows of this rank's `num_rows`."""
        return ChunkLabels.of(labels, num_rows, is_sharded=self.options.vocab is not None)

    def run(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a function of `logit_chunks`, compiled if so configured.

        The result is [sums, chunk] of `reduce_logits`, or [chunk, V] of `logits_gradient`.
        """
        if self.options.is_compiled:
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
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return l, H and l_f, float32 [T] each, and bool [T]: True where z[label] is max z.

        H and l_f are empty if they are not computed.
        """
        embedding = OutputEmbedding(hidden=hidden, weight=weight, bias=bias, options=call.options)
        vocab = call.options.vocab
        with_entropy = call.distribution.with_entropy
        labels = labels - embedding.vocab_start
        is_filtered = call.token_filter is not None
        num_sums = 3 + with_entropy + is_filtered
        sums = torch.empty((num_sums, len(hidden)), dtype=torch.float32, device=hidden.device)
        thresholds = torch.empty_like(sums[0]) if is_filtered else None
        for chunk in embedding.chunks():
            logits = call.logits(embedding, chunk)
            chunk_labels = call.labels(labels[chunk], len(weight))
            is_removed = None
            if call.token_filter is not None and thresholds is not None:
                group = None if vocab is None else vocab.group
                thresholds[chunk] = call.token_filter.thresholds(logits, group)
                is_removed = chunk_labels.removed(logits, thresholds[chunk])
            sums[:, chunk] = call.run(
                reduce_logits, logits, chunk_labels, is_removed, with_entropy=with_entropy
            )
        gathered = _gather(sums, vocab)
        logprobs, logsumexp, entropy, is_argmax = _combine(gathered, with_entropy)
        kept_logprobs, log_inverse_mass = _combine_kept(
            gathered, logprobs, logsumexp, is_filtered=is_filtered
        )
        ctx.save_for_backward(
            hidden, weight, bias, labels, logsumexp, entropy, thresholds, log_inverse_mass
        )
        ctx.call = call
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
        call: _Call = ctx.call
        embedding = OutputEmbedding(hidden=hidden, weight=weight, bias=bias, options=call.options)
        if not call.distribution.with_entropy:
            grad_entropy = None
        # Divided as vectors [T], so that the gradient of the logits needs no pass for it.
        of_chunk = _ChunkGradients(
            _divided(grad_logprobs, call.temperature),
            _divided(grad_entropy, call.temperature),
            _divided(grad_kept, call.temperature),
            *reduced,
        )

        def gradient_of(_: int, part: slice) -> Tensor:
            """Return the gradient of the logits of a chunk, [chunk, V], as dtype of `hidden`."""
            logits = call.logits(embedding, part)
            # Before the logits are overwritten.
            cap = None if call.softcap is None else capped_gradient(logits, call.softcap)
            gradient = call.run(
                logits_gradient,
                logits,
                call.labels(labels[part], len(weight)),
                of_chunk.of(part),
                dtype=hidden.dtype,
            )
            return gradient if cap is None else gradient * cap

        gradients = projection_gradients(embedding, ctx.needs_input_grad[:3], gradient_of)
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

    def of(self, part: slice) -> UpstreamGradients:
        """Return the tensors of a chunk."""
        entropy = None
        if self.grad_entropy is not None:
            entropy = EntropyGradient(self.grad_entropy[part], self.entropy[part])
        kept = None
        if self.grad_kept is not None and self.thresholds is not None:
            kept = KeptGradient(
                self.thresholds[part], self.grad_kept[part], self.log_inverse_mass[part]
            )
        grad_logprobs = None if self.grad_logprobs is None else self.grad_logprobs[part]
        return UpstreamGradients(self.logsumexp[part], grad_logprobs, entropy, kept)


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
    embedding: OutputEmbedding, inputs: ModelInputs, distribution: TokenDistribution
) -> TokenLogprobs:
    """Log-prob of `inputs.labels`, float32 [T]; 0 where `inputs.label_mask` is False.

    `embedding` has the last hidden states of all T positions of this rank. See `token_logprobs` for
    the rest. A head of the microbatch takes the place of all this, with logits that are already
    scaled; it raises ConfigError for a soft cap.
    """
    if inputs.head is not None:
        return inputs.head(_scaled(embedding), inputs)
    # Only positions with a label meet the vocabulary: in RL most of a row is prompt.
    positions = inputs.label_positions
    hidden = embedding.hidden.index_select(0, inputs.hidden_positions)
    labels = inputs.labels.index_select(0, positions)
    outputs = token_logprobs(dataclasses.replace(embedding, hidden=hidden), labels, distribution)
    return scatter_logprobs(outputs, positions, len(inputs.labels))


def _scaled(embedding: OutputEmbedding) -> OutputEmbedding:
    """Return an embedding with the same logits and a scale of 1; ConfigError for a soft cap."""
    options = embedding.options
    if options.softcap is not None:
        raise ConfigError(
            "policy.model_name has soft-capped logits, which losses of complete distributions"
            " (distillation) do not support; use a model without a soft cap"
        )
    # These heads run few passes per chunk, which compiled code would not make faster.
    embedding = dataclasses.replace(
        embedding, options=dataclasses.replace(options, scale=1.0, is_compiled=False)
    )
    if options.scale == 1.0:
        return embedding
    hidden = embedding.hidden * options.scale
    bias = None if embedding.bias is None else embedding.bias * options.scale
    return dataclasses.replace(embedding, hidden=hidden, bias=bias)
