"""The tests in tests/gpu are collected, and skipped with a reason, without a GPU and without the
libraries that a machine with one may lack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
SCRIPT = """
import sys
for name in ("ray", "hydra", "omegaconf", "megatron", "vllm", "math_verify", "tensorboard"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--confcutdir=tests/gpu", "-p", "no:cacheprovider", "-rs", "tests/gpu"]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run where there is a CUDA device")
def test_the_suite_is_collected_without_ray_hydra_and_megatron() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        # Hydra has a plugin of pytest, which would be imported.
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs a CUDA device" in done.stdout
    summary = done.stdout.splitlines()[-1]
    assert "skipped" in summary and "passed" not in summary and "failed" not in summary
