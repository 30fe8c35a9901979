"""Base class of model families: the decoder of Llama, in hooks that other families override.

Imports no Megatron at module level, so that the check of a config runs without it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_like.config.errors import ConfigError
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.param_map import ModelSharding, ParamMap, RankParams

if TYPE_CHECKING:
    from megatron.core.transformer import ModuleSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the lengths of a microbatch's rows."""


class Family:
    """How the Megatron engine builds the models of one `model_type`.

    The hooks describe a Llama: RMSNorm before each block, rotary embedding, grouped-query
    attention, a gated SiLU feed-forward block, no biases. A family overrides what is different.
    """

    has_output_bias: ClassVar[bool] = False
    """The output projection of attention has a bias."""

    def problems(self, spec: ModelSpec) -> list[str]:
        """Return the properties of a model that this engine computes differently, for a message."""
        problems = []
        if spec.rope_type not in ROPE_TYPES:
            supported = ", ".join(ROPE_TYPES)
            problems.append(f"rope_type {spec.rope_type} (supported: {supported})")
        if spec.has_output_bias != self.has_output_bias:
            problems.append(f"attention_bias {str(spec.has_output_bias).lower()}")
        if spec.has_mlp_bias:
            problems.append("mlp_bias true")
        if spec.attention_dropout:
            problems.append(f"attention_dropout {spec.attention_dropout:g}")
        if spec.activation != "silu":
            problems.append(f"hidden_act {spec.activation}")
        return problems

    def config(self, sharding: ModelSharding) -> dict[str, Any]:
        """Return the arguments of Megatron-Core's TransformerConfig that differ from a Llama's."""
        return {}

    def layer_spec(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """Return the modules of decoder layer `layer`, counted over all pipeline stages."""
        from nemo_like.policy.megatron.layers import decoder_layer

        return decoder_layer(attention=self.attention(spec, layer), mlp=self.mlp(spec, layer))

    def attention(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """Return the attention of decoder layer `layer`."""
        from nemo_like.policy.megatron.layers import self_attention

        return self_attention(window=spec.windows[layer], has_qk_norm=spec.has_qk_norm)

    def mlp(self, spec: ModelSpec, layer: int) -> ModuleSpec:
        """Return the feed-forward block of decoder layer `layer`."""
        from nemo_like.policy.megatron.layers import dense_mlp

        return dense_mlp()

    def add_attention(self, params: RankParams, attention: str, hf_attention: str) -> None:
        """Add the projections of attention.

        `attention` and `hf_attention` are the prefixes of its names in Megatron-Core and in
        transformers, for example `decoder.layers.0.self_attention` and `model.layers.0.self_attn`.
        """
        spec = params.spec
        width = spec.num_heads * spec.head_dim
        params.add_row_parallel(
            f"{attention}.linear_proj.weight", f"{hf_attention}.o_proj.weight", width
        )
        params.add_qkv(f"{attention}.linear_qkv", hf_attention, "weight")

    def add_mlp(self, params: RankParams, mlp: str, hf_mlp: str, layer: int) -> None:
        """Add the feed-forward block of decoder layer `layer`; prefixes as in `add_attention`."""
        self.add_dense(params, mlp, hf_mlp, params.spec.intermediate_size)

    def add_dense(self, params: RankParams, mlp: str, hf_mlp: str, width: int) -> None:
        """Add a gated feed-forward block with the intermediate size `width`."""
        gate_and_up = (f"{hf_mlp}.gate_proj.weight", f"{hf_mlp}.up_proj.weight")
        params.add_column_parallel(f"{mlp}.linear_fc1.weight", gate_and_up, width)
        params.add_row_parallel(f"{mlp}.linear_fc2.weight", f"{hf_mlp}.down_proj.weight", width)

    def add_layer(self, params: RankParams, prefix: str, hf_layer: str, layer: int) -> None:
        """Add all parameters of decoder layer `layer`; `prefix` and `hf_layer` are its names."""
        shape = (params.spec.hidden_size,)
        params.add_replicated(
            f"{prefix}.input_layernorm.weight", f"{hf_layer}.input_layernorm.weight", shape
        )
        self.add_attention(params, f"{prefix}.self_attention", f"{hf_layer}.self_attn")
        # transformers names the norm by what precedes it, Megatron-Core by what follows.
        hf_norm = f"{hf_layer}.post_attention_layernorm.weight"
        params.add_replicated(f"{prefix}.pre_mlp_layernorm.weight", hf_norm, shape)
        self.add_mlp(params, f"{prefix}.mlp", f"{hf_layer}.mlp", layer)

    def param_map(
        self, sharding: ModelSharding, stage: int, tp_rank: int, ep_rank: int = 0
    ) -> ParamMap:
        """Return the parameters of the rank at pipeline stage `stage`, by Megatron-Core name."""
        return self.rank_params(sharding, stage, tp_rank, ep_rank).specs

    def rank_params(
        self, sharding: ModelSharding, stage: int, tp_rank: int, ep_rank: int
    ) -> RankParams:
        """Return the parameters of a rank, and its buffers with values in files."""
        params = RankParams(sharding, tp_rank, ep_rank)
        for prefix, virtual_stage in sharding.chunks(stage).items():
            if virtual_stage == 0:
                params.add_embedding(prefix)
            for index, layer in enumerate(sharding.layers(virtual_stage)):
                # Megatron-Core counts layers from 0 in each chunk.
                name = f"{prefix}decoder.layers.{index}"
                self.add_layer(params, name, f"model.layers.{layer}", layer)
            if virtual_stage == sharding.num_virtual_stages - 1:
                params.add_output(prefix, is_first_stage=virtual_stage == 0)
        return params

    def frozen_parameters(
        self, frozen: Collection[str], sharding: ModelSharding, stage: int, param_map: ParamMap
    ) -> frozenset[str]:
        """Return the parameters of a rank, by Megatron-Core name, that consist of `frozen` weights.

        `frozen` are Hugging Face names, and `param_map` is the map of the rank. Raises ConfigError
        if a part of a fused parameter is frozen, and if a pipeline stage has no other parameters.
        """
        # The same for all ranks, so that all of them raise.
        for each in range(sharding.pp):
            names = _frozen_of_stage(frozen, self, sharding, each)
            if len(names) == len(_unsharded(self, sharding, each)):
                raise ConfigError(
                    f"policy.freeze freezes all weights of pipeline stage {each} of {sharding.pp},"
                    " which then has nothing to update: use fewer stages (parallel.pipeline), or"
                    " policy.engine=dtensor"
                )
        of_stage = _frozen_of_stage(frozen, self, sharding, stage)
        result = set()
        for name, spec in param_map.items():
            # Experts have local numbers, and all experts of a layer are one Hugging Face weight.
            # Others are not compared by their slices, because a rank may have only padding of the
            # vocabulary.
            is_frozen = name in of_stage
            if spec.is_expert:
                is_frozen = spec.slices[0].name in frozen
            if is_frozen:
                result.add(name)
        return frozenset(result)


def _frozen_of_stage(
    frozen: Collection[str], family: Family, sharding: ModelSharding, stage: int
) -> set[str]:
    """Return the unsharded parameters of a stage that consist of `frozen` weights."""
    result = set()
    for name, spec in _unsharded(family, sharding, stage).items():
        weights = {part.name for part in spec.slices}
        chosen = sorted(weights.intersection(frozen))
        if not chosen:
            continue
        others = sorted(weights.difference(frozen))
        if others:
            raise ConfigError(
                f"policy.freeze matches {', '.join(chosen)}, which policy.engine megatron stores in"
                f" one parameter with {', '.join(others)}: match all of them or none, or use"
                " policy.engine=dtensor"
            )
        result.add(name)
    _check_biases(result, _unsharded(family, sharding, stage))
    return result


def _check_biases(frozen: Collection[str], param_map: ParamMap) -> None:
    """Raise ConfigError for a trained bias of a layer with a frozen weight."""
    for name in frozen:
        module, _, kind = name.rpartition(".")
        bias = f"{module}.bias"
        if kind == "weight" and bias in param_map and bias not in frozen:
            # Megatron-Core computes no gradient for it.
            weights = sorted({part.name for part in param_map[name].slices})
            biases = sorted({part.name for part in param_map[bias].slices})
            raise ConfigError(
                f"policy.freeze matches {', '.join(weights)} and not {', '.join(biases)}, which"
                " policy.engine megatron cannot train alone: match the biases too, or use"
                " policy.engine=dtensor"
            )


def _unsharded(family: Family, sharding: ModelSharding, stage: int) -> ParamMap:
    """Return the parameters of a stage without tensor and expert parallelism."""
    unsharded = ModelSharding(sharding.spec, pp=sharding.pp, vpp=sharding.vpp)
    return family.param_map(unsharded, stage, 0, 0)
