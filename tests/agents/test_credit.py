"""Turn-level advantages: the expected gradient over all groups of episodes is the true one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.agents.credit import return_to_go

Advantages = Callable[[Sequence[np.ndarray], np.ndarray], list[np.ndarray]]
FIRST_REWARDS = (0.6, 0.5, -0.3)
"""Of the first turn's three actions; after the first of them the episode ends."""
SECOND_REWARDS = ((0.0, 1.0), (0.7, -1.2))


def episodes(logits: Tensor) -> list[tuple[list[Tensor], np.ndarray]]:
    """(log-probs of the actions, rewards) of every episode; `logits` [7] of three decisions."""
    first = logits[:3].log_softmax(0)
    second = (logits[3:5].log_softmax(0), logits[5:].log_softmax(0))
    found = [([first[0]], np.array(FIRST_REWARDS[:1]))]
    for action, after in itertools.product((1, 2), (0, 1)):
        logprobs = [first[action], second[action - 1][after]]
        rewards = [FIRST_REWARDS[action], SECOND_REWARDS[action - 1][after]]
        found.append((logprobs, np.array(rewards)))
    return found


def true_gradient(logits: Tensor) -> Tensor:
    """Of the expected sum of rewards."""
    terms = [
        torch.stack(logprobs).sum().exp() * rewards.sum() for logprobs, rewards in episodes(logits)
    ]
    (gradient,) = torch.autograd.grad(torch.stack(terms).sum(), logits)
    return gradient


def expected_gradient(logits: Tensor, advantages: Advantages, group_size: int = 3) -> Tensor:
    """Of the policy gradient over all groups, each with its probability."""
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(episodes(logits), repeat=group_size):
        probability = (
            torch.stack([each for logprobs, _ in group for each in logprobs]).sum().exp().detach()
        )
        found = advantages([rewards for _, rewards in group], np.zeros(group_size, dtype=np.int64))
        for (logprobs, _), values in zip(group, found, strict=True):
            weighted = [value * each for value, each in zip(values, logprobs, strict=True)]
            total = total + probability * sum(weighted) / group_size
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


@pytest.fixture
def logits() -> Tensor:
    values = [0.3, -0.4, 0.2, 0.1, -0.7, 0.9, -0.2]
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_the_expected_gradient_is_exact(logits: Tensor) -> None:
    error = expected_gradient(logits, return_to_go) - true_gradient(logits)
    assert error.abs().max() < 1e-12


def test_centering_per_number_of_the_turn_is_not(logits: Tensor) -> None:
    def centered(rewards: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
        del groups
        means = [
            np.mean([each[turn] for each in rewards if len(each) > turn])
            for turn in range(max(map(len, rewards)))
        ]
        advantages = []
        for each in rewards:
            left = each - means[: len(each)]
            advantages.append(np.cumsum(left[::-1])[::-1])
        return advantages

    error = expected_gradient(logits, centered) - true_gradient(logits)
    assert error.abs().max() > 0.01


def test_a_worked_example() -> None:
    rewards = [np.array([1.0, 2.0, 4.0]), np.array([3.0]), np.array([8.0, 8.0]), np.zeros(0)]
    rewards.append(np.array([2.0]))
    advantages = return_to_go(rewards, np.array([0, 0, 1, 0, 1]), discount=0.5)
    # Returns from the first turn: 1 + 1 + 1 = 3, 3, 12, 0, 2.
    expected = [[3 - 1.5, 4 - 1.5, 4 - 1.5], [3 - 1.5], [12.0 - 2, 8.0 - 2], [], [2.0 - 12]]
    for found, each in zip(advantages, expected, strict=True):
        assert found.tolist() == pytest.approx(each)
    with pytest.raises(ValueError, match="a group of one episode"):
        return_to_go(rewards[:1], np.zeros(1, dtype=np.int64))
