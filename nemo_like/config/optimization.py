"""Keys of the optimizer, the schedule, the moving average of the weights, and LoRA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_like.config.constraints import NO_EMPTY_TEXTS, Ge, Gt, Le, Lt

MAX_VLLM_RANK = 512
"""The largest rank of an adapter in vLLM."""

ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer that can have an adapter, as in PEFT."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
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


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, with moments in float32 or 8 bits, or Muon. Weight decay is not applied to norms and
    biases.
    """

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` stores both moments in 8 bits and needs the extra `optim` (torchao). `muon`
    updates the matrices of attention and feed-forward blocks by Muon, and embeddings,
    norms and biases by AdamW. Both need `policy.engine=dtensor`."""
    lr: Annotated[float, Gt(0)] = 1e-5
    """Peak learning rate; `policy.scheduler` scales it per optimizer step."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the running mean of gradients."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the running mean of squared gradients."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Constant added to the denominator of the update."""
    muon_lr: Annotated[float | None, Gt(0)] = None
    """Peak learning rate of the matrices that Muon updates; null is `lr`. For a matrix [m, n] it is
    multiplied by 0.2 sqrt(max(m, n)), with which `lr` and `weight_decay` of AdamW can be kept."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning-rate schedule, as a fraction of `policy.optimizer.lr` per optimizer step."""

    kind: Literal["constant", "linear", "cosine", "wsd", "cosine_restarts"] = "constant"
    """Shape of the schedule after warm-up. `wsd` (warm-up, stable, decay) is constant and then
    decays, `cosine_restarts` is a cosine that starts again at the full rate."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int | None = None
    """Optimizer step at which `min_ratio` is reached, warm-up included; null is the last step of
    the run. Must be above `warmup_steps`."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Final learning rate as a fraction of `policy.optimizer.lr` (all kinds but constant)."""
    wsd_decay_steps: Annotated[int | None, Ge(1)] = None
    """Optimizer steps of the decay of `wsd`, which ends at `decay_steps`; null is a tenth of
    `decay_steps`, rounded up."""
    wsd_decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of the decay of `wsd` by its progress p: `linear` is 1 - p, `sqrt` is 1 - sqrt(p),
    `cosine` is half a period of a cosine."""
    num_cycles: Annotated[int, Ge(1)] = 1
    """Cycles of `cosine_restarts` of equal length between warm-up and `decay_steps`."""
    batch_size_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate of each step by its number of rows over `base_batch_size`, or by
    the square root of that ratio; for steps of different size."""
    base_batch_size: Annotated[int | None, Ge(1)] = None
    """Rows of a step for which `policy.optimizer.lr` was chosen; needed by `batch_size_scaling`."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Exponential moving average (EMA) of the trained weights: after each applied optimizer step it
    is decay x average + (1 - decay) x weight. Training does not use it.
    """

    enabled: bool = False
    """Keep the average, in float32 and sharded like the weights, save it in checkpoints, and export
    it at the end of the run to `hf_ema` beside `hf`."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Weight of the previous average; 0.999 averages over about 1000 steps."""
