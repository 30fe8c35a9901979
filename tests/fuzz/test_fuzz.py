"""A fixed budget of the fuzzers; `python -m tests.fuzz --cases 10000` runs more."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.cases import config_case, data_case, run_case

NUM_CASES = int(os.environ.get("NEMO_LIKE_FUZZ_CASES", "400"))


@pytest.mark.parametrize("case", [config_case, data_case], ids=["configs", "data"])
def test_mutated_input_is_accepted_or_refused_with_one_short_message(case, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    problems = {seed: run_case(case(seed, tmp_path), counts) for seed in range(NUM_CASES)}
    assert {seed: problem for seed, problem in problems.items() if problem is not None} == {}
    assert min(counts["accepted"], counts["rejected"]) > NUM_CASES / 20, counts
