"""Selective activation checkpointing: what is computed once, and results that change in place."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like.policy.decoder_layers import checkpoint_layers


class _Counted(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class _Layer(nn.Module):
    """Products that are changed in place, through a view too, and further calls when it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for _ in range(self.num_calls - 1):
            # As FSDP, which gathers weights only in one of the two passes.
            torch.zeros(3).add(1.0)
        hidden = x @ self.first
        hidden.add_(self.bias)
        hidden[:, 2:].mul_(2.0)
        out = hidden.sigmoid() @ self.second
        return out.add_(x).tanh()


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_results_that_change_in_place_have_the_gradient_of_the_formula(kind):
    torch.manual_seed(0)
    layer = _Layer()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    inputs = (x, layer.first, layer.second, layer.bias)
    scale = torch.tensor([1.0, 1, 2, 2, 2, 2], dtype=torch.float64)
    hidden = (x @ layer.first + layer.bias) * scale
    expected_out = (hidden.sigmoid() @ layer.second + x).tanh()
    expected = torch.autograd.grad(expected_out.square().sum(), inputs)

    checkpoint_layers([layer], kind)
    with _Counted() as counted:
        out = layer(x)
        num_forward = counted.calls["aten::mm"]
        found = torch.autograd.grad(out.square().sum(), inputs)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert layer.num_calls == 2
    # Two products in the forward pass and four in the backward pass.
    num_products = counted.calls["aten::mm"]
    assert num_forward == 2
    assert num_products == (6 if kind == "selective" else 8)
    assert counted.calls["aten::sigmoid"] == 2
