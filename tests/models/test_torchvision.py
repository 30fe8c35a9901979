"""What a user reads where torchvision cannot be imported."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from nemo_like.models import torchvision
from nemo_like.models.torchvision import torchvision_advice, torchvision_problem


@pytest.mark.parametrize(
    ("torch", "package"),
    [
        ("2.13.0+cpu", "--no-deps --torch-backend cpu 'torchvision==0.28.*',"),
        ("2.11.1+cu130", "--no-deps --torch-backend cu130 'torchvision==0.26.*',"),
        ("2.0.1", "--no-deps 'torchvision==0.15.*',"),
    ],
)
def test_the_build_that_belongs_to_the_installed_torch(
    monkeypatch: pytest.MonkeyPatch, torch: str, package: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: torch)
    assert package in torchvision_advice("why")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", ""),
        ("import no_such_torchvision", "(ModuleNotFoundError: No module named 'no_such_torch"),
        # As a build for CUDA beside a torch for CPUs.
        (
            "raise RuntimeError('operator does not exist')",
            "(RuntimeError: operator does not exist)",
        ),
        ("import os; os._exit(3)", "(exit code 3)"),
    ],
)
def test_torchvision_is_imported_in_a_process(
    monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(torchvision, "COMMAND", (sys.executable, "-c", program))
    torchvision_problem.cache_clear()
    text = torchvision_problem()
    torchvision_problem.cache_clear()
    assert (reason in text) if reason else text == ""
