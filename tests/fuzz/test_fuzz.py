"""A fixed budget of the fuzzers; `python -m tests.fuzz --cases 10000` runs more."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.cases import config_case, data_case, run_case
from tests.fuzz.model_files import model_case

NUM_CASES = int(os.environ.get("NEMO_LIKE_FUZZ_CASES", "240"))


@pytest.mark.parametrize(
    ("case", "num_cases"),
    [(config_case, NUM_CASES), (data_case, NUM_CASES), (model_case, NUM_CASES // 8)],
    ids=["configs", "data", "models"],
)
def test_mutated_input_is_accepted_or_refused_with_one_short_message(
    case, num_cases: int, tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    problems = {seed: run_case(case(seed, tmp_path), counts) for seed in range(num_cases)}
    assert {seed: problem for seed, problem in problems.items() if problem is not None} == {}
    assert min(counts["accepted"], counts["rejected"]) > num_cases / 20, counts
