"""Log-probs of a microbatch from its last hidden states, for either engine's output embedding."""

from __future__ import annotations

from torch import Tensor

from nemo_like.policy.logprobs import scatter_logprobs, token_logprobs
from nemo_like.policy.model_inputs import ModelInputs, OutputEmbedding, TokenLogprobs
from nemo_like.policy.projection import VocabShard
from nemo_like.sampling_filter import SamplingFilter


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
    compile: bool = False,
) -> TokenLogprobs:
    """Log-prob of `inputs.labels`, float32 [T]; 0 where `inputs.label_mask` is False.

    `hidden` [T, D] are the last hidden states of all T positions of this rank, `weight` [V, D] and
    `bias` [V] this rank's rows of the output embedding. See `token_logprobs` for the rest. A head
    of the microbatch takes the place of all this.
    """
    if inputs.head is not None:
        embedding = OutputEmbedding(
            hidden=hidden, weight=weight, bias=bias, vocab=vocab, chunk_size=chunk_size
        )
        return inputs.head(embedding, inputs)
    # Only positions with a label meet the vocabulary: in RL most of a row is prompt.
    positions = inputs.label_positions
    outputs = token_logprobs(
        hidden.index_select(0, positions),
        weight,
        inputs.labels.index_select(0, positions),
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        bias=bias,
        vocab=vocab,
        token_filter=token_filter,
        compile=compile,
    )
    return scatter_logprobs(outputs, positions, len(hidden))
