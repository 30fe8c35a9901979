"""`nemo-like doctor`: the state of this machine and of a run, and an archive for a bug report."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import resource
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_like.commands.start import this_machine
from nemo_like.config.errors import ConfigError, shortened
from nemo_like.console import say
from nemo_like.distributed.activity import count_oom_kills
from nemo_like.distributed.stacks import innermost, py_spy, py_spy_dump
from nemo_like.reports.run_files import RunFiles
from nemo_like.run.versions import installed_versions

_LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE}
_MAX_LINE = 300
_POLICY_WORKER = r"worker (\d+) of the policy group: pid \d+ on node (\S+)"
_ARCHIVED = ("metrics.jsonl", "health.jsonl", "logs/driver.log", "logs/ray/*.log", "logs/ray/*.err")
"""The standard output of workers is left out: code of the user may print data."""
_REMOVED = "(removed)"
_MIN_SECRET = 6
"""A shorter value of a secret name may be a part of ordinary words and numbers."""
_SECRET_NAME = re.compile(r"(token|secret|passw\w*|key|credentials?)$", re.IGNORECASE)
_SECRETS = re.compile(
    # Values of cluster.env, passwords in URLs, tokens by their form or by the name before them.
    r"(?<=cluster\.env\.)\S+: .*|(?<=://)[^/\s@]+(?=@)"
    r"|\b(?:hf_|sk-|gh[a-z]_|github_pat_|glpat-|AKIA|eyJ)[\w.-]{12,}|(?i:(?<=bearer )\S+)"
    r"|(?i:(?:token|secret|passw\w*|key)[\"']?[=:] ?[\"']?)[^\s\"',]{6,}"
)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found, and write the archive. Raises ConfigError."""
    files = None if arguments.source is None else RunFiles(arguments.source)
    found = dict(_machine(Path() if files is None else files.directory.path))
    stacks: dict[str, str] = {}
    if files is not None:
        found |= dict(_run(files))
        if files.state.name == "running":
            stacks = _stacks(files)
            found["stacks"] = [f"{name}: {_innermost(text)}" for name, text in stacks.items()]
    if arguments.json:
        say(json.dumps(found | {"stacks": stacks}, indent=1))
    else:
        for name, lines in found.items():
            say(f"{name:<10}" + f"\n{'':10}".join(lines))
    if arguments.archive is not None:
        _write_archive(arguments.archive, files, json.dumps(found | {"stacks": stacks}, indent=1))
    return 0


def _machine(runs: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield names and lines about this machine and the Ray cluster of RAY_ADDRESS."""
    yield "versions", [installed_versions()]
    host, num_cores = socket.gethostname(), len(os.sched_getaffinity(0))
    yield "machine", [f"{host}, {platform.platform()}, {num_cores} cores"]
    machine = this_machine()
    devices = f"{machine.num_gpus} GPUs" if machine.num_gpus else "no GPU"
    owner = "GPU" if machine.num_gpus else "host"
    text = f"{devices}, {machine.memory_gib:.1f} GiB of {owner} memory free"
    yield "devices", [f"{text}; {count_oom_kills()} processes were killed for lack of memory"]
    address = os.environ.get("RAY_ADDRESS", "local")
    state = "not set: a run starts its own Ray"
    if address != "local":
        # Imported here: it takes a second.
        from nemo_like.distributed.ray.connection import connection_problem

        state = connection_problem() or f"{address}, reachable, with the same versions"
    yield "ray", [f"RAY_ADDRESS is {state}"]
    disks = {path: shutil.disk_usage(path) for path in (runs, "/dev/shm", tempfile.gettempdir())}
    texts = [f"{path} {disk.free / 2**30:.1f} GiB free" for path, disk in disks.items()]
    yield "disks", [", ".join(texts)]
    limits = {name: resource.getrlimit(limit)[0] for name, limit in _LIMITS.items()}
    texts = [f"{name} {'unlimited' if n < 0 else f'{n:,}'}" for name, n in limits.items()]
    yield "limits", [", ".join(texts)]


def _run(files: RunFiles) -> Iterator[tuple[str, list[str]]]:
    """Yield names and lines about a run."""
    state = files.state
    yield "run", [f"{files.name}: {state.name}", *filter(None, [state.text])]
    yield "steps", list(_steps(files)) or ["none is logged"]
    warned = [f"{each.place}: {each.text}" for each in files.warnings[-3:]]
    yield "warnings", [shortened(text, _MAX_LINE) for text in warned] or ["none"]


def _steps(files: RunFiles) -> Iterator[str]:
    """Yield times, slowest phases and rank: of quarters of the run, and of its last steps."""
    phases = {
        name.removeprefix("timing/").removesuffix("_s"): np.nan_to_num(values)
        for name, values in files.metrics.items()
        if re.match("timing/(?!start_)", name)
    }
    step_s = phases.pop("step", np.zeros(len(files.steps)))
    ranks = files.metrics.get("policy/rank_time_worst_over_mean")
    slowest = files.metrics.get("policy/rank_time_slowest")
    nodes = dict(re.findall(_POLICY_WORKER, "\n".join(line.text for line in files.log)))
    rows = np.flatnonzero(step_s)
    for part in (*np.array_split(rows[:-4], 4), *rows[-4:, None]):
        if not len(part):
            continue
        means = {name: values[part].mean() for name, values in phases.items()}
        longest = sorted(means, key=lambda name: -means[name])[:3]
        text = ", ".join(f"{name} {means[name]:.2f} s" for name in longest if means[name] > 0)
        if ranks is not None:
            rank = "" if slowest is None else _rank_text(slowest[part], nodes)
            text += f"; slowest rank{rank} {ranks[part].mean():.2f} times the mean"
        first, last = files.steps[part[0]], files.steps[part[-1]]
        yield f"{first}{'' if first == last else f'-{last}'}: {step_s[part].mean():.2f} s: {text}"


def _rank_text(slowest: np.ndarray, nodes: Mapping[str, str]) -> str:
    """Return the rank that was the slowest most often, with its node; `slowest` is [S]."""
    ranks, counts = np.unique(slowest[slowest % 1 == 0], return_counts=True)
    if not len(ranks):
        return ""
    rank = f"{ranks[counts.argmax()]:g}"
    node = f" on {nodes[rank]}" if rank in nodes else ""
    return f" ({rank}{node} in {counts.max()} of {len(slowest)} steps)"


def _stacks(files: RunFiles) -> dict[str, str]:
    """Return the stacks of the processes of a live run on this machine, by their name."""
    pids: dict[str, str] = {}
    for line in files.log:
        if start := re.match(r"process (\d+) on host (\S+) starts", line.text):
            pids = {"driver": start[1]} if start[2] == socket.gethostname() else {}
        elif worker := re.match(r"(worker \d+ of the \S+ group): pid (\d+) ", line.text):
            pids[worker[1]] = worker[2]
    program = py_spy()
    if program is None:
        return {"pip install py-spy shows them": f"py-spy dump --pid PID, of {pids}"}
    return {f"{name} (pid {pid})": py_spy_dump(program, int(pid)) for name, pid in pids.items()}


def _innermost(stack: str) -> str:
    """Return the innermost call of the main thread, or the first line."""
    return shortened(innermost(stack) or stack.partition("\n")[0], _MAX_LINE)


def _write_archive(path: Path, files: RunFiles | None, found: str) -> None:
    """Write what was found, and the config, metrics and logs of a run, without secrets."""
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    texts = {"doctor.json": found}
    if files is not None:
        config = _redacted(yaml.safe_load(files.config_text), "", secrets)
        texts["config.yaml"] = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        run = files.directory.path
        for log in (file for pattern in _ARCHIVED for file in sorted(run.glob(pattern))):
            texts[log.relative_to(run).as_posix()] = log.read_text(errors="replace")
    try:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in texts.items():
                content = _cleaned(text, secrets).encode()
                member = tarfile.TarInfo(f"doctor/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(
            f"--archive: {str(path)!r} cannot be written: {error.strerror}"
        ) from error


def _redacted(value: Any, name: str, secrets: list[str]) -> Any:
    """Return a config without secret values, which are added to `secrets`."""
    if isinstance(value, dict):
        return {key: _redacted(each, f"{name}.{key}", secrets) for key, each in value.items()}
    if isinstance(value, list):
        return [_redacted(each, name, secrets) for each in value]
    if isinstance(value, str) and (_SECRET_NAME.search(name) or name.startswith(".cluster.env.")):
        secrets.append(value)
        return _REMOVED
    return value


def _cleaned(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        if len(secret) >= _MIN_SECRET:
            text = text.replace(secret, _REMOVED)
    return _SECRETS.sub(_REMOVED, text)
