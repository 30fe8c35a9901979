"""Kill runs at random places, resume them, and compare what they leave with an uninterrupted run,
bit for bit.

    python -m benchmarks.fault_injection --kills 50 --seed 0 --algorithm both --out report.json

Runs are real: SFT and GRPO of the demo's task through the command line, each on a Ray cluster of
its own. An attempt is killed with SIGKILL (one of the driver, a policy or reward
worker, the raylet, the GCS) during start-up, a step, or the writing of a checkpoint; the next
attempt resumes, and is killed as well. When a run is complete it is compared with the reference.
With `--signal TERM` only the driver receives a signal: it must finish the step, save it, and exit
with 75. The exit code is 0 if everything held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fault_processes
from nemo_like.demo.task import build_demo
from nemo_like.training.stopping import EXIT_STOPPED

_REPOSITORY = Path(__file__).parents[1]
PHASES = ("startup", "step", "saving")
TARGETS = {
    "sft": ("driver", "policy", "raylet", "gcs"),
    # A generation replica that dies is replaced within the run: see `replica_failures`.
    "grpo": ("driver", "policy", "reward", "raylet", "gcs"),
}
_CLOCKS = (
    "timing/",
    "performance/",
    "policy/rank_time",
    "policy/peak_memory",
    "weight_sync/",
    "unix_time_s",
)
_GONE_S = 60.0
"""Ray's processes notice the end of the driver within this time."""

_COMMON = """
output_dir: {out}
run_name: {name}
resume: {resume}
policy:
  model_name: {demo}/model
  train_global_batch_size: 16
  max_total_sequence_length: 64
  sequence_packing: {{enabled: true, train_mb_tokens: 256, logprob_mb_tokens: 512}}
  optimizer: {{lr: 1.0e-3}}
  scheduler: {{kind: cosine, warmup_steps: 2}}
  generation: {{max_new_tokens: 16}}
  parity_check: false
cluster:
  {{backend: ray, workers_per_node: {workers}, cpus_per_worker: 0.5, restart: {{max_restarts: 0}}}}
checkpointing: {{save_period: 1, keep_latest: 2}}
logger: {{num_samples_shown: 0}}
"""
_JOBS = {
    "sft": """
sft: {{max_num_steps: {steps}}}
data: {{train_path: {demo}/sft_train.jsonl, max_train_rows: 1000}}
""",
    "grpo": """
grpo:
  max_num_steps: {steps}
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  val_at_start: false
loss_fn: {{reference_policy_kl_penalty: 0.01}}
data: {{train_path: {demo}/grpo_train.jsonl, max_train_rows: 500}}
reward: {{functions: {{digits: {{path: benchmarks.fault_injection.digit_share}}}}}}
""",
}


def digit_share(sample: Any) -> float:
    """A reward that an untrained model gets in part, so that every step has a gradient."""
    text = sample.completion
    return sum(character.isdigit() for character in text) / max(len(text), 1)


@dataclass
class Kill:
    """One attempt and what became of it."""

    algorithm: str
    run: int
    planned_phase: str
    target: str
    phase: str = ""
    """What the run was doing when the signal was sent; empty if it ended before."""
    after_s: float = 0.0
    """Seconds from the start of the driver to the signal."""
    exit_code: int | None = None
    seconds_to_exit: float = 0.0
    message: str = ""
    problems: list[str] = field(default_factory=list)
    errors: str = ""
    """The end of the driver's standard error, where there are problems."""


class Bench:
    """The runs of one algorithm: a reference and any number of killed ones."""

    def __init__(
        self, algorithm: str, folder: Path, options: argparse.Namespace, rng: random.Random
    ) -> None:
        self.algorithm, self.folder, self.options, self.rng = (
            algorithm,
            folder / algorithm,
            options,
            rng,
        )
        self.demo = folder / "demo"
        self.startup_s = self.step_s = self.save_s = 0.0
        self.folder.mkdir(parents=True)

    def run_reference(self) -> None:
        """The uninterrupted run; its durations set the times of the kills."""
        attempt = Attempt(self, "reference", resume=False)
        saves: list[float] = []
        save_began = first_step = None
        while attempt.process.poll() is None:
            if first_step is None and attempt.num_steps() > 0:
                first_step = time.monotonic() - attempt.started_at
            is_saving = attempt.is_saving()
            if is_saving and save_began is None:
                save_began = time.monotonic()
            elif not is_saving and save_began is not None:
                saves.append(time.monotonic() - save_began)
                save_began = None
            time.sleep(0.002)
        if attempt.process.returncode != 0:
            raise SystemExit(f"the reference run failed:\n{attempt.errors()}")
        attempt.close(Kill(self.algorithm, 0, "", ""))
        steps = _metrics(attempt.run)
        times = [line["unix_time_s"] for line in steps]
        self.startup_s = first_step or 1.0
        self.step_s = (times[-1] - times[0]) / max(len(times) - 1, 1)
        self.save_s = sorted(saves)[len(saves) // 2] if saves else 0.1

    def run_killed(self, number: int, plan: list[tuple[str, str]]) -> tuple[list[Kill], list[str]]:
        """One run, killed at the points of `plan` (phase, target) and resumed until it is complete;
        the plan loses what was used.

        Returns the attempts, and how the run differs from the reference.
        """
        kills: list[Kill] = []
        while True:
            phase, target = plan.pop(0) if plan else ("", "")
            kill = Kill(self.algorithm, number, phase, target)
            attempt = Attempt(self, f"run_{number}", resume=True)
            if phase:
                self._kill(attempt, kill)
            self._await_exit(attempt, kill)
            if kill.phase or kill.problems:
                kills.append(kill)
                print(_line(len(kills), kill), flush=True)
            if phase and not kill.phase:
                plan.insert(0, (phase, target))  # it was complete before the kill
            if kill.exit_code == 0 or not kill.phase:
                break
        if kill.exit_code != 0:
            return kills, [f"the run was not completed: {kill.message}"]
        differences = compare(
            self.folder / "out" / "reference", self.folder / "out" / f"run_{number}"
        )
        return kills, differences

    def _kill(self, attempt: Attempt, kill: Kill) -> None:
        if kill.planned_phase == "startup":
            attempt.wait_until(lambda: False, self.rng.uniform(0.0, self.startup_s))
        elif kill.planned_phase == "step":
            num_before = attempt.num_steps_before
            attempt.wait_until(lambda: attempt.num_steps() > num_before, self.options.start_bound)
            attempt.wait_until(lambda: False, self.rng.uniform(0.0, 1.5 * self.step_s))
        else:
            attempt.wait_until(attempt.is_saving, self.options.start_bound, poll_s=0.0005)
            attempt.wait_until(
                lambda: False, self.rng.uniform(0.0, 1.2 * self.save_s), poll_s=0.0005
            )
        victims: list[fault_processes.Process] = []

        def found() -> bool:
            victims[:] = attempt.of_target(kill.target)
            return bool(victims)

        attempt.wait_until(found, self.options.start_bound)
        if attempt.process.poll() is None and victims:
            phase, after_s = attempt.phase(), time.monotonic() - attempt.started_at
            attempt.note_shared_memory()
            if self.rng.choice(victims).kill(signal.Signals[f"SIG{self.options.signal}"]):
                kill.phase, kill.after_s = phase, round(after_s, 2)

    def _await_exit(self, attempt: Attempt, kill: Kill) -> None:
        """Wait for the driver to end by itself, and check its message and what it leaves."""
        bound = self.options.exit_bound if kill.phase else self.options.complete_bound
        began = time.monotonic()
        try:
            kill.exit_code = attempt.process.wait(bound)
        except subprocess.TimeoutExpired:
            kill.problems.append(
                f"the driver did not exit within {bound:g} s after the {kill.target or 'start'}"
            )
        kill.seconds_to_exit = round(time.monotonic() - began, 2)
        attempt.close(kill)
        errors = attempt.errors()
        kill.message = _message(errors)
        if kill.exit_code is None or (kill.target == "driver" and kill.phase):
            if self.options.signal == "TERM":
                kill.problems += attempt.problems_after_stop()
            return
        if kill.exit_code != 0 and not kill.message:
            kill.problems.append(f"exit code {kill.exit_code} without a message")
        if not kill.phase and kill.exit_code != 0:
            kill.problems.append(
                f"an attempt that was not killed failed with exit code {kill.exit_code}"
            )
        if "Traceback" in errors.split("The last lines of its log")[0]:
            kill.problems.append("the message contains a traceback")
        if kill.problems:
            kill.errors = errors[-4000:]


class Attempt:
    """One process of `nemo-like`, its Ray cluster, and a folder of its own for temporary files."""

    def __init__(self, bench: Bench, name: str, *, resume: bool) -> None:
        self.run = bench.folder / "out" / name
        self._mark = secrets.token_hex(8)
        self._temporary = Path(tempfile.mkdtemp(prefix="nlf_"))  # short: Ray's sockets lie below it
        self._shared_memory: set[str] = set()
        text = (_COMMON + _JOBS[bench.algorithm]).format(
            out=bench.folder / "out",
            name=name,
            resume=str(resume).lower(),
            demo=bench.demo,
            workers=bench.options.workers,
            steps=bench.options.steps,
        )
        config = bench.folder / f"{name}.yaml"
        config.write_text(text)
        hidden = ("RAY_ADDRESS",)
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        environment |= {
            fault_processes.MARK: self._mark,
            "TMPDIR": str(self._temporary),
            "RAY_TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(bench.folder / "inductor"),  # kept by every run
            "PYTHONPATH": str(_REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        self._errors = bench.folder / f"{name}.stderr"
        self.num_steps_before = self.num_steps()
        self._log_size = self._log_path.stat().st_size if self._log_path.exists() else 0
        self.started_at = time.monotonic()
        command = [sys.executable, "-m", "nemo_like", bench.algorithm, "--config", str(config)]
        with (
            self._errors.open("w") as errors,
            (bench.folder / f"{name}.stdout").open("w") as output,
        ):
            self.process = subprocess.Popen(
                command + bench.options.set,
                env=environment,
                cwd=_REPOSITORY,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def _log_path(self) -> Path:
        return self.run / "logs" / "driver.log"

    def wait_until(self, condition: Any, timeout_s: float, *, poll_s: float = 0.01) -> None:
        """Return when the condition holds, the driver has ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None and not condition():
            time.sleep(poll_s)

    def num_steps(self) -> int:
        """Lines of metrics.jsonl."""
        try:
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:  # before the first step; a start at step 0 renames an earlier one
            return 0

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.run / "checkpoints").glob(".writing_*"))

    def phase(self) -> str:
        if self.is_saving():
            return "saving"
        return "step" if self.num_steps() > self.num_steps_before else "startup"

    def of_target(self, target: str) -> list[fault_processes.Process]:
        log = ""
        if self._log_path.exists():  # only what this attempt wrote
            log = self._log_path.read_bytes()[self._log_size :].decode(errors="replace")
        return fault_processes.of_target(
            target, self.process.pid, fault_processes.marked(self._mark), log
        )

    def note_shared_memory(self) -> None:
        """Remember the shared memory of all processes, to find out later whether it is still
        there.
        """
        self._shared_memory |= fault_processes.shared_memory(fault_processes.marked(self._mark))

    def problems_after_stop(self) -> list[str]:
        """How the end of a driver that received SIGTERM differs from what is promised."""
        problems = []
        if self.process.returncode != EXIT_STOPPED:
            problems.append(f"exit code {self.process.returncode}, not {EXIT_STOPPED}")
        latest = self.run / "latest"
        saved = int(latest.read_text().rpartition("_")[2]) if latest.exists() else 0
        if saved != self.num_steps():
            problems.append(f"step {self.num_steps()} was finished, and step {saved} was saved")
        return problems

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def close(self, kill: Kill) -> None:
        """Add to the problems what is left after the end, and remove it."""
        left = fault_processes.wait_gone(self._mark, _GONE_S)
        for process in left:
            kill.problems.append(f"process {process.pid} is left: {process.command[:120]}")
            process.kill()
        self.process.wait(30)
        fault_processes.wait_gone(self._mark, 10.0)
        for path in sorted(self._shared_memory):
            if Path(path).exists():
                kill.problems.append(f"shared memory {path} is left")
                Path(path).unlink()
        names = sorted(path.name for path in self._temporary.iterdir())
        kill.problems += [f"temporary {name} is left" for name in names]
        shutil.rmtree(self._temporary, ignore_errors=True)


def compare(reference: Path, run: Path) -> list[str]:
    """How what `run` left differs from what `reference` left: metrics but clocks, rollouts,
    lengths, weights.
    """
    differences = []
    expected, found = (_without_clocks(_metrics(path)) for path in (reference, run))
    if expected != found:
        steps = [
            line.get("step") for line, other in zip(expected, found, strict=False) if line != other
        ]
        differences.append(
            f"metrics.jsonl: {len(found)} lines instead of {len(expected)}, different at steps"
            f" {steps}"
        )
    names = {path.relative_to(root) for root in (reference, run) for path in _kept_files(root)}
    for name in sorted(names):
        contents = [root / name for root in (reference, run)]
        if not all(path.is_file() for path in contents):
            differences.append(f"{name} exists in one of the runs only")
        elif contents[0].read_bytes() != contents[1].read_bytes():
            differences.append(f"{name} differs")
    return differences


def _kept_files(run: Path) -> list[Path]:
    patterns = (
        "rollouts/*.jsonl",
        "plan/*",
        "hf/*",
        "checkpoints/*/policy/*.safetensors",
        "checkpoints/*/training_state.json",
    )
    return [path for pattern in patterns for path in run.glob(pattern) if path.is_file()]


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def _without_clocks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(_CLOCKS)}
        for line in lines
    ]


def _message(errors: str) -> str:
    """The driver's own last message."""
    lines = [line for line in errors.splitlines() if line.startswith(("error:", "interrupted"))]
    return lines[-1] if lines else ""


def _line(number: int, kill: Kill) -> str:
    outcome = "; ".join(kill.problems) or "ok"
    return (
        f"{kill.algorithm} run {kill.run} attempt {number}: {kill.target or 'nothing'} killed after"
        f" {kill.after_s:.1f} s"
        f" ({kill.phase or 'ended before'}), exit {kill.exit_code} after {kill.seconds_to_exit:.1f}"
        f" s: {outcome}"
    )


def make_plan(num_kills: int, targets: Sequence[str], rng: random.Random) -> list[tuple[str, str]]:
    """Phase and target of each kill: every combination as often as the others, but for one, in
    random order.
    """
    combinations = [(phase, target) for phase in PHASES for target in targets]
    plan: list[tuple[str, str]] = []
    while len(plan) < num_kills:
        rng.shuffle(combinations)
        plan += combinations
    return plan[:num_kills]


def run_bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All kills; the report as JSON values."""
    build_demo(folder / "demo", 0)
    rng = random.Random(options.seed)
    targets = {"sft": ("driver",), "grpo": ("driver",)} if options.signal == "TERM" else TARGETS
    algorithms = ("sft", "grpo") if options.algorithm == "both" else (options.algorithm,)
    began = time.monotonic()
    kills: list[Kill] = []
    runs: list[dict[str, Any]] = []
    for index, algorithm in enumerate(algorithms):
        bench = Bench(algorithm, folder, options, rng)
        bench.run_reference()
        print(
            f"{algorithm}: start-up {bench.startup_s:.1f} s, step {bench.step_s:.2f} s, save"
            f" {bench.save_s:.3f} s",
            flush=True,
        )
        num_kills = options.kills * (index + 1) // len(algorithms) - options.kills * index // len(
            algorithms
        )
        plan = (
            [tuple(each.split(":")) for each in options.plan]
            if options.plan
            else make_plan(num_kills, targets[algorithm], rng)
        )
        number = 0
        while plan:
            number += 1
            done, differences = bench.run_killed(number, plan)
            kills += done
            num_done = sum(bool(kill.phase) for kill in done)
            runs.append(
                {
                    "algorithm": algorithm,
                    "run": number,
                    "num_kills": num_done,
                    "differences": differences,
                }
            )
            outcome = "; ".join(differences) or "equal to the reference"
            print(f"{algorithm} run {number}: {num_done} kills, {outcome}", flush=True)
    problems = sum(len(kill.problems) for kill in kills) + sum(
        len(run["differences"]) for run in runs
    )
    return {
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "num_kills": sum(bool(kill.phase) for kill in kills),
        "num_problems": problems,
        "runs": runs,
        "kills": [asdict(kill) for kill in kills],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=("sft", "grpo", "both"), default="both")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--workers", type=int, default=2, help="policy workers")
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of every run's config"
    )
    parser.add_argument(
        "--plan", nargs="*", metavar="PHASE:TARGET", help="these kills instead of random ones"
    )
    parser.add_argument(
        "--start-bound",
        type=float,
        default=300,
        help="most seconds until the phase to kill in is reached",
    )
    parser.add_argument(
        "--exit-bound",
        type=float,
        default=120,
        help="most seconds for the driver to exit after a kill",
    )
    parser.add_argument(
        "--complete-bound",
        type=float,
        default=900,
        help="most seconds of an attempt that is not killed",
    )
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    parser.add_argument("--folder", type=Path, help="keep the runs in this new folder")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="nemo_like_faults_"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run_bench(options, folder.resolve())
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if report["num_problems"] == 0 and options.folder is None:
        shutil.rmtree(folder)
    print(
        f"{report['num_kills']} kills in {report['seconds']:.0f} s, {report['num_problems']}"
        f" problems"
    )
    return 0 if report["num_problems"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
