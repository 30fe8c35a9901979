"""The loss of a config on a tiny batch, computed with the loss that a run trains with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_like.config.errors import ConfigError
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.text import error_text
from nemo_like.losses import (
    ClippedPolicyGradientLoss,
    GlobalCounts,
    LossInputs,
    RolloutLoss,
    rollout_loss,
)
from nemo_like.metrics import metric_values

_ADVANTAGES = (1.0, -0.5)
_ROW_IDS = (0, 0, 0, 1, 1)
_PREV_LOGPROBS = (-1.0, -2.0, -0.5, -0.7, -1.5)
# In units of the log of the upper clip: in the first row two tokens, and the row, are above it.
_UPDATES = (1.5, 0.5, 1.3, -0.25, 0.5)
_MISMATCHES = (0.05, -0.02, 0.9, 0.0, 0.01)
_REFERENCE_DIFFERENCES = (0.2, -0.1, 0.0, 0.3, 0.1)
_ENTROPY = 1.5
_METRICS = (
    "policy/ratio_mean",
    "policy/clip_fraction",
    "importance/weight_mean",
    "importance/out_of_bounds_share",
)


def example_lines(
    config: PolicyGradientLossConfig, max_new_tokens: int, *, is_single_step: bool
) -> list[str]:
    """Return the inputs, the terms, the loss and its gradient, one line each.

    Raises ConfigError for a loss of the user that cannot be used or that fails.
    """
    loss = rollout_loss(config, max_new_tokens)
    if is_single_step:
        loss = loss.for_num_steps(1)
    inputs = _example_inputs(config, is_single_step=is_single_step)
    counts = GlobalCounts(num_tokens=len(_ROW_IDS), num_rows=len(_ADVANTAGES))
    denominator = loss.denominator(counts)
    try:
        terms = loss(inputs)
        mean = terms.loss_sum / denominator
        (gradient,) = torch.autograd.grad(mean, inputs.policy_logprobs)
    except Exception as error:
        if config.path is None:
            raise
        # Code of the user can fail in any way.
        raise ConfigError(
            f"loss_fn.path is {config.path!r}, whose loss failed on the example with"
            f" {error_text(error)}"
        ) from error
    lines = list(_token_lines(inputs, gradient))
    if isinstance(loss, ClippedPolicyGradientLoss):
        lines += _term_lines(loss, inputs)
    total = float(terms.loss_sum.detach())
    lines.append(f"sum {total:.6g} / {denominator:g} = loss {total / denominator:.6g}")
    metrics = metric_values(terms.fetch_metrics())
    for name in _METRICS:
        if name in metrics:
            lines.append(f"{name} = {metrics[name]:.6g}")
    return lines


def _example_inputs(config: PolicyGradientLossConfig, *, is_single_step: bool) -> LossInputs:
    """Return two rows of 3 and 2 trained tokens with every column that a loss may read."""
    prev = torch.tensor(_PREV_LOGPROBS)
    _, highest = config.ratio_bounds
    unit = 0.2 if highest is None else math.log(highest)
    updates = torch.zeros(len(_ROW_IDS)) if is_single_step else unit * torch.tensor(_UPDATES)
    return LossInputs(
        policy_logprobs=(prev + updates).requires_grad_(),
        token_mask=torch.ones(len(_ROW_IDS), dtype=torch.bool),
        row_ids=torch.tensor(_ROW_IDS),
        row_num_tokens=torch.tensor([3.0, 2.0]),
        columns={
            "prev_logprobs": prev,
            "generation_logprobs": prev - torch.tensor(_MISMATCHES),
            "reference_logprobs": prev + torch.tensor(_REFERENCE_DIFFERENCES),
        },
        row_columns={"advantages": torch.tensor(_ADVANTAGES)},
        entropy=torch.full((len(_ROW_IDS),), _ENTROPY),
    )


def _token_lines(inputs: LossInputs, gradient: Tensor) -> Iterator[str]:
    """Yield a table of the tokens; `gradient` is float32 [T]."""
    columns = {
        "A": inputs.per_token("advantages"),
        "l": inputs.policy_logprobs.detach(),
        "l_prev": inputs.columns["prev_logprobs"],
        "l_gen": inputs.columns["generation_logprobs"],
        "l_ref": inputs.columns["reference_logprobs"],
        "d loss / d l": gradient,
    }
    yield "row" + "".join(f"{name:>14}" for name in columns)
    for index, row in enumerate(_ROW_IDS):
        values = [float(column[index]) for column in columns.values()]
        yield f"{row:>3}" + "".join(f"{value:>14.6g}" for value in values)


def _term_lines(loss: ClippedPolicyGradientLoss, inputs: LossInputs) -> Iterator[str]:
    """Yield the sum of each term of the loss over the batch."""
    config = loss.config
    without_entropy = dataclasses.replace(config, entropy_coefficient=0.0)
    surrogate_only = dataclasses.replace(without_entropy, reference_policy_kl_penalty=0.0)
    surrogate = _loss_sum(dataclasses.replace(loss, config=surrogate_only), inputs)
    with_kl = _loss_sum(dataclasses.replace(loss, config=without_entropy), inputs)
    total = _loss_sum(loss, inputs)
    name = "surrogate"
    if config.importance_correction.has_weights:
        name = "surrogate x weight"
    yield f"{name}: {surrogate:.6g}"
    if config.has_kl_in_loss:
        yield f"KL penalty: {with_kl - surrogate:.6g}"
    if config.entropy_coefficient > 0:
        yield f"entropy bonus: {total - with_kl:.6g} (with an entropy of {_ENTROPY} per token)"


def _loss_sum(loss: RolloutLoss, inputs: LossInputs) -> float:
    return float(loss(inputs).loss_sum.detach())
