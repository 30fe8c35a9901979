"""Rows of real-like lengths with random tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.prediction.lengths import read_lengths

_CV = 1.0
"""Coefficient of variation of the lognormal lengths before the longest are cut off."""


def lognormal_lengths(num_tokens: int, *, mean: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw lengths until their sum is at least `num_tokens`; int64 [B], each 2 to `longest`."""
    rng = np.random.default_rng(seed)
    variance = math.log(1 + _CV**2)
    center = math.log(mean) - variance / 2
    lengths: list[int] = []
    total = 0
    while total < num_tokens:
        length = min(max(int(rng.lognormal(center, math.sqrt(variance))), 2), longest)
        lengths.append(length)
        total += length
    return np.array(lengths, dtype=np.int64)


def file_lengths(
    path: Path, columns: Sequence[str], num_tokens: int, *, longest: int, seed: int = 0
) -> np.ndarray:
    """Draw lengths of a file until their sum is at least `num_tokens`; int64 [B].

    Lengths above `longest` are cut off. Raises ConfigError for a bad file.
    """
    values = read_lengths(path, columns=columns).values
    rng = np.random.default_rng(seed)
    drawn = rng.choice(values, size=max(num_tokens // 2, 1))
    clipped = np.clip(drawn, 2, longest)
    num_rows = int(np.searchsorted(np.cumsum(clipped), num_tokens)) + 1
    return clipped[:num_rows].astype(np.int64)


def full_lengths(num_tokens: int, longest: int) -> np.ndarray:
    """Return rows of exactly `longest` tokens with at least `num_tokens` in total, int64 [B]."""
    num_rows = max(-(-num_tokens // longest), 1)
    return np.full(num_rows, longest, dtype=np.int64)


def random_rows(lengths: np.ndarray, vocab_size: int, seed: int = 0) -> BatchedDataDict:
    """Return rows of random tokens, all of them trained; `lengths` is int64 [B].

    The columns `generation_logprobs` and `advantages` are read by a policy-gradient loss.
    """
    rng = np.random.default_rng(seed)
    num_tokens = int(lengths.sum())
    tokens = rng.integers(2, vocab_size, num_tokens).astype(np.int32)
    input_ids = Jagged.from_lengths(tokens, lengths)
    logprobs = np.full(num_tokens, -math.log(vocab_size), dtype=np.float32)
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=Jagged(np.ones(num_tokens, dtype=np.uint8), input_ids.offsets),
        generation_logprobs=Jagged(logprobs, input_ids.offsets),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        length=lengths,
        row_mask=np.ones(len(lengths), dtype=bool),
    )
