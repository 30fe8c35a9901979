"""The output heads on plain tensors: options and distribution by keyword."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from nemo_like.policy.heads import divergence, logprobs
from nemo_like.policy.outputs import LogitOptions, OutputEmbedding, TokenDistribution, TokenLogprobs

_DISTRIBUTION = {field.name for field in fields(TokenDistribution)}


def embedding_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> OutputEmbedding:
    return OutputEmbedding(hidden=hidden, weight=weight, bias=bias, options=LogitOptions(**options))


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> TokenLogprobs:
    """See `logprobs.token_logprobs`; `options` are of `TokenDistribution` and `LogitOptions`."""
    distribution = {name: options.pop(name) for name in _DISTRIBUTION & options.keys()}
    embedding = embedding_of(hidden, weight, bias, **options)
    return logprobs.token_logprobs(embedding, labels, TokenDistribution(**distribution))


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    target: divergence.VocabularyTarget | divergence.TopKTarget,
    kind: divergence.Divergence,
    bias: Tensor | None = None,
    **options: Any,
) -> divergence.DivergenceOutputs:
    """See `divergence.token_divergence`; `options` are of `LogitOptions`."""
    embedding = embedding_of(hidden, weight, bias, **options)
    return divergence.token_divergence(embedding, labels, target, kind)


def top_k_logprobs(
    hidden: Tensor, weight: Tensor, *, k: int, temperature: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """See `divergence.top_k_logprobs`; `options` are of `LogitOptions`."""
    embedding = embedding_of(hidden, weight, **options)
    return divergence.top_k_logprobs(embedding, k=k, temperature=temperature)
