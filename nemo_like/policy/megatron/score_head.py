"""The scalar head of a Megatron-Core model, which every rank of the last pipeline stage has."""

from __future__ import annotations

from torch import Tensor

from nemo_like.policy.engine import TokenLogprobs
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.megatron.model import PackedModel
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.policy.score_head import SequenceShare, row_scores
from nemo_like.sampling_filter import SamplingFilter


class ScoreHead:
    """The layer `score`; it has the signature of `VocabularyHead`."""

    def __init__(
        self,
        model: PackedModel,
        tp_rank: int,
        groups: Groups,
    ) -> None:
        self._model = model
        self._share = None
        if model.config.sequence_parallel:
            self._share = SequenceShare(groups.tp, tp_rank)

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `row_scores`; `hidden` is [T, 1, D], with sequence parallelism [T / tp, 1, D].

        The other arguments are those of a distribution, which scores do not have.
        """
        return row_scores(hidden.squeeze(1), self._model.score.weight, inputs, self._share)
