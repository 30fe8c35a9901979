"""Checks of the models of a run before its workers start: LoRA settings and frozen models.

A checkpoint has no weights of frozen models: the model below LoRA adapters, the reference, teachers
and reward models. It continues only with the models that it was trained with.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.optimization import LoraConfig
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.models.peft_adapter import (
    can_have_adapter,
    check_adapter,
    check_targets,
    quantization_problems,
)
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import read_shapes, weights_digest
from nemo_like.prediction.placement import num_adapter_params, trained_head_params

_POLICY = "policy.model_name"


def frozen_models(config: RunConfig, *, policy_only: bool = False) -> dict[str, str]:
    """Return the identities of the frozen models of a run for its checkpoints, by config key.

    With `policy_only` teachers and reward models are left out. Raises ConfigError for a file that
    cannot be read.
    """
    identities = {}
    for key, name in _model_names(config).items():
        directory = Path(name).expanduser()
        if (policy_only and key != _POLICY) or not directory.is_dir():
            continue
        try:
            identities[key] = weights_digest(directory)
        except OSError as error:
            raise ConfigError(f"{key}: {shown_path(directory)} cannot be read: {error}") from error
    return identities


def check_frozen_models(
    saved: Mapping[str, str], current: Mapping[str, str], config: RunConfig, checkpoint: Path
) -> None:
    """Raise ConfigError if `saved`, the identities in a checkpoint, are not `current`.

    Both come from `frozen_models`. An identity that one of them lacks is not compared.
    """
    names = _model_names(config)
    for key, identity in current.items():
        if saved.get(key, identity) != identity:
            raise ConfigError(
                f"{key} is {names[key]!r}, whose weights differ from the weights that"
                f" {shown_path(checkpoint)} was trained with as {_role(key, config)}: set it back,"
                " or restore the files, or start a new run"
            )


def _model_names(config: RunConfig) -> dict[str, str]:
    """Return the directory of each frozen model by its config key."""
    names = dict(config.teachers_by_key)
    if config.policy.lora.enabled or config.needs_reference:
        names[_POLICY] = config.policy.model_name
    if config.generates:
        for name, model in config.reward.models.items():
            names[f"reward.models.{name}.model_name"] = model.model_name
    return names


def _role(key: str, config: RunConfig) -> str:
    if key in config.teachers_by_key:
        return "a teacher"
    if key != _POLICY:
        return "a reward model"
    if config.policy.lora.enabled:
        return "the frozen weights of its adapters"
    return "the reference policy"


_SAVED_KEYS = ("enabled", "rank", "alpha", "use_rslora", "target_modules", "quantization")
"""Keys of `policy.lora` on which the adapters of a checkpoint depend."""


def check_lora(policy: PolicyConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a target that is no layer of the model, and for a wrong adapter.

    Layers are known from the model's weights; the workers check those that are not downloaded yet.
    """
    lora = policy.lora
    if not lora.enabled:
        return
    layers = None
    directory = Path(policy.model_name).expanduser()
    if directory.is_dir():
        layers = linear_layers(directory, spec) or None
    if layers is not None:
        check_targets(lora, layers)
    if lora.adapter_path is not None:
        check_adapter(lora, layers, spec.head)


def check_quantization(policy: PolicyConfig, spec: ModelSpec, tp: int) -> None:
    """Raise ConfigError for a model that cannot be quantized over `tp` ranks, or without the
    library.
    """
    problems = quantization_problems(policy, spec, tp)
    if problems:
        raise ConfigError("\n".join(problems))
    if policy.lora.is_quantized and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"policy.lora.quantization is {policy.lora.quantization}, but bitsandbytes is not"
            " installed: pip install 'nemo-like[qlora]', or set policy.lora.quantization to none"
        )


def linear_layers(directory: Path, spec: ModelSpec) -> list[str]:
    """Return the linear layers that can have an adapter, by the names of a model's weight files.

    They are those inside the numbered layers; see `can_have_adapter`. Raises ConfigError for a
    damaged file.
    """
    layers = []
    for file in sorted(directory.glob("*.safetensors")):
        try:
            shapes = read_shapes(file)
        except ValueError as error:
            raise ConfigError(f"policy.model_name: {shown_path(file)} {error}") from error
        for name, shape in shapes.items():
            layer = name.removesuffix(".weight")
            is_linear = len(shape) == 2 and layer != name
            is_inner = re.search(r"\.\d+\.", name) is not None
            if is_linear and is_inner and can_have_adapter(layer, spec):
                layers.append(layer)
    return layers


def check_resumed_lora(saved_config: Path, lora: LoraConfig) -> None:
    """Raise ConfigError if `lora` differs from the config.yaml of the run that is resumed.

    The adapters of a checkpoint would be loaded without an error with another alpha, and be another
    model. A file that cannot be read is not compared.
    """
    try:
        saved = yaml.safe_load(saved_config.read_text(encoding="utf-8"))["policy"].get("lora", {})
        before = LoraConfig(**{key: saved[key] for key in _SAVED_KEYS if key in saved})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return
    if not before.enabled and not lora.enabled:
        return
    changed = []
    for key in _SAVED_KEYS:
        old = getattr(before, key)
        new = getattr(lora, key)
        if key == "target_modules":
            old = sorted(old)
            new = sorted(new)
        if old != new:
            changed.append(f"policy.lora.{key} was {old} and is {new}")
    if changed:
        raise ConfigError(
            f"the checkpoints of {shown_path(saved_config.parent)} were trained with other LoRA"
            f" settings: {'; '.join(changed)}. Set them back, or start a new run"
            " (policy.lora.adapter_path continues from an exported adapter)"
        )


def lora_line(lora: LoraConfig, spec: ModelSpec) -> str:
    """Return the line about the adapters, for the log and `nemo-like validate`.

    Example: `LoRA: rank 16, scale 2, 4,884,480 of 139,400,000 parameters are trained (3.5 %)`.
    """
    line = f"LoRA: rank {lora.rank}, scale {lora.scale:g}"
    if lora.is_quantized:
        line += f", frozen linear layers in {lora.quantization}"
    num_adapter = num_adapter_params(spec, lora)
    if num_adapter > 0:
        num_trained = num_adapter + trained_head_params(spec)
        total = spec.num_params + num_adapter
        line += f", {num_trained:,} of {total:,} parameters are trained ({num_trained / total:.2%})"
    if lora.adapter_path is not None:
        line += f", from the adapter {lora.adapter_path}"
    return line
