"""Sampling of the next token, stateless: pure functions of tensors.

A draw inverts the CDF of the filtered distribution at a uniform number, which is a function of the
row's seed and the token index alone. A row's tokens therefore do not depend on the other rows, the
batch size or the number of workers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemo_like.generation.sampling_params import SamplingParams
from nemo_like.sampling_filter import filter_logits


def row_uniforms(seeds: np.ndarray, num_tokens: int) -> np.ndarray:
    """Draw float64 [B, num_tokens] in [0, 1), row i from the Philox4x64 stream of `seeds[i]`.

    `seeds` is uint64 [B]. Every stream is read from its start, so a longer request has the shorter
    one as prefix.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    raw = np.empty((len(seeds), num_tokens), dtype=np.uint64)
    for row, seed in enumerate(seeds):
        generator = np.random.Philox(key=int(seed))
        raw[row] = generator.random_raw(num_tokens)
    # The upper 53 bits, the precision of float64.
    upper_bits = raw >> np.uint64(11)
    return upper_bits * 2.0**-53


def sample_tokens(
    logits: Tensor, uniforms: Tensor, params: SamplingParams
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
    probabilities = logits.double().softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    # Relative to the computed total, which rounding moves away from 1.
    total = cumulative[:, -1:]
    target = uniforms[:, None] * total
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # The search passes the end only for non-finite logits. The log-prob is not finite then, which
    # the caller checks.
    last_token_id = logits.shape[-1] - 1
    token_ids = token_ids.clamp_(max=last_token_id)
    return token_ids, _log_probs_of(logits, token_ids)


def _log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probs [B] of `token_ids` [B] under softmax of `logits` [B, V]."""
    index = token_ids[:, None]
    picked = logits.gather(-1, index).squeeze(-1)
    return picked - logits.logsumexp(dim=-1)
