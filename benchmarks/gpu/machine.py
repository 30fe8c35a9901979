"""Description of the machine and of the installed libraries, for the head of every result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "numba",
    "flash-attn",
    "flash-attn-3",
    "vllm",
    "megatron-core",
    "ray",
)

ROOT = Path(__file__).parents[2]
"""The repository."""


def describe(device: str) -> dict[str, Any]:
    """Return hardware, library versions and date as plain JSON values."""
    import torch

    described: dict[str, Any] = {
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": _versions(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "commit": _commit(),
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return described


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Return the commit of the repository, or an empty string outside of git."""
    return _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])


def _driver() -> str:
    return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _output(command: list[str]) -> str:
    """Return the first line that a command prints; an empty string if it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
