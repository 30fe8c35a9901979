"""gpt-oss: attention with sinks, and biases of every layer, of routers and of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families.experts import ExpertLayers
from nemo_like.policy.megatron.param_map import RankParams

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec


class GptOss(ExpertLayers):
    """All layers have experts, whose weights have the layout that they have in transformers."""

    has_output_bias = True

    def attention(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """See `Family.attention`."""
        from nemo_like.policy.megatron.layers import self_attention

        return self_attention(window=spec.windows[layer], has_sinks=True)

    def mlp(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """See `Family.mlp`."""
        from nemo_like.policy.megatron.moe import ClampedExperts, moe_mlp

        return moe_mlp(experts=ClampedExperts, moe=spec.moe)

    def add_attention(self, params: RankParams, attention: str, hf_attention: str) -> None:
        """See `Family.add_attention`."""
        super().add_attention(params, attention, hf_attention)
        spec = params.spec
        params.add_qkv(f"{attention}.linear_qkv", hf_attention, "bias")
        output_bias = f"{hf_attention}.o_proj.bias"
        params.add_replicated(f"{attention}.linear_proj.bias", output_bias, (spec.hidden_size,))
        sinks = f"{attention}.core_attention.sinks"
        params.add_sharded_vector(sinks, f"{hf_attention}.sinks", spec.num_heads)

    def add_mlp(self, params: RankParams, mlp: str, hf_mlp: str, layer: int) -> None:
        """See `Family.add_mlp`."""
        moe = params.spec.moe
        assert moe is not None, "all layers have experts"
        hidden = params.spec.hidden_size
        for kind, shape in (("weight", (moe.num_experts, hidden)), ("bias", (moe.num_experts,))):
            params.add_replicated(f"{mlp}.router.{kind}", f"{hf_mlp}.router.{kind}", shape)
        for name, expert_shape in (
            ("gate_up_proj", (hidden, 2 * moe.expert_size)),
            ("gate_up_proj_bias", (2 * moe.expert_size,)),
            ("down_proj", (moe.expert_size, hidden)),
            ("down_proj_bias", (hidden,)),
        ):
            local = f"{mlp}.experts.{name}"
            hf_name = f"{hf_mlp}.experts.{name}"
            params.add_experts(local, hf_name, params.experts, expert_shape)
