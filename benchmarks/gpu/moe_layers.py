"""One mixture-of-experts layer in plain torch: a loop over the experts, or grouped products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cells import SkipCell
from benchmarks.gpu.training_steps import time_calls

_LIMIT = 2e-2
"""Largest relative difference of output and gradients between the two, in bfloat16."""


def grouped_product() -> Callable[..., Tensor]:
    """Return torch's grouped matrix product. Raises SkipCell without one."""
    for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")):
        function = getattr(owner, name, None)
        if function is not None:
            return function
    raise SkipCell("this torch has no grouped_mm")


class Experts:
    """Weights of SwiGLU experts, bfloat16, and the tokens that are routed to them."""

    def __init__(self, settings: Mapping[str, Any], num_tokens: int, device: str) -> None:
        hidden = settings["hidden_size"]
        width = settings["moe_intermediate_size"]
        num_experts = settings["num_experts"]
        num_active = settings["num_experts_per_tok"]
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device) * shape[-2] ** -0.5
            return drawn.to(torch.bfloat16).requires_grad_()

        self.gate_up = draw(num_experts, hidden, 2 * width)
        """[E, D, 2 W]"""
        self.down = draw(num_experts, width, hidden)
        """[E, W, D]"""
        self.tokens = torch.randn((num_tokens, hidden), generator=generator, device=device).to(
            torch.bfloat16
        )
        """[T, D]"""
        self.tokens.requires_grad_()
        scores = torch.rand((num_tokens, num_experts), generator=generator, device=device)
        experts = scores.topk(num_active).indices.flatten()
        self.order = experts.argsort(stable=True)
        """int64 [T x k]: token copies sorted by expert."""
        self.counts = torch.bincount(experts, minlength=num_experts)
        """int64 [E]"""
        self.num_active = num_active
        self.flops = 2.0 * num_tokens * num_active * 3 * hidden * width
        """Of one forward."""

    def loop(self) -> Tensor:
        """Return [T x k, D], one expert at a time; waits for the device once."""
        sorted_tokens = self.tokens[self.order // self.num_active]
        outputs = []
        parts = sorted_tokens.split(self.counts.tolist())
        for index, part in enumerate(parts):
            gate, up = (part @ self.gate_up[index]).chunk(2, dim=-1)
            outputs.append((F.silu(gate) * up) @ self.down[index])
        return torch.cat(outputs)

    def grouped(self) -> Tensor:
        """Return [T x k, D] by two grouped products."""
        product = grouped_product()
        sorted_tokens = self.tokens[self.order // self.num_active]
        ends = self.counts.cumsum(0).int()
        gate, up = product(sorted_tokens, self.gate_up, offs=ends).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self.down, offs=ends)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors with gradients."""
        return self.tokens, self.gate_up, self.down


def compare_moe_layers(
    settings: Mapping[str, Any], num_tokens: int, device: str
) -> Mapping[str, Any]:
    """Time both, forward and backward, and compare their outputs and gradients."""
    grouped_product()
    layer = Experts(settings, num_tokens, device)
    results: dict[str, list[Tensor]] = {}
    values: dict[str, Any] = {"num_tokens": num_tokens, **layer_sizes(settings)}
    for name, forward in (("loop", layer.loop), ("grouped", layer.grouped)):

        def both(forward: Callable[[], Tensor] = forward) -> list[Tensor]:
            output = forward()
            gradients = torch.autograd.grad(output.float().square().mean(), layer.leaves)
            return [output.detach(), *gradients]

        results[name] = both()
        seconds = time_calls(both, device, 5, 2)["median_s"]
        values[f"{name}_ms"] = seconds * 1e3
        values[f"{name}_tflops"] = 3 * layer.flops / seconds / 1e12
    differences = []
    for expected, found in zip(results["loop"], results["grouped"], strict=True):
        difference = (found.float() - expected.float()).norm() / expected.float().norm()
        differences.append(float(difference))
    values["relative difference"] = max(differences)
    values["passed"] = max(differences) <= _LIMIT
    return values


def layer_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the layer for the record."""
    names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    return {name: settings[name] for name in names}
