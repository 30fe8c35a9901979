"""Log-probs per row from any engine, gathered over the context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_like.data.jagged import Jagged
from nemo_like.device_transfer import tensor_to_device
from nemo_like.policy.engine import Engine, ResultT, StepFunction
from nemo_like.policy.inputs.model_inputs import (
    ModelInputs,
    TokenLogprobs,
    cp_gather_positions,
    segment_lengths,
    unpack_tokens,
)
from nemo_like.sampling_filter import SamplingFilter


def compute_row_logprobs(
    engine: Engine,
    microbatches: Iterable[ModelInputs],
    *,
    temperature: float = 1.0,
    token_filter: SamplingFilter | None = None,
) -> list[Jagged]:
    """Return one Jagged [T] of float32 log-probs per microbatch; 0 where `label_mask` is False.

    Every rank calls. The list is empty on all pipeline stages but the last.
    """

    def in_order(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[None, Outputs]:
        """Return None as loss, and the log-probs gathered from each rank's share [T]."""
        return None, Outputs(inputs, _gather_in_order(engine, inputs, outputs.logprobs))

    parts = engine.run(
        microbatches, in_order, backward=False, temperature=temperature, token_filter=token_filter
    )
    return unpack_outputs(parts)


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
    shares = values.split([part.inputs.num_tokens for part in parts])
    return [unpack_tokens(share, part.inputs) for share, part in zip(shares, parts, strict=True)]


class Outputs(NamedTuple):
    """Log-probs [num_tokens] of one microbatch, in the order of the pack."""

    inputs: ModelInputs
    values: Tensor


def _gather_in_order(engine: Engine, inputs: ModelInputs, values: Tensor) -> Tensor:
    """Gather [num_tokens], in the order of the pack, from this rank's share [T]."""
    if inputs.cp_size == 1:
        return values
    # Context parallelism splits each segment, trailing padding included, in zig-zag order.
    segments = segment_lengths(inputs.padded_lengths, inputs.num_tokens)
    positions = cp_gather_positions(segments, inputs.cp_size)
    index = tensor_to_device(torch.from_numpy(positions), values.device)
    return engine.gather_over_cp(values).index_select(0, index)
