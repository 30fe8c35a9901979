"""Loss and metrics of one microbatch: the step function that an engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.losses import HostRows, Loss, LossInputs, LossMetrics
from nemo_like.policy.model_inputs import NUM_TRAINED, ModelInputs, TokenLogprobs


@dataclass
class LossStep:
    """Computes loss_sum / denominator of each microbatch, its metrics and its loss inputs."""

    loss: Loss
    denominator: float
    sum_over_cp: Callable[[Tensor], Tensor]
    """See `LossInputs.sum_over_cp`."""
    finite: Tensor | None = None
    """bool []: True while the loss of every microbatch so far was finite; None before the first."""

    def __call__(
        self, inputs: ModelInputs, outputs: TokenLogprobs
    ) -> tuple[Tensor, tuple[LossMetrics, LossInputs]]:
        """Return (loss float32 [] with gradient, (metrics, detached loss inputs [T]))."""
        activity.note(f"loss of a microbatch of {inputs.num_tokens} tokens")
        entropy = outputs.entropy
        if entropy is not None and not self.loss.entropy_gradient:
            entropy = entropy.detach()
        scores = outputs.scores
        if scores is not None:
            # The last token of a row is on one context-parallel rank; all of them compute the loss.
            scores = self.sum_over_cp(scores)
        loss_inputs = LossInputs(
            policy_logprobs=outputs.logprobs,
            unfiltered_logprobs=outputs.unfiltered_logprobs,
            token_mask=inputs.label_mask,
            row_ids=inputs.row_ids,
            row_num_tokens=inputs.row_columns[NUM_TRAINED],
            columns={**_loss_columns(inputs), **(outputs.columns or {})},
            row_columns=inputs.row_columns,
            host_rows=HostRows(
                num_tokens=inputs.host_row_columns[NUM_TRAINED], columns=inputs.host_row_columns
            ),
            entropy=entropy,
            is_argmax=outputs.is_argmax,
            row_scores=scores,
            sum_over_cp=self.sum_over_cp,
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
