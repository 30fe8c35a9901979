"""Loss and metrics of one microbatch and of one optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.losses import GlobalCounts, HostRows, Loss, LossInputs, LossMetrics
from nemo_like.metrics import Max, Mean, Metrics, Sum
from nemo_like.policy.device import peak_memory_bytes
from nemo_like.policy.engine import Engine
from nemo_like.policy.inputs.model_inputs import NUM_TRAINED, ModelInputs
from nemo_like.policy.outputs import TokenLogprobs
from nemo_like.policy.rank_groups import RankGroups
from nemo_like.policy.shard_rows import EPISODE_TRAINED


@dataclass
class LossStep:
    """Computes loss_sum / denominator of each microbatch, its metrics and its loss inputs."""

    loss: Loss
    denominator: float
    ranks: RankGroups
    finite: Tensor | None = None
    """bool []: True while the loss of every microbatch so far was finite; None before the first."""

    def __call__(
        self, inputs: ModelInputs, outputs: TokenLogprobs
    ) -> tuple[Tensor, tuple[LossMetrics, LossInputs]]:
        """Return (loss float32 [] with gradient, (metrics, detached loss inputs [T]))."""
        activity.note(f"loss of a microbatch of {inputs.num_tokens} tokens")
        sum_over_cp = partial(self.ranks.sum_over_cp, size=inputs.cp_size)
        entropy = outputs.entropy
        if entropy is not None and not self.loss.entropy_gradient:
            entropy = entropy.detach()
        scores = outputs.scores
        if scores is not None:
            # The last token of a row is on one context-parallel rank; all of them compute the loss.
            scores = sum_over_cp(scores)
        loss_inputs = LossInputs(
            policy_logprobs=outputs.logprobs,
            unfiltered_logprobs=outputs.unfiltered_logprobs,
            token_mask=inputs.label_mask,
            row_ids=inputs.row_ids,
            row_num_tokens=inputs.row_columns[NUM_TRAINED],
            episode_num_tokens=inputs.row_columns.get(EPISODE_TRAINED),
            columns={**_loss_columns(inputs), **(outputs.columns or {})},
            row_columns=inputs.row_columns,
            host_rows=HostRows(
                num_tokens=inputs.host_row_columns[NUM_TRAINED], columns=inputs.host_row_columns
            ),
            entropy=entropy,
            is_argmax=outputs.is_argmax,
            row_scores=scores,
            sum_over_cp=sum_over_cp,
            row_weight=1.0 / inputs.cp_size if self.ranks.layout.dynamic_context else 1.0,
        )
        terms = self.loss(loss_inputs)
        # A tensor on the device: reading it here would wait for the device in each microbatch.
        finite = terms.loss_sum.detach().isfinite()
        self.finite = finite if self.finite is None else self.finite & finite
        # Detached, because the caller keeps the inputs of all microbatches.
        detached = dataclasses.replace(
            loss_inputs,
            policy_logprobs=outputs.logprobs.detach(),
            unfiltered_logprobs=_detached(outputs.unfiltered_logprobs),
            entropy=_detached(entropy),
            columns={name: column.detach() for name, column in loss_inputs.columns.items()},
            row_scores=_detached(scores),
        )
        return terms.loss_sum / self.denominator, (terms.metrics, detached)

    def is_finite(self) -> bool:
        """True if this rank's losses were all finite, or if it computed none."""
        return self.finite is None or bool(self.finite)


def _detached(tensor: Tensor | None) -> Tensor | None:
    """Return `tensor` [T] without its gradient; None for None."""
    return None if tensor is None else tensor.detach()


def _loss_columns(inputs: ModelInputs) -> dict[str, Tensor]:
    """Return every floating-point column per token as float32 [T]."""
    columns = {}
    for name, column in inputs.columns.items():
        if column.is_floating_point():
            columns[name] = column.float()
    return columns


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


def gradient_metrics(grad_norm: float, counts: GlobalCounts) -> Metrics:
    """Return the norm of the gradient and the counts of the step."""
    return {
        "policy/grad_norm": Mean(grad_norm),
        "policy/num_tokens": Sum(counts.num_tokens),
        "policy/num_rows": Sum(counts.num_rows),
    }


def memory_metrics(engine: Engine) -> Metrics:
    """Return the peak memory of the step, maximum and mean over ranks; empty on the CPU."""
    peak = peak_memory_bytes(engine.device)
    if peak is None:
        return {}
    peaks = engine.ranks.gather_over_world(peak)
    return {
        "policy/peak_memory_gb": Max(max(peaks) / 1e9),
        "policy/peak_memory_mean_gb": Mean(sum(peaks) / 1e9, len(peaks)),
    }


def max_over_mean(values: Sequence[float]) -> float:
    """Return the maximum of `values` over their mean; 1 if all are 0."""
    mean = sum(values) / len(values)
    if mean == 0:
        return 1.0
    return max(values) / mean
