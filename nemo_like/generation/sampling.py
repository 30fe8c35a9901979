"""Choosing the next token: filters, log-probs and stateless draws. Pure functions of tensors; no model, no tokenizer.

A draw inverts the CDF of the filtered distribution at a uniform number that is a function of (row seed, token index)
alone. What a row samples therefore does not depend on the rows beside it, the batch size or the number of workers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemo_like.generation.interface import SamplingParams


def row_uniforms(seeds: np.ndarray, num_tokens: int) -> np.ndarray:
    """float64 [B, num_tokens] in [0, 1): row i is the Philox4x64 stream keyed by `seeds[i]` (uint64 [B]).

    A stream is read from its start, so a longer request begins with the shorter one.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    raw = np.empty((len(seeds), num_tokens), dtype=np.uint64)
    for row, seed in enumerate(seeds):
        raw[row] = np.random.Philox(key=int(seed)).random_raw(num_tokens)
    return (raw >> np.uint64(11)) * 2.0**-53


def filter_logits(logits: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """[B, V] logits with everything outside the top-k and then outside the nucleus of mass `top_p` at -inf.

    Top-k first, the nucleus over what is left; ties with the k-th logit stay. The likeliest token always stays.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        kth_largest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth_largest, -torch.inf)
    if top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        outside[:, -1] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits


def sample_tokens(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The next token of each row, int64 [B], and its log-prob under the distribution sampled from, float32 [B].

    `logits` is [B, V] of any float type, `uniforms` float64 [B]. Log-probs are those after temperature and filters.
    Temperature 0 takes the likeliest token; its log-prob is then the model's own, at temperature 1 without filters.
    """
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(dim=-1)
        return token_ids, _log_probs_of(logits, token_ids)
    logits = filter_logits(logits / params.temperature, top_k=params.top_k, top_p=params.top_p)
    # float64, so that rounding of a long cumulative sum neither moves mass between tokens nor depends on the batch.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # Only non-finite logits search past the end; the log-prob then is not finite either, which the caller checks.
    token_ids = token_ids.clamp_(max=logits.shape[-1] - 1)
    return token_ids, _log_probs_of(logits, token_ids)


def _log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.gather(-1, token_ids[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)
