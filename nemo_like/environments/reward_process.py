"""A process that calls reward functions, so that a call that hangs can be ended.

`RewardProcess` is used with `reward.timeout_s`. A thread of this process that hangs in user code
cannot be interrupted, and would run on beside the run; the process is killed and replaced instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from nemo_like.config.reward import RewardFunctionConfig
from nemo_like.distributed import activity
from nemo_like.environments.calling import BadReward, Score, score_each, timed_out
from nemo_like.environments.loading import load_reward_functions
from nemo_like.environments.reward import RewardSample

_START_LIMIT_S = 300.0
_MARGIN_S = 2.0
"""An async call is cancelled in the process first, and the process ended so much later."""
_PARENT_CHECK_S = 1.0
_SERVE = "from nemo_like.environments.reward_process import serve; serve()"

_Message = tuple[int, float | tuple[str, str]]
"""Index of a sample, and its reward or the problem and its kind."""


class RewardProcess:
    """Calls the configured functions in one child process, which is started on demand."""

    def __init__(
        self,
        functions: Mapping[str, RewardFunctionConfig],
        kinds: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """`kinds` is "sync", "async" or "batched" for each function."""
        self._functions = functions
        self._kinds = kinds
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.num_started = 0
        """Processes started so far."""

    def score(self, name: str, samples: Sequence[RewardSample], label: str) -> list[Score]:
        """Return the reward of each sample, or the BadReward of a sample on which `name` failed.

        A call that exceeds the timeout, or whose process dies, is the failure of its sample; of all
        samples if the function is batched. If an async function blocks, the unfinished samples are
        scored again one at a time, so that the one that blocks is found.
        """
        scores: dict[int, Score] = {}
        max_concurrent: int | None = None
        kind = self._kinds[name]
        while len(scores) < len(samples):
            waiting = [index for index in range(len(samples)) if index not in scores]
            problem = self._score_waiting(name, samples, label, waiting, max_concurrent, scores)
            unfinished = [index for index in waiting if index not in scores]
            if problem is None or not unfinished:
                continue
            if kind == "async" and max_concurrent is None:
                max_concurrent = 1
                continue
            if kind != "batched":
                unfinished = unfinished[:1]
            for index in unfinished:
                scores[index] = BadReward(str(problem), samples[index], problem.kind)
        return [scores[index] for index in range(len(samples))]

    def close(self) -> None:
        """Kill the process and what it started in its process group."""
        child = self._child
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if self._connection is not None:
            self._connection.close()
        self._child = None
        self._connection = None

    def _score_waiting(
        self,
        name: str,
        samples: Sequence[RewardSample],
        label: str,
        waiting: Sequence[int],
        max_concurrent: int | None,
        scores: dict[int, Score],
    ) -> BadReward | None:
        """Score the samples at `waiting` and add to `scores`.

        Returns why not all were scored, None if they were; the process has been ended then.
        """
        connection = self._started()
        first = samples[waiting[0]]
        margin_s = 0.0 if self._kinds[name] == "sync" else _MARGIN_S
        try:
            connection.send((name, [samples[index] for index in waiting], max_concurrent))
            for num_done in range(len(waiting)):
                activity.note(f"{label}, {num_done} of {len(waiting)} samples done")
                if not connection.poll(self._timeout_s + margin_s):
                    self.close()
                    return timed_out(self._timeout_s, first)
                position, result = connection.recv()
                index = waiting[position]
                if isinstance(result, tuple):
                    scores[index] = BadReward(result[0], samples[index], result[1])
                else:
                    scores[index] = result
        except (EOFError, OSError):
            status = self._child.wait() if self._child is not None else 0
            self.close()
            return BadReward(f"ended its process ({_describe(status)})", first, "ended")
        return None

    def _started(self) -> Connection:
        """Return the connection to a running process. Raises RuntimeError if it does not start."""
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
            # Ctrl-C is for the driver. What the functions start is killed with the process.
            start_new_session=True,
        )
        theirs.close()
        self._child = child
        self._connection = ours
        self.num_started += 1
        try:
            ours.send(dict(self._functions))
            ours.send(self._timeout_s)
            if ours.poll(_START_LIMIT_S) and ours.recv() == "ready":
                return ours
        except (EOFError, OSError):
            pass
        self.close()
        raise RuntimeError(
            "the process that calls the reward functions did not start; its error is above"
        )


def serve() -> None:
    """Run the child process: score samples until the connection ends."""
    connection = Connection(int(sys.argv[1]))
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    functions = load_reward_functions(connection.recv())
    timeout_s: float = connection.recv()
    connection.send("ready")
    while True:
        try:
            name, samples, max_concurrent = connection.recv()
        except EOFError:
            return

        def report(index: int, score: Score) -> None:
            result: float | tuple[str, str]
            result = (str(score), score.kind) if isinstance(score, BadReward) else score
            message: _Message = (index, result)
            connection.send(message)

        score_each(
            functions[name],
            samples,
            name,
            timeout_s=timeout_s,
            max_concurrent=max_concurrent,
            report=report,
        )


def _end_with(parent: int) -> None:
    """End this process with its parent, also while a function hangs."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _describe(status: int) -> str:
    if status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"exit status {status}"
