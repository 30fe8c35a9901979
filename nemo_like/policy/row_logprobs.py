"""Log-probs of rows out of any engine: each rank's share of every microbatch, brought together and
cut into rows.
"""

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
    """One Jagged of float32 log-probs per microbatch, its rows in their order; 0 where `label_mask`
    is False.

    Every rank calls; on pipeline stages but the last the list is empty.
    """

    def in_rows(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[Tensor | None, Jagged]:
        return None, unpack_tokens(_in_order(engine, inputs, outputs.logprobs), inputs)

    return engine.run(
        microbatches, in_rows, backward=False, temperature=temperature, token_filter=token_filter
    )


def _in_order(engine: Engine, inputs: ModelInputs, values: Tensor) -> Tensor:
    """[num_tokens] from this rank's share [T] of them."""
    if inputs.cp_size == 1:
        return values
    segments = segment_lengths(inputs.padded_lengths, inputs.num_tokens)
    positions = torch.from_numpy(cp_gather_positions(np.array(segments), inputs.cp_size))
    return engine.gather_over_cp(values)[positions.to(values.device)]
