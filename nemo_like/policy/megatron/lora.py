"""LoRA on a Megatron-Core model: an adapter for each Hugging Face layer inside a fused one.

`linear_qkv` has adapters of q, k and v with matrices of their own, whose outputs are added to their
rows of the fused output, and `linear_fc1` has adapters of gate and up. The parameters are therefore
the matrices that PEFT and the other engine have:

    layer             A [rank, inputs]        B [outputs, rank]
    column-parallel   replicated              this rank's rows
    row-parallel      this rank's columns     replicated
    replicated        replicated              replicated

The output A x, of size rank, passes the collective, so that the gradients of replicated matrices
are complete on every tp rank; with sequence parallelism they cover the tokens of a rank, and
Megatron-Core sums them like the gradients of norms. In MoE models only attention has adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig
from nemo_like.models.adapters import adapter_names, can_have_adapter, check_targets
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.policy.collectives import copy_to, gather_rows, scatter_sum, sum_over
from nemo_like.policy.lora import AdapterState
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.param_map import HFSlice, ModelSharding, ParamMap, ParamSpec

_COLUMN = (".linear_qkv", ".linear_fc1", ".linear_q", ".linear_q_b", ".linear_kv_b")
_ROW = (".linear_proj", ".linear_fc2")
_REPLICATED = (".linear_q_a", ".linear_kv_a")
"""Ends of the names of layers."""


class AdapterSpec(NamedTuple):
    """One adapter of a rank: where it is, and its matrices."""

    module: str
    """Megatron-Core name of the layer, e.g. `decoder.layers.0.self_attention.linear_qkv`."""
    weight: str
    """Hugging Face name of the weight, e.g. `model.layers.0.self_attn.q_proj.weight`."""
    sharding: Literal["column", "row", "none"]
    slices: tuple[HFSlice, ...]
    """Blocks of the weight in the weight of the layer."""
    a: ParamSpec
    b: ParamSpec

    @property
    def key(self) -> str:
        """Name of the adapter in its layer, e.g. `q_proj`."""
        return self.weight.split(".")[-2]

    @property
    def parameter_names(self) -> tuple[str, str]:
        """Names of A and B in the model."""
        prefix = f"{self.module}.adapters.{self.key}"
        return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"

    @property
    def rows(self) -> list[int]:
        """Rows of the layer's weight on this rank that belong to the Hugging Face weight."""
        rows: list[int] = []
        for part in self.slices:
            first = part.local_offset[0]
            rows += range(first, first + part.shape[0])
        return rows


def check_lora(family: Family, sharding: ModelSharding, lora: AdapterConfig) -> None:
    """Raise ConfigError, the same on every rank, for adapters that some rank cannot have."""
    num_heads = sharding.spec.num_kv_heads
    if num_heads % sharding.tp != 0:
        # A rank without rows of a projection would have no adapter of it.
        raise ConfigError(
            f"policy.lora.enabled is true, and parallel.tensor {sharding.tp} does not divide the"
            f" {num_heads} key-value heads of the model: set parallel.tensor to a divisor of them"
        )
    layers: list[str] = []
    empty_stages = []
    for stage in range(sharding.pp):
        param_map = family.param_map(sharding, stage, tp_rank=0)
        on_stage = [part.layer for part in _adaptable_parts(param_map, sharding.spec)]
        layers += on_stage
        if not any(lora.is_target(layer) for layer in on_stage):
            empty_stages.append(stage)
    check_targets(lora, layers)
    if empty_stages:
        raise ConfigError(
            f"policy.lora.target_modules names no layer of pipeline stage {empty_stages[0]}, which"
            " then has nothing to train: name layers of every stage, or set parallel.pipeline to 1"
        )


def adapter_specs(
    param_map: ParamMap, lora: AdapterConfig, model: ModelSpec, tp_rank: int
) -> Iterator[AdapterSpec]:
    """Yield the adapters of a rank with these parameters, in the order of `param_map`."""
    for part in _adaptable_parts(param_map, model):
        if not lora.is_target(part.layer):
            continue
        weight = f"{part.layer}.weight"
        is_row_parallel = part.module.endswith(_ROW)
        matrix_specs = _row_parallel if is_row_parallel else _column_parallel
        matrices = matrix_specs(weight, part.slices, lora.rank, is_first=tp_rank == 0)
        sharding = "row" if is_row_parallel else "column"
        if part.module.endswith(_REPLICATED):
            sharding = "none"
            matrices = (matrices[0], replace(matrices[1], is_owner=tp_rank == 0))
        yield AdapterSpec(part.module, weight, sharding, part.slices, *matrices)


class _AdaptablePart(NamedTuple):
    """A Hugging Face layer that can have an adapter, inside a Megatron-Core layer of a rank."""

    module: str
    """Megatron-Core name of the layer."""
    layer: str
    """Hugging Face name, e.g. `model.layers.0.self_attn.q_proj`."""
    slices: tuple[HFSlice, ...]
    """Blocks of its weight."""


def _adaptable_parts(param_map: ParamMap, model: ModelSpec) -> Iterator[_AdaptablePart]:
    for name, spec in param_map.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or spec.is_expert or not module.endswith(_COLUMN + _ROW + _REPLICATED):
            continue
        slices_of_name: dict[str, list[HFSlice]] = {}
        for part in spec.slices:
            slices_of_name.setdefault(part.name, []).append(part)
        for weight, slices in slices_of_name.items():
            layer = weight.removesuffix(".weight")
            if can_have_adapter(layer, model):
                yield _AdaptablePart(module, layer, tuple(slices))


def adapter_map(
    param_map: ParamMap, lora: AdapterConfig, model: ModelSpec, tp_rank: int
) -> ParamMap:
    """Return the specs of a rank's trained parameters by their names in the model.

    They are the matrices of its adapters, and on the last stage of a reward model the score head.
    """
    specs: ParamMap = {}
    for adapter in adapter_specs(param_map, lora, model, tp_rank):
        name_a, name_b = adapter.parameter_names
        specs[name_a] = adapter.a
        specs[name_b] = adapter.b
    for name, spec in param_map.items():
        if name.endswith(SCORE_WEIGHT):
            specs[name] = spec
    return specs


class Adapter(nn.Module):
    """A and B of one Hugging Face layer on this rank, without biases."""

    def __init__(self, spec: AdapterSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        rank, num_inputs = spec.a.shape
        num_outputs, _ = spec.b.shape
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.lora_A = nn.Linear(num_inputs, rank, **options)
        self.lora_B = nn.Linear(rank, num_outputs, **options)


class EngineAdapters:
    """The adapters that a rank adds to its model, and the parameters that it then trains."""

    def __init__(
        self,
        model: nn.Module,
        param_map: ParamMap,
        config: AdapterConfig,
        sharding: ModelSharding,
        tp_rank: int,
        *,
        sequence_parallel: bool,
    ) -> None:
        """Add adapters, whose values are not initialized, to a model without gradients.

        `param_map` has the model's weights on this rank, and `check_lora` has accepted them.
        """
        self.state = AdapterState(config)
        self._specs: dict[str, list[AdapterSpec]] = {}
        """By name of the layer."""
        for spec in adapter_specs(param_map, config, sharding.spec, tp_rank):
            self._specs.setdefault(spec.module, []).append(spec)
        for name, specs in self._specs.items():
            self._add(model.get_submodule(name), specs, sequence_parallel)
        self.param_map = adapter_map(param_map, config, sharding.spec, tp_rank)
        """Specs of the trained parameters: the matrices and at most a score head."""
        parameters = dict(model.named_parameters())
        self.parameters = {name: parameters[name] for name in self.param_map}
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's parameter `name` [rows, inputs] with the updates of its adapters.

        The result is in float32, or `weight` itself if it has no adapter.
        """
        specs = self._specs.get(name.removesuffix(".weight"))
        if specs is None:
            return weight
        result = weight.to(torch.float32, copy=True)
        for spec in specs:
            matrix_a, matrix_b = (self.parameters[each].detach() for each in spec.parameter_names)
            update = self.state.scale * (matrix_b.float() @ matrix_a.float())
            rows = torch.tensor(spec.rows, device=weight.device)
            result.index_add_(0, rows, update)
        return result

    def _add(self, layer: Any, specs: Sequence[AdapterSpec], sequence_parallel: bool) -> None:
        """Add the adapters of one layer."""
        layer.adapters = nn.ModuleDict()
        rows: list[int] = []
        for spec in specs:
            adapter = Adapter(spec, layer.weight.device, layer.weight.dtype)
            layer.adapters[spec.key] = adapter
            rows += spec.rows
            # Megatron-Core sums the gradients of marked parameters over the tp ranks.
            if spec.sharding != "row":
                adapter.lora_A.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
            if spec.sharding != "column":
                adapter.lora_B.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        num_rows, _ = layer.weight.shape
        # None if the adapters have the outputs of the layer in the same order.
        is_in_order = rows == list(range(num_rows))
        index = None if is_in_order else torch.tensor(rows, device=layer.weight.device)
        layer.register_buffer("adapter_rows", index, persistent=False)
        adapted = {"column": _adapted_column, "row": _adapted_row, "none": _adapted_replicated}
        original = _Layer(self.state, layer, layer.forward, sequence_parallel)
        layer.forward = partial(adapted[specs[0].sharding], original)


class _Layer(NamedTuple):
    """A linear layer of Megatron-Core with adapters, and its forward without them."""

    state: AdapterState
    layer: Any
    forward: Callable[..., Any]
    """Returns output and bias, but a replicated layer the output alone."""
    sequence_parallel: bool


def _adapted_column(
    base: _Layer, hidden: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the outputs of the layer [T, 1, rows] and its adapters, and its bias.

    `hidden` is [T, 1, D], with sequence parallelism [T / tp, 1, D].
    """
    out, bias = base.forward(hidden, *args, **kwargs)
    if not base.state.is_enabled:
        return out, bias
    group: Any = parallel_state.get_tensor_model_parallel_group()
    parts = []
    for adapter in base.layer.adapters.values():
        low = adapter.lora_A(hidden)
        if base.sequence_parallel:
            low = gather_rows(group, low)
        elif group.size() > 1:
            low = copy_to(group, low)
        parts.append(adapter.lora_B(low))
    updates = torch.cat(parts, dim=-1)
    if base.layer.adapter_rows is None:
        return torch.add(out, updates, alpha=base.state.scale), bias
    return out.index_add(-1, base.layer.adapter_rows, updates, alpha=base.state.scale), bias


def _adapted_row(
    base: _Layer, hidden: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the outputs of the layer [T, 1, D] and its adapter, and its bias.

    `hidden` [T, 1, F] has this rank's F inputs; with sequence parallelism the output is
    [T / tp, 1, D].
    """
    out, bias = base.forward(hidden, *args, **kwargs)
    if not base.state.is_enabled:
        return out, bias
    group: Any = parallel_state.get_tensor_model_parallel_group()
    (adapter,) = base.layer.adapters.values()
    low = adapter.lora_A(hidden)
    if base.sequence_parallel:
        low = scatter_sum(group, low)
    elif group.size() > 1:
        low = sum_over(group, low)
    return torch.add(out, adapter.lora_B(low), alpha=base.state.scale), bias


def _adapted_replicated(base: _Layer, hidden: Tensor) -> Tensor:
    """Return the sum of the outputs of the layer and its adapter for `hidden` [..., D]."""
    out = base.forward(hidden)
    if not base.state.is_enabled:
        return out
    (adapter,) = base.layer.adapters.values()
    return torch.add(out, adapter.lora_B(adapter.lora_A(hidden)), alpha=base.state.scale)


def _column_parallel(
    weight: str, slices: Sequence[HFSlice], rank: int, *, is_first: bool
) -> tuple[ParamSpec, ParamSpec]:
    """Return the specs of A and B of a layer whose rows are sharded."""
    names = adapter_names(weight)
    num_inputs = slices[0].shape[1]
    shape_a = (rank, num_inputs)
    matrix_a = ParamSpec(shape_a, (HFSlice(names.a, (0, 0), shape_a, (0, 0)),), is_owner=is_first)
    parts = []
    num_rows = 0
    for part in slices:
        length = part.shape[0]
        parts.append(HFSlice(names.b, (part.offset[0], 0), (length, rank), (num_rows, 0)))
        num_rows += length
    return matrix_a, ParamSpec((num_rows, rank), tuple(parts), is_owner=True)


def _row_parallel(
    weight: str, slices: Sequence[HFSlice], rank: int, *, is_first: bool
) -> tuple[ParamSpec, ParamSpec]:
    """Return the specs of A and B of a layer whose columns are sharded."""
    names = adapter_names(weight)
    (part,) = slices
    num_outputs, num_inputs = part.shape
    shape_a = (rank, num_inputs)
    shape_b = (num_outputs, rank)
    slice_a = HFSlice(names.a, (0, part.offset[1]), shape_a, (0, 0))
    slice_b = HFSlice(names.b, (0, 0), shape_b, (0, 0))
    return (
        ParamSpec(shape_a, (slice_a,), is_owner=True),
        ParamSpec(shape_b, (slice_b,), is_owner=is_first),
    )
