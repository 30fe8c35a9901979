"""Top-k, top-p and min-p by their definition, one distribution at a time in float64: the reference
of several tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_like.sampling_filter import SamplingFilter


def kept_tokens(logits: Sequence[float], token_filter: SamplingFilter) -> set[int]:
    """The tokens that may be sampled: min_p, then top_k, then top_p; equal logits are kept or
    removed together.
    """
    values = np.asarray(logits, dtype=np.float64)
    weights = np.exp(values - values.max())
    kept = [
        token
        for token in range(len(values))
        if weights[token] >= token_filter.min_p * weights.max()
    ]
    if token_filter.top_k is not None and token_filter.top_k > 0:
        num_above = [np.count_nonzero(values[kept] > values[token]) for token in kept]
        kept = [
            token
            for token, above in zip(kept, num_above, strict=True)
            if above < token_filter.top_k
        ]
    if token_filter.top_p < 1:
        mass_above = [weights[kept][values[kept] > values[token]].sum() for token in kept]
        limit = token_filter.top_p * weights[kept].sum()
        kept = [token for token, above in zip(kept, mass_above, strict=True) if above < limit]
    return set(kept)
