"""Log-probs per row from any engine, gathered over the context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.jagged import Jagged
from nemo_like.policy.engine import Engine, TokenLogprobs
from nemo_like.policy.model_inputs import (
    ModelInputs,
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

    def to_rows(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[Tensor | None, Jagged]:
        """Return None as loss, and the log-probs as rows, gathered from each rank's share [T]."""
        in_order = _gather_in_order(engine, inputs, outputs.logprobs)
        return None, unpack_tokens(in_order, inputs)

    return engine.run(
        microbatches,
        to_rows,
        backward=False,
        temperature=temperature,
        token_filter=token_filter,
    )


def _gather_in_order(
    engine: Engine,
    inputs: ModelInputs,
    values: Tensor,
) -> Tensor:
    """Gather [num_tokens], in the order of the pack, from this rank's share [T]."""
    if inputs.cp_size == 1:
        return values
    # Context parallelism splits each segment, trailing padding included, in zig-zag order.
    segments = segment_lengths(inputs.padded_lengths, inputs.num_tokens)
    positions = torch.from_numpy(cp_gather_positions(np.array(segments), inputs.cp_size))
    return engine.gather_over_cp(values)[positions.to(values.device)]
