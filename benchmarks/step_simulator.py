"""Predicted and measured seconds per step of ten configurations, each from another recorded run.

    python -m nemo_like.demo --prepare-only
    nemo-like sft --config examples/configs/demo_sft.yaml sft.max_num_steps=100
    python -m benchmarks.step_simulator --folder simulated

A run on the local backend is bound to one core; on Ray each worker has one thread. Runs that are in
the folder are not repeated, and no run starts after `--max-minutes`, so that the command can be
called again. The first two steps of a run are not counted. A run is repeated, up to `--tries`
times, if the standard deviation of its steps is above `MAX_SPREAD` of their mean: then something
else ran on the machine. The table is printed when all runs are there. Its last rows are predicted
from a run with another number of workers on the same two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemo_like.cli import main as nemo_like

MAX_SPREAD = 0.15
WARMUP = 2
BUDGET = "policy.sequence_packing.train_mb_tokens"
PACKING = "policy.sequence_packing.enabled"
BATCH = "policy.train_global_batch_size"
COMMON = {
    "checkpointing.enabled": "false",
    "checkpointing.export_hf": "false",
    "logger.tensorboard": "false",
    "policy.parity_check": "false",
    "policy.optimizer.lr": "1e-6",
}
LOCAL = {"cluster.backend": "local", "cluster.workers_per_node": "1"}
RAY_1 = {"cluster.backend": "ray", "cluster.workers_per_node": "1"}
RAY_2 = RAY_1 | {"cluster.workers_per_node": "2"}
GRPO = {
    "grpo.val_period": "0",
    "grpo.val_at_start": "false",
    "grpo.num_prompts_per_step": "32",
    "grpo.num_generations_per_prompt": "8",
    "policy.generation.hf.batch_size": "64",
    "policy.generation.max_new_tokens": "64",
    "policy.shared_prefix": "auto",
    "policy.sequence_packing.algorithm": "balanced",
    "policy.dynamic_batching.enabled": "false",
    PACKING: "true",
    BUDGET: "2048",
    BATCH: "256",
}
SFT = {"sft.val_period": "0", "sft.val_at_start": "false", BUDGET: "2048", BATCH: "256"}
PADDED = {
    PACKING: "false",
    "policy.dynamic_batching.enabled": "true",
    "policy.dynamic_batching.train_mb_tokens": "2048",
    "policy.shared_prefix": "false",
}
FFD = {"policy.sequence_packing.algorithm": "first_fit_decreasing", BUDGET: "1024"}


@dataclass(frozen=True)
class Configuration:
    """A recorded run."""

    title: str
    keys: dict[str, str] = field(default_factory=dict)
    kind: str = "grpo"


CONFIGURATIONS = {
    "local": Configuration("GRPO, 32 x 8 completions, 2,048 tokens, local", LOCAL),
    "budget": Configuration("512 tokens per microbatch", LOCAL | {BUDGET: "512"}),
    "ffd": Configuration("first fit decreasing, 1,024 tokens", LOCAL | FFD),
    "padded": Configuration("dynamic batching (padded rows)", LOCAL | PADDED),
    "batch": Configuration("16 prompts", LOCAL | {"grpo.num_prompts_per_step": "16", BATCH: "128"}),
    "group": Configuration(
        "16 prompts x 16 completions",
        LOCAL | {"grpo.num_prompts_per_step": "16", "grpo.num_generations_per_prompt": "16"},
    ),
    "short": Configuration(
        "at most 24 new tokens", LOCAL | {"policy.generation.max_new_tokens": "24"}
    ),
    "prefixes": Configuration("no shared prefixes", LOCAL | {"policy.shared_prefix": "false"}),
    "ray": Configuration("Ray, 1 worker", RAY_1),
    "ray2": Configuration("Ray, 2 workers", RAY_2),
    "ray2_batch": Configuration(
        "Ray, 2 workers, 64 prompts, 1,024 tokens",
        RAY_2 | {"grpo.num_prompts_per_step": "64", BATCH: "512", BUDGET: "1024"},
    ),
    "sft": Configuration("SFT, 256 rows, 2,048 tokens, Ray, 1 worker", RAY_1, "sft"),
    "sft2_base": Configuration("SFT, Ray, 2 workers", RAY_2, "sft"),
    "sft2": Configuration("SFT, Ray, 2 workers, 512 tokens", RAY_2 | {BUDGET: "512"}, "sft"),
}
LOCAL_NAMES = ("budget", "ffd", "padded", "batch", "group", "short", "prefixes", "ray")
PREDICTIONS = (
    *((name, "local") for name in LOCAL_NAMES),
    ("ray2_batch", "ray2"),
    ("ray2", "ray2_batch"),
    ("sft2", "sft2_base"),
)
"""(configuration, the run from which it is predicted)."""
OTHER_WORKERS = (("ray2", "ray"), ("ray2_batch", "ray"), ("sft2", "sft"))
"""The same, with another number of workers."""


def keys_of(name: str) -> list[str]:
    """Return every key of a run as overrides, so that none is left from another run."""
    each = CONFIGURATIONS[name]
    keys = COMMON | (GRPO if each.kind == "grpo" else SFT) | each.keys
    return [f"{key}={value}" for key, value in keys.items()]


def step_seconds(folder: Path, name: str) -> np.ndarray:
    """Return the seconds of the counted steps of a run, float64 [S]; empty without a run."""
    path = folder / name / "metrics.jsonl"
    if not path.exists():
        return np.zeros(0)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return np.array([each["timing/step_s"] for each in records if "timing/step_s" in each])[WARMUP:]


def record(folder: Path, name: str, num_steps: int, tries: int) -> None:
    """Run a configuration until its steps take about the same time."""
    kind = CONFIGURATIONS[name].kind
    command = [sys.executable, "-m", "nemo_like", kind]
    command += ["--config", f"examples/configs/demo_{kind}.yaml", *keys_of(name)]
    command += [f"output_dir={folder}", f"run_name={name}", f"{kind}.max_num_steps={num_steps}"]
    if "cluster.backend=local" in command:
        command = ["taskset", "-c", "0", *command]
    spreads = []
    for _ in range(tries):
        shutil.rmtree(folder / name, ignore_errors=True)
        with (folder / f"{name}.out").open("w", encoding="utf-8") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)
        seconds = step_seconds(folder, name)
        spreads.append(seconds.std() / seconds.mean())
        print(f"{name}: {seconds.mean():.3f} s, spread {spreads[-1]:.1%}", flush=True)
        if spreads[-1] <= MAX_SPREAD:
            return


def predict(folder: Path, name: str, source: str) -> float:
    """Return the predicted seconds of a step."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = nemo_like(
            ["plan", str(folder / source), "--simulate", "--json", "-", *keys_of(name)]
        )
    if code != 0:
        raise SystemExit(f"nemo-like plan ended with code {code}")
    return json.loads(shown.getvalue())["simulation"]["predicted_s"]


def show(folder: Path) -> None:
    """Print the table."""
    print("\n| configuration | predicted from | measured s | predicted s | error |")
    print("|---|---|---|---|---|")
    errors = []
    for name, source in (*PREDICTIONS, *OTHER_WORKERS):
        seconds = step_seconds(folder, name).mean()
        predicted = predict(folder, name, source)
        errors.append(predicted / seconds - 1.0)
        title, other = CONFIGURATIONS[name].title, CONFIGURATIONS[source].title
        print(f"| {title} | {other} | {seconds:.3f} | {predicted:.3f} | {errors[-1]:+.1%} |")
    own = np.abs(errors[: len(PREDICTIONS)])
    print(f"\nlargest error of the first {len(own)}: {own.max():.1%}, mean {own.mean():.1%}")


def main() -> None:
    """Record the missing runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where runs are recorded")
    parser.add_argument("--steps", type=int, default=22, help="steps of a run")
    parser.add_argument("--tries", type=int, default=2, help="max runs of a configuration")
    parser.add_argument("--max-minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for name in CONFIGURATIONS:
        if len(step_seconds(arguments.folder, name)):
            continue
        if time.monotonic() - start > 60 * arguments.max_minutes:
            print("some runs are missing: call again")
            return
        record(arguments.folder, name, arguments.steps, arguments.tries)
    show(arguments.folder)


if __name__ == "__main__":
    main()
