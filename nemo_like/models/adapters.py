"""Adapters of a model (LoRA): which layers can have them, and the checks before a run.

Everything about adapters that needs no weights: names and shapes, models that can be stored in
4 bits (`policy.lora.quantization`), and the settings in files in the format of PEFT.
`policy.lora` reads and writes these files.

NF4 is the 4-bit format of QLoRA (Dettmers et al. 2023, arXiv 2305.14314): 64 consecutive inputs of
an output share their largest magnitude, in float32, and each value is one of 16 multiples of it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.config.errors import ConfigError, shown_path, similar_path_text
from nemo_like.config.schema import ALL_LINEAR, AdapterConfig, OutputHead, PolicyConfig
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.models.weight_files import INDEX_NAME, Shape, read_shapes, weight_paths

BLOCK_SIZE = 64
"""Values of a block, as in bitsandbytes and PEFT."""

BYTES_PER_VALUE = 0.5 + 4 / BLOCK_SIZE
"""A 4-bit code, and a share of the float32 scale of its block."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT wraps the model twice; its files have the names of the wrapped modules."""

SCORE_MODULE = SCORE_WEIGHT.removesuffix(".weight")
"""The module of `modules_to_save` that the adapter of a reward model has."""

_SCORE_MODULES = {SCORE_MODULE, "classifier"}
"""PEFT adds both names to `modules_to_save` of every sequence classifier."""

_KEY = "policy.lora.adapter_path"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian"),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "layers_to_transform": (),
    "layers_pattern": ([], ""),
    "alora_invocation_tokens": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}
"""Settings of PEFT that change the model in a way that has no counterpart, with the values that do
not; null does not either.
"""


class AdapterNames(NamedTuple):
    """Names of the matrices of one adapter, as parameters of the model."""

    a: str
    b: str


def adapter_names(weight_name: str) -> AdapterNames:
    """Return the names of A and B of a layer's weight.

    Example: `layers.0.q_proj.weight` has `layers.0.q_proj.lora_A.weight` and `...lora_B.weight`.
    """
    layer = weight_name.removesuffix(".weight")
    return AdapterNames(f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")


def adapter_shapes(layers: Mapping[str, Shape], adapter: AdapterConfig) -> dict[str, Shape]:
    """Return the shapes of A and B of each target by name; `layers` are (outputs, inputs)."""
    shapes: dict[str, Shape] = {}
    for layer, (num_outputs, num_inputs) in layers.items():
        if adapter.is_target(layer):
            names = adapter_names(layer)
            shapes[names.a] = (adapter.rank, num_inputs)
            shapes[names.b] = (num_outputs, adapter.rank)
    return shapes


def is_adapter(name: str) -> bool:
    """Return True for the name of a matrix of an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def can_have_adapter(layer: str, spec: ModelSpec) -> bool:
    """Return True if the linear layer of this name, inside a decoder layer, can have an adapter.

    In an MoE model these are the projections of attention only. PEFT maps the names of
    feed-forward layers of such a model to its experts, so adapters of its dense layers could not
    be loaded. Layers of a vision tower have none.
    """
    if "visual." in layer:
        return False
    return spec.moe is None or ".self_attn." in layer


def check_targets(adapter: AdapterConfig, layers: Iterable[str]) -> None:
    """Raise ConfigError for a target that names none of `layers`, which can have an adapter."""
    names = list(layers)
    for target in adapter.target_modules:
        if target == ALL_LINEAR:
            continue
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ConfigError(
                f"policy.lora.target_modules: {target!r} is not a linear layer that can have an"
                f" adapter; these are {_ends(names)} (experts, routers, and in models with"
                " experts all feed-forward layers, have none)"
            )


def check_adapters(policy: PolicyConfig, spec: ModelSpec, tp: int) -> None:
    """Raise ConfigError for adapters, or weights in 4 bits, that a model cannot have on `tp` ranks.

    Layers are known from the model's weights; the workers check those that are not downloaded yet.
    """
    adapter = policy.adapter
    if adapter is None:
        return
    layers: Mapping[str, Shape] = {}
    directory = Path(policy.model_name).expanduser()
    if directory.is_dir():
        layers = stored_layers(directory, spec)
    if layers:
        check_targets(adapter, layers)
    if adapter.adapter_path is not None:
        # The files of a model with a vision tower may have older names; the workers compare.
        check_adapter(adapter, {} if spec.vision is not None else layers, spec.head)
    if not adapter.is_quantized:
        return
    problems = list(_quantization_problems(policy, spec, tp))
    if problems:
        raise ConfigError("\n".join(problems))
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"policy.lora.quantization is {adapter.quantization}, but bitsandbytes is not"
            " installed: pip install 'nemo-like[qlora]', or set policy.lora.quantization to none"
        )


def _quantization_problems(policy: PolicyConfig, spec: ModelSpec, tp: int) -> Iterator[str]:
    begin = f"policy.lora.quantization is {policy.lora.quantization}"
    model = f"policy.model_name={policy.model_name}"
    if spec.moe is not None:
        yield (
            f"{begin}, but {model} has experts: bitsandbytes quantizes linear layers, and not the"
            " stacked matrices of experts, nearly all of the weights; set policy.lora.quantization"
            " to none"
        )
        return
    inputs = (
        ("hidden size", spec.hidden_size, 1),
        ("attention width (heads times their size)", spec.num_heads * spec.head_dim, tp),
        ("feed-forward width", spec.intermediate_size, tp),
    )
    for what, size, num_shards in inputs:
        possible = [count for count in range(1, tp + 1) if size % (BLOCK_SIZE * count) == 0]
        if size % (BLOCK_SIZE * num_shards) == 0:
            continue
        fix = "set policy.lora.quantization to none"
        if possible:
            fix = f"set parallel.tensor to {possible[-1]}, or policy.lora.quantization to none"
        yield (
            f"{begin}, whose blocks are {BLOCK_SIZE} inputs of a layer, and the {what} {size} of"
            f" {model} / parallel.tensor {num_shards} = {size / num_shards:g} is not a multiple:"
            f" {fix}"
        )


def stored_layers(directory: Path, spec: ModelSpec) -> dict[str, Shape]:
    """Return (outputs, inputs) of each linear layer in a model's weight files that can have an
    adapter.

    They are those inside the numbered layers; see `can_have_adapter`. Raises ConfigError for a
    damaged file.
    """
    layers = {}
    try:
        files = weight_paths(directory)
    except ValueError as error:
        index = shown_path(directory / INDEX_NAME)
        raise ConfigError(f"policy.model_name: {index} {error}") from error
    for file in files:
        for name, shape in _read_shapes("policy.model_name", file).items():
            layer = name.removesuffix(".weight")
            is_linear = len(shape) == 2 and layer != name
            is_inner = re.search(r"\.\d+\.", name) is not None
            if is_linear and is_inner and can_have_adapter(layer, spec):
                layers[layer] = shape
    return layers


def check_adapter(adapter: AdapterConfig, layers: Mapping[str, Shape], head: OutputHead) -> None:
    """Raise ConfigError unless `adapter_path` is an adapter with the settings of `adapter`.

    `layers` are (outputs, inputs) of the linear layers of the model, empty if they are not known.
    An adapter for a model with the head `scores` may have a score head.
    """
    assert adapter.adapter_path is not None, "there is an adapter to check"
    directory = Path(adapter.adapter_path)
    _check_files(directory)
    _check_settings(directory, adapter, head)
    if layers:
        check_matrices(adapter, adapter_shapes(layers, adapter))


def check_matrices(adapter: AdapterConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ConfigError unless the file of an adapter has exactly the matrices `shapes`, and at
    most a score head besides.
    """
    stored = stored_shapes(adapter)
    stored.pop(SCORE_WEIGHT, None)
    for name in sorted(shapes.keys() | stored.keys()):
        if shapes.get(name) == stored.get(name):
            continue
        layers = {each.rpartition(".lora_")[0] for each in stored}
        raise ConfigError(
            f"{_KEY}: {shown_path(Path(str(adapter.adapter_path)))} has {name} as"
            f" {stored.get(name)}, and the model needs {shapes.get(name)}; its layers are"
            f" {_ends(layers)}: set policy.lora.target_modules to them, and policy.model_name to"
            " the model that it was trained for"
        )


def stored_shapes(adapter: AdapterConfig) -> dict[str, Shape]:
    """Return the shapes of the tensors of an adapter by the names of parameters of the model.

    Raises ConfigError for a damaged file.
    """
    shapes = _read_shapes(_KEY, Path(str(adapter.adapter_path)) / ADAPTER_WEIGHTS)
    return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}


def _check_files(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(
            f"{_KEY}: there is no directory {str(directory)!r}"
            f"{similar_path_text(directory.absolute())}; give the directory of an adapter in the"
            f" format of PEFT, with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        )
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if (directory / name).is_file():
            continue
        fix = "give the directory of an adapter in the format of PEFT"
        if (directory / "adapter_model.bin").is_file():
            fix = "save the adapter as safetensors (`safe_serialization=True` of PEFT)"
        elif (directory / "adapter" / name).is_file():
            fix = f"the adapter of this model is in {shown_path(directory / 'adapter')}"
        raise ConfigError(f"{_KEY}: {shown_path(directory)} has no {name}; {fix}")


def _check_settings(directory: Path, adapter: AdapterConfig, head: OutputHead) -> None:
    """Raise ConfigError for settings without a counterpart, and for others than `adapter` has."""
    begin = f"{_KEY}: {shown_path(directory)}"
    try:
        settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = settings.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{begin}: {ADAPTER_CONFIG} is not a JSON object: {error}") from error
    if kind != "LORA":
        raise ConfigError(f"{begin} is an adapter of the type {kind}; only LORA is supported")
    modules = settings.get("modules_to_save") or []
    others = {name: settings.get(name) for name in _NEUTRAL}
    unsupported = {
        name: value
        for name, value in others.items()
        if value is not None and value not in _NEUTRAL[name]
    }
    if not set(modules) <= _SCORE_MODULES:
        unsupported["modules_to_save"] = modules
    for name, value in unsupported.items():
        raise ConfigError(
            f"{begin} has {name} {value!r}, which is not supported; merge the adapter into its"
            " model with PEFT and train that, or train a new adapter"
        )
    if modules and head == "vocabulary":
        raise ConfigError(
            f"{begin} is the adapter of a reward model (modules_to_save {modules!r}), and this run"
            " trains a language model; use it with `nemo-like rm`"
        )
    # The values that PEFT assumes for settings that a file lacks.
    found = {
        "rank": settings.get("r", 8),
        "alpha": settings.get("lora_alpha", 8),
        "use_rslora": bool(settings.get("use_rslora", False)),
    }
    changes = []
    for key, value in found.items():
        current = getattr(adapter, key)
        if value != current:
            changes.append(f"policy.lora.{key} to {json.dumps(value)} (now {json.dumps(current)})")
    if changes:
        raise ConfigError(f"{begin} was trained with other settings: set {', '.join(changes)}")


def _read_shapes(key: str, path: Path) -> dict[str, Shape]:
    try:
        return read_shapes(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {shown_path(path)} {error}") from error


def _ends(layers: Iterable[str]) -> str:
    """Return the last parts of the names, e.g. `q_proj`, each once."""
    return ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
