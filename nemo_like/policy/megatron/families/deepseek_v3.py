"""DeepSeek-V3: latent attention, and experts that are chosen in groups, with shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families.experts import ExpertLayers, is_sparse
from nemo_like.policy.megatron.param_map import ModelSharding, RankParams, Shape

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec


class DeepseekV3(ExpertLayers):
    """The correction bias of the routers keeps the values of the model's files."""

    def config(self, sharding: ModelSharding) -> dict[str, Any]:
        """See `Family.config`."""
        config = super().config(sharding)
        moe = sharding.spec.moe
        if moe is not None and moe.shared_size:
            config["moe_shared_expert_intermediate_size"] = moe.shared_size
        return config

    def attention(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """See `Family.attention`."""
        from nemo_like.policy.megatron.latent_attention import latent_attention

        assert spec.latent is not None, "the family has latent attention"
        return latent_attention(spec.latent)

    def mlp(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """See `Family.mlp`."""
        from nemo_like.policy.megatron.moe import SigmoidRouter, moe_mlp

        if not is_sparse(spec, layer):
            return super().mlp(spec, layer)
        return moe_mlp(router=SigmoidRouter, moe=spec.moe)

    def add_attention(self, params: RankParams, attention: str, hf_attention: str) -> None:
        """See `Family.add_attention`."""
        spec = params.spec
        latent = spec.latent
        assert latent is not None, "the family has latent attention"
        hidden = spec.hidden_size
        query_width = spec.num_heads * (latent.nope_dim + latent.rope_dim)
        key_value_width = spec.num_heads * (latent.nope_dim + latent.value_dim)
        # (name, name in transformers, shape)
        replicated: list[tuple[str, str, Shape]] = [
            ("linear_kv_a", "kv_a_proj_with_mqa", (latent.kv_rank + latent.rope_dim, hidden)),
            ("kv_layernorm", "kv_a_layernorm", (latent.kv_rank,)),
        ]
        sharded = [("linear_kv_b", "kv_b_proj", (key_value_width, latent.kv_rank))]
        if latent.query_rank is None:
            sharded.append(("linear_q", "q_proj", (query_width, hidden)))
        else:
            replicated.append(("linear_q_a", "q_a_proj", (latent.query_rank, hidden)))
            replicated.append(("q_layernorm", "q_a_layernorm", (latent.query_rank,)))
            sharded.append(("linear_q_b", "q_b_proj", (query_width, latent.query_rank)))
        for name, hf_name, shape in replicated:
            hf_weight = f"{hf_attention}.{hf_name}.weight"
            params.add_replicated(f"{attention}.{name}.weight", hf_weight, shape)
        for name, hf_name, (width, num_inputs) in sharded:
            hf_weight = f"{hf_attention}.{hf_name}.weight"
            params.add_column_parallel(
                f"{attention}.{name}.weight", (hf_weight,), width, num_inputs=num_inputs
            )
        width = spec.num_heads * latent.value_dim
        output = f"{hf_attention}.o_proj.weight"
        params.add_row_parallel(f"{attention}.linear_proj.weight", output, width)

    def add_mlp(self, params: RankParams, mlp: str, hf_mlp: str, layer: int) -> None:
        """See `Family.add_mlp`."""
        super().add_mlp(params, mlp, hf_mlp, layer)
        moe = params.spec.moe
        if moe is None or not is_sparse(params.spec, layer):
            return
        params.buffers[f"{mlp}.router.correction_bias"] = f"{hf_mlp}.gate.e_score_correction_bias"
        if moe.shared_size:
            self.add_dense(
                params, f"{mlp}.shared_experts", f"{hf_mlp}.shared_experts", moe.shared_size
            )
