"""Finds whether torchvision can be imported, which vLLM needs for models with a vision tower."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib import metadata

_TORCH_TO_TORCHVISION = 15
"""torchvision 0.(n + 15) belongs to torch 2.n."""
COMMAND = (sys.executable, "-c", "import torchvision")
_TIMEOUT_S = 120


@cache
def torchvision_problem() -> str:
    """Return why torchvision cannot be imported, and what to install; empty if it can.

    It is imported in a process of its own: this one may do without torch.
    """
    result = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if result.returncode == 0:
        return ""
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return torchvision_advice(lines[-1])


def torchvision_advice(reason: str) -> str:
    """Return the text of an error: the build of torchvision for the installed torch."""
    torch = metadata.version("torch")
    release, _, build = torch.partition("+")
    minor = int(release.split(".")[1]) + _TORCH_TO_TORCHVISION
    backend = f" --torch-backend {build}" if build else ""
    return (
        "policy.generation.backend is vllm, which generates with models with a vision tower only"
        f" where torchvision can be imported ({reason}): uv pip install --reinstall --no-deps"
        f"{backend} 'torchvision==0.{minor}.*', which belongs to torch {torch}, or set"
        " policy.generation.backend to hf"
    )
