"""Predicted time of a training step: FLOPs at an assumed utilization, and collectives.

Relative and absolute times of `nemo-like plan` use these rates. docs/planner.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nemo_like.data.planning.spec import CostModel
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import Placement
from nemo_like.training_engines import ENGINES

PEAK_FLOPS = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200, from its datasheet."""
BYTES_PER_S = 300e9
"""Achieved bytes/s of collectives per GPU, within a node and between nodes with eight 400 Gb/s
adapters.
"""
_MEASURED_SIZES = (1.24e9, 7.50e9)
"""Parameters, without an untied input embedding, of the models of `_COMPILED_MFU`."""
_COMPILED_MFU = (0.424, 0.499)
"""Measured on one H200 with compiled layers (docs/performance.md)."""
_EAGER_SHARE = 0.335 / 0.424
"""MFU without compilation over MFU with it, measured with the smaller model."""


def train_passes(placement: Placement) -> int:
    """Return the FLOPs of forward and backward pass in units of one forward pass.

    The backward pass computes the gradients of inputs and of weights. With adapters the weights
    are frozen, and the adapters are small beside them. Full recomputation is one more forward pass.
    """
    num_passes = 2 if placement.has_adapters else 3
    return num_passes + (placement.activation_checkpointing == "full")


@dataclass(frozen=True)
class StepDuration:
    """Rates of a model in a placement."""

    model: ModelSpec
    placement: Placement

    @cached_property
    def token_flops(self) -> float:
        """Forward FLOPs of a token, without attention scores."""
        return CostModel.from_spec(self.model).linear

    @property
    def mfu(self) -> float:
        """Assumed share of the peak FLOP/s, recomputed FLOPs included, without communication.

        The measured values are interpolated over the logarithm of the active parameters.
        """
        sizes = np.log(_MEASURED_SIZES)
        compiled = float(np.interp(np.log(self.token_flops / 2), sizes, _COMPILED_MFU))
        return compiled * (1.0 if self.is_compiled else _EAGER_SHARE)

    @property
    def is_compiled(self) -> bool:
        """True unless layers are eager; with recomputation, those that exchange keys are."""
        place = self.placement
        recomputes = place.activation_checkpointing != "none"
        return place.is_compiled and not (recomputes and place.parallel_layout.cp > 1)

    @property
    def flops_per_s(self) -> float:
        """Forward FLOP/s of the GPUs of a data-parallel rank in a training step."""
        num_gpus = self.placement.parallel_layout.replica_size
        return self.mfu * PEAK_FLOPS * num_gpus / train_passes(self.placement)

    @property
    def min_tokens(self) -> float:
        """Tokens of a microbatch whose compute takes as long as its FSDP communication.

        Weights are all-gathered for forward and backward, float32 gradients are reduce-scattered:
        2 c + 4 bytes per parameter with c bytes per value, with adapters 2 c. It is 0 if weights
        are not communicated in every microbatch. Weights in 4 bits never are, and what remains,
        adapters and embeddings, is neglected.
        """
        place = self.placement
        model = self.model
        is_unsharded = place.parallel_layout.keeps_unsharded(place.engine, model.num_params)
        is_sharded = ENGINES[place.engine].shards_weights and place.num_shards > 1
        if place.has_quantized_weights or not is_sharded or is_unsharded:
            return 0.0
        num_bytes = 2 * place.compute_bytes + (0 if place.has_adapters else 4)
        tables = model.embedding_params + (0 if model.is_tied else model.head_params)
        num_params = model.num_layers * place.gathered_layer_params(model)
        num_params += tables / place.parallel_layout.tp
        return self._tokens(num_bytes * num_params)

    @property
    def token_share(self) -> float:
        """Time of a token's collectives within a data-parallel rank over that of its products.

        Per layer and pass (forward, backward, recomputation): two all-reduces of the hidden states
        over tp, an all-gather of keys and values over cp, and two all-to-alls of the inputs of the
        active experts over ep.
        """
        layout = self.placement.parallel_layout
        model = self.model
        # A rank has 1/cp of the tokens of a microbatch.
        values = 4 * (layout.tp - 1) / layout.tp * model.hidden_size / layout.cp
        values += self._exchanged_values
        if model.moe is not None:
            copies = model.moe.num_active_experts * model.num_sparse_layers / model.num_layers
            values += 2 * copies * model.hidden_size * (layout.ep - 1) / layout.ep / layout.cp
        num_passes = 2 + (self.placement.activation_checkpointing == "full")
        num_layers = model.num_layers / layout.pp
        return self._tokens(self.placement.compute_bytes * values * num_layers * num_passes)

    @property
    def _exchanged_values(self) -> float:
        """Keys and values of a token from other context-parallel ranks, per layer and pass."""
        layout = self.placement.parallel_layout
        key_width = 2 * self.model.num_kv_heads * self.model.head_dim / layout.tp
        return key_width * (layout.cp - 1) / layout.cp

    @property
    def exchange_share(self) -> float:
        """Share of `token_share` for the exchange of keys and values; 0 without any collective."""
        num_passes = 2 + (self.placement.activation_checkpointing == "full")
        num_layers = self.model.num_layers / self.placement.parallel_layout.pp
        num_bytes = self.placement.compute_bytes * self._exchanged_values * num_layers * num_passes
        return self._tokens(num_bytes) / (self.token_share or 1.0)

    def _tokens(self, num_bytes: float) -> float:
        """Return the tokens whose products take as long as the transfer of bytes by each GPU."""
        return num_bytes / BYTES_PER_S * self.flops_per_s / self.token_flops
