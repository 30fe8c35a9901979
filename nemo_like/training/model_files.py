"""Opens and checks the models of a run: tokenizer, configuration, weights, adapters, frozen models.

A checkpoint has no weights of frozen models: the model below adapters, the reference, teachers
and reward models. It continues only with the models that it was trained with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_like.config.errors import ConfigError, Problem, raise_problems, shown_path
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import located_problems, policy_layout
from nemo_like.config.paths import hub_name, model_directory
from nemo_like.config.rollout import RewardModelConfig
from nemo_like.config.schema import (
    ClusterConfig,
    DataConfig,
    OutputHead,
    ParallelConfig,
    PolicyConfig,
    Switch,
)
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.image_encoding import ImageEncoder
from nemo_like.data.routed_experts import routed_bytes
from nemo_like.models.adapters import ADAPTER_WEIGHTS, check_adapters
from nemo_like.models.layout_check import frozen_weights, model_problems
from nemo_like.models.pretrained import (
    check_model_type,
    load_model_config,
    load_tokenizer,
    with_output_head,
)
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    read_header,
    weight_paths,
    weight_sizes,
    weights_digest,
)
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import microbatch_budget, shared_prefix_mode
from nemo_like.prediction.memory import GIB, MemoryModel
from nemo_like.prediction.placement import num_adapter_params, policy_placement
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.images import check_trains_images
from nemo_like.training.policy_backends import policy_backend

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def open_encoder(
    policy: PolicyConfig,
    data: DataConfig,
    vocab_size: int | None,
    images: ImageEncoder | None = None,
) -> ChatEncoder:
    """Load the policy's tokenizer with its chat template, or with `policy.chat_template`.

    `vocab_size` is the size of the model's vocabulary, None if it is not known; `images` encodes
    the images of rows. Raises ConfigError for missing or unusable files, and for a chat template
    that does not write images.
    """
    encoder = load_encoder(
        policy,
        "policy",
        vocab_size,
        system_prompt=data.system_prompt,
        prompt_template=data.prompt_template,
        # The encoding of SFT rows selects the last turn from all of the assistant.
        train_on="all" if data.train_on == "all" else "assistant",
        chat_template_kwargs=data.chat_template_kwargs,
    )
    if images is not None:
        images.check_template(encoder.template)
        encoder.images = images
    return encoder


def load_encoder(
    section: PolicyConfig | RewardModelConfig,
    section_key: str,
    vocab_size: int | None,
    *,
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    train_on: Literal["assistant", "all"] = "assistant",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatEncoder:
    """Load the tokenizer and the chat template that a section names; see `open_encoder`.

    `section_key` is the key of the section, for messages.
    """
    key = f"{section_key}.tokenizer_name" if section.tokenizer_name else f"{section_key}.model_name"
    name = section.tokenizer_name or section.model_name
    directory = model_directory(key, name, weights=False)
    try:
        tokenizer = load_tokenizer(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: no tokenizer can be loaded from {name!r} ({error}); give the directory or the"
            " hub name of a Hugging Face model with its tokenizer"
        ) from error
    if section.chat_template is not None:
        template_key = f"{section_key}.chat_template"
        tokenizer.chat_template = _read_chat_template(Path(section.chat_template), template_key)
    try:
        return ChatEncoder(
            tokenizer,
            system_prompt=system_prompt,
            prompt_template=prompt_template,
            train_on=train_on,
            vocab_size=vocab_size,
            chat_template_kwargs=chat_template_kwargs,
        )
    except ConfigError:
        raise
    except Exception as error:
        # The library does not check the types in tokenizer_config.json: a wrong one raises
        # an exception of any type when the tokenizer is first used.
        raise ConfigError(
            f"{key}: the tokenizer of {name!r} cannot be used ({type(error).__name__}: {error});"
            " correct its tokenizer_config.json, or save the tokenizer again"
        ) from error


def _read_chat_template(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}: {shown_path(path)} cannot be read as UTF-8 text ({error}); give a Jinja file"
            " or leave it null"
        ) from error


def open_model_config(
    policy: PolicyConfig,
    parallel: ParallelConfig,
    cluster: ClusterConfig,
    needs: RunNeeds,
    *,
    is_trained: bool = True,
) -> PretrainedConfig:
    """Load the model's configuration and check it against its files, the engine and `parallel`.

    Raises ConfigError for a missing or damaged file, and for a model that the engine, `parallel` or
    vLLM does not support.
    """
    name = policy.model_name
    stored = load_checked_config(name, _POLICY)
    # vLLM generates with models that the engines do not train.
    if is_trained:
        has_images = check_model_type(
            stored, needs.head, name, _POLICY, trains_images=needs.trains_images
        )
        if has_images:
            layout = policy_layout(parallel, cluster)
            check_trains_images(policy, layout, needs, stored.model_type)
    model_config = with_output_head(stored, needs.head, name)
    spec = ModelSpec.from_config(model_config, name)
    policy_backend(policy).check_model(spec, name)
    layout_problems = model_problems(policy_layout(parallel, cluster), policy.engine, spec)
    problems = located_problems(layout_problems, cluster)
    is_on_cpu = cluster.gpus_per_node == 0
    if needs.rollouts is not None:
        problems += generation_backend(policy).problems(policy, spec, is_on_cpu=is_on_cpu)
    if policy.router_replay is True and spec.moe is None:
        key = "policy.router_replay"
        problems.append(
            Problem((key,), f"{key} is true, but {name} has no experts: set it to auto or false")
        )
    if needs.uses_experts and policy.may_record_experts(is_on_cpu=is_on_cpu):
        problems += _routed_experts_problems(policy, spec, needs.batch.num_rows)
    raise_problems(problems)
    # Raises for a model whose rows cannot share prefixes.
    shared_prefix_mode(policy, spec)
    _check_optimizer(policy, parallel, spec)
    check_adapters(policy, spec, parallel.tensor)
    return model_config


def _routed_experts_problems(policy: PolicyConfig, spec: ModelSpec, num_rows: int) -> list[Problem]:
    """Return a problem if the experts of a rollout may exceed their budget."""
    if spec.moe is None:
        return []
    token_bytes = routed_bytes(spec.moe.num_experts) * len(spec.moe.layers)
    token_bytes *= spec.moe.num_active_experts
    num_tokens = num_rows * policy.max_total_sequence_length
    gib = token_bytes * num_tokens / GIB
    key = "policy.router_replay_gib"
    limit = policy.router_replay_gib
    if gib <= limit:
        return []
    text = (
        f"the experts of a rollout may take {gib:.3g} GiB of the driver's memory: {token_bytes}"
        f" bytes for each of {num_rows} x {policy.max_total_sequence_length}"
        f" tokens. That is above {key} {limit:g}: raise it, or set policy.router_replay to false"
    )
    return [Problem((key, "policy.router_replay"), text)]


def load_checked_config(name: str, key: str) -> PretrainedConfig:
    """Load the configuration of the model that `key` names, and check its files.

    Raises ConfigError for a missing or damaged file.
    """
    directory = model_directory(key, name, weights=False)
    subject = f"{key} is {name!r}, "
    # The library checks the size of a download, and a command may not have needed the weights.
    if hub_name(directory) is None:
        _check_model_directory(Path(directory), subject)
    model_config = _load_model_config(directory, subject)
    _check_not_quantized(Path(directory), model_config, subject)
    return model_config


@dataclass(frozen=True)
class RewardModelFiles:
    """The files of a reward model, without its weights."""

    spec: ModelSpec
    encoder: ChatEncoder
    """With the reward model's tokenizer; it adds no prompts."""
    max_length: int | None
    """Max tokens of a conversation; None without a limit."""


def open_reward_model(name: str, config: RewardModelConfig) -> RewardModelFiles:
    """Open the files of `reward.models.<name>`.

    Raises ConfigError for missing or damaged files, for a model that is not one for sequence
    classification with one output, and for a limit above the positions of the model.
    """
    key = f"reward.models.{name}"
    model = load_checked_config(config.model_name, f"{key}.model_name")
    architecture = str((getattr(model, "architectures", None) or ["model of no architecture"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{key}.model_name is {config.model_name!r}, a {architecture}, which has no score head:"
            " give the directory that `nemo-like rm` exports (<output_dir>/<run_name>/hf), or"
            " another model for sequence classification with one label"
        )
    num_labels = int(getattr(model, "num_labels", 1))
    if num_labels != 1:
        raise ConfigError(
            f"{key}.model_name is {config.model_name!r}, a classifier of {num_labels} labels; a"
            " reward model has one output (num_labels 1 in config.json)"
        )
    check_model_type(model, "scores", config.model_name, f"{key}.model_name")
    spec = ModelSpec.from_config(model, config.model_name)
    limit = spec.max_positions
    if config.max_length is not None and limit is not None and config.max_length > limit:
        raise ConfigError(
            f"{key}.max_length is {config.max_length}, above the {limit} positions of the model"
            f" {config.model_name!r}: lower it, or set it to null for that number"
        )
    encoder = load_encoder(config, key, spec.vocab_size)
    return RewardModelFiles(spec, encoder, config.max_length or limit)


def _check_optimizer(policy: PolicyConfig, parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a missing library, or patterns of `policy.freeze` that cannot be."""
    if policy.optimizer.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "policy.optimizer.name is adamw_8bit, but torchao is not installed: pip install"
            " 'nemo-like[optim]', or set policy.optimizer.name to adamw"
        )
    # A reward model has no output embedding, but a scalar head.
    sizes = None if spec.head == "scores" else weight_sizes(spec)
    if not policy.freeze or sizes is None:
        # The workers check the names of a model whose names are not known here.
        return
    names = {name: name for name in sizes}
    if spec.is_tied:
        names["lm_head.weight"] = "model.embed_tokens.weight"
    frozen = frozen_weights(policy.freeze, names)
    policy_backend(policy).check_frozen(frozen, spec, policy.model_name, parallel)


def open_model_spec(policy: PolicyConfig, head: OutputHead = "vocabulary") -> ModelSpec:
    """Read the sizes of the model, without further checks. Raises ConfigError as above."""
    name = policy.model_name
    directory = model_directory("policy.model_name", name, weights=False)
    model_config = _load_model_config(directory, f"policy.model_name is {name!r}, ")
    return ModelSpec.from_config(model_config, name).with_output_head(head)


def _load_model_config(directory: str, subject: str) -> PretrainedConfig:
    """Load config.json of a directory. `subject` begins the error message."""
    _require_config_file(Path(directory), subject)
    try:
        return load_model_config(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{subject}whose config.json cannot be used: {error}") from error


def _require_config_file(path: Path, subject: str) -> None:
    """Raise ConfigError for a directory without config.json. `subject` begins the message."""
    if (path / "config.json").is_file():
        return
    solution = "give the directory of a Hugging Face model"
    if (path / "adapter_config.json").is_file():
        solution = (
            "it has an adapter: give the merged model that the run exported (its hf"
            " directory), or the one that `nemo-like export` writes"
        )
    elif any((path / part).is_dir() for part in ("checkpoints", "policy")):
        solution = (
            f"it is a run or one of its checkpoints: give the model that `nemo-like export"
            f" {shown_path(path)} --out DIR` writes"
        )
    if (path / "hf" / "config.json").is_file():
        solution = f"give the model that this run exported, {shown_path(path / 'hf')}"
    raise ConfigError(f"{subject}a directory without config.json; {solution}")


def _check_model_directory(path: Path, subject: str) -> None:
    """Raise ConfigError for missing or damaged files. `subject` begins the message."""
    _require_config_file(path, subject)
    try:
        files = weight_paths(path)
    except ValueError as error:
        raise ConfigError(
            f"{subject}but its file {shown_path(path / INDEX_NAME)} {error}"
        ) from error
    if not files:
        gguf = next(path.glob("*.gguf"), None)
        solution = "save the model as safetensors"
        if gguf is not None:
            solution = f"nemo-like convert {gguf} --out DIR makes some of the GGUF file"
        elif any(path.glob("*.safetensors")):
            solution = f"it has others than {WEIGHTS_NAME}, and no {INDEX_NAME}"
        raise ConfigError(f"{subject}a directory without *.safetensors weights; {solution}")
    for file in files:
        try:
            # An index comes with a downloaded model: it must not direct reads elsewhere.
            if file.parent != path or file.name == "..":
                raise ValueError("is outside of the directory")
            read_header(file)
        except ValueError as error:
            raise ConfigError(
                f"{subject}but its file {shown_path(file)} {error}; download or export the"
                " model again"
            ) from error


def _check_not_quantized(path: Path, model_config: PretrainedConfig, subject: str) -> None:
    """Raise ConfigError for weights in a quantized format. `subject` begins the message.

    A `quantization_config` that another tool left in a model with plain weights has no effect.
    """
    try:
        headers = [read_header(file) for file in weight_paths(path)]
    except ValueError:
        # Files of a download that is not complete.
        headers = []
    dtypes = {entry["dtype"] for header in headers for entry in header.values()}
    settings = getattr(model_config, "quantization_config", None)
    is_quantized = any(dtype.startswith("F8") for dtype in dtypes)
    if settings is not None:
        is_quantized |= not headers or not dtypes <= _FLOATING_POINT
    if not is_quantized:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    raise ConfigError(
        f"{subject}a model with quantized weights (quantization_config in its config.json:"
        f" {method}), which cannot be trained; use the original model in bfloat16 or"
        " float32 (policy.lora.quantization=nf4 trains adapters on it in 4 bits)"
    )


_FLOATING_POINT = {"F64", "F32", "F16", "BF16"}
_POLICY = "policy.model_name"
_ADAPTER = "policy.lora."
_REFERENCE = f"{_ADAPTER}adapter_path"


def frozen_models(
    policy: PolicyConfig, needs: RunNeeds, *, policy_only: bool = False
) -> dict[str, str]:
    """Return the identities of the frozen models of a run for its checkpoints, by config key.

    They include the settings on which adapters depend. With `policy_only`
    teachers and reward models are left out. Raises ConfigError for a file that cannot be read.
    """
    adapter = policy.adapter
    identities = {f"{_ADAPTER}enabled": str(adapter is not None)}
    if adapter is not None:
        for name in ("rank", "alpha", "use_rslora", "quantization", "reference"):
            identities[_ADAPTER + name] = str(getattr(adapter, name))
        identities[f"{_ADAPTER}target_modules"] = ", ".join(sorted(adapter.target_modules))
    for key, (name, _) in _frozen_names(policy, needs).items():
        directory = Path(name).expanduser()
        if (policy_only and key != _POLICY) or not directory.is_dir():
            continue
        try:
            is_adapter = key == _REFERENCE
            paths = [directory / ADAPTER_WEIGHTS] if is_adapter else weight_paths(directory)
            identities[key] = weights_digest(paths)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: {shown_path(directory)} cannot be read: {error}") from error
    return identities


def check_frozen_models(
    saved: Mapping[str, str],
    current: Mapping[str, str],
    policy: PolicyConfig,
    needs: RunNeeds,
    checkpoint: Path,
) -> None:
    """Raise ConfigError if `saved`, the identities in a checkpoint, are not `current`.

    Both come from `frozen_models`. An identity that one of them lacks is not compared. The adapters
    of a checkpoint would be loaded without an error with another alpha, and be another model.
    """
    changed = {key: value for key, value in current.items() if saved.get(key, value) != value}
    names = _frozen_names(policy, needs)
    for key in changed.keys() & names.keys():
        name, role = names[key]
        raise ConfigError(
            f"{key} is {name!r}, whose weights differ from the weights that"
            f" {shown_path(checkpoint)} was trained with as {role}: set it back, or restore the"
            " files, or start a new run"
        )
    if changed:
        settings = [f"{key} was {saved[key]} and is {value}" for key, value in changed.items()]
        raise ConfigError(
            f"{shown_path(checkpoint)} was trained with other LoRA settings: {'; '.join(settings)}."
            " Set them back, or start a new run (policy.lora.adapter_path continues from an"
            " exported adapter)"
        )


def _frozen_names(policy: PolicyConfig, needs: RunNeeds) -> dict[str, tuple[str, str]]:
    """Return directory and role of each frozen model by its config key."""
    names = {key: (name, "a teacher") for key, name in needs.teachers.items()}
    if policy.adapter is not None:
        names[_POLICY] = (policy.model_name, "the frozen weights of its adapters")
        if policy.lora.reference == "adapter":
            names[_REFERENCE] = (str(policy.lora.adapter_path), "the reference policy")
    elif needs.reference:
        names[_POLICY] = (policy.model_name, "the reference policy")
    if needs.rollouts is not None:
        for name, model in needs.rollouts.rewards.models.items():
            names[f"reward.models.{name}.model_name"] = (model.model_name, "a reward model")
    return names


def adapter_line(policy: PolicyConfig, needs: RunNeeds, spec: ModelSpec) -> str | None:
    """Return the line about adapters, for the log and `nemo-like validate`; None without.

    Example: `LoRA: rank 16, scale 2, 4,884,480 of 139,400,000 parameters are trained (3.5 %)`.
    """
    adapter = policy.adapter
    if adapter is None:
        return None
    line = f"LoRA: rank {adapter.rank}, scale {adapter.scale:g}"
    if adapter.is_quantized:
        line += f", frozen linear layers in {adapter.quantization}"
    num_adapter = num_adapter_params(spec, adapter)
    if num_adapter > 0:
        # The head of a reward model is trained besides the adapters.
        num_trained = num_adapter + (spec.head_params if spec.head == "scores" else 0)
        total = spec.num_params + num_adapter
        line += f", {num_trained:,} of {total:,} parameters are trained ({num_trained / total:.2%})"
    if adapter.adapter_path is not None:
        line += f", from the adapter {adapter.adapter_path}"
    if needs.reference:
        has_adapter = adapter.reference == "adapter"
        line += f"; reference: the model {'with this adapter' if has_adapter else 'without it'}"
    return line


def recorded_experts(policy: PolicyConfig, needs: RunNeeds) -> Switch:
    """Return `policy.router_replay` for the generator: `false` where no policy uses the experts."""
    mode = policy.recorded_experts
    if not needs.uses_experts or open_model_spec(policy).moe is None:
        return False
    return policy_backend(policy).recorded_experts(mode, policy.model_name)


def policy_memory(
    policy: PolicyConfig, layout: ParallelLayout, needs: RunNeeds, spec: ModelSpec, device_type: str
) -> tuple[int, MemoryModel]:
    """Return the tokens of the largest training microbatch, and the memory of a policy worker."""
    teachers = [
        ModelSpec.from_config(load_model_config(name), name) for name in needs.teachers.values()
    ]
    placement = policy_placement(
        policy,
        layout,
        needs_reference=needs.reference,
        device_type=device_type,
        teachers=tuple(teachers),
        keeps_teacher_embeddings=needs.keeps_teacher_embeddings,
    )
    max_tokens, max_rows = microbatch_budget(policy, "train")
    if max_tokens is None:
        assert max_rows is not None, "a budget limits tokens or rows"
        max_tokens = max_rows * policy.max_total_sequence_length
    return max_tokens, MemoryModel(spec, placement)
