"""Sampling of the next token, stateless: pure functions of tensors.

A draw inverts the CDF of the filtered distribution at a uniform number, which is a function of the
row's seed and the token index alone. A row's tokens therefore do not depend on the other rows, the
batch size or the number of workers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemo_like.generation.worker_protocol import SamplingParams
from nemo_like.sampling_filter import filter_logits


def row_uniforms(seeds: np.ndarray, num_tokens: int) -> np.ndarray:
    """Draw float64 [B, num_tokens] in [0, 1), row i from the Philox4x64 stream of `seeds[i]`.

    `seeds` is uint64 [B]. Every stream is read from its start, so a longer request has the shorter
    one as prefix.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    raw = np.empty((len(seeds), num_tokens), dtype=np.uint64)
    for row, seed in enumerate(seeds):
        raw[row] = np.random.Philox(key=int(seed)).random_raw(num_tokens)
    # The upper 53 bits, the precision of float64.
    return (raw >> np.uint64(11)) * 2.0**-53


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row, int64 [B], and its log-prob, float32 [B].

    `logits` is [B, V] of any float type, `uniforms` float64 [B]. The log-prob is that of the
    distribution sampled from, after temperature and filters. Temperature 0 takes the most likely
    token; its log-prob is that of the model at temperature 1 without filters.
    """
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(dim=-1)
        return token_ids, _log_probs_of(logits, token_ids)
    logits = filter_logits(logits / params.temperature, params.token_filter)
    # float64, so that rounding of a long cumulative sum does not move mass between tokens and does
    # not depend on the batch.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # The search passes the end only for non-finite logits. The log-prob is not finite then, which
    # the caller checks.
    token_ids = token_ids.clamp_(max=logits.shape[-1] - 1)
    return token_ids, _log_probs_of(logits, token_ids)


def _log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    picked = logits.gather(-1, token_ids[:, None]).squeeze(-1)
    return picked - logits.logsumexp(dim=-1)
