"""The layers of a Megatron-Core model: norms, attention, and experts with one grouped matrix
product.

Modules, parameters and their names are as in Megatron-Core's SequentialMLP, so weights,
gradients, optimizer and checkpoints are as with it. It would run three small products per expert
and layer, and read the number of tokens of each expert on the host.

Norms and attention are the project's own. Transformer Engine is therefore not needed, and rows,
windows and context parallelism behave as in the other engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
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
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nemo_like.device_transfer import tensor_to_device
from nemo_like.models.routers import replayed
from nemo_like.policy.inputs.attention import varlen_attention

_ALIGNMENT_BYTES = 16
"""The kernels on CUDA load rows that begin at multiples of this."""


class GroupedExperts(SequentialMLP):
    """SwiGLU experts without biases; a single expert runs as a plain feed-forward block."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Return ([T, D], None) for hidden states [T, D], sorted by expert, and their router
        weights [T]; `tokens_per_expert` is int64 [experts], on the host or the device.
        """
        hidden = permuted_local_hidden_states
        if self.num_local_experts == 1 or len(hidden) == 0:
            output, _ = super().forward(hidden, tokens_per_expert, permuted_probs)
            return output, None
        ends = tokens_per_expert.cumsum(0).to(torch.int32)
        ends = tensor_to_device(ends, hidden.device)
        experts: Any = self.local_experts
        up = grouped_linear(hidden, ends, [expert.linear_fc1.weight for expert in experts])
        activated = self._activate(up, permuted_probs)
        down = grouped_linear(activated, ends, [expert.linear_fc2.weight for expert in experts])
        return down, None

    def _activate(self, up: Tensor, probs: Tensor) -> Tensor:
        """Return silu(gate) * up, times the router weights [T]; [T, width] from [T, 2 width]."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(up, None, probs.unsqueeze(-1))
        gate, linear = up.chunk(2, dim=-1)
        activated = F.silu(gate) * linear
        return (activated * probs.unsqueeze(-1)).to(up.dtype)


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply consecutive groups of `tokens` [T, K] by the transpose of one weight [N, K] each.

    `ends`, int32 [groups], are the ends of the groups; the last one is T. Returns [T, N].
    """
    return _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[return-value]


class _GroupedLinear(torch.autograd.Function):
    """Saves the separate weights and stacks them again in the backward pass.

    A stack that autograd saved would be a second copy of all experts of all layers.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Return [T, N]; see `grouped_linear`."""
        ctx.save_for_backward(tokens, ends, *weights)
        stacked = torch.stack(weights)
        return _grouped_product(tokens, stacked.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens [T, K] and of each weight [N, K]."""
        tokens, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_tokens = None
        if ctx.needs_input_grad[0]:
            grad_tokens = _grouped_product(grad, torch.stack(weights), ends)
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            gradients = _grouped_product(grad.t(), tokens, ends)
            # Some kernels leave the result of an empty group uninitialized (pytorch#172439).
            sizes = ends.diff(prepend=ends.new_zeros(1))
            gradients.masked_fill_((sizes == 0)[:, None, None], 0.0)
            grad_weights = gradients.unbind()
        return grad_tokens, None, *grad_weights


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group.

    With `right` [groups, K, N] the groups are rows of `left` [T, K], and the result is [T, N]. With
    `right` [T, N] they are columns of `left` [K, T], and the result is [groups, K, N].
    """
    if _has_kernel(left, right):
        return F.grouped_mm(left, right, offs=ends)
    # Without a kernel the host reads the ends of the groups.
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if right.dim() == 3:
        parts = left.split(sizes)
        return torch.cat([torch.mm(part, each) for part, each in zip(parts, right, strict=True)])
    columns = left.split(sizes, dim=1)
    rows = right.split(sizes)
    return torch.stack([torch.mm(a, b) for a, b in zip(columns, rows, strict=True)])


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """Return True if `torch.nn.functional.grouped_mm` takes these operands as they are."""
    if not hasattr(F, "grouped_mm"):
        return False
    if not left.is_cuda:
        return True
    if left.dtype != torch.bfloat16:
        return False
    # The dim that the groups share out is never the contiguous one and needs no alignment.
    widths = (left.shape[0], right.shape[1]) if right.dim() == 2 else right.shape[1:]
    return all(width * left.element_size() % _ALIGNMENT_BYTES == 0 for width in widths)


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
        module=DecoderLayer,
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
    exchange: Any = None
    """`ModelInputs.exchange`."""
    cos: Any = None
    """[T, 1, head_dim], for the position of each token in its row."""
    sin: Any = None
    """[T, 1, head_dim]"""
    experts: Any = None
    """int16 [tokens, layers, top-k], of this rank's tokens: the choices of the routers, -1 for
    their own. None: their own for all."""


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


class Router(TopKRouter):
    """MoE router whose logits are float32 whatever the precision of the weights is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._experts: Tensor | None = None

    def choose(self, experts: Tensor | None) -> None:
        """Choose those of this layer of `experts`, see `Segments`, until the next call."""
        # Megatron-Core calls `get_replay_topk` of this attribute if it is set.
        self.router_replay: Any = None
        if experts is None:
            return
        frequency: Any = self.config.moe_layer_freq
        assert self.layer_number is not None
        index = sum(frequency[: self.layer_number - 1])
        self._experts = experts[:, index]
        self.router_replay = self

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices, [tokens, topk] each, of the given experts."""
        _, own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert self._experts is not None, "set together with `router_replay`"
        return replayed(scores, own, self._experts)

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
            exchange=segments.exchange,
        )
        return out.reshape(len(out), 1, -1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding [T, 1, D] to `heads` [T, H, D] as Llama does, in two halves."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def untyped(value: Any) -> Any:
    """Cast to Any: Megatron-Core's annotations are narrower than what it accepts."""
    return value
