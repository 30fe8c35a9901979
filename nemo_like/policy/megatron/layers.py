"""Modules of a decoder layer in Megatron-Core, of which model families compose their layers.

Norms and attention are the project's own. Transformer Engine is therefore not needed, and rows,
windows and context parallelism behave as in the other engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import (
    ModuleSpec,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from nemo_like.policy.attention import varlen_attention
from nemo_like.policy.megatron.experts import GroupedExperts


def decoder_layer(
    *, window: int | None, has_qk_norm: bool = False, mlp: ModuleSpec | None = None
) -> ModuleSpec:
    """Return a layer with RMSNorm before attention and before `mlp` (default: `dense_mlp`).

    A token attends to itself and the `window` - 1 positions before it; None means to all.
    """
    qk_norm = RMSNorm if has_qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=untyped(partial(SegmentAttention, window=window)),
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=untyped(get_bias_dropout_add),
            pre_mlp_layernorm=RMSNorm,
            mlp=dense_mlp() if mlp is None else mlp,
            mlp_bda=untyped(get_bias_dropout_add),
        ),
    )


def dense_mlp() -> ModuleSpec:
    """Return a feed-forward block, gated as TransformerConfig selects."""
    return ModuleSpec(module=MLP, submodules=_mlp_submodules())


def moe_mlp() -> ModuleSpec:
    """Return a mixture-of-experts (MoE) layer with a float32 router."""
    experts = ModuleSpec(module=GroupedExperts, submodules=_mlp_submodules())
    submodules = MoESubmodules(experts=experts, router=untyped(Router))
    return ModuleSpec(module=MoELayer, submodules=submodules)


def _mlp_submodules() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


@dataclass
class Segments(PackedSeqParams):
    """Row bounds and rotary embedding of a microbatch, an argument of every layer.

    As an argument, and not as state of the model, it is right also for a recomputed layer, which
    may run after the forward of a later microbatch.
    """

    bounds: Any = None
    """int32 [segments + 1]: segment bounds over all context-parallel ranks."""
    max_length: int = 0
    cos: Any = None
    """[T, 1, head_dim], for the position of each token in its row."""
    sin: Any = None
    """[T, 1, head_dim]"""


class RMSNorm(nn.RMSNorm):
    """The model's only norm.

    With sequence parallelism Megatron-Core sums the gradients of weights marked as
    `sequence_parallel` over the tp ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Router(TopKRouter):
    """MoE router whose logits are float32 whatever the precision of the weights is."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., experts] of `input` [..., D]."""
        return F.linear(input.float(), self.weight.float())


class SegmentAttention(MegatronModule):
    """Rotary embedding and causal attention within each segment, for this rank's heads."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        window: int | None,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.scale = config.kv_channels**-0.5
        self.window = window
        self.cp_group = pg_collection.cp if pg_collection.cp.size() > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: Segments,
        **kwargs: Any,
    ) -> Tensor:
        """Return [T, 1, heads * head_dim] for `query` [T, heads, head_dim]."""
        segments = packed_seq_params
        out = varlen_attention(
            _rotated(query, segments.cos, segments.sin),
            _rotated(key, segments.cos, segments.sin),
            value,
            segments.bounds,
            segments.max_length,
            scale=self.scale,
            window=self.window,
            cp_group=self.cp_group,
        )
        return out.reshape(len(out), 1, -1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding [T, 1, D] to `heads` [T, H, D] as Llama does, in two halves."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def untyped(value: Any) -> Any:
    """Cast to Any: Megatron-Core's annotations are narrower than what it accepts."""
    return value
