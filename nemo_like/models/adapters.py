"""LoRA adapters and quantization of a model: which layers can have an adapter, and PEFT's format.

Sizes of frozen weights in NF4 (`policy.lora.quantization`), and the models that can have them.

NF4 is the 4-bit format of QLoRA (Dettmers et al. 2023, arXiv 2305.14314): 64 consecutive inputs of
an output share their largest magnitude, in float32, and each value is one of 16 multiples of it.

`policy.checkpoint.adapter` documents the format, writes adapters and reads their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.config.errors import ConfigError, shown_path, similar_path_text
from nemo_like.config.optimization import ALL_LINEAR, LoraConfig
from nemo_like.config.output_head import OutputHead
from nemo_like.config.schema import PolicyConfig
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.models.weight_files import read_shapes


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


def is_adapter(name: str) -> bool:
    """Return True for the name of a matrix of an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def can_have_adapter(layer: str, spec: ModelSpec) -> bool:
    """Return True if the linear layer of this name, inside a decoder layer, can have an adapter.

    In an MoE model these are the projections of attention only. PEFT maps the names of
    feed-forward layers of such a model to its experts, so adapters of its dense layers could not
    be loaded.
    """
    return spec.moe is None or ".self_attn." in layer


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


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT wraps the model twice; its files have the names of the wrapped modules."""
SCORE_MODULE = SCORE_WEIGHT.removesuffix(".weight")
"""The module of `modules_to_save` that the adapter of a reward model has."""

_SCORE_MODULES = {SCORE_MODULE, "classifier"}
"""PEFT adds both names to `modules_to_save` of every sequence classifier."""
_KEY = "policy.lora.adapter_path"
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
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
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}
"""Settings of PEFT that change the model in a way that has no counterpart, with the values that do
not; null does not either.
"""


def check_adapter(lora: LoraConfig, layers: Collection[str] | None, head: OutputHead) -> None:
    """Raise ConfigError unless `lora.adapter_path` is an adapter with the settings of `lora`.

    `layers` are the linear layers of the model, None if they are not known. An adapter for a model
    with the head `scores` may have a score head. Shapes are checked when the values are read.
    """
    assert lora.adapter_path is not None, "there is an adapter to check"
    directory = Path(lora.adapter_path)
    _check_files(directory)
    settings = _read_settings(directory)
    _check_settings(directory, settings, lora)
    _check_saved_modules(directory, settings, head)
    adapted = _adapted_layers(directory)
    wanted = None
    if layers is not None:
        wanted = {layer for layer in layers if lora.is_target(layer)}
    _check_layers(directory, adapted, wanted, lora)


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


def _read_settings(directory: Path) -> Mapping[str, Any]:
    path = directory / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{_KEY}: {shown_path(path)} cannot be read as JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{_KEY}: {shown_path(path)} is not a JSON object")
    return settings


def _check_settings(directory: Path, settings: Mapping[str, Any], lora: LoraConfig) -> None:
    """Raise ConfigError for a setting without a counterpart, and for one that `lora` differs in."""
    shown = shown_path(directory)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{_KEY}: {shown} is an adapter of the type {kind}; only LORA is supported"
        )
    for name, neutral in _NEUTRAL.items():
        value = settings.get(name)
        if value is not None and value not in neutral:
            raise ConfigError(
                f"{_KEY}: {shown} has {name} {value!r}, which is not supported; merge the adapter"
                " into its model with PEFT and train that, or train a new adapter"
            )
    # The values that PEFT assumes for settings that a file lacks.
    found = {
        "rank": settings.get("r", 8),
        "alpha": settings.get("lora_alpha", 8),
        "use_rslora": bool(settings.get("use_rslora", False)),
    }
    changes = []
    for key, value in found.items():
        current = getattr(lora, key)
        if value != current:
            changes.append(f"policy.lora.{key} to {json.dumps(value)} (now {json.dumps(current)})")
    if changes:
        raise ConfigError(
            f"{_KEY}: {shown} was trained with other settings: set {', '.join(changes)}"
        )


def _check_saved_modules(directory: Path, settings: Mapping[str, Any], head: OutputHead) -> None:
    """Raise ConfigError if the adapter has a layer that is trained in full, but a score head."""
    modules = settings.get("modules_to_save") or []
    others = sorted(set(modules) - _SCORE_MODULES)
    if others:
        raise ConfigError(
            f"{_KEY}: {shown_path(directory)} has modules_to_save {modules!r}, and only a score"
            " head is supported; merge the adapter into its model with PEFT and train that, or"
            " train a new adapter"
        )
    if modules and head == "vocabulary":
        raise ConfigError(
            f"{_KEY}: {shown_path(directory)} is the adapter of a reward model (modules_to_save"
            f" {modules!r}), and this run trains a language model; use it with `nemo-like rm`"
        )


def _adapted_layers(directory: Path) -> set[str]:
    """Return the names of the layers that have matrices in the file."""
    path = directory / ADAPTER_WEIGHTS
    try:
        names = read_shapes(path)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {shown_path(path)} {error}") from error
    layers = set()
    for name in names:
        if name == PREFIX + SCORE_WEIGHT:
            continue
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{_KEY}: {shown_path(path)} has the tensor {name}, which is neither a matrix A or"
                " B of a linear layer nor a score head; only these are supported"
            )
        layers.add(match[1])
    return layers


def _check_layers(
    directory: Path, adapted: set[str], wanted: set[str] | None, lora: LoraConfig
) -> None:
    """Raise ConfigError unless the adapter has exactly the layers of `target_modules`."""
    others = [layer for layer in adapted if not lora.is_target(layer)]
    if wanted is None:
        missing = []
        for target in lora.target_modules:
            if target != ALL_LINEAR and not any(
                f".{layer}".endswith(f".{target}") for layer in adapted
            ):
                missing.append(target)
    else:
        others = list(adapted - wanted)
        missing = list(wanted - adapted)
    if not others and not missing:
        return
    problem = "has no matrices of " if missing else "has matrices of "
    names = sorted(missing or others)
    more = f" and {len(names) - 1} other layers" if len(names) > 1 else ""
    raise ConfigError(
        f"{_KEY}: {shown_path(directory)} {problem}{names[0]}{more}; its layers are"
        f" {', '.join(_ends(adapted))}: set policy.lora.target_modules to them, and"
        " policy.model_name to the model that it was trained for"
    )


def _ends(layers: Iterable[str]) -> list[str]:
    """Return the last parts of the names, e.g. `q_proj`, each once."""
    return sorted({layer.rpartition(".")[2] for layer in layers})


def check_targets(config: LoraConfig, layers: Iterable[str]) -> None:
    """Raise ConfigError for a target that names none of `layers`, which can have an adapter."""
    names = list(layers)
    for target in config.target_modules:
        if target == ALL_LINEAR:
            continue
        if not any(f".{name}".endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"policy.lora.target_modules: {target!r} is not a linear layer that can have an"
                f" adapter; these are {', '.join(ends)} (experts, routers, and in models with"
                " experts all feed-forward layers, have none)"
            )
