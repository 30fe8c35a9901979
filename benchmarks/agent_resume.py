"""Kills the driver of a GRPO run of programs at random times, and resumes the run each time.

    python -m benchmarks.agent_resume --folder DIR --kills 10

The run is local, on the model of the demo; the embedded generator decodes one request at a time,
because the last bits of log-probs depend on what is decoded together. Metrics without clocks,
rollouts and weights are compared with those of a run that was not killed, byte by byte: equal
rollouts have every episode of every step once. After each kill no process and no folder of a
program may be left. The exit code is 0 if all of it held.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.agent_faults import MARK, lines_of, processes
from nemo_like import cli
from nemo_like.demo.task import build_demo

_CLOCKS = ("timing/", "performance/", "policy/rank_time", "policy/peak_memory", "weight_sync/")
_CLOCKS += ("unix_time_s", "episodes/seconds")
_GONE_S = 30.0
_CONFIG = """
output_dir: {folder}
environment:
  kind: program
  path: tests.agents.faulty_programs.misbehaves_at_random
  options: {{folder: "{folder}", share: 0.0}}
policy:
  model_name: {folder}/demo/model
  train_global_batch_size: 8
  max_total_sequence_length: 96
  sequence_packing: {{enabled: true, train_mb_tokens: 2048, logprob_mb_tokens: 2048}}
  optimizer: {{lr: 1.0e-3}}
  generation: {{max_new_tokens: 8, hf: {{batch_size: 1}}}}
  parity_check: false
grpo:
  max_num_steps: {steps}
  num_prompts_per_step: 2
  num_generations_per_prompt: 4
  val_period: 0
  val_at_start: false
data: {{train_path: {folder}/demo/grpo_train.jsonl}}
cluster: {{backend: local}}
checkpointing: {{save_period: 1, keep_latest: 2}}
logger: {{num_samples_shown: 0}}
"""


def train(folder: Path, name: str, temporary: Path) -> None:
    """Run in a forked process, and exit with the code of the command."""
    with (folder / f"{name}.output").open("a") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.environ.update({"TMPDIR": str(temporary), MARK: str(folder)})
    tempfile.tempdir = None
    arguments = ["grpo", "--config", str(folder / "config.yaml"), f"run_name={name}", "resume=true"]
    sys.exit(cli.main(arguments))


def start(folder: Path, name: str, temporary: Path) -> multiprocessing.Process:
    """Start a run without the imports of a new interpreter."""
    process: Any = multiprocessing.get_context("fork").Process(
        target=train, args=(folder, name, temporary), daemon=False
    )
    process.start()
    return process


def num_started(folder: Path) -> int:
    """Return the number of programs that have started."""
    keys = folder / "keys"
    return len(keys.read_text().splitlines()) if keys.exists() else 0


def left_over(folder: Path, temporary: Path) -> list[str]:
    """Return what a killed run has left after a while."""
    deadline = time.monotonic() + _GONE_S
    while True:
        found = [f"it runs still: {each[:200]}" for each in processes(str(folder))]
        found += [f"left: {path}" for path in temporary.glob("nemo_like_agents_*")]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def differences(expected: Path, found: Path) -> list[str]:
    """Return what differs between two runs."""
    problems = []
    metrics = []
    for run in (expected, found):
        lines = lines_of(run / "metrics.jsonl")
        metrics.append(
            [{name: line[name] for name in line if not name.startswith(_CLOCKS)} for line in lines]
        )
    if [line["step"] for line in metrics[0]] != [line["step"] for line in metrics[1]]:
        problems.append("the steps of metrics.jsonl differ")
    for line, other in zip(*metrics, strict=False):
        names = [name for name in line if line[name] != other.get(name)]
        problems += [f"step {line['step']}: {name} differs" for name in names]
    paths = [*expected.glob("rollouts/*.jsonl"), *expected.glob("checkpoints/**/*.safetensors")]
    for path in paths:
        other_path = found / path.relative_to(expected)
        if not other_path.exists() or path.read_bytes() != other_path.read_bytes():
            problems.append(f"{path.relative_to(expected)} differs")
    print(f"{len(metrics[0])} lines of metrics and {len(paths)} files compared")
    return problems if paths else ["there is nothing to compare"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-delay-s", type=float, default=4.0)
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True)
    build_demo(folder / "demo", 0)
    (folder / "config.yaml").write_text(_CONFIG.format(folder=folder, steps=arguments.steps))
    problems: list[str] = []
    rng = random.Random(0)
    kills: list[Any] = []
    with tempfile.TemporaryDirectory() as temporary:
        straight = start(folder, "straight", Path(temporary))
        straight.join()
        if straight.exitcode != 0:
            problems.append("the run that was not killed failed")
        code = None
        while code is None:
            before = num_started(folder)
            process = start(folder, "killed", Path(temporary))
            while process.is_alive() and num_started(folder) == before:
                time.sleep(0.02)
            delay_s = rng.uniform(0, arguments.max_delay_s)
            process.join(delay_s if len(kills) < arguments.kills else None)
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
                num_lines = len(lines_of(folder / "killed" / "metrics.jsonl"))
                kills.append((round(delay_s, 2), num_lines))
                problems += left_over(folder, Path(temporary))
    print(f"killed after seconds of training, with complete steps: {kills}")
    if code != 0 or len(kills) < arguments.kills:
        problems.append(f"exit code {code} after {len(kills)} of {arguments.kills} kills")
    problems += differences(folder / "straight", folder / "killed")
    print(f"{num_started(folder)} programs, {len(problems)} problems")
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
