"""Keys of LoRA: low-rank adapters that are trained instead of the weights of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from nemo_like.config.constraints import NO_EMPTY_TEXTS

MAX_VLLM_RANK = 512
"""The largest rank of an adapter in vLLM."""

ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer that can have an adapter, as in PEFT."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: the weights of the model are frozen, and every target layer gets a low-rank update. Its
    output is W x + scale B A x with A [rank, inputs] and B [outputs, rank].
    """

    enabled: bool = False
    """Train adapters only. Weights are stored in `policy.precision`, and checkpoints have the
    adapters. The reference policy is the model without adapters, which needs no second copy."""
    rank: Annotated[int, Ge(1)] = 16
    """Rank of the update of each layer."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """The scale of the update is `alpha / rank`."""
    use_rslora: bool = False
    """Rank-stabilized LoRA: the scale is `alpha / sqrt(rank)`, so that the size of the update does
    not depend on the rank."""
    target_modules: Annotated[tuple[str, ...], NO_EMPTY_TEXTS] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers with an adapter, by the end of their name, as in PEFT: `q_proj`, or
    `self_attn.q_proj`; `all-linear` are all linear layers. The output embedding, experts and
    routers have none."""
    quantization: Literal["none", "nf4"] = "none"
    """QLoRA: `nf4` stores the frozen linear layers in 4 bits per value, by bitsandbytes (extra
    `qlora`); every data-parallel rank has all of them. Only with the DTensor engine, and for models
    without experts."""
    adapter_path: str | None = None
    """Directory of an adapter in the format of PEFT with which training starts, e.g. `hf/adapter`
    of another run. Its rank, alpha and layers must be those set here. null starts with new
    adapters."""

    weight_sync: Literal["auto", "merged", "adapter"] = "auto"
    """What the generator receives after each step. `merged`: all weights, W + scale B A, rounded to
    `policy.precision`. `adapter`: A and B alone, and the generator computes W x + scale B A x like
    the policy. An update then has far fewer bytes, and small changes are not lost in the rounding
    of bfloat16 weights; decoding computes the adapters as well. `auto` is `adapter` in bfloat16,
    and `merged` in float32, with `quantization`, and above rank 512."""

    def sends_adapters(self, precision: str) -> bool:
        """Return True if weight updates of the generator have the adapters alone.

        `precision` is `policy.precision`.
        """
        if not self.enabled:
            return False
        if self.weight_sync != "auto":
            return self.weight_sync == "adapter"
        return precision == "bfloat16" and not self.is_quantized and self.rank <= MAX_VLLM_RANK

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        if self.use_rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank

    @property
    def is_quantized(self) -> bool:
        """True if frozen linear layers are stored in 4 bits."""
        return self.enabled and self.quantization != "none"

    def is_target(self, name: str) -> bool:
        """Return True if the layer `name`, e.g. `model.layers.0.self_attn.q_proj`, gets an adapter.

        A target is the complete name, or its end after a dot, or `all-linear`.
        """
        if ALL_LINEAR in self.target_modules:
            return True
        return any(f".{name}".endswith(f".{target}") for target in self.target_modules)
