"""Inputs and results of an output head: an embedding, a distribution, and log-probs per token.

Only values; `heads` computes them and `inputs` passes them along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from nemo_like.sampling_filter import SamplingFilter


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


@dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """How logits are computed from hidden states and an output embedding, without tensors."""

    vocab: VocabShard | None = None
    """None if this rank has the complete vocabulary."""
    chunk_size: int = 1024
    """Tokens per chunk in which logits are computed."""
    scale: float = 1.0
    """`ModelSpec.logit_scale`, before the soft cap and the temperature."""
    softcap: float | None = None
    """`ModelSpec.logit_softcap` c: logits x become c * tanh(x / c), before the temperature."""
    is_compiled: bool = False
    """Passes over the logits are compiled by torch.compile; results are equal up to rounding."""


@dataclass(frozen=True, kw_only=True)
class OutputEmbedding:
    """The input of an output head: hidden states, and this rank's part of the vocabulary."""

    hidden: Tensor
    """[T, D], of all T positions of this rank."""
    weight: Tensor
    """[V, D]: this rank's rows. FSDP frees them after the forward pass."""
    bias: Tensor | None = None
    """[V]."""
    options: LogitOptions = LogitOptions()

    @property
    def vocab_start(self) -> int:
        """First vocabulary row of this rank."""
        return 0 if self.options.vocab is None else self.options.vocab.start

    def chunks(self) -> list[slice]:
        """Return consecutive slices of at most `chunk_size` tokens."""
        size = self.options.chunk_size
        return [slice(start, start + size) for start in range(0, len(self.hidden), size)]


@dataclass(frozen=True, kw_only=True)
class TokenDistribution:
    """The distribution that log-probs refer to: softmax(logits / temperature), maybe filtered.

    Raises ValueError for a temperature that is not above 0.
    """

    temperature: float = 1.0
    token_filter: SamplingFilter | None = None
    """Log-probs refer to the filtered, renormalized distribution."""
    with_entropy: bool = False
    """Compute the entropy of the unfiltered distribution as well."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; log-probs need one above 0")


PLAIN = TokenDistribution()
"""The distribution of the model itself."""


class TokenLogprobs(NamedTuple):
    """Outputs at the T predicting positions of a microbatch; 0 where `label_mask` is False.

    With shared prefixes T is the T_r of `ModelInputs`.
    """

    logprobs: Tensor
    """float32 [T]: log-prob of `ModelInputs.labels`, under the filtered distribution where
    sampling is filtered.
    """
    entropy: Tensor | None
    """float32 [T], with `with_entropy`: entropy of the unfiltered distribution."""
    unfiltered_logprobs: Tensor | None = None
    """float32 [T], with a token filter: log-prob of `ModelInputs.labels` under the unfiltered
    distribution.
    """
    is_argmax: Tensor | None = None
    """bool [T]: True where no token is more probable than the label; ties count as True."""
    columns: Mapping[str, Tensor] | None = None
    """float32 [T] each, of a microbatch with a `head` of its own: they join its columns for the
    loss.
    """
    scores: Tensor | None = None
    """float32 [R], of an engine with a score head: the score of each row whose last token is on
    this context-parallel rank, else 0. `logprobs` are 0 then.
    """
