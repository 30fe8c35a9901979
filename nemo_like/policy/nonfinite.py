"""Loss of each row of a skipped optimizer step, to find those that are not finite."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Return the summed loss of each of the R rows of a microbatch.

    The loss is evaluated on the positions of one row at a time; it is a sum over rows, so they add
    up to the loss of the microbatch, and a value that is not finite shows the row that caused it.
    Rows that the loss couples, such as the two of a preference pair, are evaluated together and
    each gets their loss.
    """
    num_rows = len(inputs.row_num_tokens)
    groups = loss.coupled_rows(inputs)
    if groups is None:
        groups = torch.arange(num_rows, device=inputs.row_ids.device)
    sums = [0.0] * num_rows
    for group in groups.unique().tolist():
        is_in_group = groups == group
        total = float(loss(_select_rows(inputs, is_in_group)).loss_sum)
        for row in is_in_group.nonzero().squeeze(1).tolist():
            sums[row] = total
    return sums


def _select_rows(inputs: LossInputs, is_selected: Tensor) -> LossInputs:
    """Return the positions of the rows that `is_selected` bool [R] marks."""
    # Positions that are not trained are included: a weight of 0 times an infinity is NaN.
    positions = is_selected[inputs.row_ids].nonzero().squeeze(1)
    return dataclasses.replace(
        inputs,
        policy_logprobs=inputs.policy_logprobs[positions],
        unfiltered_logprobs=_select(inputs.unfiltered_logprobs, positions),
        token_mask=inputs.token_mask[positions],
        row_ids=inputs.row_ids[positions],
        row_num_tokens=torch.where(is_selected, inputs.row_num_tokens, 0.0),
        # It has the tokens of all rows.
        host_rows=None,
        columns={name: column[positions] for name, column in inputs.columns.items()},
        entropy=_select(inputs.entropy, positions),
        is_argmax=_select(inputs.is_argmax, positions),
    )


def _select(values: Tensor | None, positions: Tensor) -> Tensor | None:
    """Return the elements of `values` [T] at `positions` int64 [n]; None for None."""
    return None if values is None else values[positions]
