"""LoRA on a Hugging Face model: adapters beside frozen weights, sharded like them.

For a layer W [outputs, inputs] the adapter is A [rank, inputs] and B [outputs, rank]. The output is
W x + scale B A x. Tensor parallelism shards an adapter along the dim of its layer:

    layer                     A                     B
    q, k, v, gate, up         replicated            rows (output features)
    o, down                   columns (inputs)      replicated

Both need no further collective: the partial sums of a row-parallel layer include the sums of its
adapter. A replicated matrix has a partial gradient on every tp rank, and these are all-reduced.
FSDP shards dim 0 of every matrix; B in the same rows as W, so that a rank merges its shard.

With quantization (QLoRA) W is a pair of buffers in NF4, so FSDP neither gathers nor casts it: each
rank has the tensor-parallel shard of its own, equal on all data- and context-parallel ranks. A
shard consists of complete blocks, so it is quantized as in the complete weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig
from nemo_like.models.adapters import BLOCK_SIZE, adapter_names, can_have_adapter, check_targets
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.checkpoint.hf_reader import ModelFiles
from nemo_like.policy.dtensor.parallel import Groups, ShardSpec, TensorParallel
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard, row_range
from nemo_like.policy.lora import (
    AdapterState,
    Nf4,
    dequantize,
    nf4_linear,
    open_initial,
    quantize,
    quantized_layers,
    require_library,
    rows_at_once,
)

_ReduceOutput = Callable[[Tensor], Tensor]

_CODES = "weight_codes"
_SCALES = "weight_scales"


class SpecPair(NamedTuple):
    """Tensor-parallel specs of one adapter."""

    a: ShardSpec
    """Of A, [rank, inputs]."""
    b: ShardSpec
    """Of B, [outputs, rank]."""

    @classmethod
    def of(cls, weight: ShardSpec, rank: int) -> SpecPair:
        """Return the specs of the adapter of a layer whose `weight` is [outputs, inputs]."""
        num_outputs, num_inputs = weight.full_shape
        shape_a = (rank, num_inputs)
        shape_b = (num_outputs, rank)
        if weight.dim == 0:
            return cls(
                ShardSpec(shape_a, has_partial_grad=True),
                ShardSpec(shape_b, 0, weight.start, weight.stop),
            )
        if weight.dim == 1:
            return cls(
                ShardSpec(shape_a, 1, weight.start, weight.stop),
                ShardSpec(shape_b, has_partial_grad=True),
            )
        is_partial = weight.has_partial_grad
        return cls(
            ShardSpec(shape_a, has_partial_grad=is_partial),
            ShardSpec(shape_b, has_partial_grad=is_partial),
        )


class Adapter(NamedTuple):
    """The sharded matrices of one layer's adapter."""

    a: ShardedParameter
    b: ShardedParameter
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's shard of W + scale B A in float32, [m, ...] as `weight`.

        Every FSDP rank calls: A is all-gathered.
        """
        matrix_a = self.a.gather_over_fsdp(local_shard(self.a.parameter))
        matrix_b = local_shard(self.b.parameter)
        return torch.addmm(weight.float(), matrix_b, matrix_a, alpha=self.scale)


def add_adapters(
    causal_lm: PreTrainedModel,
    layers: Sequence[nn.Module],
    config: AdapterConfig,
    specs: dict[str, ShardSpec],
    tensor: TensorParallel | None,
) -> AdapterState:
    """Add an adapter on the meta device to every target layer inside `layers`.

    The weights of the model, on the meta device as well, are sharded already; `specs` has the spec
    of each by name and gets those of the adapters. Raises ConfigError for a target that names no
    linear layer.
    """
    state = AdapterState(config)
    linears = _adaptable_layers(causal_lm, layers)
    check_targets(config, linears)
    for name, module in linears.items():
        if not config.is_target(name):
            continue
        weight_name = f"{name}.weight"
        weight_spec = specs[weight_name]
        pair = SpecPair.of(weight_spec, config.rank)
        name_a, name_b = adapter_names(weight_name)
        specs[name_a] = pair.a
        specs[name_b] = pair.b
        num_outputs, num_inputs = local_shape(module)
        with torch.device("meta"):
            module.lora_A = nn.Linear(num_inputs, config.rank, bias=False)
            module.lora_B = nn.Linear(config.rank, num_outputs, bias=False)
        reduce_output = None
        if weight_spec.dim == 1:
            assert tensor is not None, "a sharded weight has a tensor-parallel group"
            reduce_output = tensor.reduce_output
        module.forward = partial(_adapted_linear, state, reduce_output, module)
    return state


def _adaptable_layers(causal_lm: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the linear layers inside `layers` that can have an adapter, by name."""
    spec = ModelSpec.from_config(causal_lm.config)
    inner = {module for layer in layers for module in layer.modules()}
    linears = {}
    for name, module in causal_lm.named_modules():
        is_inner_linear = isinstance(module, nn.Linear) and module in inner
        if is_inner_linear and can_have_adapter(name, spec):
            linears[name] = module
    return linears


def sharded_adapters(
    parameters: Mapping[str, ShardedParameter], config: AdapterConfig
) -> dict[str, Adapter]:
    """Return the adapter of each weight that has one, by the name of the weight."""
    adapters = {}
    for name in parameters:
        names = adapter_names(name)
        if names.a in parameters:
            adapters[name] = Adapter(parameters[names.a], parameters[names.b], config.scale)
    return adapters


@torch.no_grad()
def initialize(adapters: Iterable[Adapter], config: AdapterConfig, seed: int) -> None:
    """Set the matrices of all adapters to their initial values; see `open_initial`."""
    matrices: list[ShardedParameter] = []
    for adapter in adapters:
        matrices += [adapter.a, adapter.b]
    shapes = {sharded.name: tuple(sharded.spec.full_shape) for sharded in matrices}
    with open_initial(config, shapes, seed) as read:
        for sharded in matrices:
            offset, shape = sharded.block()
            local_shard(sharded.parameter).copy_(read(sharded.name, offset, shape))


def _adapted_linear(
    state: AdapterState, reduce_output: _ReduceOutput | None, module: Any, hidden: Tensor
) -> Tensor:
    """Compute `module`, a linear layer, and its adapter.

    `hidden` is [B, S, inputs], for a row-parallel layer (`reduce_output`) this rank's inputs. The
    result is [B, S, outputs] with this rank's outputs, or with all after the reduction.
    """
    bias = module.bias
    # The bias of a row-parallel layer is added once, after the reduction.
    out = base_product(module, hidden, bias if reduce_output is None else None)
    if state.is_enabled:
        # Looked up in each call: FSDP replaces the parameters of its modules.
        update = module.lora_B(module.lora_A(hidden))
        out = torch.add(out, update, alpha=state.scale)
    if reduce_output is None:
        return out
    out = reduce_output(out)
    return out if bias is None else out + bias


def quantize_layers(
    causal_lm: PreTrainedModel,
    specs: Mapping[str, ShardSpec],
    tensor: TensorParallel | None,
    device: torch.device,
) -> None:
    """Replace the weights of linear layers by memory for their NF4 tensors on `device`.

    The weights, on the meta device, are sharded by tensor parallelism and not by FSDP yet; `specs`
    has the spec of each by name. Raises ConfigError for a layer whose inputs are no complete
    blocks, and without bitsandbytes.
    """
    require_library()
    layers: dict[str, Any] = {**quantized_layers(causal_lm)}
    for name, module in layers.items():
        num_outputs, num_inputs = module.weight.shape
        if num_inputs % BLOCK_SIZE:
            raise ConfigError(
                f"policy.lora.quantization is nf4, whose blocks are {BLOCK_SIZE} inputs of a"
                f" layer, but {name} has {num_inputs} on a tensor-parallel rank, which is not a"
                " multiple: set policy.lora.quantization to none, or parallel.tensor to a smaller"
                " size"
            )
        del module.weight
        codes = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(num_outputs, num_inputs // BLOCK_SIZE, device=device)
        module.register_buffer(_CODES, codes, persistent=False)
        module.register_buffer(_SCALES, scales, persistent=False)
        reduce_output = None
        if specs[f"{name}.weight"].dim == 1:
            assert tensor is not None, "a sharded weight has a tensor-parallel group"
            reduce_output = tensor.reduce_output
        module.forward = partial(_frozen_linear, reduce_output, module)


def is_quantized(module: nn.Module) -> bool:
    """Return True for a layer that `quantize_layers` changed."""
    return _CODES in module._buffers


def local_shape(module: nn.Linear) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer, quantized or not, on this tp rank."""
    if not is_quantized(module):
        return module.weight.shape[0], module.weight.shape[1]
    codes, _ = _tensors(module)
    return codes.shape[0], 2 * codes.shape[1]


def base_product(module: nn.Linear, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Return W x + `bias` [B, S, outputs] of `hidden` [B, S, inputs], W quantized or not."""
    if not is_quantized(module):
        return F.linear(hidden, module.weight, bias)
    out = nf4_linear(hidden, *_tensors(module))
    return out if bias is None else out + bias


@dataclass(frozen=True)
class QuantizedParameter(ShardedParameter):
    """A weight in NF4. `parameter` has its shape on this tp rank, and no memory.

    Every FSDP rank has all rows. `block` is about those that FSDP would give the rank if it sharded
    the weight, which are the rows that a rank dequantizes where the full weight is gathered.
    """

    stored: Nf4

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of the rows of `dequantized` in the full tensor."""
        start, stop = self._rows()
        row, column = self._offset
        return (row + start, column), (stop - start, self.parameter.shape[1])

    def dequantized(self) -> Tensor:
        """Return this rank's rows of the weight, float32 [m, n]."""
        start, stop = self._rows()
        codes, scales = self.stored
        return dequantize(codes[start:stop], scales[start:stop], torch.float32)

    def read(self, files: ModelFiles, stored_name: str) -> None:
        """Read this tp rank's shard of the weight `stored_name` and quantize it, rows by rows.

        The complete shard is never in memory.
        """
        row, column = self._offset
        num_rows, num_columns = self.parameter.shape
        step = rows_at_once(num_columns)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            rows = torch.empty(stop - start, num_columns, device=self.stored.codes.device)
            files.read_into(rows, stored_name, (row + start, column))
            found = quantize(rows)
            self.stored.codes[start:stop] = found.codes
            self.stored.scales[start:stop] = found.scales

    @property
    def _offset(self) -> tuple[int, int]:
        """Row and column of the full tensor at which the shard of this tp rank begins."""
        if self.spec.dim is None:
            return 0, 0
        return (self.spec.start, 0) if self.spec.dim == 0 else (0, self.spec.start)

    def _rows(self) -> tuple[int, int]:
        num_rows = self.parameter.shape[0]
        group = self.groups.shard
        if group is None:
            return 0, num_rows
        return row_range(num_rows, group.size(), group.rank())


def quantized_parameters(
    causal_lm: PreTrainedModel, specs: Mapping[str, ShardSpec], groups: Groups
) -> Iterator[QuantizedParameter]:
    """Yield the weights that `quantize_layers` replaced, by the Hugging Face names of `specs`."""
    for layer, module in causal_lm.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(module):
            name = f"{layer}.weight"
            shape = torch.empty(local_shape(module), device="meta")
            weight = nn.Parameter(shape, requires_grad=False)
            yield QuantizedParameter(name, weight, specs[name], groups, Nf4(*_tensors(module)))


def _tensors(module: nn.Module) -> tuple[Tensor, Tensor]:
    codes: Any = module._buffers[_CODES]
    scales: Any = module._buffers[_SCALES]
    return codes, scales


def _frozen_linear(
    reduce_output: Callable[[Tensor], Tensor] | None, module: nn.Linear, hidden: Tensor
) -> Tensor:
    """Compute a layer without adapter, [B, S, outputs] from `hidden` [B, S, inputs].

    A row-parallel layer has `reduce_output`; see `_row_parallel_linear`.
    """
    if reduce_output is None:
        return base_product(module, hidden, module.bias)
    out = reduce_output(base_product(module, hidden, None))
    return out if module.bias is None else out + module.bias
