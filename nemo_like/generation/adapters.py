"""Adapters that a generator receives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.schema import AdapterConfig
from nemo_like.models.adapters import adapter_shapes, can_have_adapter
from nemo_like.models.output_head import auto_class
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec

_INNER = re.compile(r"\.\d+\.")
"""Part of the name of every layer inside a decoder layer."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class AdapterSettings:
    """The adapters of a model."""

    config: AdapterConfig
    shapes: Shapes
    has_experts: bool = False
    """The model is a mixture of experts."""

    @classmethod
    def of_files(cls, adapter: AdapterConfig, model_name: str) -> AdapterSettings:
        """Return the adapters of the model `model_name`, of which only config.json is read."""
        config = load_model_config(model_name)
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        has_experts = ModelSpec.from_config(config).moe is not None
        layers = {name: tuple(module.weight.shape) for name, module in _targets(model, adapter)}
        return cls(adapter, adapter_shapes(layers, adapter), has_experts)


def add_adapters(model: PreTrainedModel, adapter: AdapterConfig) -> Shapes:
    """Let all target layers of `model` compute W x + scale B A x; A and B are 0 at first.

    They have the device and the dtype of the weight, and are frozen. Returns their shapes by name.
    """
    layers: Shapes = {}
    for name, module in list(_targets(model, adapter)):
        num_outputs, num_inputs = layers[name] = tuple(module.weight.shape)
        options: dict[str, Any] = {
            "bias": False,
            "device": module.weight.device,
            "dtype": module.weight.dtype,
        }
        adapted: Any = module
        adapted.lora_A = nn.Linear(num_inputs, adapter.rank, **options).requires_grad_(False)
        adapted.lora_B = nn.Linear(adapter.rank, num_outputs, **options).requires_grad_(False)
        torch.nn.init.zeros_(adapted.lora_A.weight)
        torch.nn.init.zeros_(adapted.lora_B.weight)
        adapted.forward = partial(_adapted_linear, adapted, adapter.scale)
    return adapter_shapes(layers, adapter)


def _targets(model: PreTrainedModel, adapter: AdapterConfig) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers with an adapter by name; these are the layers of the policy."""
    spec = ModelSpec.from_config(model.config)
    modules: Iterator[tuple[str, nn.Module]] = model.named_modules()
    for name, module in modules:
        is_inner = _INNER.search(name) is not None
        if not isinstance(module, nn.Linear) or not is_inner:
            continue
        if can_have_adapter(name, spec) and adapter.is_target(name):
            yield name, module


def _adapted_linear(module: Any, scale: float, hidden: Tensor) -> Tensor:
    """Return the output [..., outputs] of `module` with its adapter for `hidden` [..., inputs].

    The operations are the same as in the policy, so that both round alike.
    """
    out = F.linear(hidden, module.weight, module.bias)
    return torch.add(out, module.lora_B(module.lora_A(hidden)), alpha=scale)
