"""A run on a Ray of this machine, and the faults that are injected into it."""

from __future__ import annotations

import math
import os
import random
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nemo_like.commands.train import WRONG_INPUT
from nemo_like.config.errors import ConfigError
from nemo_like.run import processes
from nemo_like.run.processes import Process
from nemo_like.training.restart import last_step

_POLL_S = 0.05
_SAVE_POLL_S = 0.002
_MAX_SAVE_STEPS = 3
_GONE_S = 60.0
"""Ray's processes notice the end of the driver within this time."""
_STOPPED_S = 20.0
"""A stopped driver, head or node is replaced after this time, as a scheduler or an operator
does; nothing inside the run can replace it."""
_MAX_STARTS = 3
"""Starts of the driver after one fault, and attempts to start a node."""
_REPLACED_S = 3.0
"""A node that was killed is replaced after this time."""
_MAX_DELAY_S = 8.0


class Fault(NamedTuple):
    """One fault to inject. Example: `Fault("kill", "policy", during_save=True)`."""

    kind: str
    target: str
    during_save: bool

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    fault: str
    step: int
    """The last step before it."""
    recovery_s: float
    """Seconds until a step that had not been complete before was complete."""
    num_lost_steps: int
    """Steps that were trained again."""
    num_starts: int
    """Starts of the driver by this command; 0 if the run recovered by itself."""
    num_restarts: int
    """Restarts of the run or of a worker by the run itself."""
    problem: str = ""


class LocalRay:
    """A Ray cluster of several nodes on this machine, of the processes with `mark`."""

    def __init__(self, mark: str, num_nodes: int, num_cpus: int, folder: Path) -> None:
        self._mark = mark
        self._num_nodes = num_nodes
        self._num_cpus = num_cpus
        self._folder = folder
        self._node_marks: list[str] = []
        """Marks of all nodes but the head."""
        # Other users of this machine must not run code on it.
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def start(self) -> None:
        """Start the head and the nodes. Raises ConfigError."""
        temp_dir = Path(tempfile.mkdtemp(prefix="ray_", dir=self._folder))
        self._node_marks = []
        self.environment.pop("RAY_ADDRESS", None)
        self._start_node(
            self._mark, "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={temp_dir}"
        )
        self.environment["RAY_ADDRESS"] = (temp_dir / "ray_current_cluster").read_text().strip()
        for _ in range(1, self._num_nodes):
            self.add_node()

    def add_node(self) -> None:
        """Add a node."""
        self._node_marks.append(f"{self._mark}/{len(self._node_marks)}")
        self._start_node(self._node_marks[-1], f"--address={self.environment['RAY_ADDRESS']}")

    def node_processes(self) -> list[Process]:
        """Return the processes of all nodes but the head."""
        return [each for mark in self._node_marks for each in processes.marked(mark)]

    def stop(self) -> None:
        """Kill all processes of the cluster."""
        _end(processes.marked(self._mark))
        processes.wait_gone(self._mark, _GONE_S)

    def _start_node(self, mark: str, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        command += ["--disable-usage-stats", "--num-gpus=0"]
        # The first node of the machine has taken the fixed default port.
        command += ["--dashboard-agent-listen-port=0", f"--num-cpus={self._num_cpus}"]
        environment = _without_address() | self.environment | {processes.MARK: mark}
        error = ""
        # Ray gives its processes 30 s to start, which a busy machine may exceed.
        for _ in range(_MAX_STARTS):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
            error = (done.stderr or done.stdout)[-500:]
            _end(processes.marked(mark))
        raise ConfigError(f"Ray could not be started: {error}")


class FaultyRun:
    """A run in the directory `path`: its driver, its Ray, and faults that are injected."""

    def __init__(
        self, command: Sequence[str], path: Path, *, num_nodes: int, num_cpus: int, timeout_s: float
    ) -> None:
        """Start the run. With several nodes its Ray is started first. Raises ConfigError.

        `command` starts the driver, also after a fault. `num_cpus` are the cores of each node.
        Every wait for the run ends after `timeout_s`.
        """
        self.path = path
        self._command = command
        self._timeout_s = timeout_s
        self._mark = secrets.token_hex(8)
        # A short path, because sockets of Ray are below it.
        self._folder = Path(tempfile.mkdtemp(prefix="nlc_"))
        self._shared_memory: set[str] = set()
        self._ray = None
        if num_nodes > 1:
            self._ray = LocalRay(self._mark, num_nodes, num_cpus, self._folder)
            self._ray.start()
        self._driver = self._start_driver()

    @property
    def step(self) -> int:
        """The last complete step."""
        return last_step(self.path / "metrics.jsonl")[0]

    @property
    def _is_saving(self) -> bool:
        return any((self.path / "checkpoints").glob(".writing_*"))

    @property
    def has_ended(self) -> bool:
        return self._driver.poll() is not None

    def groups(self) -> set[str]:
        """Return the kinds of worker groups that the run has started, e.g. `generation`."""
        return {name.partition("-")[0] for name, _ in self._workers()}

    def finish(self) -> str:
        """Wait for the end of the run; return the problem, or an empty text."""
        if not self._wait(lambda: self.has_ended):
            return f"the run did not end within {self._timeout_s:g} s"
        code = self._driver.returncode
        return f"exit code {code}: {self._errors()[-500:]}" if code else ""

    def inject(self, fault: Fault, rng: random.Random, step_s: float) -> Outcome | None:
        """Inject a fault at a random time of a step or of a save, and wait for the recovery.

        The first fault is after the first step, because a failure before it is final. Returns None
        if the run ended before.
        """
        self._wait(lambda: self.step > 0)
        if fault.during_save:
            # A short save can be missed.
            last = self.step + _MAX_SAVE_STEPS
            self._wait(lambda: self._is_saving or self.step > last, poll_s=_SAVE_POLL_S)
        else:
            self._wait(lambda: False, rng.uniform(0.0, 1.5 * step_s))
        victims = self._victims(fault.target)
        if self.has_ended or not victims:
            return None
        self._shared_memory |= processes.shared_memory(processes.marked(self._mark))
        num_before = self._num_restarts()
        step = highest = lowest = self.step
        undo_s, undo = self._apply(fault, rng.choice(victims), rng)
        began = time.monotonic()
        num_starts, problem, is_noticed = 0, "", fault.kind == "delay"
        while not problem:
            now, last = time.monotonic() - began, self.step
            if now > undo_s:
                undo_s = math.inf
                undo()
            if self.has_ended and self._driver.returncode == 0:
                break
            if is_noticed and last > highest:
                break
            if self.has_ended:
                if num_starts == _MAX_STARTS or self._driver.returncode == WRONG_INPUT:
                    problem = f"the driver ended {num_starts + 1} times: {self._errors()[-500:]}"
                    break
                num_starts += 1
                self._start_again(fault)
            is_noticed = is_noticed or num_starts + self._num_restarts() > num_before
            if not is_noticed:
                highest = lowest = max(highest, last)
            lowest = min(lowest, last)
            if now > self._timeout_s:
                problem = f"no new step within {self._timeout_s:g} s"
            time.sleep(_POLL_S)
        if undo_s < math.inf:
            undo()
        return Outcome(
            fault=fault.name,
            step=step,
            recovery_s=time.monotonic() - began,
            num_lost_steps=highest - lowest,
            num_starts=num_starts,
            num_restarts=self._num_restarts() - num_before,
            problem=problem,
        )

    def close(self) -> list[str]:
        """End what is left of the run; return what should not have been left."""
        is_complete = self.has_ended
        if not is_complete:
            _end(processes.marked(self._mark))
        if self._ray is not None:
            self._ray.stop()
        left = processes.wait_gone(self._mark, _GONE_S)
        _end(left)
        self._driver.wait()
        problems = [f"process {each.pid} ({each.program}) is left" for each in left]
        for path in map(Path, sorted(self._shared_memory)):
            if path.exists():
                problems.append(f"shared memory {path} is left")
                path.unlink()
        problems += [f"{path} is left" for path in self._folder.glob("nemo_like_ray_*")]
        shutil.rmtree(self._folder, ignore_errors=True)
        return problems if is_complete else []

    def _apply(
        self, fault: Fault, victim: Process, rng: random.Random
    ) -> tuple[float, Callable[[], object]]:
        """Inject a fault; return how many seconds later which function is called."""
        if fault.kind == "delay":
            victim.kill(signal.SIGSTOP)
            return rng.uniform(1.0, _MAX_DELAY_S), lambda: victim.kill(signal.SIGCONT)
        if fault.kind == "full_disk":
            # A limit on the size of files: writes fail as on a full disk, other programs' do not.
            size = (self.path / "metrics.jsonl").stat().st_size
            writers = [*self._victims("driver"), *self._victims("policy")]
            _limit_files(writers, size)
            return math.inf, lambda: None
        is_stopped = fault.kind == "stop"
        victim.kill(signal.SIGSTOP if is_stopped else signal.SIGKILL)
        if fault.target in ("driver", "head") and is_stopped:
            return _STOPPED_S, victim.kill
        if fault.target == "raylet":
            return _STOPPED_S if is_stopped else _REPLACED_S, lambda: self._replace_node(victim)
        return math.inf, lambda: None

    def _replace_node(self, raylet: Process) -> None:
        """End a node, and start another one where the nodes are not part of the run."""
        raylet.kill()
        if self._ray is not None:
            self._ray.add_node()

    def _start_again(self, fault: Fault) -> None:
        """Start the driver again, as a scheduler does."""
        if self._ray is None:
            processes.wait_gone(self._mark, _GONE_S)
        elif fault.target == "head":
            self._ray.stop()
            self._ray.start()
        self._driver = self._start_driver()

    def _start_driver(self) -> subprocess.Popen[bytes]:
        environment = _without_address() | {
            processes.MARK: self._mark,
            "RAY_TMPDIR": str(self._folder),
        }
        if self._ray is not None:
            environment |= self._ray.environment
        with (
            self.path.with_suffix(".stderr").open("ab") as errors,
            self.path.with_suffix(".stdout").open("ab") as output,
        ):
            return subprocess.Popen(
                self._command, env=environment, stdout=output, stderr=errors, start_new_session=True
            )

    def _victims(self, target: str) -> list[Process]:
        living = processes.marked(self._mark)
        if target == "driver":
            return [each for each in living if each.pid == self._driver.pid]
        if target == "head":
            return [each for each in living if each.program == "gcs_server"]
        if target == "raylet":
            nodes = living if self._ray is None else self._ray.node_processes()
            return [each for each in nodes if each.program == "raylet"]
        pids = {pid for name, pid in self._workers() if name.partition("-")[0] == target}
        return [each for each in living if each.pid in pids]

    def _workers(self) -> list[tuple[str, int]]:
        """Return group and pid of each worker of the run so far."""
        log = self.path / "logs" / "driver.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        found = re.findall(r"worker \d+ of the (\S+) group: pid (\d+)", text)
        return [(name, int(pid)) for name, pid in found]

    def _num_restarts(self) -> int:
        """Return the restarts of the run and of its workers so far."""
        texts = (self._errors(), self.path.with_suffix(".stdout").read_text(errors="replace"))
        return sum(len(re.findall(r"\(restart \d+ of at most", text)) for text in texts)

    def _errors(self) -> str:
        """Return what the drivers have written to standard error."""
        return self.path.with_suffix(".stderr").read_text(errors="replace")

    def _wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        poll_s: float = _POLL_S,
    ) -> bool:
        """Wait until the condition holds or the driver has ended; return whether it holds."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while not (holds := condition()) and not self.has_ended and time.monotonic() < deadline:
            time.sleep(poll_s)
        return holds


def _end(living: Sequence[Process]) -> None:
    for process in living:
        process.kill()


def _limit_files(living: Sequence[Process], num_bytes: int) -> None:
    """Set the largest size of a file that the processes may write."""
    for process in living:
        with suppress(ProcessLookupError):
            hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def _without_address() -> dict[str, str]:
    """Return the environment without the Ray of the user."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
