"""The run directory `<output_dir>/<run_name>`: names, lock, config.yaml, and cleanup at a resume.

No file of an existing run changes before `start_run_directory`, which is called after every check
that can refuse the run.

One driver may use a run directory. It holds an advisory lock (flock) on the file `run.lock`. The
kernel releases it at the end of the process, also after SIGKILL, so a lock is never stale. The file
has host and process id of the driver, for the message to another one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.errors import ConfigError
from nemo_like.run.checkpoint import wait_until_visible
from nemo_like.run.files import WriteError, replacing, reporting_write_errors, write_text

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"

_NAMES = {"metrics.jsonl", "plan", "rollouts", "checkpoints", "tb", "logs", LOCK_NAME}
"""What a run may have without its config.yaml."""
_BEFORE_RESUME = ".before_resume"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run; paths of checkpoints are in `checkpoint.Checkpointer`."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def media(self) -> Path:
        """Samples and distributions, one JSON object per line."""
        return self.path / "media.jsonl"

    @property
    def health(self) -> Path:
        """What the health rules found, one JSON object per line."""
        return self.path / "health.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def hf_ema(self) -> Path:
        """The exported model with averaged weights (`policy.ema`)."""
        return self.path / "hf_ema"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lengths(self) -> Path:
        """Row lengths of every step, for `nemo-like plan --metrics`."""
        return self.path / "plan" / "lengths.jsonl"

    def plan(self, step: int) -> Path:
        return self.path / "plan" / f"step_{step}.json"

    def skipped(self, step: int) -> Path:
        """Rows of the optimizer steps of `step` that were skipped."""
        return self.path / "skipped" / f"step_{step}.jsonl"

    def rollouts(self, step: int) -> Path:
        """The rows of a rollout as text."""
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def rollout_tokens(self, step: int) -> Path:
        """Token ids and log-probs of the same rows."""
        return self.path / "rollouts" / f"step_{step}.safetensors"


@contextmanager
def open_run_directory(output_dir: str, run_name: str, *, resume: bool) -> Iterator[RunDirectory]:
    """Create or open a run's directory and lock it inside the block.

    Files of an existing run are not changed. Raises ConfigError if a run of this name has written
    results and `resume` is off, if the name cannot be a directory, if the directory cannot be
    created, or if another driver uses it.
    """
    # No separators and no leading dot: the name must not lead out of output_dir or hide the run.
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", run_name) is None:
        raise ConfigError(
            f"run_name: {run_name!r} cannot name a directory; use letters, digits, '_', '-' and '.'"
        )
    directory = RunDirectory(Path(output_dir) / run_name)
    _make_directories(directory.path)
    _refuse_other_directory(directory)
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(directory.path))
        except WriteError as error:
            raise ConfigError(f"output_dir: {error}") from error
        # Under the lock, or another driver could write results after the check.
        if not resume:
            _refuse_results(directory)
        _make_directories(directory.logs, directory.lengths.parent, directory.rollouts(0).parent)
        yield directory


def write_config(directory: RunDirectory, config: Mapping[str, Any]) -> None:
    """Replace config.yaml by the resolved configuration. Raises WriteError."""
    write_text(directory.config, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def start_run_directory(
    directory: RunDirectory, config: Mapping[str, Any], resumed_step: int | None
) -> None:
    """Remove the records after `resumed_step`, which the run writes again; write config.yaml.

    Call it after every check that can refuse the run. A truncated last line, which a kill leaves,
    is removed as well. None means a start at step 0: metrics.jsonl is kept under another name then.
    Raises WriteError.
    """
    if resumed_step is None and directory.metrics.exists() and directory.metrics.stat().st_size > 0:
        renamed = directory.metrics.with_name(directory.metrics.name + _BEFORE_RESUME)
        logger.warning("the run starts again at step 0; its earlier metrics are in %s", renamed)
        with reporting_write_errors(renamed):
            directory.metrics.replace(renamed)
    last_step = -1 if resumed_step is None else resumed_step
    for parent in (directory.path, directory.lengths.parent):
        for path in sorted(parent.glob("*.jsonl")):
            if path.is_file():
                keep_records(path, last_step)
    _remove_steps_after(last_step, directory.rollouts(0).parent)
    _remove_steps_after(last_step, directory.skipped(0).parent)
    write_config(directory, config)


def _remove_steps_after(last_step: int, directory: Path) -> None:
    """Remove the files `step_<N>.*` of later steps. Raises WriteError."""
    for path in directory.glob("step_*"):
        # At most 18 digits, as in the names of checkpoints.
        match = re.fullmatch(r"step_([0-9]{1,18})", path.stem)
        if match is not None and int(match[1]) > last_step:
            with reporting_write_errors(path):
                path.unlink()


def keep_records(path: Path, last_step: int) -> None:
    """Remove the lines of a .jsonl file that are incomplete or of a step after `last_step`.

    Lines without a step are kept. The change is atomic; a file without such lines is not written.
    Raises WriteError.
    """
    with reporting_write_errors(path):
        num_removed = 0
        lacks_newline = False
        # Read twice instead of once into memory: the file of a long run may be large.
        with path.open("rb") as lines:
            for line in lines:
                num_removed += not _is_kept(line, last_step)
                lacks_newline = not line.endswith(b"\n")
        if num_removed == 0 and not lacks_newline:
            return
        with path.open("rb") as lines, replacing(path) as temporary, temporary.open("xb") as kept:
            for line in lines:
                if _is_kept(line, last_step):
                    kept.write(line.rstrip(b"\n") + b"\n")
    logger.info("removed %d records after step %d from %s", num_removed, max(last_step, 0), path)


def log_config_changes(directory: RunDirectory, config: Mapping[str, Any]) -> None:
    """Log every key whose value differs from the existing config.yaml, old -> new."""
    if not directory.config.exists():
        return
    try:
        before = flatten(yaml.safe_load(directory.config.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError, AttributeError, RecursionError) as error:
        logger.warning(
            "%s cannot be read, so changes of the configuration are not listed: %s",
            directory.config,
            error,
        )
        return
    # Through YAML, so that both have the same plain types (lists instead of tuples).
    after = flatten(yaml.safe_load(yaml.safe_dump(dict(config))))
    # `resume` itself differs at every resume.
    for key in sorted(before.keys() | after.keys()):
        old = before.get(key, "(not there)")
        new = after.get(key, "(not there)")
        if old != new and key != "resume":
            logger.warning("changed since this run was started: %s: %s -> %s", key, old, new)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys: `{"a": {"b": 1}}` -> `{"a.b": 1}`. Lists are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _make_directories(*directories: Path) -> None:
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir: cannot create {directory} ({error.strerror}); set output_dir to a"
                " path that can be written"
            ) from error


def _refuse_other_directory(directory: RunDirectory) -> None:
    """Raise ConfigError if the directory has files and is not a run's directory."""
    names = {path.name for path in directory.path.iterdir()}
    if "config.yaml" not in names and names - _NAMES:
        raise ConfigError(
            f"run_name: {directory.path} exists and is not the directory of a run; choose another"
            " run_name"
        )


def is_unused(path: Path) -> bool:
    """Return whether a new run may have `path`: it does not exist, or a run could not start there.

    Such a run has left its log only, as config.yaml is written after every check.
    """
    if not path.exists():
        return True
    if not path.is_dir() or any((path / name).exists() for name in ("config.yaml", LOCK_NAME)):
        return False
    files = [each for each in path.rglob("*") if not each.is_dir()]
    return all(each.is_relative_to(path / "logs") for each in files)


def _refuse_results(directory: RunDirectory) -> None:
    """Raise ConfigError if the directory has results; a run that wrote none may start again."""
    has_metrics = directory.metrics.exists() and directory.metrics.stat().st_size > 0
    checkpoints = directory.path / "checkpoints"
    if has_metrics or (checkpoints.exists() and any(checkpoints.iterdir())):
        raise ConfigError(
            f"run_name: {directory.path} already has a run; choose another run_name, or set"
            " resume=true to continue it from its latest checkpoint"
        )


def _is_kept(line: bytes, last_step: int) -> bool:
    """Return True if a line is a complete record of a step up to `last_step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        # A line that a kill or a full disk truncated.
        return False
    step = record.get("step", last_step) if isinstance(record, dict) else None
    return isinstance(step, int) and not isinstance(step, bool) and step <= last_step


def check_shared(
    directory: Path, call_workers: Callable[[str, str], Sequence[str]], nodes: Sequence[str]
) -> None:
    """Raise ConfigError unless the driver and every worker read and write the same `directory`.

    `call_workers(path, token)` calls `answer(path, token, rank)` in every worker and returns the
    answers in rank order. `nodes` are the nodes' addresses by rank; it may be empty.
    """
    token = secrets.token_hex(8)
    # A new name each time: an old file of an earlier check proves nothing.
    probe = directory / "logs" / f".probe_{token}"
    problems: dict[int, str] = {}
    try:
        with reporting_write_errors(probe):
            probe.mkdir()
        answers = call_workers(str(probe.resolve()), token)
        for rank, problem in enumerate(answers):
            path = probe / f"rank_{rank}"
            if problem:
                problems[rank] = problem
            elif not wait_until_visible(path.exists):
                problems[rank] = f"the driver does not see the file {path} that the worker wrote"
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if not problems:
        return
    rank = min(problems)
    node = f"node {nodes[rank]}" if rank < len(nodes) else "its node"
    others = ""
    if len(problems) > 1:
        others = f" (and {len(problems) - 1} of the {len(answers)} workers more)"
    raise ConfigError(
        f"output_dir: policy worker {rank} on {node} and the driver on {socket.gethostname()} do"
        f" not share {directory.resolve()}: {problems[rank]}{others}. Checkpoints and the exported"
        " model need a directory that the driver and all policy workers read and write; set"
        " output_dir to one on a file system that all nodes mount at the same path"
    )


def answer(probe: str, token: str, rank: int) -> str:
    """Write a file into the driver's directory, in a worker; return the problem, or an empty text.

    The name of the directory ends with `token`.
    """
    host = socket.gethostname()
    if not wait_until_visible(Path(probe).is_dir):
        return f"the worker on {host} does not see {probe}, which the driver created"
    try:
        (Path(probe) / f"rank_{rank}").write_text(token, encoding="ascii")
    except OSError as error:
        return f"the worker on {host} cannot write to it ({error.strerror})"
    return ""


_WAIT_S = 5.0
"""Processes that a killed driver started can hold its lock for a moment longer."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the run in `directory`, which must exist, inside the block.

    Raises ConfigError with host and process if another driver has the lock, and WriteError if it
    cannot be written.
    """
    path = directory / LOCK_NAME
    with reporting_write_errors(path):
        descriptor = _acquire(path)
        os.ftruncate(descriptor, 0)
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    try:
        yield
    finally:
        if _is_file_of(path, descriptor):
            # The directory may be read-only now.
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def is_in_use(directory: RunDirectory) -> bool:
    """Return True if a driver has the lock of the run."""
    try:
        descriptor = os.open(directory.path / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquire(path: Path) -> int:
    """Take the lock and return the descriptor of its file. Raises ConfigError."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        is_locked = _flock(descriptor, path)
        # The driver before this one may have removed the file since it was opened.
        if is_locked and _is_file_of(path, descriptor):
            return descriptor
        owner = _read_owner(descriptor)
        os.close(descriptor)
        if not is_locked and (not _has_ended(owner) or time.monotonic() >= deadline):
            user = "another process"
            if owner:
                user = f"process {owner['pid']} on host {owner['host']}"
            raise ConfigError(
                f"run_name: the run in {path.parent} is in use by {user}; wait for it or stop it,"
                " or choose another run_name"
            )
        time.sleep(0.05)


def _flock(descriptor: int, path: Path) -> bool:
    """Lock the file; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # A file system that is mounted without locks.
        logger.warning(
            "%s cannot be locked (%s), so a second driver of this run is not refused",
            path,
            error.strerror,
        )
    return True


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Return True if `path` is still the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Return host and process id in a lock file; empty while it is being written."""
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return {"host": owner["host"], "pid": owner["pid"]}
    except (ValueError, LookupError, TypeError):
        return {}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return True if the process that wrote the lock file has ended, as far as this host knows."""
    is_here = owner.get("host") == socket.gethostname()
    return is_here and not Path(f"/proc/{owner['pid']}").exists()
