"""avg@n and pass@k of n scored completions per prompt (Chen et al. 2021, arXiv 2107.03374)."""

from __future__ import annotations

import numpy as np

from nemo_like.metrics import Mean, Metrics


def pass_at_k(num_samples: int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """Return the probability that k of the samples of a prompt have a correct one, float64 [P].

    `num_correct` is int [P], of `num_samples` samples each. With n samples of which c are correct
    it is 1 - C(n - c, k) / C(n, k): the mean over all subsets of k samples, and an unbiased
    estimate of the probability that k new samples have a correct one. Raises ValueError for k
    outside 1 to n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; pass@k of {num_samples} samples needs k from 1 to that number")
    # C(n - c, k) / C(n, k) is the product of (n - c - i) / (n - i) over i < k; a factor is 0 where
    # fewer than k samples are wrong.
    fail = np.ones(len(num_correct))
    for i in range(k):
        wrong_left = np.maximum(num_samples - num_correct - i, 0)
        fail *= wrong_left / (num_samples - i)
    return 1.0 - fail


def powers_of_two(largest: int) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`."""
    powers = [1]
    while powers[-1] * 2 <= largest:
        powers.append(powers[-1] * 2)
    return powers


def pass_metrics(is_correct: np.ndarray, num_samples: int) -> Metrics:
    """Return `avg_at_<n>`, and `pass_at_<k>` for each power of two k up to n = `num_samples`.

    `is_correct` is bool [P x n], prompt-major. avg@n is the share of correct samples, the mean of
    pass@1. All are means over prompts.
    """
    num_correct = is_correct.reshape(-1, num_samples).sum(axis=1)
    num_prompts = len(num_correct)
    share = float(num_correct.sum()) / num_samples
    metrics: Metrics = {f"avg_at_{num_samples}": Mean(share, num_prompts)}
    for k in powers_of_two(num_samples):
        values = pass_at_k(num_samples, num_correct, k)
        metrics[f"pass_at_{k}"] = Mean(float(values.sum()), num_prompts)
    return metrics
