"""A GRPO run of programs with faults of many kinds at random times, beside an undisturbed one.

    python -m benchmarks.agent_faults --folder DIR --steps 12

Both runs train the model of the demo, with an `HTTP_PROXY` that reaches nothing. A share of all
attempts at an episode has a fault, drawn from the random stream of the attempt; see
`tests.agents.faulty_programs`. The processes of the generator and of the programs are killed at
random times; weights are updated during calls. With `--backend local` these two are simulated in
one process, and updates are between rollouts. Checked are: all steps
end; every attempt is counted once at every step; mean reward and mean length of the trained
episodes are those of the undisturbed run within two standard errors; no process, open port or
folder of a program is left; no key is in a log or a record. The exit code is 0 if all of it held.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like import cli
from nemo_like.agents.events import EpisodeEnd
from nemo_like.agents.statuses import attempt_seed
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_config
from nemo_like.demo.task import build_demo
from nemo_like.distributed.errors import WorkerDied
from nemo_like.distributed.local_group import LocalGroup
from nemo_like.distributed.worker_group import Handle
from nemo_like.rollout.episodes import Ended, EpisodeDriver
from nemo_like.training import groups
from tests.agents.faulty_programs import drawn_fault

MARK = "NEMO_LIKE_AGENT_FAULTS"
_GONE_S = 60.0
_LOCATION = re.compile(r"worker 0 of the (generation|environment)-0 group: pid (\d+)")
_PROXY = "http://127.0.0.1:9"
_CONFIG = """
output_dir: {folder}
run_name: run
environment:
  kind: program
  path: tests.agents.faulty_programs.misbehaves_at_random
  options: {{folder: "{folder}", share: {share}}}
  timeout_s: 10
  retries: 4
  # A program that hangs is not slower because of its replies.
  on_limit: drop
policy:
  model_name: {demo}/model
  train_global_batch_size: 32
  max_total_sequence_length: 128
  sequence_packing: {{enabled: true, train_mb_tokens: 2048, logprob_mb_tokens: 2048}}
  # So small that both runs sample from nearly the same policy.
  optimizer: {{lr: 1.0e-5}}
  generation: {{max_new_tokens: 12}}
  parity_check: false
grpo:
  max_num_steps: {steps}
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  val_period: 0
  val_at_start: false
data: {{train_path: {demo}/grpo_train.jsonl}}
reward: {{max_error_share: 0.5}}
checkpointing: {{enabled: false}}
cluster:
  backend: {backend}
  cpus_per_worker: 0.5
  max_restarts: 100
  env: {{HTTP_PROXY: "{proxy}", http_proxy: "{proxy}", ALL_PROXY: "{proxy}"}}
logger: {{num_samples_shown: 0}}
"""
_ASYNCHRONOUS = ("grpo.max_staleness=1", "grpo.weight_update=in_flight")


def write_ends(path: Path) -> None:
    """Write what becomes of each attempt: its first random number, status and time."""
    original = EpisodeDriver._end

    def recorded(self: EpisodeDriver, end: EpisodeEnd) -> list[Ended]:
        attempt = self._attempts[end.episode]
        first = random.Random(attempt_seed(attempt.row.seed, attempt.number)).random()
        ended = original(self, end)
        write(path, [first, end.status.value, time.time()])
        return ended

    EpisodeDriver._end = recorded


def lossy_group(folder: Path, num_losses: int) -> type[LocalGroup]:
    """Return a local group whose worker is lost at random times, as one that is killed on Ray."""
    rng = random.Random(0)
    kinds = ["generation", "environment"] * num_losses
    times = {"due": time.monotonic() + 20}

    class LossyGroup(LocalGroup):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            lost = times.pop(self.name, None)
            if lost is not None:
                write(folder / "kills", [self.name, time.monotonic() - lost])
                times["due"] = time.monotonic() + rng.uniform(10, 40)

        def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
            is_due = time.monotonic() > times.get("due", math.inf)
            if method in ("poll", "advance") and is_due and kinds[:1] == [self.name]:
                times[kinds.pop(0)] = time.monotonic()
                del times["due"]
                self.shutdown()
                raise WorkerDied("it was killed", group=self.name, rank=0, method=method)
            return super().submit_all(method, *args, **kwargs)

    return LossyGroup


def write(path: Path, value: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def processes(mark: str) -> list[str]:
    """Return the command lines of processes whose environment has the mark of a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [each for each in found if each]


def kill_workers(folder: Path, process: subprocess.Popen[bytes], num_kills: int) -> None:
    """Kill the processes of generator and programs in turn, until `process` ends.

    The next one is killed some time after the one before was started again. Writes kind and
    seconds until then.
    """
    rng = random.Random(0)
    log, metrics = folder / "run" / "logs" / "driver.log", folder / "run" / "metrics.jsonl"
    kinds = ["generation", "environment"] * num_kills
    while kinds and process.poll() is None:
        time.sleep(0.2)
        if not lines_of(metrics):
            continue
        time.sleep(rng.uniform(1, 6))
        kind = kinds.pop(0)
        pid = dict(_LOCATION.findall(log.read_text()))[kind]
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
        start = time.monotonic()
        while dict(_LOCATION.findall(log.read_text()))[kind] == pid and process.poll() is None:
            time.sleep(0.2)
        write(folder / "kills", [kind, time.monotonic() - start])


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def episodes_of(folder: Path) -> Iterator[tuple[float, int, int]]:
    """Yield reward, trained tokens and number of weight versions of the trained episodes."""
    for path in sorted((folder / "run" / "rollouts").glob("step_*.jsonl")):
        by_episode = defaultdict(list)
        for row in lines_of(path):
            by_episode[row["episode"]].append(row)
        for rows in by_episode.values():
            if not any(row.get("dropped") or "error" in row for row in rows):
                versions = {each for row in rows for each in row["weight_versions"]}
                tokens = sum(row["num_trained_tokens"] for row in rows)
                yield rows[0]["reward"], tokens, len(versions)


def left_over(folder: Path, temporary: Path, mark: str) -> list[str]:
    """Return what a run has left, and where one of its keys is."""
    deadline = time.monotonic() + _GONE_S
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.5)
    problems = [f"it runs still: {each[:200]}" for each in processes(mark)]
    problems += [f"left: {path}" for path in temporary.rglob("nemo_like_agents_*")]
    path = folder / "keys"
    keys = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    ports = {int(url.split(":")[2].split("/")[0]) for url, _ in keys}
    ports |= {int(path.read_text()) for path in folder.glob("port")}
    for port in sorted(ports):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            problems.append(f"port {port} is open")
    secrets = re.compile("|".join(re.escape(key) for _, key in keys).encode() or b"(?!)")
    own = {folder / name for name in ("keys", "ended")}
    for root in (folder, temporary):
        for path in root.rglob("*"):
            if path.is_file() and path not in own and secrets.search(path.read_bytes()):
                problems.append(f"a key is in {path}")
    return problems


def run(folder: Path, arguments: argparse.Namespace, share: float, kills: int) -> list[str]:
    """Run with faults; return what is wrong."""
    backend, steps = arguments.backend, arguments.steps
    folder.mkdir(parents=True)
    # Its path must be short: Ray makes sockets in it.
    temporary = Path(tempfile.mkdtemp(dir="/tmp", prefix="n"))
    build_demo(folder / "demo", 0)
    values: dict[str, Any] = {"backend": backend, "proxy": _PROXY}
    values |= {"folder": folder, "demo": folder / "demo", "steps": steps, "share": share}
    (folder / "config.yaml").write_text(_CONFIG.format(**values))
    names = {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary), MARK: str(folder)}
    command = [sys.executable, "-m", "benchmarks.agent_faults", "--train", str(folder)]
    command += ["--backend", backend, "--kills", str(kills)]
    start = time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | names
        )
        if backend == "ray":
            kill_workers(folder, process, kills)
        code = process.wait()
    problems = left_over(folder, temporary, str(folder))
    shutil.rmtree(temporary)
    metrics = lines_of(folder / "run" / "metrics.jsonl")
    if code or [line["step"] for line in metrics] != list(range(1, steps + 1)):
        problems.append(f"exit code {code} after {len(metrics)} steps")
    counts = ("trained", "dropped", "cancelled", "replaced")
    for line in metrics:
        if line["episodes/started"] != sum(line[f"episodes/{name}"] for name in counts):
            problems.append(f"step {line['step']} does not count every attempt once")
    total = {name: sum(line[f"episodes/{name}"] for line in metrics) for name in counts}
    print(f"{folder.name}: {len(metrics)} steps in {time.monotonic() - start:.0f} s, {total}")
    return problems


def report(folder: Path) -> int:
    """Print the table by kind; return the number of faults."""
    ends = {number: rest for number, *rest in lines_of(folder / "ends")}
    share = load_config(GrpoRunConfig, folder / "config.yaml", []).environment.options["share"]
    statuses: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    for number, time_s in lines_of(folder / "faults"):
        status, end_s = ends[number]
        kind = drawn_fault(number, share)
        statuses[kind][status] += 1
        seconds[kind].append(end_s - time_s)
    for kind, recovered_s in lines_of(folder / "kills"):
        statuses[f"process of {kind}"]["started again"] += 1
        seconds[f"process of {kind}"].append(recovered_s)
    print("\n| fault | count | status of the attempt | s until its end, median | max |")
    print("|---|---|---|---|---|")
    for kind, found in statuses.items():
        text = ", ".join(f"{status} {number}" for status, number in sorted(found.items()))
        median, longest = np.median(seconds[kind]), max(seconds[kind])
        print(f"| {kind} | {found.total()} | {text} | {median:.1f} | {longest:.1f} |")
    mixed = sum(num_versions > 1 for _, _, num_versions in episodes_of(folder))
    print(f"| weight update in an episode | {mixed} | trained {mixed} | | |")
    return sum(found.total() for found in statuses.values()) + mixed


def compare(faulty: Path, undisturbed: Path) -> list[str]:
    """Print means with standard errors; return which of them differ."""
    problems = []
    found = [np.array(list(episodes_of(each)), dtype=float) for each in (faulty, undisturbed)]
    for column, name in enumerate(("reward", "trained tokens")):
        values = [each[:, column] for each in found]
        means = [each.mean() for each in values]
        error = np.sqrt(sum(each.var(ddof=1) / len(each) for each in values))
        ratio = abs(means[0] - means[1]) / error
        print(f"{name}: {means[0]:.4f} with faults, {means[1]:.4f} without: {ratio:.2f} errors")
        if ratio > 2:
            problems.append(f"the mean {name} differs by {ratio:.1f} standard errors")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--kills", type=int, default=3, help="of each kind of process")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.train is not None:
        write_ends(arguments.train / "ends")
        groups.LocalGroup = lossy_group(arguments.train, arguments.kills)
        options = _ASYNCHRONOUS if arguments.backend == "ray" else ()
        return cli.main(["grpo", "--config", str(arguments.train / "config.yaml"), *options])
    problems: list[str] = []
    faulty, undisturbed = arguments.folder.resolve() / "f", arguments.folder.resolve() / "u"
    runs = ((faulty, arguments.share, arguments.kills), (undisturbed, 0.0, 0))
    for folder, share, kills in runs:
        problems += run(folder, arguments, share, kills)
    num_faults = report(faulty)
    problems += compare(faulty, undisturbed)
    print(f"{num_faults} faults, {len(problems)} problems")
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
