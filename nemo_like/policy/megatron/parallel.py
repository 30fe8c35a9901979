"""Parallelism of a Megatron-Core model (tp, sp, pp, cp, ep): its TransformerConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from nemo_like.policy.megatron.param_map import ModelSharding


def transformer_config(
    sharding: ModelSharding,
    family_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    sequence_parallel: bool,
    recompute: bool,
) -> TransformerConfig:
    """Build Megatron-Core's configuration of the model and of its parallelism.

    `family_config` has the arguments in which the family differs from a Llama. `dtype` is that of
    weights and activations. With `recompute` each layer is recomputed in the backward.
    """
    is_cuda = device.type == "cuda"
    spec = sharding.spec
    # An explicit layout, because the layers need not divide evenly by the number of stages.
    stages = [["decoder"] * len(sharding.layers(stage)) for stage in range(sharding.pp)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sharding.tp,
        pipeline_model_parallel_size=sharding.pp,
        pipeline_model_parallel_layout=stages if sharding.pp > 1 else None,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Microbatches differ in length. Megatron-Core requires this dispatcher with the flag, even
        # for dense models.
        variable_seq_lengths=sharding.pp > 1,
        moe_token_dispatcher_type="alltoall",
        **family_config,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=is_cuda,
        # The loss is already divided by the global count; it and its gradients stay unscaled.
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # Weights are read from files.
        perform_initialization=False,
        use_cpu_initialization=not is_cuda,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=is_cuda,
        bias_dropout_fusion=is_cuda,
        cuda_graph_scope=[],
    )
