"""Sizes of frozen weights in NF4 (`policy.lora.quantization`), and the models that can have them.

NF4 is the 4-bit format of QLoRA (Dettmers et al. 2023, arXiv 2305.14314): 64 consecutive inputs of
an output share their largest magnitude, in float32, and each value is one of 16 multiples of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.schema import PolicyConfig
from nemo_like.models.spec import ModelSpec

BLOCK_SIZE = 64
"""Values of a block, as in bitsandbytes and PEFT."""
BYTES_PER_VALUE = 0.5 + 4 / BLOCK_SIZE
"""A 4-bit code, and a share of the float32 scale of its block."""
_TO_NONE = "or policy.lora.quantization to none"


def quantization_problems(policy: PolicyConfig, spec: ModelSpec, tp: int) -> list[str]:
    """Return why the layers of a model cannot be stored in `policy.lora.quantization`.

    `tp` is the tensor-parallel size. Empty if they can, or if nothing is quantized.
    """
    if not policy.lora.is_quantized:
        return []
    if spec.moe is not None:
        problem = (
            f"policy.lora.quantization is {policy.lora.quantization}, but"
            f" policy.model_name={policy.model_name} has experts: bitsandbytes quantizes linear"
            " layers, and the stacked matrices of experts, nearly all of the weights, are none; set"
            " policy.lora.quantization to none"
        )
        return [problem]
    return list(_size_problems(policy, spec, tp))


def _size_problems(policy: PolicyConfig, spec: ModelSpec, tp: int) -> Iterator[str]:
    query = spec.num_heads * spec.head_dim
    inputs = {
        "hidden size": (spec.hidden_size, 1),
        "attention width (heads times their size)": (query, tp),
        "feed-forward width": (spec.intermediate_size, tp),
    }
    for what, (size, num_shards) in inputs.items():
        if size % BLOCK_SIZE:
            yield (
                f"policy.lora.quantization is {policy.lora.quantization}, whose blocks are"
                f" {BLOCK_SIZE} inputs of a layer, but policy.model_name={policy.model_name} has a"
                f" {what} of {size}, which is not a multiple: set policy.lora.quantization to none"
            )
        elif size % (BLOCK_SIZE * num_shards):
            largest = max(
                count for count in range(1, num_shards) if size % (BLOCK_SIZE * count) == 0
            )
            yield (
                f"policy.lora.quantization is {policy.lora.quantization}, whose blocks are"
                f" {BLOCK_SIZE} inputs of a layer, and the {what} {size} of"
                f" policy.model_name={policy.model_name} / parallel.tensor {tp} ="
                f" {size / tp:g}, which is not a multiple: set parallel.tensor to {largest},"
                f" {_TO_NONE}"
            )
