"""The LoRA adapters of a Megatron-Core model as its engine trains, gathers and merges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nemo_like.config.lora import LoraConfig
from nemo_like.models.adapters import adapter_names
from nemo_like.models.spec import SCORE_WEIGHT
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.lora_state import LoraState
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.lora import (
    AdapterMaps,
    AdapterSpec,
    adapter_map,
    adapter_specs,
    add_adapters,
    check_lora,
    merged,
)
from nemo_like.policy.megatron.param_map import ModelSharding, ParamMap, parallel_coords
from nemo_like.policy.megatron.parameters import FullWeightGatherer


class EngineAdapters:
    """The adapters that a rank adds to its model, and the parameters that it then trains."""

    def __init__(
        self,
        model: nn.Module,
        param_map: ParamMap,
        family: Family,
        sharding: ModelSharding,
        *,
        lora: LoraConfig,
        parallel_layout: ParallelLayout,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Add adapters, whose values are not initialized, to a model without gradients.

        `param_map` has the model's weights on this rank. Raises ConfigError, the same on every
        rank, for adapters that some rank cannot have.
        """
        check_lora(family, sharding, lora)
        self.state = LoraState(lora)
        self._lora = lora
        self._specs: dict[str, list[AdapterSpec]] = {}
        """By name of the layer."""
        _, tp_rank, _ = parallel_coords(parallel_layout, rank)
        for spec in adapter_specs(param_map, lora, sharding.spec, tp_rank):
            self._specs.setdefault(spec.module, []).append(spec)
        add_adapters(
            model,
            self._specs,
            self.state,
            device=device,
            dtype=dtype,
            sequence_parallel=parallel_layout.sequence_parallel,
        )
        self.param_map = adapter_map(param_map, lora, sharding.spec, tp_rank)
        """Specs of the trained parameters: the matrices and at most a score head."""
        parameters = dict(model.named_parameters())
        self.parameters = {name: parameters[name] for name in self.param_map}
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self._gatherer = FullWeightGatherer(
            AdapterMaps(family, lora), sharding, parallel_layout, rank, device
        )

    def shapes(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the full shapes of what is trained, given those of the model's weights."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in weights.items():
            names = adapter_names(name)
            if names.a in self._gatherer.names:
                num_outputs, num_inputs = shape
                shapes[names.a] = (self._lora.rank, num_inputs)
                shapes[names.b] = (num_outputs, self._lora.rank)
            elif name == SCORE_WEIGHT:
                shapes[name] = shape
        return shapes

    def gather(
        self,
        names: Sequence[str],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        local: Callable[[str], Tensor] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the named matrices, on rank 0 each with its full shape; every rank calls.

        `local` returns other values [...] of a parameter, e.g. its gradient; default its value.
        """
        values = local or (lambda name: self.parameters[name].detach())
        return self._gatherer.gather(names, shapes, dtype, values)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return parameter `name` [rows, inputs] with the updates of its adapters.

        The result is in float32, or `weight` itself if it has no adapter.
        """
        specs = self._specs.get(name.removesuffix(".weight"))
        if specs is None:
            return weight
        return merged(weight, specs, self.parameters, self._lora.scale)
