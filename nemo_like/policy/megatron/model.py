"""A Llama, Qwen2, Qwen3 or Qwen3-MoE as a Megatron-Core model: one pipeline stage of it.

The model maps packed rows to hidden states. The output embedding is applied elsewhere, in chunks of
tokens, so the logits of a microbatch never exist. Norms, attention and rotary embedding are the
project's or transformers' own. Transformer Engine is therefore not needed, and rows, windows and
context parallelism behave as in the other engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
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
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from nemo_like.policy.attention import varlen_attention
from nemo_like.policy.megatron.parallel import transformer_config
from nemo_like.policy.megatron.param_map import ModelSharding
from nemo_like.policy.model_inputs import ModelInputs


def build_model(
    sharding: ModelSharding,
    rotary: nn.Module,
    *,
    padding_id: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sequence_parallel: bool,
    recompute: bool,
) -> PackedModel:
    """Build this rank's pipeline stage; its weights are not yet filled.

    `padding_id` is the token whose input embedding transformers does not train.
    """
    spec = sharding.spec
    config = transformer_config(
        sharding,
        dtype=dtype,
        device=device,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = [
        _layer_spec(spec.windows[layer], spec.has_qk_norm, layer in sharding.moe_layers)
        for layer in sharding.layers(stage)
    ]
    model = PackedModel(
        rotary,
        dtype,
        padding_id,
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=_untyped(RMSNorm)
        ),
        vocab_size=sharding.vocabulary_rows * sharding.tp,
        max_sequence_length=spec.max_positions or 0,
        position_embedding_type="none",
        share_embeddings_and_output_weights=spec.is_tied,
        pre_process=stage == 0,
        post_process=stage == sharding.pp - 1,
    )
    return model.to(device)


class PackedModel(GPTModel):
    """Maps packed ModelInputs to hidden states [T / cp, 1, D].

    With sequence parallelism the hidden states are [T / cp / tp, 1, D].
    """

    def __init__(
        self, rotary: nn.Module, dtype: torch.dtype, padding_id: int | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.rotary = rotary
        self._dtype = dtype
        self._padding_id = padding_id

    def forward(self, inputs: ModelInputs) -> Tensor:  # type: ignore[override]
        assert inputs.cu_seqlens is not None, "the packed layout has boundaries"
        # The rotary module reads only dtype and device of its first argument.
        like = torch.empty(0, dtype=self._dtype, device=inputs.position_ids.device)
        cos, sin = self.rotary(like, inputs.position_ids)
        segments = Segments(
            qkv_format="thd",
            bounds=inputs.cu_seqlens,
            max_length=inputs.max_seqlen,
            cos=cos.squeeze(0)[:, None],
            sin=sin.squeeze(0)[:, None],
        )
        return super().forward(
            inputs.input_ids, inputs.position_ids, _untyped(None), packed_seq_params=segments
        )

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the two replicas of a tied embedding on the first and the last stage.

        Megatron-Core's own method also broadcasts the weight between the stages. Here each stage
        fills its replica from the files.
        """
        is_tied = self.share_embeddings_and_output_weights
        if not is_tied or self.config.pipeline_model_parallel_size == 1:
            return
        weight: Any = self.shared_embedding_or_output_weight()
        if weight is not None:
            # The mark gives it a bucket of its own, so that both stages shard it the same way over
            # the data-parallel ranks.
            weight.shared_embedding = True

    def _preprocess(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        hidden, *rest = super()._preprocess(input_ids, *args, **kwargs)
        if hidden is not None and self._padding_id is not None:
            start = 0
            if self.config.sequence_parallel:
                # This rank has only its share of the tokens.
                start = self.pg_collection.tp.rank() * len(hidden)
            is_padding = input_ids[0, start : start + len(hidden)] == self._padding_id
            # transformers' `padding_idx` does the same: the padding token's row has no gradient.
            hidden = torch.where(is_padding[:, None, None], hidden.detach(), hidden)
        return hidden, *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Megatron-Core would compute the logits of all tokens here.
        return hidden_states


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
    """[T / cp, 1, head_dim], for the position of each token in its row."""
    sin: Any = None
    """[T / cp, 1, head_dim]"""


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
        """Return [T / cp, 1, heads * head_dim] for `query` [T / cp, heads, head_dim]."""
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


def _untyped(value: Any) -> Any:
    """Cast to Any: Megatron-Core's annotations are narrower than what it accepts."""
    return value


def _layer_spec(window: int | None, has_qk_norm: bool, is_sparse: bool) -> ModuleSpec:
    qk_norm = RMSNorm if has_qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=_untyped(partial(SegmentAttention, window=window)),
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    dense = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(module=MLP, submodules=dense)
    if is_sparse:
        experts = ModuleSpec(module=SequentialMLP, submodules=dense)
        mlp = ModuleSpec(
            module=MoELayer, submodules=MoESubmodules(experts=experts, router=_untyped(Router))
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
            self_attn_bda=_untyped(get_bias_dropout_add),
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=_untyped(get_bias_dropout_add),
        ),
    )
