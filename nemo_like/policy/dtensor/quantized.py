"""Frozen linear layers in NF4 (QLoRA), beside parameters that FSDP shards.

A quantized weight is a pair of buffers, so FSDP neither gathers nor casts it: each rank has the
tensor-parallel shard of its own, equal on all data- and context-parallel ranks. A shard consists of
complete blocks, so it is quantized as in the complete weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.models.peft_adapter import BLOCK_SIZE
from nemo_like.policy.checkpoint.hf_reader import ModelFiles
from nemo_like.policy.dtensor.parallel import Groups, ShardSpec, TensorParallel
from nemo_like.policy.dtensor.parameters import ShardedParameter, row_range
from nemo_like.policy.nf4 import (
    Nf4,
    dequantize,
    nf4_linear,
    quantize,
    quantized_layers,
    require_library,
    rows_at_once,
)

_CODES = "weight_codes"
_SCALES = "weight_scales"


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
