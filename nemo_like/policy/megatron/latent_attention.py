"""Multi-head latent attention (DeepSeek) over packed rows.

Queries (if they are compressed), keys and values are computed from a latent vector per token. The
compressing layers are replicated over the tp ranks; the expanding layers are sharded by heads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from nemo_like.models.spec import LatentAttention
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.megatron.layers import RMSNorm, Segments, rotated

_NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever the model's other norms have."""


def latent_attention(latent: LatentAttention) -> ModuleSpec:
    """Return attention with these dimensions."""
    return ModuleSpec(module=LatentSelfAttention, params={"latent": latent})


class ReplicatedLinear(nn.Linear):
    """A linear layer without bias that every tp rank has in full.

    With sequence parallelism it computes the tokens of a rank, and Megatron-Core sums its gradient
    over the tp ranks.
    """

    def __init__(self, config: TransformerConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentSelfAttention(MegatronModule):
    """Causal attention within each segment, for this rank's heads."""

    def __init__(
        self, config: TransformerConfig, *, latent: LatentAttention, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config=config)
        self._latent = latent
        self._tp_group = pg_collection.tp
        query_key_dim = latent.nope_dim + latent.rope_dim
        self._scale = query_key_dim**-0.5 * latent.score_factor
        num_heads = config.num_attention_heads
        self._num_local_heads = num_heads // self._tp_group.size()
        options: Any = {"config": config, "init_method": config.init_method, "bias": False}
        options["tp_group"] = self._tp_group
        hidden = config.hidden_size
        query_width = num_heads * query_key_dim
        if latent.query_rank is None:
            self.linear_q = ColumnParallelLinear(hidden, query_width, **options)
        else:
            self.linear_q_a = ReplicatedLinear(config, hidden, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank, _NORM_EPS)
            self.linear_q_b = ColumnParallelLinear(latent.query_rank, query_width, **options)
        self.linear_kv_a = ReplicatedLinear(config, hidden, latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, _NORM_EPS)
        key_value_width = num_heads * (latent.nope_dim + latent.value_dim)
        self.linear_kv_b = ColumnParallelLinear(latent.kv_rank, key_value_width, **options)
        options.update(input_is_parallel=True, skip_bias_add=True)
        self.linear_proj = RowParallelLinear(num_heads * latent.value_dim, hidden, **options)

    def forward(
        self, hidden: Tensor, *args: Any, packed_seq_params: Segments, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return ([T, 1, D], None) for `hidden` [T, 1, D].

        With sequence parallelism both are [T / tp, 1, D].
        """
        latent = self._latent
        segments = packed_seq_params
        query_nope, query_rope = self._heads(self._query(hidden), latent.nope_dim)
        compressed = self.linear_kv_a(hidden)
        vector, key_rope = compressed.split((latent.kv_rank, latent.rope_dim), dim=-1)
        expanded, _ = self.linear_kv_b(self.kv_layernorm(vector))
        key_nope, value = self._heads(expanded, latent.nope_dim)
        query_rope = self._rotated(query_rope, segments)
        # One for all heads, [T, 1, rope_dim].
        key_rope = self._rotated(self._for_all_ranks(key_rope), segments)
        key_rope = key_rope.expand(-1, self._num_local_heads, -1)
        query = torch.cat((query_nope, query_rope), dim=-1)
        key = torch.cat((key_nope, key_rope), dim=-1)
        out = segments.attend(query, key, value, scale=self._scale)
        return self.linear_proj(out)

    def _query(self, hidden: Tensor) -> Tensor:
        """Return the queries of this rank's heads, [T, 1, heads * query-key dim]."""
        if self._latent.query_rank is None:
            query, _ = self.linear_q(hidden)
        else:
            query, _ = self.linear_q_b(self.q_layernorm(self.linear_q_a(hidden)))
        return query

    def _heads(self, joined: Tensor, first_dim: int) -> tuple[Tensor, Tensor]:
        """Split `joined` [T, 1, heads * D] to [T, heads, first_dim] and the rest of each head."""
        heads = joined.view(len(joined), self._num_local_heads, -1)
        return heads[..., :first_dim], heads[..., first_dim:]

    def _for_all_ranks(self, key: Tensor) -> Tensor:
        """Return the keys [T, 1, rope_dim] of all tokens; the backward sums over the tp ranks.

        `key` is [T / tp, 1, rope_dim]: models with experts have sequence parallelism with tp.
        """
        return gather_rows(self._tp_group, key) if self.config.sequence_parallel else key

    def _rotated(self, heads: Tensor, segments: Segments) -> Tensor:
        """Apply the rotary embedding to `heads` [T, H, rope_dim]."""
        if self._latent.is_interleaved:
            # Pairs of neighbours become the two halves.
            heads = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotated(heads, segments.cos, segments.sin)
