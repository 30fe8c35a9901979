"""LoRA on a Hugging Face model: adapters beside frozen weights, sharded like them.

Of a layer W [outputs, inputs] the adapter is A [rank, inputs] and B [outputs, rank], and the output
is W x + scale B A x. Tensor parallelism shards an adapter along the dim of its layer:

    layer                     A                     B
    q, k, v, gate, up         replicated            rows (output features)
    o, down                   columns (inputs)      replicated

Both need no further collective: the partial sums of a row-parallel layer include the sums of its
adapter. A replicated matrix has a partial gradient on every tp rank, and these are all-reduced.
FSDP shards dim 0 of every matrix; B in the same rows as W, so that a rank merges its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.optimization import LoraConfig
from nemo_like.models.peft_adapter import adapter_names, can_have_adapter, check_targets
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.checkpoint.adapter import open_initial
from nemo_like.policy.decoder_layers import LoraState
from nemo_like.policy.dtensor.parallel import ShardSpec, TensorParallel
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.dtensor.quantized import base_product, local_shape

_ReduceOutput = Callable[[Tensor], Tensor]


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
    config: LoraConfig,
    specs: dict[str, ShardSpec],
    tensor: TensorParallel | None,
) -> LoraState:
    """Add an adapter on the meta device to every target layer inside `layers`.

    The weights of the model, on the meta device as well, are sharded already; `specs` has the spec
    of each by name and gets those of the adapters. Raises ConfigError for a target that names no
    linear layer.
    """
    state = LoraState(config)
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


@torch.no_grad()
def initialize(adapters: Iterable[Adapter], config: LoraConfig, seed: int) -> None:
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
    state: LoraState, reduce_output: _ReduceOutput | None, module: Any, hidden: Tensor
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
