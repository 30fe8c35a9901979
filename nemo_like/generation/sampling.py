"""Choosing the next token: log-probs and stateless draws. Pure functions of tensors; no model, no
tokenizer.

A draw inverts the CDF of the filtered distribution at a uniform number that is a function of (row
seed, token index) alone. What a row samples therefore does not depend on the rows beside it, the
batch size or the number of workers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemo_like.generation.generator import SamplingParams
from nemo_like.sampling_filter import filter_logits


def row_uniforms(seeds: np.ndarray, num_tokens: int) -> np.ndarray:
    """float64 [B, num_tokens] in [0, 1): row i is the Philox4x64 stream keyed by `seeds[i]` (uint64
    [B]).

    A stream is read from its start, so a longer request begins with the shorter one.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    raw = np.empty((len(seeds), num_tokens), dtype=np.uint64)
    for row, seed in enumerate(seeds):
        raw[row] = np.random.Philox(key=int(seed)).random_raw(num_tokens)
    return (raw >> np.uint64(11)) * 2.0**-53


def sample_tokens(
    logits: Tensor, uniforms: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """The next token of each row, int64 [B], and its log-prob under the distribution sampled from,
    float32 [B].

    `logits` is [B, V] of any float type, `uniforms` float64 [B]. Log-probs are those after
    temperature and filters. Temperature 0 takes the likeliest token; its log-prob is then the
    model's own, at temperature 1 without filters.
    """
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(dim=-1)
        return token_ids, _log_probs_of(logits, token_ids)
    logits = filter_logits(logits / params.temperature, params.token_filter)
    # float64, so that rounding of a long cumulative sum neither moves mass between tokens nor
    # depends on the batch.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # Only non-finite logits search past the end; the log-prob then is not finite either, which the
    # caller checks.
    token_ids = token_ids.clamp_(max=logits.shape[-1] - 1)
    return token_ids, _log_probs_of(logits, token_ids)


def _log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.gather(-1, token_ids[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)
