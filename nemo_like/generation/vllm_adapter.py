"""The LoRA adapter of a vLLM worker, set from tensors in memory.

Every request uses the adapter with the id `ADAPTER_ID`. A weight update replaces its matrices, so
that unfinished requests continue with the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from nemo_like.generation.adapters import AdapterSettings
from nemo_like.models.peft_adapter import PREFIX
from nemo_like.weight_sync.coverage import UpdateCoverage
from nemo_like.weight_sync.receiver import NamedTensors

ADAPTER_ID = 1


def adapter_request() -> LoRARequest:
    """Return the option of a request that uses the adapter; vLLM reads no file for it."""
    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="in memory")


def engine_options(adapters: AdapterSettings) -> dict[str, Any]:
    """Return the options of an engine with these adapters."""
    layers = {name.rpartition(".lora_")[0] for name in adapters.shapes}
    return {
        "enable_lora": True,
        "max_loras": 1,
        # vLLM pads the rank to one of a few sizes.
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= adapters.lora.rank),
        # Other layers compute without the overhead of adapters. vLLM finds q_proj in its qkv_proj.
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


class WorkerAdapter:
    """The adapter in one worker process of vLLM, and the update of it that is in progress."""

    def __init__(self, model_runner: Any, adapters: AdapterSettings) -> None:
        """Set an adapter whose matrices are 0. Raises ValueError for a layer that vLLM lacks."""
        self._manager = model_runner.lora_manager._adapter_manager
        self._dtype: torch.dtype = model_runner.lora_config.lora_dtype
        self._model = model_runner.get_model()
        self._lora = adapters.lora
        self._shapes = adapters.shapes
        self._coverage: UpdateCoverage | None = None
        self._tensors: dict[str, Tensor] = {}
        self._set({name: torch.zeros(shape) for name, shape in adapters.shapes.items()})

    def has(self, names: Sequence[str]) -> bool:
        """Return True if an update with these names is one of the adapter."""
        return any(name in self._shapes for name in names)

    def begin(self, names: Sequence[str]) -> None:
        """Start an update with matrices of these names; see `WeightTarget.begin_update`."""
        self._coverage = UpdateCoverage(self._shapes, names)
        self._tensors = {}

    def load(self, named: NamedTensors) -> None:
        """Keep copies of matrices, [*shape] each."""
        assert self._coverage is not None, "an update has begun"
        for name, tensor in named:
            self._coverage.add(name, tuple(tensor.shape))
            # In host memory, as vLLM keeps adapters: these copies stay there while it sleeps.
            self._tensors[name] = tensor.to("cpu", copy=True)

    def finish(self) -> None:
        """Compute with the new matrices. Raises ValueError if one is missing."""
        assert self._coverage is not None, "an update has begun"
        self._coverage.check_complete()
        self._coverage = None
        tensors = self._tensors
        self._tensors = {}
        self._set(tensors)

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter by one with these matrices, [*shape] each on the CPU."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        helper = PEFTHelper(
            r=self._lora.rank,
            # Declared as an integer, and only divided.
            lora_alpha=self._lora.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=list(self._lora.target_modules),
            use_rslora=self._lora.use_rslora,
        )
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {PREFIX + name: tensor for name, tensor in tensors.items()},
            helper,
            device="cpu",
            dtype=self._dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        self._check_layers(adapter)
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER_ID)

    def _check_layers(self, adapter: LoRAModel) -> None:
        """Raise ValueError for a layer that vLLM would leave without its adapter."""
        known = set(self._manager.modules)
        for parts in self._manager.packed_modules.values():
            known |= set(parts)
        unknown = sorted(set(adapter.loras) - known)
        if unknown:
            raise ValueError(
                f"vLLM's model has no layer {unknown[0]} that can have an adapter"
                f" ({len(unknown)} such layers): set policy.lora.weight_sync to merged"
            )
