"""Predicted activations of one decoder layer and of the head, in bytes per token of a rank.

They are the tensors that autograd saves in a Llama-like layer; attention saves no score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import Placement, adapter_activations, adapter_outputs


@dataclass(frozen=True)
class Activations:
    """Bytes per token of the activations of a model."""

    spec: ModelSpec
    placement: Placement

    @property
    def layer_bytes(self) -> float:
        """Bytes that autograd saves for the backward pass of one layer."""
        spec = self.spec
        place = self.placement
        size = place.compute_bytes
        tp = place.parallel_layout.tp
        cp = place.parallel_layout.cp
        query = spec.num_heads * spec.head_dim / tp
        key = spec.num_kv_heads * spec.head_dim / tp
        # A norm saves its input in float32, its output, and one float32 number per token.
        norms = 2 * ((4 + size) * spec.hidden_size + 4) / self.token_shares
        if spec.has_qk_norm:
            num_heads = (spec.num_heads + spec.num_kv_heads) / tp
            norms += (4 + size) * (query + key) + 4 * num_heads
        # The inputs of attention and feed-forward; each active expert after the first has a copy.
        num_active_experts = 0 if spec.moe is None else spec.moe.num_active_experts
        num_copies = max(num_active_experts - 1, 0)
        inputs = 2 * size * spec.hidden_size * (1 + num_copies / 2)
        # Context parallelism all-gathers keys and values: the own chunks and all chunks
        # before them are saved.
        key_shares = 1 if cp == 1 else cp + 0.5
        # Query, output, keys and values, and the log-sum-exp of each head in float32.
        attention = size * (2 * query + 2 * key * key_shares) + 4 * spec.num_heads / tp
        # Gate, up projection, activation and their product.
        feed_forward = 4 * size * spec.active_mlp_size / tp
        return norms + inputs + attention + feed_forward + self._adapter_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes of one layer that are kept from forward to backward pass."""
        kind = self.placement.activation_checkpointing
        if kind == "none":
            return self.layer_bytes
        layer_input = self.placement.compute_bytes * self.spec.hidden_size / self.token_shares
        if kind == "full":
            return layer_input
        return layer_input + sum(self._selected_bytes)

    @property
    def recomputed_bytes(self) -> float:
        """Bytes of one layer that its recomputation in the backward pass adds to `saved_bytes`."""
        kind = self.placement.activation_checkpointing
        if kind == "none":
            return 0.0
        if kind == "full":
            return self.layer_bytes
        # The recomputation of a layer releases what autograd does not need.
        return self.layer_bytes - sum(self._selected_bytes)

    @property
    def head_bytes(self) -> float:
        """Bytes of the last norm and of the hidden states for the log-probs."""
        size = self.placement.compute_bytes
        hidden = self.spec.hidden_size
        norm = ((4 + size) * hidden + 4) / self.token_shares
        return norm + 2 * size * hidden

    @property
    def token_shares(self) -> int:
        """Ranks over which sequence parallelism shards the tokens of norms and residuals."""
        layout = self.placement.parallel_layout
        return layout.tp if layout.sequence_parallel else 1

    @property
    def _adapter_bytes(self) -> float:
        """Bytes that autograd saves for the adapters of one layer."""
        if self.placement.lora is None:
            return 0.0
        return self.placement.compute_bytes * adapter_activations(self.spec, self.placement.lora)

    @property
    def _selected_bytes(self) -> tuple[float, float]:
        """Bytes that selective checkpointing saves besides the input of a layer.

        The first number is of tensors that autograd saves as well, the second of tensors that it
        does not save.
        """
        spec = self.spec
        size = self.placement.compute_bytes
        tp = self.placement.parallel_layout.tp
        query = spec.num_heads * spec.head_dim / tp
        key = spec.num_kv_heads * spec.head_dim / tp
        # Values, output and log-sum-exp of attention; gate and up projection.
        width = spec.active_mlp_size / tp
        used = size * (key + query + 2 * width) + 4 * spec.num_heads / tp
        # Queries and keys before the rotary embedding; results of the output and down projection.
        unused = size * (query + key + 2 * spec.hidden_size)
        lora = self.placement.lora
        if lora is not None:
            unused += size * adapter_outputs(spec, lora, tp)
        return used + self._adapter_bytes, unused
