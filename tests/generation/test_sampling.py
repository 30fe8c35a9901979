"""Token choice: draws that follow the distribution and depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_like.generation.hf_decoding import row_uniforms, sample_tokens
from nemo_like.generation.requests import SamplingParams
from nemo_like.sampling_filter import filter_logits


def _logits(seed: int, num_rows: int = 5, vocabulary: int = 37) -> torch.Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_uniforms_are_a_function_of_seed_and_token_index() -> None:
    seeds = np.array([7, 2**64 - 1, 7, 0], dtype=np.uint64)
    uniforms = row_uniforms(seeds, 100)
    assert np.array_equal(uniforms[0], uniforms[2])
    assert np.array_equal(row_uniforms(seeds[1:2], 100)[0], uniforms[1])
    assert np.array_equal(row_uniforms(seeds, 30), uniforms[:, :30])
    assert uniforms.min() >= 0 and uniforms.max() < 1
    assert len(np.unique(uniforms)) == 3 * 100


def test_uniforms_never_change_between_versions() -> None:
    """A resumed run must draw what the first would have drawn; NumPy guarantees the raw Philox
    stream.
    """
    expected = [0.3035680343067586, 0.8487087496857769, 0.1561347780434731]
    assert row_uniforms(np.array([1], np.uint64), 3)[0].tolist() == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=1, temperature=0.6),
        SamplingParams(max_new_tokens=1, temperature=1.5, top_k=6),
        SamplingParams(max_new_tokens=1, temperature=0.9, top_p=0.8),
        SamplingParams(max_new_tokens=1, temperature=1.2, top_k=12, top_p=0.9),
        SamplingParams(max_new_tokens=1, temperature=1.2, min_p=0.1),
    ],
)
def test_frequencies_follow_the_filtered_distribution(params: SamplingParams) -> None:
    num_draws, vocabulary = 20_000, 20
    logits = _logits(3, 1, vocabulary) / 2
    uniforms = torch.from_numpy(row_uniforms(np.array([11], np.uint64), num_draws)[0])
    token_ids, logprobs = sample_tokens(logits.expand(num_draws, -1), uniforms, params)
    filtered = filter_logits(logits / params.temperature, params.token_filter)[0]
    probabilities = filtered.softmax(dim=-1)
    counts = torch.bincount(token_ids, minlength=vocabulary)
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities * num_draws >= 5
    expected = probabilities[likely] * num_draws
    chi_square = float(((counts[likely] - expected) ** 2 / expected).sum())
    degrees = int(likely.sum()) - 1
    assert degrees >= 3
    # Mean `degrees`, standard deviation sqrt(2 degrees); five of them is far outside chance, and
    # the seed is fixed.
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5
    torch.testing.assert_close(logprobs, filtered.log_softmax(dim=-1)[token_ids])


def test_temperature_zero_is_greedy_with_the_models_own_logprob() -> None:
    logits = _logits(5)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, top_k=3)
    token_ids, logprobs = sample_tokens(logits, torch.rand(5, dtype=torch.float64), params)
    assert torch.equal(token_ids, logits.argmax(dim=-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(dim=-1).amax(dim=-1))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_without_mass_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    token_ids, logprobs = sample_tokens(
        logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams(max_new_tokens=1)
    )
    assert token_ids.item() in (1, 3)
    assert torch.isfinite(logprobs).all()
