"""Start-up check that rows of one microbatch do not see each other, on the model to be trained.

Leakage between packed rows is silent: the loss still falls. Before the first step the model
therefore computes the log-probs of a few rows together, again with one token of one row changed,
and once more of each row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.integer_math import round_up
from nemo_like.policy.engine import Engine
from nemo_like.policy.heads.row_outputs import compute_row_logprobs, compute_row_scores
from nemo_like.policy.inputs.model_inputs import build_inputs

_LENGTHS = (11, 24, 3, 17)
_NUM_BEYOND = 6
"""Tokens of a row beyond the length above which rotary frequencies differ."""
_ROUND = 4
"""Rows are padded to a multiple of this at least, so that padding inside a pack is checked."""
_MAX_MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Limit between a row in a microbatch and the row alone. The reduction order depends on the shapes,
and bfloat16 has a precision of 8 bits.
"""

_NUM_ATTEMPTS = 3
_NOT_FINITE = "the log-probs of a row alone are not finite"

_SHARED = (0, 9, 0, 2)
"""Leading tokens that each row of `_measure_shared` has in common with the row before it."""

_CHANGES = ((2, (0, 1), "a prefix"), (12, (1,), "a row after its prefix"), (1, (2, 3), "a prefix"))
"""(Position of the changed token, rows that have it, the part that contains it)."""


class IsolationError(ValueError):
    """Rows of one microbatch influence each other, so training would be wrong."""


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """Measurements of a probe that passed."""

    layout: Literal["packed", "padded"]
    num_rows: int
    mean_difference: float
    """Mean |log-prob in the microbatch - log-prob of the row alone| over all tokens; NaN on all
    pipeline stages but the last, which compute no log-probs.
    """


def probe_isolation(
    engine: Engine,
    *,
    layout: Literal["packed", "padded"],
    vocab_size: int,
    precision: str,
    max_length: int = 0,
    with_shared_prefixes: bool = False,
) -> IsolationReport:
    """Check three properties; raises IsolationError for the first that fails. Every rank calls.

    Raises ConfigError for a model whose log-probs are not finite even for a row alone.

    1. Changing a token of one row leaves the log-probs of all other rows bit-equal.
    2. Changing the token id of the padding leaves all log-probs bit-equal.
    3. A row has the same log-probs, up to rounding, in the microbatch and alone.

    Where the rotary frequencies of rows above a length differ and `max_length`, that of the run's
    rows, is above it, one of the rows is.

    `with_shared_prefixes`, in the packed layout, the same holds for rows of which two and two have
    a common prefix, and changing a token of a prefix changes the log-probs of its own rows alone.

    For MoE models properties 1 and 2 also hold up to rounding only: changing a token can change the
    batch size of two experts' GEMMs and thus the reduction order. The same can happen on a CPU
    whose cores have other work, where a library may use fewer threads for one of the GEMMs. A
    failed check is therefore repeated: rows that see each other fail every time.
    """
    lengths = _LENGTHS
    threshold = engine.spec.rope_threshold
    if threshold is not None and threshold < max_length:
        lengths = (*_LENGTHS, min(threshold + _NUM_BEYOND, max_length))
    findings: list[str] = []
    for _ in range(_NUM_ATTEMPTS):
        # A compiled layer leaves out the check of its windows.
        with torch.compiler.set_stance("force_eager"):
            finding, difference = _measure(engine, layout, vocab_size, precision, lengths)
            if with_shared_prefixes:
                # On every rank: pipeline stages but the last have no finding, and compute as many.
                finding_shared = _measure_shared(engine, vocab_size, precision)
                finding = finding or finding_shared
        # Ranks may have different findings, and all of them have to compute again.
        findings = [each for each in engine.ranks.gather_over_world(finding) if each]
        if not findings:
            return IsolationReport(layout, len(lengths), difference)
    if _NOT_FINITE in findings:
        raise ConfigError(
            f"policy.model_name gives log-probs that are not finite in {precision}, although its"
            " weights are finite; use another model, or policy.precision=float32"
        )
    raise _leak(layout, findings[0])


def _measure(
    engine: Engine,
    layout: Literal["packed", "padded"],
    vocab_size: int,
    precision: str,
    lengths: Sequence[int],
) -> tuple[str, float]:
    """Return the property that fails, or "", and `IsolationReport.mean_difference`."""
    limit = _limit(engine, precision)
    rows = random_rows(vocab_size, lengths)
    changes = [_with_other_token(rows, [row], 2, vocab_size) for row in (0, 1)]
    together = _compute_logprobs(engine, rows, layout)
    changed = [_compute_logprobs(engine, other, layout) for other in changes]
    repadded = _compute_logprobs(engine, rows, layout, pad_token_id=1)
    alone = []
    for row in rows:
        alone += _compute_logprobs(engine, [row], "padded")
    if not together:
        return "", math.nan
    if not all(np.isfinite(row).all() for row in alone):
        return _NOT_FINITE, math.nan
    # Comparisons are written as `not a <= b`, so that NaN fails them.
    for row, outputs in enumerate(changed):
        for other in range(len(rows)):
            difference = _mean_difference([outputs[other]], [together[other]])
            if other != row and not difference <= limit:
                return f"a token of row {row} changed the log-probs of row {other}", math.nan
    if not _mean_difference(repadded, together) <= limit:
        return "the token id of the padding changed log-probs of real tokens", math.nan
    difference = _mean_difference(alone, together)
    if not difference <= _MAX_MEAN_DIFFERENCE[precision]:
        finding = (
            "log-probs of rows in a microbatch differ from the log-probs of each row alone by"
            f" {difference:.2g} on average"
        )
        return finding, difference
    return "", difference


def _limit(engine: Engine, precision: str) -> float:
    """Largest mean difference of rows that must not change."""
    return 0.0 if engine.spec.moe is None else _MAX_MEAN_DIFFERENCE[precision]


def _measure_shared(engine: Engine, vocab_size: int, precision: str) -> str:
    """Return the property that fails for rows that share prefixes, or ""."""
    limit = _limit(engine, precision)
    rows = sorted(random_rows(vocab_size), key=len, reverse=True)
    for row in (1, 3):
        rows[row][: _SHARED[row]] = rows[row - 1][: _SHARED[row]]
    together = _compute_logprobs(engine, rows, "packed", shared=_SHARED)
    changed = []
    for position, changed_rows, _ in _CHANGES:
        changes = _with_other_token(rows, changed_rows, position, vocab_size)
        changed.append(_compute_logprobs(engine, changes, "packed", shared=_SHARED))
    alone = []
    for row in rows:
        alone += _compute_logprobs(engine, [row], "padded")
    for (_, changed_rows, place), outputs in zip(_CHANGES, changed, strict=True):
        for row, expected in enumerate(together):
            difference = _mean_difference([outputs[row]], [expected])
            if row in changed_rows and difference == 0.0:
                return f"a token of {place} did not change the log-probs of row {row}, which has it"
            if row not in changed_rows and not difference <= limit:
                return f"a token of {place} changed the log-probs of row {row} without it"
    if together and not _mean_difference(alone, together) <= _MAX_MEAN_DIFFERENCE[precision]:
        return "log-probs of rows that share prefixes differ from the log-probs of each row alone"
    return ""


def _mean_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the mean |difference| over all tokens of some rows; 0 only for bit-equal rows.

    The rows are float32 [length] each.
    """
    difference = np.concatenate(found) - np.concatenate(expected)
    return float(np.abs(difference).mean())


def random_rows(vocab_size: int, lengths: Sequence[int] = _LENGTHS) -> list[np.ndarray]:
    """Draw rows of `lengths`, int32 [length] each."""
    # A fixed seed: every rank must compute the same rows.
    generator = np.random.default_rng(0)
    rows = []
    for length in lengths:
        row = generator.integers(0, vocab_size, length)
        rows.append(row.astype(np.int32))
    return rows


def _with_other_token(
    rows: Sequence[np.ndarray], changed_rows: Sequence[int], position: int, vocab_size: int
) -> list[np.ndarray]:
    """Return a copy of `rows`, int32 [length] each, with another token at `position` of some."""
    changed = [tokens.copy() for tokens in rows]
    for row in changed_rows:
        changed[row][position] = (changed[row][position] + 1) % vocab_size
    return changed


def _compute_logprobs(
    engine: Engine,
    rows: Sequence[np.ndarray],
    layout: Literal["packed", "padded"],
    pad_token_id: int = 0,
    shared: tuple[int, ...] = (),
) -> list[np.ndarray]:
    """Compute the log-probs of `rows` as one microbatch, float32 [length] for each row.

    Of a model with a score head they are the scores, float32 [1] for each row. The list is empty
    on all pipeline stages but the last.
    """
    parallel_layout = engine.ranks.layout
    multiples = parallel_layout.padding_multiples(layout, sequence_length_round=_ROUND)
    lengths = tuple(len(row) for row in rows)
    if layout == "packed":
        num_shared = shared or (0,) * len(rows)
        padded = tuple(
            round_up(length - common, multiples.row)
            for length, common in zip(lengths, num_shared, strict=True)
        )
        # Room for a segment of trailing padding.
        num_tokens = multiples.tokens_of_row(sum(padded) + 1)
    else:
        padded = (round_up(max(lengths), multiples.row),) * len(rows)
        num_tokens = sum(padded)
    microbatch = Microbatch(tuple(range(len(rows))), lengths, padded, num_tokens, shared)
    spec = PlanSpec(layout=layout, max_tokens=num_tokens, cp_size=parallel_layout.cp)
    shard = {"input_ids": Jagged.from_rows(rows, np.int32)}
    cp_rank = engine.ranks.cp_rank
    inputs = build_inputs(
        shard, microbatch, spec, pad_token_id=pad_token_id, cp_rank=cp_rank, device=engine.device
    )
    if engine.spec.head == "scores":
        scores = compute_row_scores(engine, [inputs])
        return [score[None] for part in scores for score in part]
    logprobs = []
    for microbatch_rows in compute_row_logprobs(engine, [inputs]):
        logprobs += list(microbatch_rows)
    return logprobs


def _leak(layout: str, finding: str) -> IsolationError:
    if layout == "packed":
        remedy = (
            "set policy.shared_prefix=false if the rows share prefixes, switch to"
            " policy.dynamic_batching (and policy.sequence_packing.enabled=false), or use another"
            " model"
        )
    else:
        remedy = "train with policy.train_micro_batch_size=1, or use another model"
    return IsolationError(
        f"the isolation check failed on policy.model_name in the {layout} layout: {finding}. Rows"
        " of one microbatch see each other, and training would silently go wrong;"
        f" {remedy}"
    )
