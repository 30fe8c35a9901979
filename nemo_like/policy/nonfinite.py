"""Which rows of a skipped optimizer step had a loss that is not finite."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from nemo_like.losses import Loss, LossInputs


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """An optimizer step that was skipped because the loss or the gradients were not finite."""

    index: int
    """Position among the optimizer steps of one call of `train`."""
    grad_norm: float
    """Global gradient norm; NaN where the loss was not finite."""
    row_losses: dict[int, float]
    """Row of the shard -> summed loss of its tokens, before the division by the step's count."""


@torch.no_grad()
def row_loss_sums(loss: Loss, inputs: LossInputs) -> list[float]:
    """Summed loss of each of the R rows of a microbatch: the loss evaluated on the positions of
    that row alone.

    Together the rows have the loss of the microbatch, as a loss is a sum over positions; a value
    that is not finite shows which row caused it. Positions that are not trained are included: a
    weight of 0 does not hide an infinity in them.
    """
    sums = []
    for row in range(len(inputs.row_num_tokens)):
        positions = (inputs.row_ids == row).nonzero().squeeze(1)
        if len(positions) == 0:
            sums.append(0.0)
            continue
        part = dataclasses.replace(
            inputs,
            policy_logprobs=inputs.policy_logprobs[positions],
            unfiltered_logprobs=None
            if inputs.unfiltered_logprobs is None
            else inputs.unfiltered_logprobs[positions],
            token_mask=inputs.token_mask[positions],
            row_ids=inputs.row_ids[positions],
            columns={name: column[positions] for name, column in inputs.columns.items()},
            entropy=None if inputs.entropy is None else inputs.entropy[positions],
        )
        sums.append(float(loss(part).loss_sum))
    return sums
