"""Chunked log-probs equal the naive ones in value and gradient, in a fraction of the memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.policy.logprobs import token_logprobs


def naive_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, bias: Tensor | None = None):
    log_probs = (torch.nn.functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(1, labels[:, None]).squeeze(1), entropy


def random_inputs(num_tokens: int, dim: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden, weight, bias, labels


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    chunk_size=st.integers(1, 24),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
    entropy_weight=st.sampled_from([0.0, 0.3]),
)
def test_values_and_gradients_equal_the_naive_ones(num_tokens, chunk_size, temperature, with_bias, entropy_weight):
    hidden, weight, bias, labels = random_inputs(num_tokens, 8, 33)
    parameters = [hidden, weight, *([bias] if with_bias else [])]
    token_weights = torch.linspace(-1, 1, num_tokens)

    def gradients(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = (token_weights * logprobs).sum() + entropy_weight * (token_weights.square() * entropy).sum()
        return torch.autograd.grad(loss, parameters)

    expected = naive_logprobs(hidden, weight, labels, temperature, bias if with_bias else None)
    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=True,
        bias=bias if with_bias else None,
    )
    assert entropy is not None
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-6, atol=1e-5)
    for found, naive in zip(gradients(logprobs, entropy), gradients(*expected), strict=True):
        largest = float(naive.abs().max()) if naive.numel() else 0.0
        torch.testing.assert_close(found, naive, rtol=1e-6, atol=2e-6 * max(1.0, largest))


def test_without_entropy_none_is_computed_and_the_gradient_is_the_same():
    hidden, weight, _, labels = random_inputs(11, 8, 33)
    logprobs, entropy = token_logprobs(hidden, weight, labels, chunk_size=4)
    assert entropy is None
    expected, _ = naive_logprobs(hidden, weight, labels, 1.0)
    found = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), (hidden, weight)), rtol=1e-6, atol=2e-6)


def test_impossible_tokens_leave_values_and_gradients_finite():
    hidden, weight, _, labels = random_inputs(6, 8, 33)
    bias = torch.zeros(33)
    bias[20:] = float("-inf")
    logprobs, entropy = token_logprobs(hidden, weight, labels % 20, with_entropy=True, bias=bias)
    assert entropy is not None
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (logprobs, entropy, *gradients))
    assert float(gradients[1][20:].abs().max()) == 0.0


def test_half_precision_hidden_states_give_float32_logprobs_near_the_exact_ones():
    hidden, weight, _, labels = random_inputs(40, 16, 64, dtype=torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, labels, chunk_size=16)
    exact, _ = naive_logprobs(hidden.float(), weight.float(), labels, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=0.1)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    expected = torch.autograd.grad(exact.sum(), (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(gradients, expected, rtol=0.05, atol=0.1)


def test_temperature_zero_is_an_error():
    hidden, weight, _, labels = random_inputs(2, 4, 8)
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(hidden, weight, labels, temperature=0.0)


_PEAK_PROGRAM = """
import re, sys
import torch
from nemo_like.policy.logprobs import token_logprobs
from tests.policy.test_logprobs import naive_logprobs, random_inputs

def peak_bytes():
    # Not getrusage: its maximum outlives exec, so it would be the test runner's.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

functions = {
    "chunked": lambda *tensors: token_logprobs(*tensors, chunk_size=128, with_entropy=True),
    "naive": lambda *tensors: naive_logprobs(*tensors, 1.0),
}
function = functions[sys.argv[1]]
warm_hidden, warm_weight, _, warm_labels = random_inputs(8, 32, 64)
sum(function(warm_hidden, warm_weight, warm_labels)).sum().backward()
hidden, weight, _, labels = random_inputs(2048, 32, 16384)
before = peak_bytes()
sum(function(hidden, weight, labels)).sum().backward()
print(peak_bytes() - before)
"""


def test_peak_memory_is_a_fraction_of_the_naive_one():
    """2048 tokens x 16384 vocabulary: one float32 matrix of logits would be 128 MiB, one chunk of them is 8 MiB."""
    peaks = {}
    for name in ("chunked", "naive"):
        command = [sys.executable, "-c", _PEAK_PROGRAM, name]
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        peaks[name] = int(result.stdout)
    assert peaks["naive"] > 3 * 2048 * 16384 * 4
    assert peaks["chunked"] < 2048 * 16384 * 4 / 2
