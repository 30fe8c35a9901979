"""The output embedding of a Megatron-Core model, vocabulary-parallel over the tp ranks."""

from __future__ import annotations

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.megatron.model import PackedModel
from nemo_like.policy.megatron.param_map import ModelSharding
from nemo_like.policy.model_inputs import ModelInputs, TokenLogprobs
from nemo_like.policy.projection import VocabShard
from nemo_like.policy.vocab_head import label_logprobs
from nemo_like.sampling_filter import SamplingFilter


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
        self._chunk_size = chunk_size
        self._is_sequence_parallel = model.config.sequence_parallel
        self._rows = sharding.vocabulary_range(tp_rank)
        self._shard = None
        if sharding.tp > 1:
            # With sequence parallelism the backward of the gather sums the ranks' gradients.
            self._shard = VocabShard(
                groups.tp, self._rows.start, partial_hidden_grad=self._is_sequence_parallel
            )

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `label_logprobs`; `hidden` is [T, 1, D], with sequence parallelism [T / tp, 1, D]."""
        if self._is_sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        return label_logprobs(
            hidden.squeeze(1),
            self._weight(),
            inputs,
            temperature=temperature,
            chunk_size=self._chunk_size,
            with_entropy=with_entropy,
            token_filter=token_filter,
            vocab=self._shard,
        )

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
