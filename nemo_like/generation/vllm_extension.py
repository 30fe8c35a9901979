"""Weights of a vLLM worker: updates in place, and the LoRA adapter from tensors in memory.

Every request uses the adapter with the id `ADAPTER_ID`. A weight update replaces its matrices, so
that unfinished requests continue with the new ones.

vLLM imports this class by name in every worker process of a replica (`worker_extension_cls`). Its
methods become methods of vLLM's worker, so their names must not be methods of that class.
"""

from __future__ import annotations

import glob
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from nemo_like.generation.adapters import AdapterSettings
from nemo_like.models.adapters import PREFIX
from nemo_like.weight_sync.channel import (
    BucketMessage,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    UpdateCoverage,
)
from nemo_like.weight_sync.transfer import NamedTensors, WeightReceiver

ADAPTER_ID = 1


def request_options() -> dict[str, Any]:
    """Return the options of a request that uses the adapter; vLLM reads no file for it."""
    adapter = LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="in memory")
    return {"lora_request": adapter}


def engine_options(adapters: AdapterSettings) -> dict[str, Any]:
    """Return the options of an engine with these adapters."""
    layers = {name.rpartition(".lora_")[0] for name in adapters.shapes}
    return {
        "enable_lora": True,
        "max_loras": 1,
        # vLLM pads the rank to one of a few sizes.
        "max_lora_rank": min(
            rank for rank in get_args(MaxLoRARanks) if rank >= adapters.config.rank
        ),
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
        self._config = adapters.config
        self._shapes = adapters.shapes
        self._coverage: UpdateCoverage | None = None
        self._tensors: dict[str, Tensor] = {}
        self._set({name: torch.zeros(shape) for name, shape in adapters.shapes.items()})

    def has(self, names: Sequence[str]) -> bool:
        """Return True if an update with these names is one of the adapter."""
        return any(name in self._shapes for name in names)

    def begin(self, names: Sequence[str]) -> None:
        """Start an update with matrices of these names; see `BucketLoader.begin_update`."""
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
            r=self._config.rank,
            # Declared as an integer, and only divided.
            lora_alpha=self._config.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=list(self._config.target_modules),
            use_rslora=self._config.use_rslora,
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


_MAX_NAMES = 5
"""Names that an error message lists."""


_init_segments = _CPUSHMDistributed._init_cpu_shm


def _init_unnamed_segments(self: _CPUSHMDistributed) -> int:
    """Map the segments in `/dev/shm`, 8 MB per rank on CPU, and remove their names.

    vLLM never removes them. Every rank has mapped them here, so the system frees them with the last
    process, whatever ends it.
    """
    handle = _init_segments(self)
    for segment in Path("/dev/shm").glob(f"{glob.escape(self.group_name)}*"):
        segment.unlink(missing_ok=True)
    return handle


# vLLM imports this module in every rank before it creates the segments.
_CPUSHMDistributed._init_cpu_shm = _init_unnamed_segments


class VLLMWorkerExtension:
    """Loads new weights into the model of one vLLM worker, bucket by bucket.

    Layers are loaded by vLLM's layerwise reload: a layer keeps references to its tensors until all
    of them have come, and is then loaded and converted to the format of its kernel. Embeddings and
    output heads are copied in place, because the layerwise reload would allocate them anew.

    With tensor parallelism every worker gets the full tensors and keeps its shard. Experts may be
    stacked, as in the model in memory, or one tensor each, as in files: vLLM loads both. A failed
    update leaves the model unusable: the replica must be restarted.

    After `start_adapter` an update has either all weights or the LoRA adapters alone.
    """

    # Set by vLLM's worker, whose base class this becomes.
    vllm_config: Any
    model_config: Any
    model_runner: Any
    rank: int
    device: torch.device

    _adapter: WorkerAdapter | None = None
    _updated_adapter: WorkerAdapter | None = None
    """The adapter in an update of it; None in an update of the weights."""
    _saved_tensors: Sequence[tuple[Tensor, Tensor]] = ()

    def start_adapter(self, adapters: AdapterSettings) -> None:
        """Compute with adapters, which are 0 until the first update."""
        self._adapter = WorkerAdapter(self.model_runner, adapters)

    def save_other_tensors(self) -> None:
        """Copy what sleep level 2 of vLLM loses besides the weights; vLLM itself keeps buffers."""
        model = self.model_runner.model
        tensors = other_tensors(model, self.device)
        # Parameters that no update loads, such as the biases of routers: buffers in transformers.
        for name, weight in model.named_parameters():
            if name.rpartition(".")[2] in SKIP_LOAD_TENSORS and weight.device == self.device:
                tensors.append(weight.data)
        self._saved_tensors = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]

    @torch.inference_mode()
    def restore_other_tensors(self) -> None:
        """Restore what `save_other_tensors` has copied."""
        for tensor, copy in self._saved_tensors:
            tensor.copy_(copy)
        self._saved_tensors = []

    def ignore_interrupts(self) -> None:
        """Ignore SIGINT from now on, in a process that the worker of the replica has started.

        Ctrl-C in a terminal reaches all processes of a command. The one that started this process
        decides what it means: it finishes the step, or keeps the finished completions.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def weight_endpoint(self) -> Endpoint:
        """Return this process, for `WeightTarget.weight_endpoints`."""
        return Endpoint.of_process(self.device)

    def open_weight_channel(self, spec: ChannelSpec, first_index: int) -> str:
        """Join a channel; the index of this receiver is `first_index` plus the tp rank."""
        # The class has no constructor of its own: vLLM adds its methods to a worker.
        self.close_weight_channel()
        self._weight_receiver = WeightReceiver(self.device)
        return self._weight_receiver.open(spec, first_index + self.rank)

    def close_weight_channel(self) -> None:
        """See `WeightTarget.close_weight_channel`."""
        receiver = getattr(self, "_weight_receiver", None)
        if receiver is not None:
            receiver.close()

    def begin_update(self, names: Sequence[str]) -> None:
        """See `BucketLoader.begin_update`. Names of weights are not checked."""
        self._updated_adapter = None
        if self._adapter is not None and self._adapter.has(names):
            self._updated_adapter = self._adapter
            self._adapter.begin(names)
            return
        model = self.model_runner.model
        self._loaded_parameters: set[str] = set()
        with set_current_vllm_config(self.vllm_config):
            # Ends an update that broke off, whose values are all replaced now.
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                _discard_expert_kernels(model)
            initialize_layerwise_reload(model)
            for embedding in _embeddings(model).values():
                # Puts the tensors back, to which the weights are then copied directly.
                finalize_layerwise_reload(embedding, self.model_config)

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """See `BucketLoader.load_bucket`."""
        if self._updated_adapter is not None:
            return self._weight_receiver.load(message, self._updated_adapter.load)
        with set_current_vllm_config(self.vllm_config):
            return self._weight_receiver.load(message, self._load_named)

    def finish_update(self) -> None:
        """Complete the update. Raises ValueError if a module did not get all of its weights."""
        if self._updated_adapter is not None:
            self._updated_adapter.finish()
            return
        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            incomplete = _incomplete_layers(model)
            incomplete += _incomplete_embeddings(model, self._loaded_parameters)
            if incomplete:
                raise ValueError(
                    f"the weight update left out weights of {len(incomplete)} modules:"
                    f" {', '.join(incomplete[:_MAX_NAMES])} ..."
                )
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                self._refresh_packed_embeddings()

    def _load_named(self, named: NamedTensors) -> None:
        """Load tensors, [*shape] each, that are views of a bucket."""
        model = self.model_runner.model
        storages: set[int] = set()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named:
                storages.add(tensor.untyped_storage().data_ptr())
                yield name, tensor

        self._loaded_parameters |= model.load_weights(noted())
        _copy_kept_tensors(model, storages)

    def _refresh_packed_embeddings(self) -> None:
        """Repack output heads on CPU.

        There vLLM computes logits from a packed copy of the head, which it makes only when the
        engine starts. Other embeddings have such a copy too, which nothing needs.
        """
        for embedding in _embeddings(self.model_runner.model).values():
            if isinstance(embedding, ParallelLMHead):
                embedding.quant_method.process_weights_after_loading(embedding)
            else:
                # Called with the weight itself. Releases the packed copy.
                embedding.cpu_linear = nn.functional.linear  # pyright: ignore[reportArgumentType]


def _embeddings(model: nn.Module) -> dict[str, VocabParallelEmbedding]:
    """Return embeddings and output heads by name."""
    modules = model.named_modules()
    return {name: each for name, each in modules if isinstance(each, VocabParallelEmbedding)}


def other_tensors(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Return the tensors on `device` that are neither weights nor buffers nor KV caches.

    They are attributes of modules, or of objects of vLLM that modules have, such as the slopes of
    ALiBi or the scales of an attention layer.
    """
    named = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr() for each in named}
    found: list[Tensor] = []
    visited: set[int] = set()
    pending: list[Any] = list(model.modules())
    while pending:
        each = pending.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            is_other = each.untyped_storage().data_ptr() not in storages
            if is_other and each.device.type == device.type:
                found.append(each)
        elif isinstance(each, list | tuple):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, nn.Module) or type(each).__module__.startswith("vllm."):
            attributes = getattr(each, "__dict__", {})
            pending += [value for name, value in attributes.items() if name != "kv_cache"]
    return found


def _discard_expert_kernels(model: nn.Module) -> None:
    """Have the kernels of MoE layers built again after the update.

    On CPU they compute with packed experts. vLLM packs them only when it builds a kernel, and would
    leave the experts of an update unpacked.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _copy_kept_tensors(model: nn.Module, storages: set[int]) -> None:
    """Copy the tensors that incomplete layers keep and that are views of one of `storages`.

    The memory of a bucket is overwritten by a later one.
    """
    for module in model.modules():
        for _, arguments in get_layerwise_info(module).loaded_weights:
            for name, value in arguments.arguments.items():
                if not isinstance(value, Tensor) or value.is_meta:
                    continue
                if value.untyped_storage().data_ptr() in storages:
                    arguments.arguments[name] = value.clone()


def _incomplete_layers(model: nn.Module) -> list[str]:
    """Return the names of modules that have parameters without new values, embeddings excepted."""
    names = []
    for name, module in model.named_modules():
        # A module that got all values has been processed, and its record cleared. The embeddings
        # were taken out of the layerwise reload.
        has_parameters = next(module.parameters(recurse=False), None) is not None
        info = get_layerwise_info(module)
        # The number is 0 if an update never loads any parameter of the module.
        if has_parameters and info.can_load() and info.load_numel_total != 0:
            names.append(name)
    return names


def _incomplete_embeddings(model: nn.Module, loaded: set[str]) -> list[str]:
    """Return the names of embeddings and heads of which no name is in `loaded`.

    A tied head and its embedding have one parameter, which is loaded under one of its names.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded_ids = {id(parameters[name]) for name in loaded if name in parameters}
    names = []
    for name, embedding in _embeddings(model).items():
        if any(id(each) not in loaded_ids for each in embedding.parameters()):
            names.append(name)
    return names
