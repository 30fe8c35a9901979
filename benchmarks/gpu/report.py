"""Measure one GPU: correctness, training steps, data movement, Megatron-Core and MoE layers.

    python -m benchmarks.gpu.report --parts S --out DIR                             # minutes
    python -m benchmarks.gpu.report --parts A,B,C,D --out DIR
    python -m benchmarks.gpu.report --parts A --out DIR --device cpu --size tiny    # a test
    python -m benchmarks.gpu.tables DIR                                             # tables

Each part is a process with a time limit (--seconds, 480 by default) that writes DIR/<part>.json. It
needs torch, transformers, numba, safetensors, pytest and hypothesis; it runs from source and
without Ray, pydantic, OmegaConf, Megatron-Core and vLLM. What is missing is recorded as skipped.
B is short for its halves B1 (matrix of steps) and B2 (options, profile, comparison). A cell that
exceeds its own limit, and a process that dies, are recorded, and the part continues in a new
process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.arguments import add_arguments
from benchmarks.gpu.cells import Recorder, read_record
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.part import DEVICE_LOST, MODULES

_HALVES = {"B": ("B1", "B2")}
_RESERVE_S = 10.0
"""A part's own budget ends so many seconds before its limit."""
_MAX_PROCESSES = 6
"""Processes of one part, counting those that continue after a failure."""
_POLL_S = 0.2
_EXPANDABLE_SEGMENTS = ("S", "S3", "B1", "B2", "D")
"""Parts whose models fill the memory. CUDA IPC, in part C, may not support such segments."""


@dataclass(frozen=True, kw_only=True)
class PartRun:
    """How the process of a part is started."""

    part: str
    out: Path
    seconds: float
    """Limit of the part: all its processes together end before."""
    options: tuple[str, ...]
    """Further arguments of `benchmarks.gpu.part`."""

    @property
    def record(self) -> Path:
        """The JSON file of the part."""
        return self.out / f"{self.part}.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="A,B,C,D", help="by comma; default A,B,C,D")
    parser.add_argument("--seconds", type=float, default=480.0, help="limit of each part")
    parser.add_argument("--work", type=Path, help="folder of models; default a temporary one")
    add_arguments(parser)
    parsed = parser.parse_args(argv)
    parts = parse_parts(parsed.parts)
    parsed.out.mkdir(parents=True, exist_ok=True)
    options = ["--device", parsed.device, "--size", parsed.size, "--columns", parsed.columns]
    options += ["--cells", parsed.cells]
    if parsed.lengths is not None:
        options += ["--lengths", str(parsed.lengths.resolve())]
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as temporary:
        work = parsed.work or Path(temporary)
        options += ["--work", str(work.resolve())]
        for part in parts:
            run = PartRun(
                part=part, out=parsed.out.resolve(), seconds=parsed.seconds, options=tuple(options)
            )
            run_part(run)
            print_part(run.record)
    # Results of a CPU are not written into the README.
    options = "" if parsed.device.startswith("cuda") else " --print"
    print(f"tables: python -m benchmarks.gpu.tables {parsed.out}{options}", flush=True)
    return 0


def parse_parts(text: str) -> list[str]:
    """Return the names of the parts. Example: "A,B" gives A, B1 and B2. Exits for unknown names."""
    parts: list[str] = []
    for name in text.split(","):
        names = _HALVES.get(name.strip(), (name.strip(),))
        for each in names:
            if each not in MODULES:
                known = ", ".join([*MODULES, *_HALVES])
                raise SystemExit(f"--parts has {each!r}; the parts are {known}")
            parts.append(each)
    return parts


def run_part(run: PartRun) -> None:
    """Run a part in as many processes as needed; all of them end within its limit."""
    print(f"part {run.part}: {MODULES[run.part][1]}", flush=True)
    start = time.monotonic()
    run.record.unlink(missing_ok=True)
    with (run.out / "report.log").open("ab") as log:
        for attempt in range(_MAX_PROCESSES):
            left = run.seconds - (time.monotonic() - start)
            if left < _RESERVE_S:
                break
            num_cells = num_recorded(run.record)
            code, reason = run_process(run, left, log, resume=attempt > 0)
            if code == 0:
                break
            note_failure(run.record, reason)
            # A process that fails before its first cell would fail again.
            if num_recorded(run.record) == num_cells:
                print(f"part {run.part}: {reason}; see {run.out / 'report.log'}", flush=True)
                break
    if run.record.exists():
        recorder = Recorder(run.record, {}, resume=True)
        recorder.record["part_s"] = round(time.monotonic() - start, 1)
        if recorder.record["finished"]:
            recorder.finish()
        else:
            # What the part did not record itself is not known here.
            recorder.finish(finished=False)


def run_process(run: PartRun, seconds: float, log: Any, *, resume: bool) -> tuple[int, str]:
    """Run one process of the part; return its exit code and why it is not 0."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", run.part, "--out", str(run.out)]
    command += ["--seconds", f"{max(seconds - _RESERVE_S, 0):.1f}", *run.options]
    if resume:
        command.append("--resume")
    log.write(f"\n=== {' '.join(command)}\n".encode())
    log.flush()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = dict(os.environ)
    if run.part in _EXPANDABLE_SEGMENTS:
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
    )
    try:
        reason = watch(process, run.record, time.monotonic() + seconds)
    finally:
        # Peers that the part started belong to the same session.
        end_session(process)
    code = process.returncode
    if code == DEVICE_LOST:
        reason = "the device was lost"
    elif code < 0 and not reason:
        reason = f"the process ended with signal {signal.Signals(-code).name}"
    elif code != 0 and not reason:
        reason = f"the process ended with exit code {code}"
    return code, reason


def watch(process: subprocess.Popen[bytes], record: Path, deadline: float) -> str:
    """Wait for the process; return why it has to be ended, or an empty string if it ended."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return "the part reached its time limit"
        running = read_record(record)["running"] if record.exists() else None
        if running is not None and time.time() - running["since"] > running["limit_s"]:
            return f"the cell exceeded its limit of {running['limit_s']:.0f} s"
        time.sleep(_POLL_S)
    return ""


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, which share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def num_recorded(record: Path) -> int:
    """Return the number of recorded cells."""
    return len(read_record(record)["cells"]) if record.exists() else 0


def note_failure(record: Path, reason: str) -> None:
    """Record the cell in which the process ended."""
    if record.exists():
        Recorder(record, {}, resume=True).end_running(reason)


def print_part(record: Path) -> None:
    """Print each cell in one line, then the number of cells by status."""
    if not record.exists():
        print("  no results", flush=True)
        return
    part = read_record(record)
    counts: dict[str, int] = {}
    for cell in part["cells"]:
        counts[cell["status"]] = counts.get(cell["status"], 0) + 1
        if cell["status"] != "ok":
            reason = cell.get("reason", "").partition("\n")[0]
            print(f"  {cell['status']}: {cell['name']}: {reason[:200]}", flush=True)
        else:
            print(f"  {cell['name']}: {shown_values(cell['values'])}", flush=True)
    shown = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"  {shown}; {part['part_s']} s; {record}", flush=True)


_SHOWN = (
    "tokens_per_s",
    "mfu",
    "step_s",
    "first_step_s",
    "load_s",
    "peak_gb",
    "predicted_over_measured",
    "busy_share",
    "waits_per_microbatch",
    "kernels_per_microbatch",
    "logprob_s ratio",
    "train_s ratio",
    "product_tflops",
    "copy_gb_per_s",
    "attention",
    "counts",
    "phases_s",
    "output",
    "gradient error",
    "relative difference",
)
"""Values that are printed, in this order."""


def shown_values(values: Mapping[str, Any]) -> str:
    """Return the most important values of a cell in one line."""
    shown = []
    for name in _SHOWN:
        if name in values:
            value = values[name]
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown.append(f"{name} {text}")
    return ", ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
