"""Cells of a report part: measured one by one within a time budget, written as soon as measured.

A cell is one measurement. Cells are ordered by importance. A cell that fails is recorded with its
message and the part continues. What does not fit into the budget is recorded as not run.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "wrong", "failed", "skipped", "not run"]
"""`wrong`: the result differs from its reference by more than the limit. `skipped`: something that
the cell needs is missing on this machine. `not run`: no time was left, or the device was lost."""

_MAX_MESSAGE = 2000
"""Characters of a failure's message that are kept."""


class SkipCell(Exception):
    """The machine lacks something that a cell needs; the message is the reason."""


class DeviceLostError(RuntimeError):
    """The CUDA context is unusable after a failure; only a new process can continue."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement."""

    name: str
    """Unique within the part."""
    measure: Callable[[], Mapping[str, Any]]
    """Returns plain JSON values. `passed` False marks the result as wrong. Raises SkipCell."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, as plain JSON values."""
    expected_s: float = 5.0
    """Seconds on an H200. The cell is not started with less time left."""
    limit_s: float = 120.0
    """The parent process ends the part's process after so many seconds in this cell."""


class Budget:
    """Seconds of a part, from its construction."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    @property
    def left(self) -> float:
        """Seconds that are left; negative after the end."""
        return self._start + self.seconds - self._clock()


class Recorder:
    """The JSON file of one part; rewritten after every change, so that it is always complete."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool = False) -> None:
        """Start the file, or continue it with `resume`."""
        self.path = path
        if resume and path.exists():
            self.record = read_record(path)
            return
        self.record = {**header, "finished": False, "running": None, "cells": []}
        self._write()

    @property
    def names(self) -> set[str]:
        """Names of the recorded cells."""
        return {cell["name"] for cell in self.record["cells"]}

    def begin(self, cell: Cell) -> None:
        """Write which cell runs, so that the parent process can end it."""
        self.record["running"] = {
            "name": cell.name,
            "settings": dict(cell.settings),
            "since": time.time(),
            "limit_s": cell.limit_s,
        }
        self._write()

    def add(
        self,
        name: str,
        status: Status,
        *,
        settings: Mapping[str, Any],
        seconds: float = 0.0,
        values: Mapping[str, Any] | None = None,
        reason: str = "",
    ) -> None:
        """Append the result of a cell."""
        entry: dict[str, Any] = {"name": name, "status": status, "seconds": round(seconds, 3)}
        if settings:
            entry["settings"] = dict(settings)
        if reason:
            entry["reason"] = reason[:_MAX_MESSAGE]
        if values is not None:
            entry["values"] = dict(values)
        self.record["cells"].append(entry)
        self.record["running"] = None
        self._write()

    def end_running(self, reason: str) -> None:
        """Record the running cell, whose process ended, as failed; does nothing without one."""
        running = self.record["running"]
        if running is not None:
            seconds = time.time() - running["since"]
            self.add(
                running["name"],
                "failed",
                settings=running["settings"],
                seconds=seconds,
                reason=reason,
            )

    def finish(self, **more: Any) -> None:
        """Mark the part as finished."""
        self.record |= {"finished": True, "running": None, **more}
        self._write()

    def _write(self) -> None:
        write_json(self.path, self.record)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file under a temporary name and rename it."""
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps(value, indent=1, default=_plain)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """Return the Python number of a scalar of NumPy or torch."""
    return value.item()


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON file of a part."""
    return json.loads(path.read_text(encoding="utf-8"))


def run_cells(
    recorder: Recorder,
    cells: Iterable[Cell],
    budget: Budget,
    *,
    free: Callable[[], None] = lambda: None,
) -> None:
    """Measure all cells that are not recorded and fit into the budget.

    `free` releases what cells share; it is called after a failure. Raises DeviceLostError if the
    device cannot be used after a failure.
    """
    done = recorder.names
    for cell in cells:
        if cell.name in done:
            continue
        if budget.left < cell.expected_s:
            reason = f"out of time: {max(budget.left, 0):.0f} s left, about {cell.expected_s:.0f}"
            recorder.add(cell.name, "not run", settings=cell.settings, reason=f"{reason} s needed")
            continue
        recorder.begin(cell)
        has_failed = _run_cell(recorder, cell)
        if has_failed:
            free()
        free_memory()
        if has_failed:
            _check_device(cell)


def _run_cell(recorder: Recorder, cell: Cell) -> bool:
    """Measure and record one cell; returns True if it failed."""
    start = time.perf_counter()
    try:
        values = cell.measure()
    except SkipCell as error:
        recorder.add(cell.name, "skipped", settings=cell.settings, reason=str(error))
        return False
    except Exception as error:  # noqa: BLE001 (recorded; the other cells are independent)
        # The cause has the message of the worker's exception without its traceback.
        cause = error.__cause__ or error
        last_frames = "".join(traceback.format_tb(cause.__traceback__)[-3:])
        recorder.add(
            cell.name,
            "failed",
            settings=cell.settings,
            seconds=time.perf_counter() - start,
            reason=f"{type(cause).__name__}: {str(cause)[:1000]}\n{last_frames}",
        )
        return True
    status: Status = "ok" if values.get("passed", True) else "wrong"
    recorder.add(
        cell.name,
        status,
        settings=cell.settings,
        seconds=time.perf_counter() - start,
        values=values,
    )
    return False


def free_memory() -> None:
    """Return the memory of unreachable tensors to the device."""
    import torch

    # Reference cycles keep tensors until the collector runs.
    gc.collect()
    if torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(str(error)) from error


def _check_device(cell: Cell) -> None:
    """Raise DeviceLostError if the CUDA context is unusable."""
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        raise DeviceLostError(f"after the cell {cell.name}: {error}") from error


def require_modules(*names: str) -> None:
    """Raise SkipCell unless all modules can be imported."""
    missing = missing_modules(names)
    if missing:
        raise SkipCell(f"not installed: {', '.join(missing)}")


def missing_modules(names: Sequence[str]) -> list[str]:
    """Return the names of top-level modules that cannot be imported."""
    import importlib

    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing
