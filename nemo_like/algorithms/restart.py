"""Runs a job, and starts it again from its latest checkpoint after a lost worker or node."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_like.config.errors import counted
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import ClusterConfig, PolicyConfig, RunConfig
from nemo_like.console import say_error
from nemo_like.metrics import start_timers
from nemo_like.run.checkpoint import Checkpointer
from nemo_like.run.directory import RunDirectory
from nemo_like.training.microbatches import MAX_REDUCTIONS, MemoryPolicy, microbatch_limits
from nemo_like.training.restart import Restart, RestartPolicy, last_step
from nemo_like.training.run import RunResult
from nemo_like.training.stopping import RunStopped, StopRequests


def run_with_restarts(
    run_job: Callable[[RunConfig], RunResult], config: RunConfig, stop: StopRequests
) -> RunResult:
    """Return the result of `run_job`, after the restarts that `cluster.restart` and `policy.oom`
    allow.

    With `cluster.restart.min_nodes` a restart may have fewer nodes; the run then ends at a step
    and starts again when the others have returned. Raises what a final failure raises.
    """
    decision = _Decision(config.cluster, RunDirectory(Path(config.output_dir) / config.run_name))
    num_nodes = config.cluster.num_nodes
    while True:
        started = time.time()
        stop.watch_nodes(_returned_nodes(decision.policy.cluster, config.cluster.num_nodes))
        stop.restarts_after = partial(_restarts_after, stop, decision, config, started)
        try:
            return run_job(config)
        except RunStopped:
            has_returned = stop.has_returned_nodes
            stop.watch_nodes(None)
            # A signal in the same step ends the run.
            if not has_returned or stop.reason is not None:
                raise
            restart = Restart(0.0, num_nodes, 0)
            say_error(f"nodes have returned: the run continues on {restart.num_nodes}")
        except Exception as error:
            # The cluster may be gone, which a check for nodes would need.
            stop.watch_nodes(None)
            if stop.reason is not None:
                raise
            found = decision.next_start(config, error, started)
            if found is None:
                raise
            restart, config, text = found
            say_error(text)
        # The exception is gone here, and with it what its frames kept alive.
        _wait(restart.delay_s, stop)
        cluster = replace(config.cluster, num_nodes=restart.num_nodes)
        config = replace(config, resume=True, cluster=cluster)


class _Decision:
    """Whether and how a run starts again, from its failures in order."""

    def __init__(self, cluster: ClusterConfig, directory: RunDirectory) -> None:
        self.policy = RestartPolicy(cluster)
        self._memory = MemoryPolicy()
        self._directory = directory

    def next_start(
        self, config: RunConfig, error: Exception, started: float
    ) -> tuple[Restart, RunConfig, str] | None:
        """Return the restart, its configuration and the line about it; None after a final failure.

        `started` is when the start that failed began, on the clock of `time.time`.
        """
        step, written = last_step(self._directory.metrics)
        checkpointer = Checkpointer(self._directory.path, config.checkpointing)
        saved = checkpointer.selected().get("latest")
        num_nodes = config.cluster.num_nodes
        layout = policy_layout(config.parallel, config.cluster)
        smaller = self._memory.next_policy(config.policy, layout, config.needs.batch, error)
        if smaller is not None:
            text = _memory_text(error, step, saved, smaller, self._memory.num_reductions)
            return Restart(0.0, num_nodes, 0), replace(config, policy=smaller), text
        restart = self.policy.next_start(
            error, step=step, has_new_steps=written >= started, num_nodes=num_nodes
        )
        if restart is None:
            return None
        return restart, config, _failure_text(error, step, saved, restart, self.policy.cluster)


def _restarts_after(
    stop: StopRequests, decision: _Decision, config: RunConfig, started: float, error: BaseException
) -> bool:
    """Return whether the run will start again after `error`, without deciding it."""
    if isinstance(error, RunStopped):
        return stop.has_returned_nodes and stop.final_reason is None
    if not isinstance(error, Exception) or stop.final_reason is not None:
        return False
    return deepcopy(decision).next_start(config, error, started) is not None


def _wait(delay_s: float, stop: StopRequests) -> None:
    """Wait before a restart; a signal ends the wait and the run."""
    failed = time.monotonic()
    stop.finish_steps(enabled=False)
    time.sleep(delay_s)
    start_timers.pop()  # of the start that failed
    start_timers.add("start_restart_wait", time.monotonic() - failed)


def _returned_nodes(cluster: ClusterConfig, num_nodes: int) -> Callable[[], bool] | None:
    """Return a check for the nodes that a run on `num_nodes` lacks; None if it lacks none."""
    num_missing = cluster.num_nodes - num_nodes
    if num_missing <= 0:
        return None

    def has_returned() -> bool:
        # Imported on demand: a run without Ray does not need it.
        from nemo_like.distributed.ray.virtual_cluster import num_free_nodes

        return num_free_nodes(cluster) >= num_missing

    return has_returned


def _failure_text(
    error: Exception, step: int, saved: Path | None, restart: Restart, cluster: ClusterConfig
) -> str:
    """Return the one line about a failure and the restart that follows."""
    nodes = ""
    if restart.num_nodes != cluster.num_nodes:
        nodes = f" on {restart.num_nodes} of {cluster.num_nodes} nodes"
    return (
        f"failed after step {step}: {str(error).rstrip('.')}."
        f" {_start_text(step, saved)}{nodes}. It starts in"
        f" {restart.delay_s:g} s (restart {restart.number} of at most"
        f" {cluster.restart.max_restarts} in {cluster.restart.window_s:g} s; cluster.restart)."
    )


def _memory_text(
    error: Exception, step: int, saved: Path | None, policy: PolicyConfig, number: int
) -> str:
    """Return the line about a run that continues with the smaller microbatches of `policy`."""
    limits = ", ".join(f"{key}={value}" for key, value in microbatch_limits(policy))
    return (
        f"out of memory after step {step}: {str(error).rstrip('.')}."
        f" {_start_text(step, saved)} with {limits} (reduction {number} of at most"
        f" {MAX_REDUCTIONS}; policy.oom)."
    )


def _start_text(step: int, saved: Path | None) -> str:
    """Return what follows a failure; `saved` is the latest checkpoint, `step_<N>`."""
    if saved is None:
        return (
            f"There is no checkpoint: the run starts at step 0 again, {counted(step, 'step')} lost"
        )
    num_repeated = max(0, step - int(saved.name.rpartition("_")[2]))
    repeated = f"repeats {counted(num_repeated, 'step')}"
    return f"No result is lost: the run continues from {saved.name} and {repeated}"
