"""The tests in tests/gpu are collected, and skipped with a reason, without a GPU and without the
libraries that a machine with one may lack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.features import all_values, check_values, features_of, save_teachers
from tests.policy.tiny import save_tiny_model

REPOSITORY = Path(__file__).parents[1]
SCRIPT = """
import sys
for name in ("ray", "pydantic", "annotated_types", "hydra", "omegaconf", "megatron", "vllm"):
    sys.modules[name] = None
for name in ("math_verify", "tensorboard"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--confcutdir=tests/gpu", "-p", "no:cacheprovider", "-rs", "tests/gpu"]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run where there is a CUDA device")
@pytest.mark.exhaustive
def test_the_suite_is_collected_without_ray_pydantic_and_megatron() -> None:
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


def test_the_programs_of_the_features_run_on_a_cpu(tmp_path: Path) -> None:
    """Some of them: what the others train is tested elsewhere."""
    model = str(save_tiny_model(tmp_path / "model", "llama"))
    teachers = save_teachers(tmp_path / "teachers")
    names = ("lora", "ema", "scores", "distillation, top-k")
    assert set(names) < set(features_of("dtensor"))
    found = all_values("dtensor", "cpu", "float32", model, teachers, names)
    for name, values in found.items():
        check_values(name, values, values, "float32")
        changed = values | {"loss": [each * 1.001 for each in values["loss"]]}
        with pytest.raises(AssertionError):
            check_values(name, changed, values, "float32")
        check_values(name, changed, values, "bfloat16")
    # The reference is the model without adapters.
    assert found["lora"]["prev_logprobs"] != found["lora"]["reference_logprobs"]
    assert found["ema"]["averaged"] != found["ema"]["prev_logprobs"]
    assert np.std(found["scores"]["scores"]) > 0
