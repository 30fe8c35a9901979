"""Checks of token budgets count the padding that the parallel layout needs."""

from __future__ import annotations

import pytest

from nemo_like.commands.validate import validate
from nemo_like.config.check import find_problems
from nemo_like.config.errors import ConfigError
from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.training.diagnostics import Report
from tests.config.test_check import derived
from tests.recipe import Recipe

CONTEXT = ("cluster.backend=ray", "cluster.workers_per_node=4", "parallel.context=4")
"""Rows are then padded to multiples of 8."""


def test_the_derivation_counts_padded_rows(recipe: Recipe) -> None:
    lengths = ("policy.max_total_sequence_length=50", "policy.sequence_packing.train_mb_tokens=160")
    alone = derived(recipe.sft(*lengths))
    padded = derived(recipe.sft(*lengths, *CONTEXT))
    # 160 / 50 is 3; with rows of 56 positions it is 2.
    assert "which fit 3 of the longest rows (50 tokens)" in alone
    assert "which fit 2 of the longest rows (50 tokens)" in padded


def test_a_row_that_exceeds_the_budget_once_padded_is_refused(recipe: Recipe) -> None:
    config = recipe.sft(*CONTEXT)
    assert find_problems(config) == []
    overrides = (
        "policy.max_total_sequence_length=85",
        "policy.sequence_packing.train_mb_tokens=86",
    )
    # Loading a config reports the problems that `find_problems` returns.
    with pytest.raises(ConfigError) as refused:
        recipe.sft(*CONTEXT, *overrides)
    text = str(refused.value)
    assert "train_mb_tokens is 86, but a row may have 85 tokens" in text
    assert "88 when rounded up to" in text
    assert "set train_mb_tokens to at least 88" in text


def tokens_of_longest_row(report: Report) -> int:
    """Positions that the longest training row takes in a microbatch."""
    for line in report.sections["lengths"]:
        if "train_mb_tokens" in line:
            return int(line.rpartition("longest row (")[2].split()[0])
    raise AssertionError(f"no line about the budget in {report}")


def test_validate_compares_padded_rows_with_the_budget(recipe: Recipe) -> None:
    report = validate(recipe.sft())
    longest = tokens_of_longest_row(report)
    padded = tokens_of_longest_row(validate(recipe.sft(*CONTEXT)))
    assert padded == -(-longest // 8) * 8 > longest
    # A budget between both is too small for the padded row.
    budget = f"policy.sequence_packing.train_mb_tokens={padded - 1}"
    with pytest.warns(OversizeWarning):
        report = validate(recipe.sft(*CONTEXT, budget, "policy.oversize_rows=truncate"))
    assert any(
        f"the longest row takes {padded} tokens, more than policy.sequence_packing.train_mb_tokens"
        in warning
        for warning in report.warnings
    )
