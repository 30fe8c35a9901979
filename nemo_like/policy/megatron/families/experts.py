"""Mixture-of-experts (MoE) layers, some or all, in the place of feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.param_map import ModelSharding, RankParams

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec


class ExpertLayers(Family):
    """MoE layers that route each token to its top-k experts by a softmax; no shared experts."""

    def problems(self, spec: ModelSpec) -> list[str]:
        """See `Family.problems`."""
        problems = super().problems(spec)
        moe = spec.moe
        if moe is not None and moe.normalizes_weights and moe.num_active_experts == 1:
            # Every router weight is 1 then, so the router receives no gradient.
            problems.append("norm_topk_prob with num_experts_per_tok 1")
        return problems

    def config(self, sharding: ModelSharding) -> dict[str, Any]:
        """See `Family.config`. Dropless routing, no jitter, no load-balancing loss."""
        config = super().config(sharding)
        moe = sharding.spec.moe
        if moe is None:
            return config
        is_sparse = [int(layer in moe.layers) for layer in range(sharding.spec.num_layers)]
        return config | {
            "num_moe_experts": moe.num_experts,
            "moe_ffn_hidden_size": moe.expert_size,
            "moe_layer_freq": is_sparse,
            "moe_router_topk": moe.num_active_experts,
            # Normalized probabilities of the chosen experts equal a softmax over the chosen
            # experts alone, that is after the top-k.
            "moe_router_pre_softmax": not moe.normalizes_weights,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": sharding.ep,
            "expert_tensor_parallel_size": 1,
        }

    def mlp(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """See `Family.mlp`."""
        from nemo_like.policy.megatron.moe import moe_mlp

        return moe_mlp() if is_sparse(spec, layer) else super().mlp(spec, layer)

    def add_mlp(self, params: RankParams, mlp: str, hf_mlp: str, layer: int) -> None:
        """See `Family.add_mlp`."""
        if not is_sparse(params.spec, layer):
            super().add_mlp(params, mlp, hf_mlp, layer)
            return
        moe = params.spec.moe
        assert moe is not None, "only MoE layers have experts"
        hidden = params.spec.hidden_size
        router_shape = (moe.num_experts, hidden)
        params.add_replicated(f"{mlp}.router.weight", f"{hf_mlp}.gate.weight", router_shape)
        for index, expert in enumerate(params.experts):
            # Experts are counted from 0 on each expert-parallel rank.
            local = f"{mlp}.experts.local_experts.{index}"
            fc1_shape = (2 * moe.expert_size, hidden)
            fc1 = f"{local}.linear_fc1.weight"
            only = range(expert, expert + 1)
            params.add_experts(fc1, f"{hf_mlp}.experts.gate_up_proj", only, fc1_shape)
            fc2_shape = (hidden, moe.expert_size)
            fc2 = f"{local}.linear_fc2.weight"
            params.add_experts(fc2, f"{hf_mlp}.experts.down_proj", only, fc2_shape)


def is_sparse(spec: ModelSpec, layer: int) -> bool:
    """Return True if decoder layer `layer` has experts."""
    return spec.moe is not None and layer in spec.moe.layers
