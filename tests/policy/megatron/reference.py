"""Results of plain transformers and torch, which every layout of ranks must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import PolicyConfig
from tests.policy.megatron.ranks import (
    NUM_STEPS,
    Gradients,
    OnRanks,
    Step,
    StepResult,
    as_tensors,
    of_model,
    take_steps,
)
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import grouped_batch, random_batch, relative_error, row_accuracy, row_loss


def transformers_gradients(model_name: str) -> tuple[Gradients, float]:
    """Return gradients and loss of `grouped_batch`, each row by itself and unpadded."""
    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="eager")
    loss = row_loss(model, grouped_batch())
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients, loss.item()


@cache
def transformers_accuracy(model_name: str) -> float:
    """Return the token accuracy on `grouped_batch`, in float64."""
    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="eager")
    return row_accuracy(model, grouped_batch())


class TrainedReference(NamedTuple):
    """`NUM_STEPS` optimizer steps."""

    losses: list[float]
    norms: list[float]
    weights: Gradients


def train_transformers(config: PolicyConfig) -> TrainedReference:
    """Train transformers with torch's AdamW, except for frozen weights; only matrices decay."""
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in config.freeze):
            parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
    )
    losses = []
    norms = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = row_loss(model, random_batch(LENGTHS))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return TrainedReference(losses, norms, weights)


def assert_step_is(
    ranks: Sequence[StepResult], gradients: Gradients, loss: float, label: object
) -> None:
    """Check one step of all ranks: gradients on rank 0, loss on the last, the norm on each."""
    found = as_tensors(ranks[0].gradients)
    assert relative_error(found, gradients) < TOLERANCE, label
    # A loss of few rows whose terms cancel is much smaller than its terms.
    assert ranks[-1].metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE, abs=1e-6)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for result in ranks:
        assert result.metrics["policy/grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def check_cases(
    cases: Sequence[tuple[str, str]],
    parallel: str,
    model_dir: Callable[[str], str],
    expected: Callable[[str], tuple[Gradients, float]],
    on_ranks: OnRanks,
) -> None:
    """Take a step of each architecture with each way of batching, all in one process group."""
    steps = [
        Step(of_model(LAYOUTS[layout], model_dir(architecture)), grouped_batch())
        for architecture, layout in cases
    ]
    ranks = on_ranks(take_steps, parallel, steps)
    for index, (architecture, layout) in enumerate(cases):
        results = [steps_of_rank[index] for steps_of_rank in ranks]
        gradients, loss = expected(architecture)
        assert_step_is(results, gradients, loss, (architecture, layout))


@torch.no_grad()
def assert_same_logprobs(
    model: Any, found: np.ndarray, row: np.ndarray, mask: np.ndarray, is_trained: bool
) -> None:
    """Compare `found` float32 [L] with the model's log-probs of the tokens `row` [L]."""
    input_ids = torch.from_numpy(row.astype(np.int64))[None]
    predictions = model(input_ids).logits[0, :-1].log_softmax(-1)
    logprobs = predictions.gather(1, input_ids[0, 1:, None]).squeeze(1).numpy()
    trained = mask[1:].astype(bool) & is_trained
    assert found[0] == 0
    np.testing.assert_allclose(found[1:], np.where(trained, logprobs, 0.0), rtol=1e-4, atol=1e-5)
