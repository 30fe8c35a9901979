"""Weights of a vLLM worker: updates in place, and the LoRA adapter from tensors in memory.

Every request uses the adapter with the id `ADAPTER_ID`. A weight update replaces its matrices, so
that unfinished requests continue with the new ones.

vLLM imports this class by name in every worker process of a replica (`worker_extension_cls`). Its
methods become methods of vLLM's worker, so their names must not be methods of that class.
"""

from __future__ import annotations

import glob
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
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
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from nemo_like.generation.adapters import AdapterSettings
from nemo_like.models.adapters import PREFIX
from nemo_like.models.output_head import auto_class
from nemo_like.weight_sync.channel import (
    BucketMessage,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    UpdateCoverage,
)
from nemo_like.weight_sync.transfer import NamedTensors, WeightReceiver

ADAPTER_ID = 1

_MAX_NAMES = 5
"""Names that an error message lists."""


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

    With tensor parallelism every worker gets the full tensors and keeps its shard. Weights
    have the names and shapes of the model in memory, with stacked experts, and are converted to
    those of files, which vLLM loads for every type. A failed
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

    @cached_property
    def conversion_model(self) -> PreTrainedModel | None:
        """The model on the meta device, for names of weights in files; None if they are the same.

        Built once per worker, at the first update: a type with experts has many modules.
        """
        return _converted_model(self.model_config.hf_config)

    def start_adapter(self, adapters: AdapterSettings) -> None:
        """Compute with adapters, which are 0 until the first update."""
        self._adapter = WorkerAdapter(self.model_runner, adapters)

    def save_other_tensors(self, keeps_tower: bool) -> None:
        """Copy what sleep level 2 of vLLM loses besides the weights; vLLM itself keeps buffers.

        `keeps_tower`: also the weights of a vision tower, which an update may leave out.
        """
        model = self.model_runner.model
        tensors = other_tensors(model, self.device)
        # Parameters that no update loads, such as the biases of routers: buffers in transformers.
        for name, weight in model.named_parameters():
            is_kept = keeps_tower and name.startswith("visual.")
            is_kept = is_kept or name.rpartition(".")[2] in SKIP_LOAD_TENSORS
            if is_kept and weight.device == self.device:
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
        has_tower = any(name.startswith("model.visual.") for name in names)
        self._reloaded: nn.Module = model if has_tower else _without_tower(model)
        self._loaded_parameters: set[str] = set()
        with set_current_vllm_config(self.vllm_config):
            # Ends an update that broke off, whose values are all replaced now.
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                _discard_expert_kernels(model)
            initialize_layerwise_reload(self._reloaded)
            for embedding in _embeddings(model).values():
                # Puts the tensors back, to which the weights are then copied directly.
                finalize_layerwise_reload(embedding, self.model_config)
            self._direct_copies = _DirectCopies(model)

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
            incomplete = _incomplete_layers(self._reloaded)
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
        weights = dict(named)
        storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        if self.conversion_model is not None:
            weights = revert_weight_conversion(self.conversion_model, weights)
        with self._direct_copies:
            self._loaded_parameters |= model.load_weights(weights.items())
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


_DATA: Any = torch.Tensor.data
_GET_DATA = _DATA.__get__


class _DirectCopies(TorchFunctionMode):
    """Gives layers the tensors that a model copies into their parameters without a weight loader.

    The layerwise reload knows only of calls of weight loaders. The parameters are on the meta
    device, where a copy has no effect.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch the parameters of `model` that wait for new values."""
        super().__init__()
        self._is_loader_active = False
        self._owners: dict[int, tuple[nn.Module, str, Any]] = {}
        """By the id of a parameter, or of its data."""
        self._data: list[Tensor] = []
        for module in model.modules():
            parameters: Iterator[tuple[str, Any]] = module.named_parameters(recurse=False)
            for name, weight in parameters:
                if weight.is_meta and name not in SKIP_LOAD_TENSORS:
                    self._owners[id(weight)] = module, name, weight
                    weight.weight_loader = self._marked(weight.weight_loader)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        owner = None if self._is_loader_active or not args else self._owners.get(id(args[0]))
        if owner is None:
            return func(*args, **(kwargs or {}))
        module, name, weight = owner
        if func == _GET_DATA:
            # The caller may copy into it.
            data = weight.data
            self._data.append(data)
            self._owners[id(data)] = owner
            return data
        if func == torch.Tensor.copy_:
            weight.weight_loader = default_weight_loader
            weight.weight_loader = self._marked(make_online_process_loader(module, name))
            weight.weight_loader(weight, args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _marked(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Return a weight loader whose own copies are not seen."""

        # vLLM recognizes its loaders by their name, and finds what they wrap.
        @wraps(loader)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._is_loader_active = True
            try:
                return loader(*args, **kwargs)
            finally:
                self._is_loader_active = False

        return marked


def _converted_model(config: PretrainedConfig) -> PreTrainedModel | None:
    """Return a model without data if files of its type have other tensors than the model."""
    if not get_checkpoint_conversion_mapping(config.model_type):
        return None
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def _without_tower(model: Any) -> nn.Module:
    """Return the part of a model that an update without a vision tower replaces."""
    return model.language_model if hasattr(model, "visual") else model


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
