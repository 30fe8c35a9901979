"""Divergences of two distributions by their definitions, in float64 with NumPy."""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def kl(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first * (np.log(first) - np.log(second))).sum(axis=-1)


def divergence_of(
    student: np.ndarray, teacher: np.ndarray, kind: str, weight: float = 0.5
) -> np.ndarray:
    """Divergence of distributions [..., V]; `weight` is that of the forward KL, or beta."""
    if kind == "reverse_kl":
        return kl(student, teacher)
    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "mixed_kl":
        return weight * kl(teacher, student) + (1 - weight) * kl(student, teacher)
    mixture = weight * teacher + (1 - weight) * student
    return weight * kl(teacher, mixture) + (1 - weight) * kl(student, mixture)


def outcomes(probs: np.ndarray, teacher: np.ndarray, top_k: int | None) -> np.ndarray:
    """`probs` [T, V] of the compared outcomes: the k largest of `teacher`, and the rest."""
    if top_k is None:
        return probs
    ids = np.argsort(-teacher, axis=-1)[:, :top_k]
    kept = np.take_along_axis(probs, ids, axis=-1)
    is_kept = np.zeros(probs.shape, dtype=bool)
    np.put_along_axis(is_kept, ids, True, axis=-1)
    rest = np.where(is_kept, 0.0, probs).sum(axis=-1, keepdims=True)
    return np.concatenate([kept, rest], axis=-1)
