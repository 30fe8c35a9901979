"""Log-probs, entropies and gradients of the output head against float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.sizes import Size
from nemo_like.policy.heads.logprobs import token_logprobs
from nemo_like.policy.outputs import LogitOptions, OutputEmbedding, TokenDistribution

_LOGIT_STD = 4.0
"""Standard deviation of the logits: a peaked distribution, as a trained model has."""
_LIMITS = {
    "bfloat16": {"max log-prob error": 0.15, "max entropy error": 0.15, "gradient error": 2e-2},
    "float32": {"max log-prob error": 1e-3, "max entropy error": 1e-3, "gradient error": 1e-4},
}
"""Largest absolute errors of values in nats, and relative errors of gradients in the 2-norm.
Logits rounded to bfloat16 have steps of 0.06 to 0.125 above 16."""


def logprob_cells(device: str, size: Size) -> Iterator[Cell]:
    """Yield a cell per precision and temperature."""
    for precision in ("bfloat16", "float32"):
        for temperature in (1.0, 0.7):
            yield Cell(
                name=f"log-probs {precision} temperature {temperature}",
                measure=partial(check_logprobs, device, size, precision, temperature),
                settings={"vocab_size": size.vocab_size, "precision": precision},
                expected_s=5.0,
            )


def check_logprobs(
    device: str, size: Size, precision: str, temperature: float
) -> Mapping[str, Any]:
    """Compare the chunked head with the formula in float64."""
    num_tokens = size.check_tokens
    width = 64 if size.name == "tiny" else 1536
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, precision)
    hidden = torch.randn(num_tokens, width, generator=generator).to(dtype).to(device)
    weight = torch.randn(size.vocab_size, width, generator=generator)
    weight = (weight * (_LOGIT_STD / width**0.5)).to(dtype).to(device)
    labels = torch.randint(size.vocab_size, (num_tokens,), generator=generator).to(device)
    upstream = torch.randn(num_tokens, generator=generator).to(device)
    found_inputs = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
    embedding = OutputEmbedding(
        hidden=found_inputs[0],
        weight=found_inputs[1],
        options=LogitOptions(chunk_size=max(num_tokens // 4, 1)),
    )
    distribution = TokenDistribution(temperature=temperature, with_entropy=True)
    outputs = token_logprobs(embedding, labels, distribution)
    assert outputs.entropy is not None
    loss = (outputs.logprobs * upstream).sum() + (outputs.entropy * upstream).sum()
    gradients = torch.autograd.grad(loss, found_inputs)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = exact_inputs[0] @ exact_inputs[1].T / temperature
    log_probs = logits.log_softmax(dim=-1)
    picked = log_probs.gather(1, labels[:, None]).squeeze(1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    exact_loss = (picked * upstream).sum() + (entropy * upstream).sum()
    exact_gradients = torch.autograd.grad(exact_loss, exact_inputs)
    logprob_errors = (outputs.logprobs.double() - picked).abs()
    errors = [
        float((found.double() - exact).norm() / exact.norm())
        for found, exact in zip(gradients, exact_gradients, strict=True)
    ]
    values: dict[str, Any] = {
        "max log-prob error": float(logprob_errors.max()),
        "mean log-prob error": float(logprob_errors.mean()),
        "max entropy error": float((outputs.entropy.double() - entropy).abs().max()),
        "gradient error": max(errors),
        "max logit": float(logits.detach().max()),
    }
    limits = _LIMITS[precision]
    values["passed"] = all(values[name] <= limit for name, limit in limits.items())
    return values | {"limits": limits}
