"""Log-probs and entropy out of a Megatron model's last hidden states, each tp rank with its part of the vocabulary."""

from __future__ import annotations

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_like.data.packing.layout import ModelInputs
from nemo_like.policy import megatron_groups
from nemo_like.policy.logprobs import VocabShard, token_logprobs
from nemo_like.policy.megatron_model import PackedModel
from nemo_like.policy.megatron_table import Geometry


class VocabularyHead:
    """The output embedding, tied or not, of the last pipeline stage."""

    def __init__(self, model: PackedModel, geometry: Geometry, tp_rank: int, chunk_size: int) -> None:
        self._model = model
        self._chunk_size = chunk_size
        self._is_scattered = model.config.sequence_parallel
        self._rows = geometry.vocabulary_range(tp_rank)
        self._shard = None
        if geometry.tp > 1:
            # The sequence-parallel gather adds gradients up in its own backward.
            self._shard = VocabShard(megatron_groups.joined().tp, self._rows.start, partial_hidden_grad=self._is_scattered)

    def __call__(
        self, hidden: Tensor, inputs: ModelInputs, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """float32 [T] each, 0 where `inputs.label_mask` is False; only the other positions meet the vocabulary."""
        if self._is_scattered:
            hidden = gather_from_sequence_parallel_region(hidden)
        positions = inputs.label_mask.nonzero().squeeze(1)
        logprobs, entropy = token_logprobs(
            hidden.squeeze(1).index_select(0, positions),
            self._weight(),
            inputs.labels.index_select(0, positions),
            temperature=temperature,
            chunk_size=self._chunk_size,
            with_entropy=with_entropy,
            vocab=self._shard,
        )

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(len(inputs.labels)).index_copy(0, positions, values)

        return spread(logprobs), None if entropy is None else spread(entropy)

    def _weight(self) -> Tensor:
        """Without the padding of the vocabulary."""
        model = self._model
        is_tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        assert weight is not None
        return weight if len(weight) == len(self._rows) else weight[: len(self._rows)]
