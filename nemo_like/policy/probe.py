"""The start-up check that rows of one microbatch do not see each other, on the very model that is to be trained.

Leakage between packed rows is silent: the loss still falls. So before the first step the model scores a few rows
together, again with one token of one row changed, and once more each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nemo_like.data.jagged import Jagged
from nemo_like.data.packing.layout import ModelInputs, build_inputs, unpack_tokens
from nemo_like.data.packing.plan import Microbatch, PlanSpec
from nemo_like.policy.engine import Engine, TokenScores

_LENGTHS = (11, 24, 3, 17)
_ALIGNMENT = 4
"""Rows are padded to multiples of this, so that padding inside a pack is looked at as well."""
_MAX_MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Between a row in a microbatch and alone: other shapes add up in another order, and bfloat16 has 8 bits."""


class IsolationError(ValueError):
    """The model mixes rows; training on such microbatches would corrupt it."""


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """What a passed probe measured."""

    layout: Literal["packed", "padded"]
    num_rows: int
    mean_difference: float
    """Mean |log-prob in the microbatch - log-prob of the row alone| over all tokens."""


def probe_isolation(engine: Engine, *, layout: Literal["packed", "padded"], vocab_size: int, precision: str) -> IsolationReport:
    """Check three sentences; raises IsolationError for the first that does not hold. Every rank calls.

    1. Changing a token of one row leaves the log-probs of all other rows equal to the bit.
    2. Changing the padding leaves all log-probs equal to the bit.
    3. A row has the same log-probs, but for rounding, in the microbatch and alone.
    """
    rows = _random_rows(vocab_size)
    together = _score(engine, rows, layout)
    for changed in (0, 1):
        other = [row.copy() for row in rows]
        other[changed][2] = (other[changed][2] + 1) % vocab_size
        scores = _score(engine, other, layout)
        seeing = [row for row in range(len(rows)) if row != changed and not np.array_equal(scores[row], together[row])]
        if seeing:
            raise IsolationError(_leak(layout, f"a token of row {changed} changed the log-probs of row {seeing[0]}"))
    repadded = _score(engine, rows, layout, pad_token_id=1)
    if not np.array_equal(repadded.values, together.values):
        raise IsolationError(_leak(layout, "the token id of the padding changed log-probs of real tokens"))
    alone = Jagged.concat([_score(engine, [row], "padded") for row in rows])
    difference = float(np.abs(alone.values - together.values).mean())
    if not difference <= _MAX_MEAN_DIFFERENCE[precision]:  # NaN must not pass
        what = f"log-probs in a microbatch differ from those of each row alone by {difference:.2g} on average"
        raise IsolationError(_leak(layout, what))
    return IsolationReport(layout, len(rows), difference)


def _random_rows(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).astype(np.int32) for length in _LENGTHS]


def _score(engine: Engine, rows: Sequence[np.ndarray], layout: Literal["packed", "padded"], pad_token_id: int = 0) -> Jagged:
    """Log-probs of all rows, scored as one microbatch."""
    lengths = tuple(len(row) for row in rows)
    aligned = tuple(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)
    padded = aligned if layout == "packed" else (max(aligned),) * len(rows)
    num_tokens = sum(padded) + (_ALIGNMENT if layout == "packed" else 0)  # with a segment of trailing padding
    microbatch = Microbatch(tuple(range(len(rows))), lengths, padded, num_tokens)
    spec = PlanSpec(layout=layout, max_tokens=num_tokens)
    shard = {"input_ids": Jagged.from_rows(rows, np.int32)}
    inputs = build_inputs(shard, microbatch, spec, pad_token_id=pad_token_id, device=engine.device)
    (scores,) = engine.run([inputs], _unpacked, backward=False)
    return scores


def _unpacked(inputs: ModelInputs, scores: TokenScores) -> tuple[torch.Tensor | None, Jagged]:
    return None, unpack_tokens(scores.logprobs, inputs)


def _leak(layout: str, what: str) -> str:
    way_out = {
        "packed": "switch to policy.dynamic_batching (and policy.sequence_packing.enabled=false), or use another model",
        "padded": "train with policy.train_micro_batch_size=1, or use another model",
    }[layout]
    return (
        f"the isolation check failed on policy.model_name in the {layout} layout: {what}. Rows of one microbatch see each "
        f"other, and training would silently go wrong; {way_out}"
    )
