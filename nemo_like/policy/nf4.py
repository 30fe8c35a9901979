"""Weights in NF4 by bitsandbytes, and products with them.

A weight [m, n] is stored as two tensors with the dim 0 of the weight: codes, uint8 [m, n / 2],
with two values per byte (the first in the upper bits), and the largest magnitude of each block of
64 inputs, float32 [m, n / 64]. As no block has values of two rows, any rows, and any columns that
begin and end with a block, are quantized by themselves as in the complete weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.models.peft_adapter import BLOCK_SIZE

_FORMAT = "nf4"
_MAX_VALUES = 1 << 24
"""Values that are quantized at once: on CPU the library needs several temporary copies of them."""


class Nf4(NamedTuple):
    """A quantized weight [m, n], or rows of one."""

    codes: Tensor
    """uint8 [m, n / 2]."""
    scales: Tensor
    """The largest magnitude of each block, float32 [m, n / 64]."""


def require_library() -> None:
    """Raise ConfigError unless bitsandbytes, which defines the operators, can be imported."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "policy.lora.quantization is nf4, which needs bitsandbytes: pip install"
            f" 'nemo-like[qlora]' on every node, or set policy.lora.quantization to none ({error})"
        ) from error


def quantize(weight: Tensor) -> Nf4:
    """Return `weight`, floating point [m, n] with n a multiple of 64, in NF4."""
    num_rows, num_columns = weight.shape
    codes = weight.new_empty((num_rows, num_columns // 2), dtype=torch.uint8)
    scales = weight.new_empty((num_rows, num_columns // BLOCK_SIZE), dtype=torch.float32)
    step = rows_at_once(num_columns)
    for start in range(0, num_rows, step):
        rows = weight[start : start + step].contiguous()
        found_codes, found_scales = torch.ops.bitsandbytes.quantize_4bit.default(
            rows, BLOCK_SIZE, _FORMAT, torch.uint8
        )
        codes[start : start + step] = found_codes.view(len(rows), -1)
        scales[start : start + step] = found_scales.view(len(rows), -1)
    return Nf4(codes, scales)


def rows_at_once(num_columns: int) -> int:
    """Return the number of rows that are read and quantized at once."""
    return max(1, _MAX_VALUES // num_columns)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [m, n] of codes [m, n / 2] and scales [m, n / 64] in `dtype`."""
    shape = (codes.shape[0], 2 * codes.shape[1])
    if codes.shape[0] == 0:
        # A kernel is not started without rows; FSDP leaves ranks without some.
        return torch.empty(shape, dtype=dtype, device=codes.device)
    return torch.ops.bitsandbytes.dequantize_4bit.default(
        codes, scales, BLOCK_SIZE, _FORMAT, shape, dtype
    )


def rounded(weight: Tensor) -> Tensor:
    """Return `weight`, floating point [m, n], as it is after quantization, in float32."""
    codes, scales = quantize(weight)
    return dequantize(codes, scales, torch.float32)


class _Linear(torch.autograd.Function):
    """Product with a frozen NF4 weight, which the backward pass dequantizes again.

    Autograd would keep the dequantized weight of every layer until the backward pass.
    """

    @staticmethod
    def forward(hidden: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return F.linear(hidden, dequantize(codes, scales, hidden.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, codes, scales = inputs
        ctx.save_for_backward(codes, scales)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (grad,) = grads
        codes, scales = ctx.saved_tensors
        return grad @ dequantize(codes, scales, grad.dtype), None, None


def nf4_linear(hidden: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return W x, [..., m], of `hidden` [..., n] and a weight W [m, n] in NF4.

    The product has the precision of `hidden`.
    """
    output: Any = _Linear.apply(hidden, codes, scales)
    return output


def quantized_layers(causal_lm: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers of a model that are quantized, by name.

    They are those that transformers replaces by layers of bitsandbytes: all linear layers except
    the output embedding.
    """
    head = causal_lm.get_output_embeddings()
    modules = causal_lm.named_modules()
    return {
        name: module for name, module in modules if type(module) is nn.Linear and module is not head
    }
