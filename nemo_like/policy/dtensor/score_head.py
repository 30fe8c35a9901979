"""The scalar head of a Hugging Face model, which every tensor-parallel rank has."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.engine import TokenLogprobs
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.policy.score_head import SequenceShare, row_scores
from nemo_like.sampling_filter import SamplingFilter


class ScoreHead:
    """The layer `score`; it has the signature of `VocabularyHead`."""

    def __init__(self, model: PreTrainedModel, groups: Groups) -> None:
        self._model: Any = model
        tensor = groups.tensor
        self._share = None
        if tensor is not None and tensor.sequence:
            self._share = SequenceShare(tensor.group, tensor.rank)

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `row_scores`; `hidden` is [B, S, D], with sequence parallelism [1, T / tp, D].

        The other arguments are those of a distribution, which scores do not have.
        """
        # Looked up in each call: FSDP replaces the parameters of its modules.
        return row_scores(hidden.flatten(0, 1), self._model.score.weight, inputs, self._share)
