"""`nemo-like plan RUN --simulate` on recordings whose times are computed here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.cli import main
from tests.recipe import Recipe

PROMPTS, GROUP, ROWS_PER_MICROBATCH = 8, 4, 4
BATCH_SIZE = "policy.train_global_batch_size"


def step_seconds(prompts: list[int], completions: list[int], num_workers: int) -> dict[str, float]:
    """The seconds of each phase of a step; rows have one length, so there is no padding.

    A replica decodes all its rows at a time. 10 us per token and 2 ms per microbatch in training.
    """
    num_rows = len(prompts) // num_workers
    num_tokens = sum(prompts + completions) // num_workers
    phases = {
        "generation": 1e-3 * max(completions) + 2e-5 * sum(completions) / num_workers,
        "reward": 1e-4 * len(prompts),
        "train": 1e-5 * num_tokens + 2e-3 * math.ceil(num_rows / ROWS_PER_MICROBATCH),
        "weight_sync": 0.01,
    }
    return phases | {"step": sum(phases.values()) + 2e-4 * len(prompts)}


def record_run(recipe: Recipe, num_steps: int = 10) -> Path:
    """Write the directory of a run with one worker."""
    recipe.grpo()
    folder = recipe.folder / "recorded"
    (folder / "plan").mkdir(parents=True, exist_ok=True)
    config = (recipe.folder / "grpo.yaml").read_text()
    packing = "sequence_packing: {enabled: true, train_mb_tokens: 256, logprob_mb_tokens: 512}"
    assert packing in config
    padded = f"shared_prefix: false\n  train_micro_batch_size: {ROWS_PER_MICROBATCH}"
    config = config.replace(packing, padded).replace("train_global_batch_size: 16", "")
    config = config.replace(padded, f"{padded}\n  train_global_batch_size: {PROMPTS * GROUP}")
    config = config.replace("reference_policy_kl_penalty: 0.01", "reference_policy_kl_penalty: 0")
    (folder / "config.yaml").write_text(config)
    rng = np.random.default_rng(0)
    lengths, metrics = [], []
    for step in range(1, num_steps + 1):
        prompt, completion = int(rng.integers(5, 10)), int(rng.integers(8, 25))
        num_rows = PROMPTS * GROUP
        prompts, completions = [prompt] * num_rows, [completion] * num_rows
        seconds = step_seconds(prompts, completions, 1)
        # The first steps compile.
        slow = 5.0 if step < 3 else 1.0
        metrics.append({"step": step, **{f"timing/{k}_s": slow * v for k, v in seconds.items()}})
        totals = [prompt + completion] * num_rows
        lengths.append({"step": step, "lengths": totals, "num_trained": completions})
    for name, lines in (("plan/lengths.jsonl", lengths), ("metrics.jsonl", metrics)):
        (folder / name).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder


def simulated(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", str(run), "--simulate", "--json", "-", *options]) == 0
    return json.loads(capsys.readouterr().out)["simulation"]


def message(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", "--simulate", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def recorded_lengths(run: Path) -> list[tuple[int, int]]:
    """(prompt, completion) of the rows of each step, without the first two."""
    lines = (run / "plan" / "lengths.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][2:]
    return [(each["lengths"][0] - each["num_trained"][0], each["num_trained"][0]) for each in steps]


def test_the_recorded_run_has_its_own_time(recipe: Recipe, capsys) -> None:
    run = record_run(recipe)
    found = simulated(capsys, run)
    num_rows = PROMPTS * GROUP
    expected = [
        step_seconds([prompt] * num_rows, [completion] * num_rows, 1)
        for prompt, completion in recorded_lengths(run)
    ]
    assert found["num_recorded"] == 8
    mean = float(np.mean([each["step"] for each in expected]))
    assert found["predicted_s"] == pytest.approx(mean, rel=0.03)
    assert found["measured_s"] == pytest.approx(mean)
    for phase, timer in (("rollout", "generation"), ("training", "train")):
        seconds = float(np.mean([each[timer] for each in expected]))
        assert found["phases"][phase]["predicted_s"] == pytest.approx(seconds, rel=0.03), phase
    num_tokens = num_rows * np.mean([sum(each) for each in recorded_lengths(run)])
    assert found["tokens_per_s"] == pytest.approx(num_tokens / found["predicted_s"])


def test_other_batches_and_ranks_take_the_time_of_their_rows(recipe: Recipe, capsys) -> None:
    run = record_run(recipe)
    # The mean over all steps: groups of all recorded steps are drawn.
    prompt, completion = np.mean(recorded_lengths(run), axis=0)
    longest = max(length for _, length in recorded_lengths(run))
    ray = ("cluster.backend=ray", "cluster.workers_per_node=2")
    found = simulated(capsys, run, "grpo.num_prompts_per_step=16", *ray)
    # 64 rows in optimizer steps of 32, of which each rank has 32 rows in 8 microbatches.
    train = 1e-5 * 32 * (prompt + completion) + 2e-3 * 8
    assert found["phases"]["training"]["predicted_s"] == pytest.approx(train, rel=0.15)
    rollout = 1e-3 * longest + 2e-5 * 32 * completion
    assert found["phases"]["rollout"]["predicted_s"] == pytest.approx(rollout, rel=0.15)
    assert found["phases"]["environment"]["predicted_s"] == pytest.approx(6.4e-3)
    assert found["phases"]["driver"]["predicted_s"] == pytest.approx(12.8e-3)
    assert found["phases"]["weight sync"]["predicted_s"] == pytest.approx(0.01)
    assert found["notes"] == ["the past run had one worker, so communication was not measured"]
    longer = simulated(capsys, run, "policy.generation.max_new_tokens=48")
    assert longer["notes"] == ["completions have at most 24 tokens, as in the past run"]


def test_more_ranks_are_not_slower(recipe: Recipe, capsys) -> None:
    run = record_run(recipe)
    seconds, rollouts = [], []
    for num_workers in (1, 2, 4, 8):
        keys = ("cluster.backend=ray", f"cluster.workers_per_node={num_workers}")
        phases = simulated(capsys, run, *keys)["phases"]
        seconds.append(phases["training"]["predicted_s"])
        rollouts.append(phases["rollout"]["predicted_s"])
    assert seconds == sorted(seconds, reverse=True) and len(seconds) == len(set(seconds))
    assert rollouts == sorted(rollouts, reverse=True)


def test_thousands_of_gpus_are_predicted(recipe: Recipe, capsys) -> None:
    run = record_run(recipe)
    num_rows = 4 * 4096
    options = ("--gpus", "4096", "--memory-gb", "80", "policy.sequence_packing.enabled=true")
    options += (f"grpo.num_prompts_per_step={num_rows // GROUP}", f"{BATCH_SIZE}={num_rows}")
    assert "only one of both uses GPUs" in message(capsys, run, *options)
    config = run / "config.yaml"
    text = config.read_text().replace("{backend: local}", "{backend: ray, gpus_per_node: 8}")
    config.write_text(text.replace("\npolicy:\n", "\npolicy:\n  precision: bfloat16\n"))
    layout = ("parallel.tensor=1", "parallel.context=1", "parallel.pipeline=1")
    found = simulated(capsys, run, *options, *layout)
    assert found["phases"]["environment"]["predicted_s"] == pytest.approx(1e-4 * num_rows)
    assert found["phases"]["driver"]["predicted_s"] == pytest.approx(2e-4 * num_rows)
    # Eight GPUs had 32 rows, 4096 have 16384: each has as many.
    for name in ("training", "rollout"):
        phase = found["phases"][name]
        assert phase["predicted_s"] == pytest.approx(phase["measured_s"], rel=0.5), name


def test_the_table_has_measured_and_predicted_seconds(recipe: Recipe, capsys) -> None:
    assert main(["plan", str(record_run(recipe)), "--simulate"]) == 0
    shown = capsys.readouterr().out
    for word in ("measured s", "predicted s", "weight sync", "8 steps of the past run"):
        assert word in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


def test_what_was_not_measured_is_one_error(recipe: Recipe, tmp_path: Path, capsys) -> None:
    run = record_run(recipe)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("12\n")
    assert "give its directory" in message(capsys, "--lengths", lengths)
    text = message(capsys, run, "policy.precision=bfloat16")
    assert "policy.precision is bfloat16" in text and "measured with float32" in text
    assert "grpo.max_staleness" in message(
        capsys, run, "grpo.max_staleness=1", "cluster.backend=ray"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    untimed = [{"step": line["step"]} for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, untimed)))
    text = message(capsys, run)
    assert "timing/train_s" in text and "recorded" in text
