"""The layers of a Megatron-Core model: norms and attention.

They are the project's own. Transformer Engine is therefore not needed, and rows, windows and
context parallelism behave as in the other engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
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
from torch import Tensor, nn

from nemo_like.policy.inputs.attention import varlen_attention


def decoder_layer(*, attention: ModuleSpec, mlp: ModuleSpec) -> ModuleSpec:
    """Return a layer with RMSNorm before `attention` and before the feed-forward block `mlp`."""
    return ModuleSpec(
        module=DecoderLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=untyped(get_bias_dropout_add),
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=untyped(get_bias_dropout_add),
        ),
    )


def self_attention(
    *, window: int | None, has_qk_norm: bool = False, has_sinks: bool = False
) -> ModuleSpec:
    """Return grouped-query attention, with `has_sinks` with a sink for each head.

    A token attends to itself and the `window` - 1 positions before it; None means to all.
    """
    qk_norm = RMSNorm if has_qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=untyped(partial(SegmentAttention, window=window, has_sinks=has_sinks)),
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def dense_mlp() -> ModuleSpec:
    """Return a feed-forward block, gated as TransformerConfig selects."""
    return ModuleSpec(module=MLP, submodules=mlp_submodules())


def mlp_submodules() -> MLPSubmodules:
    """Return the linear layers of a feed-forward block."""
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
    exchange: Any = None
    """`ModelInputs.exchange`."""
    context_group: Any = None
    """The context-parallel group of this microbatch; None for a single rank."""
    cos: Any = None
    """[T, 1, head_dim], for the position of each token in its row."""
    sin: Any = None
    """[T, 1, head_dim]"""
    experts: Any = None
    """int16 [tokens, layers, top-k], of this rank's tokens: the choices of the routers, -1 for
    their own. None: their own for all."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return [T, 1, heads * value dim] for [T, heads, head_dim]; see `varlen_attention`."""
        options.update(exchange=self.exchange, cp_group=self.context_group)
        out = varlen_attention(query, key, value, self.bounds, self.max_length, **options)
        return out.reshape(len(out), 1, -1)


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


class DecoderLayer(TransformerLayer):
    """A decoder layer whose router, if it has one, may have to choose given experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `TransformerLayer.forward`."""
        router = getattr(self.mlp, "router", None)
        if router is not None:
            # Here, so that a recomputed layer has the experts of its own microbatch.
            router.choose(kwargs["packed_seq_params"].experts)
        return super().forward(*args, **kwargs)


class SegmentAttention(MegatronModule):
    """Rotary embedding and causal attention within each segment, for this rank's heads."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        window: int | None,
        pg_collection: Any,
        has_sinks: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.sinks = None
        if has_sinks:
            num_heads = config.num_attention_heads // pg_collection.tp.size()
            self.sinks = nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
        self.scale = config.kv_channels**-0.5
        self.window = window

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
        return segments.attend(
            rotated(query, segments.cos, segments.sin),
            rotated(key, segments.cos, segments.sin),
            value,
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
        )


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding [T, 1, D] to `heads` [T, H, D] as Llama does, in two halves."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def untyped(value: Any) -> Any:
    """Cast to Any: Megatron-Core's annotations are narrower than what it accepts."""
    return value
