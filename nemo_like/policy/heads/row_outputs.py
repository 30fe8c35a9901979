"""Log-probs and scores per row from any engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import RankPlan
from nemo_like.device_transfer import tensor_to_device
from nemo_like.distributed import activity
from nemo_like.distributed.batched_data_dict import SlicedDataDict
from nemo_like.policy.collectives import sum_over
from nemo_like.policy.engine import Engine, ResultT, StepFunction
from nemo_like.policy.inputs.grid import cp_gather_positions, segment_lengths
from nemo_like.policy.inputs.model_inputs import ModelInputs, build_inputs, unpack_tokens
from nemo_like.policy.outputs import PLAIN, TokenDistribution, TokenLogprobs


def compute_row_logprobs(
    engine: Engine, microbatches: Iterable[ModelInputs], distribution: TokenDistribution = PLAIN
) -> list[Jagged]:
    """Return one Jagged [T] of float32 log-probs per microbatch; 0 where `label_mask` is False.

    Every rank calls. The list is empty on all pipeline stages but the last.
    """

    def in_order(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[None, Outputs]:
        """Return None as loss, and the log-probs gathered from each rank's share [T]."""
        return None, Outputs(inputs, _gather_in_order(engine, inputs, outputs.logprobs))

    return unpack_outputs(engine.run(microbatches, in_order, distribution, backward=False))


def keeping_logprobs(
    engine: Engine, step_fn: StepFunction[ResultT]
) -> StepFunction[tuple[ResultT, Outputs]]:
    """Return a step function that also keeps the log-probs, for `unpack_outputs`.

    Every rank calls it: it gathers over the context-parallel ranks.
    """

    def run(
        inputs: ModelInputs, outputs: TokenLogprobs
    ) -> tuple[Tensor | None, tuple[ResultT, Outputs]]:
        loss, result = step_fn(inputs, outputs)
        values = _gather_in_order(engine, inputs, outputs.logprobs.detach())
        return loss, (result, Outputs(inputs, values))

    return run


def unpack_outputs(parts: Sequence[Outputs]) -> list[Jagged]:
    """Return one Jagged [T] of float32 log-probs per microbatch; waits for the device."""
    if not parts:
        return []
    # After the last microbatch, so that the device is waited for once.
    values = torch.cat([part.values for part in parts]).to("cpu", torch.float32)
    shares = values.split([part.inputs.num_outputs for part in parts])
    return [unpack_tokens(share, part.inputs) for share, part in zip(shares, parts, strict=True)]


class Outputs(NamedTuple):
    """Log-probs [num_outputs] of one microbatch, in the order of the pack."""

    inputs: ModelInputs
    values: Tensor


def _gather_in_order(engine: Engine, inputs: ModelInputs, values: Tensor) -> Tensor:
    """Gather [num_outputs], in the order of the pack, from this rank's share [T]."""
    if inputs.cp_size == 1:
        return values
    if inputs.exchange is not None:
        # Every rank has all tokens of the rows, with 0 for the tokens of other ranks.
        return engine.ranks.sum_over_cp(values, inputs.cp_size)
    # Context parallelism splits each segment, trailing padding included, in zig-zag order.
    segments = segment_lengths(inputs.padded_lengths, inputs.num_tokens)
    positions = cp_gather_positions(segments, inputs.cp_size)
    index = tensor_to_device(torch.from_numpy(positions), values.device)
    return engine.ranks.gather_over_cp(values, inputs.cp_size).index_select(0, index)


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
        self, hidden: Tensor, inputs: ModelInputs, distribution: TokenDistribution
    ) -> TokenLogprobs:
        """See `row_scores`; `hidden` is [B, S, D] or [T, 1, D], with sequence parallelism T / tp.

        Scores have no `distribution`.
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
    `hidden` and `weight` have this rank's positions, else they are complete on every rank.
    """
    positions = inputs.last_positions
    rows = inputs.last_rows
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


def shard_scores(engine: Engine, shard: SlicedDataDict, plan: RankPlan) -> np.ndarray | None:
    """Return the score of each row of `shard`, float32 [B]; None on pipeline stages but the last.

    Of the columns only `input_ids` is read. A row that `plan` does not contain gets 0. Every rank
    calls. Raises ValueError for an engine without a score head.
    """
    ranks = engine.ranks
    columns = {"input_ids": shard["input_ids"]}
    own = [each.on_context_rank(ranks.cp_rank, plan.spec) for each in plan.microbatches]

    def inputs() -> Iterable[ModelInputs]:
        for part, spec, cp_rank in own:
            activity.note(f"scores of a microbatch of {len(part.rows)} rows")
            yield build_inputs(columns, part, spec, cp_rank=cp_rank, device=engine.device)

    parts = compute_row_scores(engine, inputs())
    engine.clock.drop()
    if not parts:
        return None
    scores = np.zeros(len(shard["input_ids"]), dtype=np.float32)
    for (microbatch, _, rank), part in zip(own, parts, strict=True):
        # All ranks of a context-parallel group have the scores of its rows.
        if plan.spec.dynamic_context and rank > 0:
            continue
        # A dummy has a score and no row.
        rows = list(microbatch.rows)
        scores[rows] = part[: len(rows)]
    return ranks.join_over_cp(scores) if plan.spec.dynamic_context else scores


def compute_row_scores(engine: Engine, microbatches: Iterable[ModelInputs]) -> list[np.ndarray]:
    """Return the scores of each microbatch, float32 [R] each; none on stages but the last.

    Every rank calls. Raises ValueError for an engine without a score head.
    """
    if engine.spec.head != "scores":
        raise ValueError(
            "this model has no score head; start the worker with head='scores' and the directory of"
            " a reward model"
        )

    def gathered(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[None, Tensor]:
        """Return None as loss, and the scores [R]: each is on one context-parallel rank."""
        assert outputs.scores is not None, "an engine with a score head returns scores"
        return None, engine.ranks.sum_over_cp(outputs.scores.detach(), inputs.cp_size)

    parts = engine.run(microbatches, gathered, backward=False)
    if not parts:
        return []
    # After the last microbatch, so that the device is waited for once.
    values = torch.cat(parts).cpu().numpy()
    ends = np.cumsum([len(part) for part in parts])
    return np.split(values, ends[:-1])
