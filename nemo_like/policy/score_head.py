"""The scalar head of a reward model, for either engine; every tensor-parallel rank has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.policy.collectives import sum_over
from nemo_like.policy.model_inputs import ModelInputs, TokenLogprobs
from nemo_like.sampling_filter import SamplingFilter


class SequenceShare(NamedTuple):
    """The positions of one rank with sequence parallelism: an equal share of T in rank order."""

    group: dist.ProcessGroup
    rank: int


class ScoreHead:
    """The layer `score` of a model; it has the signature of `VocabularyHead`."""

    def __init__(self, model: Any, share: SequenceShare | None) -> None:
        self._model = model
        self._share = share

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `row_scores`; `hidden` is [B, S, D] or [T, 1, D], with sequence parallelism T / tp.

        The other arguments are those of a distribution, which scores do not have.
        """
        # Looked up in each call: FSDP replaces the parameters of its modules.
        return row_scores(hidden.flatten(0, 1), self._model.score.weight, inputs, self._share)


def row_scores(
    hidden: Tensor, weight: Tensor, inputs: ModelInputs, share: SequenceShare | None
) -> TokenLogprobs:
    """Return the score of each row: `weight` times the hidden state of its last token, float32.

    `hidden` [T, D] are the last hidden states of this rank's positions, with sequence parallelism
    [T / tp, D]; `weight` [1, D] is the score head. The product is float32 in any precision: the
    loss compares scores whose difference is small. With sequence parallelism the gradients of
    `hidden` and `weight` are those of this rank's positions, else they are complete on every rank.
    """
    positions = inputs.last_positions
    rows = inputs.row_ids.index_select(0, positions)
    is_local = None
    if share is not None:
        positions = positions - share.rank * len(hidden)
        is_local = (positions >= 0) & (positions < len(hidden))
        # A mask and not a selection: the number of local rows would have to be read from the
        # device.
        positions = positions.clamp(0, len(hidden) - 1)
    states = hidden.index_select(0, positions).float()
    values = (states @ weight.float().mT).squeeze(1)
    if is_local is not None:
        values = torch.where(is_local, values, 0.0)
    scores = values.new_zeros(inputs.num_rows).index_add(0, rows, values)
    if share is not None:
        scores = sum_over(share.group, scores)
    return TokenLogprobs(scores.new_zeros(len(inputs.row_ids)), None, scores=scores)
