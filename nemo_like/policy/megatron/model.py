"""A decoder of a supported family as a Megatron-Core model: one pipeline stage of it.

The model maps packed rows to hidden states. The output embedding is applied elsewhere, in chunks of
tokens, so the logits of a microbatch never exist. The rotary embedding is that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from nemo_like.config.schema import ActivationCheckpointing
from nemo_like.policy.activation_checkpointing import checkpoint_layers
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.layers import RMSNorm, Segments, untyped
from nemo_like.policy.megatron.parallel import transformer_config
from nemo_like.policy.megatron.param_map import ModelSharding
from nemo_like.policy.model_inputs import ModelInputs


def build_model(
    family: Family,
    sharding: ModelSharding,
    rotary: nn.Module,
    *,
    padding_id: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sequence_parallel: bool,
    recompute: ActivationCheckpointing,
) -> PackedModel:
    """Build this rank's pipeline stage; its weights are not yet filled.

    `padding_id` is the token whose input embedding transformers does not train.
    """
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
    layers = [family.layer_spec(spec, layer) for layer in sharding.layers(stage)]
    model = PackedModel(
        rotary,
        dtype,
        padding_id,
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=untyped(RMSNorm)
        ),
        vocab_size=sharding.vocabulary_rows * sharding.tp,
        max_sequence_length=spec.max_positions or 0,
        position_embedding_type="none",
        share_embeddings_and_output_weights=spec.is_tied,
        pre_process=stage == 0,
        post_process=stage == sharding.pp - 1,
    )
    if spec.head == "scores" and stage == sharding.pp - 1:
        model.use_score_head()
    if recompute == "selective":
        # Megatron-Core's own granularity recomputes complete modules, with their products.
        if sharding.tp > 1 and not sequence_parallel:
            _keep_products_of(model.decoder)
        checkpoint_layers(model.decoder.layers, recompute)
    return model.to(device)


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
        self, rotary: nn.Module, dtype: torch.dtype, padding_id: int | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.rotary = rotary
        self._dtype = dtype
        self._padding_id = padding_id
        self.is_embedding_frozen = False
        """The input embedding has no gradient, but layers behind it have LoRA adapters."""

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
            cos=cos.squeeze(0)[:, None],
            sin=sin.squeeze(0)[:, None],
        )
        return super().forward(
            inputs.input_ids, inputs.position_ids, untyped(None), packed_seq_params=segments
        )

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
