"""What one GPU must hold, part by part, as a function of the token budget. Arithmetic from sizes;
nothing is allocated.

The formulas are those of what this package does: FSDP2 over dp x cp with float32 master weights and
AdamW, log-probs in chunks, attention that saves no scores. Activations are what autograd saves in a
Llama-like layer; `assumptions` spells every formula out beside where it was checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nemo_like.distributed.parallel_layout import Topology
from nemo_like.models.spec import ModelSpec

GIB = 1 << 30
CONTEXT_BYTES = 2 * GIB
"""CUDA context, kernels and NCCL buffers of a process."""
SAFETY_SHARE = 0.10
"""Of the rest, left to the allocator's fragmentation and to what the formulas leave out."""
WHOLE_SHARE = 1 / 8
"""A model whose float32 weights are at most this share of the memory stays unsharded within a step,
as the engine does.
"""
CPU_GIB = 32.0
"""Stands for a device without memory of its own: there the engine keeps up to 4 GiB whole."""
MEASURED = (
    "predicted over measured bytes per token is 0.99 - 1.04 for small real Llamas on CPU (bfloat16"
    " and float32, with and without"
    " checkpointing, the copies of CPU attention counted); no GPU has been measured"
)

Precision = Literal["float32", "bfloat16"]
Engine = Literal["dtensor", "megatron"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a model is spread and computed."""

    topology: Topology = field(default_factory=Topology)
    sequence_parallel: bool = False
    precision: Precision = "bfloat16"
    activation_checkpointing: bool = False
    engine: Engine = "dtensor"
    chunk_size: int = 1024
    """Tokens whose logits exist at once."""
    has_reference: bool = False
    """A frozen copy of the starting model is kept beside the policy."""
    device_gib: float = 80.0
    """Memory of one device: what decides whether a small model stays unsharded."""

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision == "bfloat16" else 4

    @property
    def num_shards(self) -> int:
        """Ranks that share weights, gradients and optimizer state."""
        return self.topology.dp * self.topology.cp

    @property
    def has_compute_copy(self) -> bool:
        """Whether the model computes with weights other than its shard of the master weights."""
        return self.num_shards > 1 or self.precision == "bfloat16"


def usable_bytes(device_gib: float) -> float:
    """What a plan may use of a device's memory."""
    return max(0.0, (device_gib * GIB - CONTEXT_BYTES) * (1.0 - SAFETY_SHARE))


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes of one GPU of the busiest pipeline stage, for microbatches of up to so many
    tokens.
    """

    spec: ModelSpec
    placement: Placement

    def peak(self, max_tokens: int) -> float:
        return sum(self.parts(max_tokens).values())

    def parts(self, max_tokens: int) -> dict[str, float]:
        """Bytes by part at the moment of the peak, the parts in the order they are drawn."""
        stages = {0, self.placement.topology.pp - 1}
        return max(
            (self._stage(max_tokens, stage) for stage in stages),
            key=lambda parts: sum(parts.values()),
        )

    def largest_budget(self, num_bytes: float, multiple: int) -> int:
        """The largest multiple of `multiple` tokens whose peak is at most `num_bytes`; 0 if not
        even one fits.
        """
        if self.peak(multiple) > num_bytes:
            return 0
        low, high = 1, 2
        while self.peak(high * multiple) <= num_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.peak(middle * multiple) <= num_bytes else (low, middle)
            )
        return low * multiple

    @property
    def keeps_whole(self) -> bool:
        """The engine leaves a small model unsharded between the microbatches of a step."""
        place = self.placement
        is_small = (
            4 * self.spec.num_params / place.topology.tp <= WHOLE_SHARE * place.device_gib * GIB
        )
        return place.engine == "dtensor" and is_small

    @property
    def activation_bytes(self) -> float:
        """Saved for the backward of one layer, per token of this rank."""
        spec, place = self.spec, self.placement
        size, tp, cp = place.compute_bytes, place.topology.tp, place.topology.cp
        shared = tp if place.sequence_parallel else 1
        query, key = spec.num_heads * spec.head_dim / tp, spec.num_kv_heads * spec.head_dim / tp
        norms = 2 * ((4 + size) * spec.hidden_size + 4) / shared
        if spec.has_qk_norm:
            norms += (4 + size) * (query + key) + 4 * (spec.num_heads + spec.num_kv_heads) / tp
        num_active_experts = 0 if spec.moe is None else spec.moe.num_active_experts
        inputs = 2 * size * spec.hidden_size * (1 + max(num_active_experts - 1, 0) / 2)
        # Context parallelism gathers the keys and values of whole rows: its own chunks and those
        # before them.
        seen = 1 if cp == 1 else cp + 0.5
        attention = size * (2 * query + 2 * key * seen) + 4 * spec.num_heads / tp
        return norms + inputs + attention + 4 * size * spec.active_mlp_size / tp

    def assumptions(self) -> list[str]:
        """Each formula in words, for whoever wants to check a number."""
        place = self.placement
        kept = (
            "layers x c hidden, and one whole layer in the backward"
            if place.activation_checkpointing
            else "layers x one layer"
        )
        lines = [
            f"{self.spec.name}: {self.spec.num_params / 1e9:.3f} B parameters P, counted from the"
            f" configuration (equal to"
            " transformers' count for Llama, Qwen2, Qwen3 and Mixtral shapes).",
            *self._state_lines(),
            f"activations: {kept}; a layer saves {self.activation_bytes:,.0f} bytes per token:"
            f" norms 2 x (4 + c) x hidden,"
            " projection inputs 2 c hidden, attention c (2 H d + 2 H_kv d) + 4 H, feed-forward 4 c"
            " width; c bytes per value."
            f" Saved tensors equal autograd's; of the peak, {MEASURED}.",
            "tensor parallelism divides heads and width, sequence parallelism also the norms;"
            " context parallelism divides the"
            " tokens, but keys and values of whole rows are gathered (cp + 1/2 shares); a"
            " pipeline's first stage holds pp"
            " microbatches.",
            f"at the peak either logits or a layer's backward, the larger: {place.chunk_size}"
            f" tokens x vocabulary x"
            f" {self._logit_bytes} bytes of logits and the output embedding's gradient, or 2 c"
            f" (width + hidden) bytes per token"
            " and a layer's gradients before they are reduced.",
            f"usable memory: device - {CONTEXT_BYTES / GIB:.0f} GiB (CUDA context, NCCL) -"
            f" {SAFETY_SHARE:.0%} of the rest"
            " (fragmentation). Generation is not in it: a colocated generator is asleep while the"
            " policy trains.",
        ]
        return lines

    def _state_lines(self) -> list[str]:
        place = self.placement
        tp = place.topology.tp
        if place.engine == "megatron":
            return [
                f"Megatron: weights {place.compute_bytes} P and gradients 4 P on every rank, AdamW"
                f" with float32 master weights"
                f" 12 P over dp x cp = {place.num_shards} (distributed optimizer); P / (tp x pp)"
                f" per rank."
            ]
        copy = "the output embedding and two layers at a time"
        if not place.has_compute_copy:
            copy = "nothing, one process computes with the weights it has"
        elif self.keeps_whole:
            copy = "whole during a step (a small model)"
        return [
            "FSDP2: float32 weights 4 P, gradients 4 P and AdamW 8 P, each shared by dp x cp x tp ="
            f" {place.num_shards * tp} ranks; gathered in compute precision: {copy}."
        ]

    def _stage(self, max_tokens: int, stage: int) -> dict[str, float]:
        spec, place = self.spec, self.placement
        topology = place.topology
        is_first, is_last = stage == 0, stage == topology.pp - 1
        num_layers = -(-spec.num_layers // topology.pp)
        embedding = spec.embedding_params / topology.tp
        num_tables = 1 if spec.is_tied and topology.pp == 1 else is_first + is_last
        params = (
            num_layers * spec.layer_params / topology.tp
            + num_tables * embedding
            + is_last * spec.hidden_size
        )
        tokens = max_tokens / topology.cp
        parts = self._state(params, embedding if is_last else 0.0)
        parts["activations"] = tokens * num_layers * self._kept_bytes * (topology.pp - stage)
        moments = {"backward": self._backward(tokens, is_last)}
        if is_last:
            moments["logits"] = self._logits(tokens, embedding)
        name = max(moments, key=lambda moment: moments[moment])
        return parts | {name: moments[name]}

    def _state(self, params: float, embedding: float) -> dict[str, float]:
        """What does not depend on the tokens."""
        place, size = self.placement, self.placement.compute_bytes
        if place.engine == "megatron":
            optimizer = (12 if size == 2 else 8) * params / place.num_shards
            parts = {"weights": size * params, "gradients": 4 * params, "optimizer": optimizer}
            return parts | ({"reference": size * params} if place.has_reference else {})
        own = params / place.num_shards
        parts = {"weights": 4 * own, "gradients": 4 * own, "optimizer": 8 * own}
        if place.has_reference:
            parts["reference"] = 4 * own
        if place.has_compute_copy:
            layers = 2 * self.spec.layer_params / place.topology.tp
            # A whole model's gradients also stay whole, in the precision they are reduced in.
            parts["gathered weights"] = (
                (size + 4) * params if self.keeps_whole else size * (embedding + layers)
            )
        return parts

    @property
    def _kept_bytes(self) -> float:
        """Kept of one layer from forward to backward, per token."""
        place = self.placement
        if not place.activation_checkpointing:
            return self.activation_bytes
        return place.compute_bytes * self.spec.hidden_size / self._token_shares

    @property
    def _token_shares(self) -> int:
        """Ranks among which sequence parallelism shares the tokens of norms and residuals."""
        return self.placement.topology.tp if self.placement.sequence_parallel else 1

    @property
    def _head_bytes(self) -> float:
        """Kept of the last norm and the hidden states that log-probs are computed from, per
        token.
        """
        size, hidden = self.placement.compute_bytes, self.spec.hidden_size
        return ((4 + size) * hidden + 4) / self._token_shares + 2 * size * hidden

    @property
    def _logit_bytes(self) -> int:
        return 6 if self.placement.compute_bytes == 2 else 4

    def _logits(self, tokens: float, embedding: float) -> float:
        """A chunk of logits, and the gradient of the output embedding summed over chunks in
        float32.
        """
        place, size = self.placement, self.placement.compute_bytes
        chunk = (
            min(tokens, place.chunk_size)
            * self.spec.vocab_size
            / place.topology.tp
            * self._logit_bytes
        )
        gradient = (
            size * embedding if tokens <= place.chunk_size or size == 4 else (4 + size) * embedding
        )
        return chunk + gradient + tokens * (self._head_bytes + size * self.spec.hidden_size)

    def _backward(self, tokens: float, is_last: bool) -> float:
        """The last norm's backward or a layer's: gradients of activations, and those of weights
        before they are reduced.
        """
        spec, place = self.spec, self.placement
        size, tp, hidden = place.compute_bytes, place.topology.tp, spec.hidden_size
        norm = (
            self._head_bytes + (12 * hidden + size * hidden) / self._token_shares
            if is_last
            else 0.0
        )
        layer = 2 * size * spec.active_mlp_size / tp + 2 * size * hidden
        if place.activation_checkpointing:
            layer += self.activation_bytes
        gradients = 0.0
        if place.engine == "dtensor" and place.has_compute_copy:
            table = 0 if self.keeps_whole or not is_last else size * spec.embedding_params / tp
            gradients = (size + 4) * spec.layer_params / tp + table
        return tokens * max(norm, layer) + gradients
