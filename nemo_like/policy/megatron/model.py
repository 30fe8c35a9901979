"""A Megatron-Core model: its parallelism, its construction, its output embedding.

The model maps packed rows to hidden states. The output embedding is applied elsewhere, in chunks of
tokens, so the logits of a microbatch never exist. The rotary embedding is computed as in
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from nemo_like.config.schema import ActivationCheckpointing
from nemo_like.policy.decoder_layers import checkpoint_layers
from nemo_like.policy.heads.logprobs import label_logprobs
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.megatron.layers import RMSNorm, Segments, untyped
from nemo_like.policy.megatron.param_map import ModelSharding
from nemo_like.policy.outputs import (
    LogitOptions,
    OutputEmbedding,
    TokenDistribution,
    TokenLogprobs,
    VocabShard,
)


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

    `family_config` has the arguments in which the family differs from a Llama. `dtype` is the dtype
    of weights and activations. With `recompute` each layer is recomputed in the backward.
    """
    is_cuda = device.type == "cuda"
    spec = sharding.spec
    # An explicit layout, because the layers need not divide evenly by the number of stages.
    num_stages = sharding.num_virtual_stages
    stages = [["decoder"] * len(sharding.layers(stage)) for stage in range(num_stages)]
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
        # Families with a bias of this projection have one of every layer.
        add_bias_linear=spec.has_output_bias,
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
        # Microbatches differ in length, see `schedule.KnownShapes`. Megatron-Core requires this
        # dispatcher with the flag, even for dense models.
        variable_seq_lengths=sharding.pp > 1,
        moe_token_dispatcher_type="alltoall",
        **family_config,
        deallocate_pipeline_outputs=True,
        # A batch of the interleaved schedule would have two messages in each direction between two
        # stages of a pipeline of two, and confuse them.
        overlap_p2p_comm=sharding.vpp > 1,
        batch_p2p_comm=sharding.vpp == 1,
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


def build_model(
    family: Family,
    sharding: ModelSharding,
    groups: Groups,
    causal_lm: Any,
    *,
    dtype: torch.dtype,
    recompute: ActivationCheckpointing,
) -> list[PackedModel]:
    """Build the model chunks of this rank's pipeline stage; their weights are not yet filled.

    `causal_lm` is the Hugging Face model on the meta device.
    """
    device = groups.device
    sequence_parallel = groups.layout.sequence_parallel
    # With real buffers in place of those on the meta device.
    rotary = type(causal_lm.base_model.rotary_emb)(config=causal_lm.config)
    # transformers does not train the input embedding of this token.
    padding_id = getattr(causal_lm.get_input_embeddings(), "padding_idx", None)
    spec = sharding.spec
    config = transformer_config(
        sharding,
        family.config(sharding),
        dtype=dtype,
        device=device,
        sequence_parallel=sequence_parallel,
        recompute=recompute == "full",
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk, virtual_stage in enumerate(sharding.chunks(stage).values()):
        layers = [family.layer_spec(spec, layer) for layer in sharding.layers(virtual_stage)]
        is_last = virtual_stage == sharding.num_virtual_stages - 1
        model = PackedModel(
            rotary,
            dtype,
            padding_id,
            groups.cp_group,
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=layers, layer_norm=untyped(RMSNorm)
            ),
            vocab_size=sharding.vocabulary_rows * sharding.tp,
            max_sequence_length=spec.max_positions or 0,
            position_embedding_type="none",
            share_embeddings_and_output_weights=spec.is_tied,
            pre_process=virtual_stage == 0,
            post_process=is_last,
            vp_stage=chunk if sharding.vpp > 1 else None,
        )
        if spec.head == "scores" and is_last:
            model.use_score_head()
        if recompute == "selective":
            # Megatron-Core's own granularity recomputes complete modules, with their products.
            if sharding.tp > 1 and not sequence_parallel:
                _keep_products_of(model.decoder)
            checkpoint_layers(model.decoder.layers, recompute)
        chunks.append(model.to(device))
    return chunks


def _keep_products_of(decoder: nn.Module) -> None:
    """Give row-parallel layers results that Megatron-Core may overwrite.

    It all-reduces the result of the product in place, which selective checkpointing has saved.
    """
    for module in decoder.modules():
        if isinstance(module, RowParallelLinear):
            module._forward_impl = partial(_copied, module._forward_impl)


def _copied(product: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return a copy of the result of `product`, [T, 1, D]."""
    return product(*args, **kwargs).clone()


class PackedModel(GPTModel):
    """Maps packed ModelInputs to hidden states [T, 1, D]; T are the positions of this cp rank.

    With sequence parallelism the hidden states are [T / tp, 1, D].
    """

    def __init__(
        self,
        rotary: nn.Module,
        dtype: torch.dtype,
        padding_id: int | None,
        context_group: Callable[[int], Any],
        **kwargs: Any,
    ) -> None:
        """`context_group` returns the context-parallel group of a size."""
        super().__init__(**kwargs)
        self.rotary = rotary
        self._dtype = dtype
        self._padding_id = padding_id
        self._context_group = context_group
        self.is_embedding_frozen = False
        """The input embedding has no gradient, but layers behind it have adapters."""

    def forward(self, inputs: ModelInputs) -> Tensor:  # type: ignore[override]
        """Return hidden states, or activations for the next stage, [T, 1, D]."""
        assert inputs.cu_seqlens is not None, "the packed layout has boundaries"
        # The rotary module reads only dtype and device of its first argument.
        like = torch.empty(0, dtype=self._dtype, device=inputs.position_ids.device)
        cos, sin = self.rotary(like, inputs.position_ids)
        segments = Segments(
            qkv_format="thd",
            bounds=inputs.cu_seqlens,
            max_length=inputs.max_seqlen,
            exchange=inputs.exchange,
            context_group=self._context_group(inputs.cp_size),
            cos=self._of_heads(cos),
            sin=self._of_heads(sin),
            experts=self._local_experts(inputs.routed_experts),
        )
        return super().forward(
            inputs.input_ids, inputs.position_ids, untyped(None), packed_seq_params=segments
        )

    def _of_heads(self, rotary: Tensor) -> Tensor:
        """Return the cosines or sines `rotary` [1, T, head_dim] as [T, 1, head_dim].

        Some models have one number for both halves of a head, [1, T, head_dim / 2].
        """
        if 2 * rotary.shape[-1] == self.config.kv_channels:
            rotary = torch.cat((rotary, rotary), dim=-1)
        return rotary.squeeze(0)[:, None]

    def _local_experts(self, experts: Tensor | None) -> Tensor | None:
        """Return the part of `experts` [T, layers, top-k] that the routers of this rank choose."""
        if experts is None or not self.config.sequence_parallel:
            return experts
        group = self.pg_collection.tp
        return experts.chunk(group.size())[group.rank()]

    def use_score_head(self) -> None:
        """Replace the output embedding by the layer `score` with one output."""
        del self.output_layer
        size = self.config.hidden_size
        self.score = nn.Linear(size, 1, bias=False, dtype=self._dtype)
        # With sequence parallelism each tp rank has the gradient of its own tokens.
        weight: Any = self.score.weight
        weight.sequence_parallel = self.config.sequence_parallel

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
        """Embed `input_ids` [1, T] on the first stage, without gradient for padding."""
        hidden, *rest = super()._preprocess(input_ids, *args, **kwargs)
        if hidden is not None and self._padding_id is not None:
            start = 0
            if self.config.sequence_parallel:
                # This rank has only its share of the tokens.
                start = self.pg_collection.tp.rank() * len(hidden)
            is_padding = input_ids[0, start : start + len(hidden)] == self._padding_id
            # transformers' `padding_idx` does the same: the padding token's row has no gradient.
            hidden = torch.where(is_padding[:, None, None], hidden.detach(), hidden)
        if hidden is not None and self.is_embedding_frozen and torch.is_grad_enabled():
            # Megatron-Core's recomputation of a layer has gradients only if its input has one.
            hidden = hidden.detach().requires_grad_()
        return hidden, *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `hidden_states` [T, 1, D] as they are."""
        # Megatron-Core would compute the logits of all tokens here.
        return hidden_states


class VocabularyHead:
    """The output embedding, tied or not, of the last pipeline stage."""

    def __init__(
        self,
        model: PackedModel,
        sharding: ModelSharding,
        tp_rank: int,
        groups: Groups,
        chunk_size: int,
    ) -> None:
        self._model = model
        self._is_sequence_parallel = model.config.sequence_parallel
        self._rows = sharding.vocabulary_range(tp_rank)
        vocab = None
        if sharding.tp > 1:
            # With sequence parallelism the backward of the gather sums the ranks' gradients.
            vocab = VocabShard(
                groups.tp, self._rows.start, partial_hidden_grad=self._is_sequence_parallel
            )
        self._options = LogitOptions(vocab=vocab, chunk_size=chunk_size)

    def __call__(
        self, hidden: Tensor, inputs: ModelInputs, distribution: TokenDistribution
    ) -> TokenLogprobs:
        """See `label_logprobs`; `hidden` is [T, 1, D], with sequence parallelism [T / tp, 1, D]."""
        if self._is_sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        embedding = OutputEmbedding(
            hidden=hidden.squeeze(1), weight=self._weight(), options=self._options
        )
        return label_logprobs(embedding, inputs, distribution)

    def _weight(self) -> Tensor:
        """Return this rank's rows [V / tp, D] without the padding of the vocabulary."""
        model = self._model
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        else:
            weight = model.output_layer.weight
        assert weight is not None
        num_rows = len(self._rows)
        # The unsliced parameter where possible, so that its gradient needs no padded copy.
        return weight if len(weight) == num_rows else weight[:num_rows]
