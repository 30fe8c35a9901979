"""Grouped experts compute what Megatron-Core's SequentialMLP computes, expert by expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.policy.megatron.moe import GroupedExperts, grouped_linear
from tests.policy.megatron.ranks import RecordingEngine, as_tensors, joined, of_model
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS
from tests.policy.tiny import random_batch, relative_error


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), has_kernel=st.booleans())
def test_each_group_is_multiplied_by_its_own_weight(sizes, has_kernel):
    """With `grouped_mm` of torch and without it; groups may be empty."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(sizes), 8, generator=generator).requires_grad_()
    weights = [torch.randn(4, 8, generator=generator).requires_grad_() for _ in sizes]
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    parts = tokens.split(sizes)
    expected = torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])
    grad = torch.randn(expected.shape, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        if not has_kernel:
            patch.delattr(torch.nn.functional, "grouped_mm")
        found = grouped_linear(tokens, ends, weights)
        gradients = torch.autograd.grad(found, (tokens, *weights), grad)
    wanted = torch.autograd.grad(expected, (tokens, *weights), grad)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients, wanted, rtol=1e-6, atol=1e-6)


def test_an_expert_without_tokens_has_no_gradient(monkeypatch):
    """Also where the kernel writes nothing for an empty group, as on some devices."""
    product = torch.nn.functional.grouped_mm

    def leaves_empty_groups(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        result = product(left, right, offs=offs)
        if right.dim() == 2:
            result[1] = torch.nan
        return result

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_empty_groups)
    tokens = torch.ones(5, 8)
    weights = [torch.ones(8, 8, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    gradients = torch.autograd.grad(grouped_linear(tokens, ends, weights).sum(), weights)
    assert [float(gradient.mean()) for gradient in gradients] == [2.0, 0.0, 3.0]


def train_both_ways(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig
) -> dict[str, Any]:
    """Return the gradients of one step with grouped experts, and with SequentialMLP's loop."""

    def sequential(self: GroupedExperts, *args: Any) -> tuple[Tensor, Any]:
        return SequentialMLP.forward(self, *args)

    found: dict[str, Any] = {}
    with joined(context, parallel) as rank, pytest.MonkeyPatch.context() as patch:
        for name in ("grouped", "sequential"):
            if name == "sequential":
                patch.setattr(GroupedExperts, "forward", sequential)
            worker = rank.worker(config)
            shard = rank.shard(config, worker, random_batch(LENGTHS))
            worker.train(shard, None, NllLoss())
            engine = worker.engine
            assert isinstance(engine, RecordingEngine)
            found[name] = engine.gradients
    return found


@pytest.mark.parametrize("parallel", ["one rank", "ep2"])
def test_gradients_equal_those_of_sequential_experts(parallel, model_dir, on_ranks):
    config = of_model(LAYOUTS["packed, 2 microbatches"], model_dir("qwen3_moe"))
    config = dataclasses.replace(config, max_grad_norm=0.0)
    gradients = on_ranks(train_both_ways, parallel, config)[0]
    grouped, sequential = as_tensors(gradients["grouped"]), as_tensors(gradients["sequential"])
    assert grouped.keys() == sequential.keys()
    assert relative_error(grouped, sequential) < 1e-6
