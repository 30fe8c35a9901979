"""The start-up check that rows of one microbatch do not see each other, on the very model that is
to be trained.

Leakage between packed rows is silent: the loss still falls. So before the first step the model
computes the log-probs of a few rows together, again with one token of one row changed, and once more each row by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.engine import Engine
from nemo_like.policy.model_inputs import build_inputs
from nemo_like.policy.row_logprobs import compute_row_logprobs

_LENGTHS = (11, 24, 3, 17)
_MAX_MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Between a row in a microbatch and alone: other shapes add up in another order, and bfloat16 has 8
bits.
"""


class IsolationError(ValueError):
    """The model mixes rows; training on such microbatches would corrupt it."""


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """What a passed probe measured."""

    layout: Literal["packed", "padded"]
    num_rows: int
    mean_difference: float
    """Mean |log-prob in the microbatch - log-prob of the row alone| over all tokens; NaN on
    pipeline stages but the last, which compute none."""


def probe_isolation(
    engine: Engine, *, layout: Literal["packed", "padded"], vocab_size: int, precision: str
) -> IsolationReport:
    """Check three sentences; raises IsolationError for the first that does not hold. Every rank
    calls.

    1. Changing a token of one row leaves the log-probs of all other rows equal to the bit.
    2. Changing the padding leaves all log-probs equal to the bit.
    3. A row has the same log-probs, but for rounding, in the microbatch and alone.

    Of a mixture of experts all three hold but for rounding: a token that goes to another expert
    changes how many rows the matrix products of two experts have, and kernels for other sizes add
    up in another order.
    """
    is_moe = ModelSpec.from_config(engine.model_config).moe is not None
    limit = _MAX_MEAN_DIFFERENCE[precision] if is_moe else 0.0
    rows = _random_rows(vocab_size)
    changes = [_with_other_token(rows, row, vocab_size) for row in (0, 1)]
    together = _compute_logprobs(engine, rows, layout)
    changed = [_compute_logprobs(engine, other, layout) for other in changes]
    repadded = _compute_logprobs(engine, rows, layout, pad_token_id=1)
    alone = [outputs for row in rows for outputs in _compute_logprobs(engine, [row], "padded")]
    if not together:
        return IsolationReport(layout, len(rows), math.nan)
    for row, outputs in enumerate(changed):
        for other in range(len(rows)):
            if (
                other != row and not _mean_difference([outputs[other]], [together[other]]) <= limit
            ):  # NaN must not pass
                raise IsolationError(
                    _leak(layout, f"a token of row {row} changed the log-probs of row {other}")
                )
    if not _mean_difference(repadded, together) <= limit:
        raise IsolationError(
            _leak(layout, "the token id of the padding changed log-probs of real tokens")
        )
    difference = _mean_difference(alone, together)
    if not difference <= _MAX_MEAN_DIFFERENCE[precision]:
        what = f"log-probs in a microbatch differ from those of each row alone by {difference:.2g} on average"
        raise IsolationError(_leak(layout, what))
    return IsolationReport(layout, len(rows), difference)


def _mean_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Over all tokens of some rows; 0 only where they are equal to the bit."""
    return float(np.abs(np.concatenate(found) - np.concatenate(expected)).mean())


def _random_rows(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).astype(np.int32) for length in _LENGTHS]


def _with_other_token(rows: Sequence[np.ndarray], row: int, vocab_size: int) -> list[np.ndarray]:
    changed = [tokens.copy() for tokens in rows]
    changed[row][2] = (changed[row][2] + 1) % vocab_size
    return changed


def _compute_logprobs(
    engine: Engine,
    rows: Sequence[np.ndarray],
    layout: Literal["packed", "padded"],
    pad_token_id: int = 0,
) -> list[np.ndarray]:
    """Log-probs of each row, all scored as one microbatch; empty on pipeline stages but the
    last.
    """
    topology = engine.topology
    # Larger than any length is a multiple of, so that padding inside a pack is looked at as well.
    alignment = 4 * topology.cp * topology.tp
    lengths = tuple(len(row) for row in rows)
    aligned = tuple(-(-length // alignment) * alignment for length in lengths)
    padded = aligned if layout == "packed" else (max(aligned),) * len(rows)
    num_tokens = sum(padded) + (
        alignment if layout == "packed" else 0
    )  # with a segment of trailing padding
    microbatch = Microbatch(tuple(range(len(rows))), lengths, padded, num_tokens)
    spec = PlanSpec(layout=layout, max_tokens=num_tokens, cp_size=topology.cp)
    shard = {"input_ids": Jagged.from_rows(rows, np.int32)}
    cp_rank = topology.coordinates(engine.rank).cp
    inputs = build_inputs(
        shard, microbatch, spec, pad_token_id=pad_token_id, cp_rank=cp_rank, device=engine.device
    )
    return [outputs for part in compute_row_logprobs(engine, [inputs]) for outputs in part]


def _leak(layout: str, what: str) -> str:
    way_out = {
        "packed": "switch to policy.dynamic_batching (and policy.sequence_packing.enabled=false), or use another model",
        "padded": "train with policy.train_micro_batch_size=1, or use another model",
    }[layout]
    return (
        f"the isolation check failed on policy.model_name in the {layout} layout: {what}. Rows of"
        f" one microbatch see each "
        f"other, and training would silently go wrong; {way_out}"
    )
