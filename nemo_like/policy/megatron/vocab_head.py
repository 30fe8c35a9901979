"""Log-probs and entropy out of a Megatron model's last hidden states, each tp rank with its part of
the vocabulary.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_like.policy.engine import TokenLogprobs
from nemo_like.policy.logprobs import VocabShard, scatter_logprobs, token_logprobs
from nemo_like.policy.megatron import groups as megatron_groups
from nemo_like.policy.megatron.model import PackedModel
from nemo_like.policy.megatron.param_map import Geometry
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.sampling_filter import SamplingFilter


class VocabularyHead:
    """The output embedding, tied or not, of the last pipeline stage."""

    def __init__(
        self, model: PackedModel, geometry: Geometry, tp_rank: int, chunk_size: int
    ) -> None:
        self._model = model
        self._chunk_size = chunk_size
        self._is_scattered = model.config.sequence_parallel
        self._rows = geometry.vocabulary_range(tp_rank)
        self._shard = None
        if geometry.tp > 1:
            # The sequence-parallel gather adds gradients up in its own backward.
            self._shard = VocabShard(
                megatron_groups.joined().tp,
                self._rows.start,
                partial_hidden_grad=self._is_scattered,
            )

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `TokenLogprobs`; logits are computed only where `inputs.label_mask` is True."""
        if self._is_scattered:
            hidden = gather_from_sequence_parallel_region(hidden)
        positions = inputs.label_mask.nonzero().squeeze(1)
        outputs = token_logprobs(
            hidden.squeeze(1).index_select(0, positions),
            self._weight(),
            inputs.labels.index_select(0, positions),
            temperature=temperature,
            chunk_size=self._chunk_size,
            with_entropy=with_entropy,
            vocab=self._shard,
            token_filter=token_filter,
        )
        return scatter_logprobs(outputs, positions, len(inputs.labels))

    def _weight(self) -> Tensor:
        """Without the padding of the vocabulary."""
        model = self._model
        is_tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        assert weight is not None
        return weight if len(weight) == len(self._rows) else weight[: len(self._rows)]
