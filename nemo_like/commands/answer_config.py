"""The config of the commands that sample answers, from their options or from a training config."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from nemo_like.config.build import build_config, to_dict
from nemo_like.config.check import find_problems
from nemo_like.config.errors import ConfigError, raise_problems
from nemo_like.config.paths import resolve_paths
from nemo_like.config.schema import RunConfig
from nemo_like.data.row_columns import check_columns
from nemo_like.distributed.errors import ClusterError, WorkerError
from nemo_like.environments.reward import RewardError
from nemo_like.models.spec import ModelSpec
from nemo_like.training.model_files import open_model_config, open_model_spec

_KEYS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer_name",
    "chat_template": "policy.chat_template",
    "precision": "policy.precision",
    "max_length": "policy.max_total_sequence_length",
    "oversize_rows": "policy.oversize_rows",
    "backend": "policy.generation.backend",
    "temperature": "policy.generation.temperature",
    "top_p": "policy.generation.top_p",
    "top_k": "policy.generation.top_k",
    "min_p": "policy.generation.min_p",
    "max_new_tokens": "policy.generation.max_new_tokens",
    "stop": "policy.generation.stop_strings",
    "batch_size": "policy.generation.hf.batch_size",
    "tensor_parallel": "policy.generation.vllm.tensor_parallel_size",
    "system_prompt": "data.system_prompt",
    "prompt_template": "data.prompt_template",
    "source_column": "data.source_column",
    "max_rows": "data.max_validation_rows",
    "column": "data.columns",
    "seed": "seed",
    "reward_timeout": "reward.timeout_s",
    "on_reward_error": "reward.on_error",
    "max_error_share": "reward.max_error_share",
}
"""The key that an option sets."""
_POLICY_KEYS = (
    "model_name",
    "tokenizer_name",
    "chat_template",
    "precision",
    "max_total_sequence_length",
    "oversize_rows",
    "generation",
)
"""Keys of `policy` of a training config that matter for answers."""
_MAX_NEW_TOKENS = 256
_UNKNOWN_LIMIT = 4096
"""Max tokens of a row of a model that does not declare its limit."""
_GPU_MEMORY = 0.9
"""Share of the GPU memory for vLLM, where no policy shares the GPU."""


@dataclass(frozen=True, kw_only=True)
class AnswerRunConfig(RunConfig):
    """Config of a command that only samples answers; keys of training have no effect."""

    kind: ClassVar[str] = "answers"

    @property
    def generates(self) -> bool:
        return True


@contextmanager
def naming_options(arguments: argparse.Namespace) -> Iterator[None]:
    """Raise the errors of the block that the user can correct as ConfigErrors that name options."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error.cause, (ConfigError, RewardError)):
            raise ConfigError(_named(str(error.cause), arguments)) from error
        raise
    except (ConfigError, ClusterError, RewardError) as error:
        raise ConfigError(_named(str(error), arguments)) from error


def answer_config(
    arguments: argparse.Namespace,
    *,
    files: Mapping[str, str],
    rewards: Mapping[str, Mapping[str, Any]] | None = None,
    base: RunConfig | None = None,
    temperature: float | None = None,
) -> AnswerRunConfig:
    """Return the checked config, with absolute paths.

    `files` are the rows by name, as `data.validation_files`. `rewards` has `functions` and `models`
    in the place of those of `base`, a training config; `temperature` is used where no option sets
    one. Raises ConfigError.
    """
    tree = _tree(arguments, files, base)
    for section, values in (rewards or {}).items():
        _set(tree, f"reward.{section}", dict(values))
    if temperature is not None and arguments.temperature is None:
        _set(tree, "policy.generation.temperature", temperature)
    # With the default limit, which is not used: the model's own is not known yet.
    spec = open_model_spec(_built(tree | {"policy": _without_lengths(tree["policy"])}))
    _set_lengths(tree, spec, arguments.max_length)
    config = _built(tree)
    raise_problems(find_problems(_single_device(config)))
    open_model_config(_single_device(config))
    return config


def with_longest_prompt(config: AnswerRunConfig, num_tokens: int) -> AnswerRunConfig:
    """Return the config for prompts of at most `num_tokens` tokens.

    The engine then reserves no memory for longer rows. The answers are the same.
    """
    policy = config.policy
    needed = num_tokens + policy.generation.max_new_tokens
    if config.environment.path is not None or needed >= policy.max_total_sequence_length:
        return config
    return replace(config, policy=replace(policy, max_total_sequence_length=needed))


def _tree(
    arguments: argparse.Namespace, files: Mapping[str, str], base: RunConfig | None
) -> dict[str, Any]:
    """Return the keys of the options over those of `base`."""
    tree: dict[str, Any] = {"policy": {}, "data": {}}
    if base is not None:
        values = to_dict(base)
        tree = {name: values[name] for name in ("seed", "data", "reward", "environment")}
        tree["policy"] = {name: values["policy"][name] for name in _POLICY_KEYS}
        _set(tree, "data.train_sets", {})
        _set(tree, "data.train_weights", {})
        _set(tree, "policy.generation.vllm.tensor_parallel_size", 1)
        for model in tree["reward"]["models"].values():
            # They score in this process.
            model["num_workers"] = 0
        if values["policy"]["oversize_rows"] == "singleton":
            _set(tree, "policy.oversize_rows", "error")
    else:
        _set(tree, "policy.generation.vllm.gpu_memory_utilization", _GPU_MEMORY)
    tree["run_name"] = "answers"
    _set(tree, "data.train_path", next(iter(files.values()), "-"))
    _set(tree, "data.validation_path", files.get(""))
    _set(tree, "data.validation_sets", {name: path for name, path in files.items() if name})
    has_gpu = _has_gpu(arguments.device)
    if base is None:
        _set(tree, "policy.precision", "bfloat16" if has_gpu else "float32")
    for option, key in _KEYS.items():
        value = getattr(arguments, option, None)
        if value is not None and option != "column":
            _set(tree, key, value)
    columns = _columns(getattr(arguments, "column", []))
    if columns:
        _set(tree, "data.columns", columns)
    tree["cluster"] = _cluster(arguments, has_gpu=has_gpu)
    # Every replica is one policy worker of the layout, which needs a row of each batch.
    _set(tree, "policy.train_global_batch_size", getattr(arguments, "replicas", 1))
    return tree


def _cluster(arguments: argparse.Namespace, *, has_gpu: bool) -> dict[str, Any]:
    """Return the section `cluster`. Raises ConfigError for a layout that is not possible."""
    replicas = getattr(arguments, "replicas", 1)
    tensor_parallel = getattr(arguments, "tensor_parallel", 1)
    for option, value in (("--replicas", replicas), ("--tensor-parallel", tensor_parallel)):
        if value < 1:
            raise ConfigError(f"{option} is {value}; it must be at least 1")
    if tensor_parallel > 1 and replicas > 1:
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel} and --replicas {replicas} cannot be combined;"
            " set one of them to 1"
        )
    if tensor_parallel > 1 and arguments.backend != "vllm":
        raise ConfigError(f"--tensor-parallel {tensor_parallel} needs --backend vllm")
    if replicas == 1:
        return {"backend": "local", "gpus_per_node": int(has_gpu)}
    return {
        "backend": "ray",
        "gpus_per_node": replicas if has_gpu else 0,
        "workers_per_node": replicas,
    }


def _set_lengths(tree: dict[str, Any], spec: ModelSpec, max_length: int | None) -> None:
    """Set the limits on tokens that neither an option nor the training config sets."""
    limit = spec.max_positions
    if max_length is not None and limit is not None and max_length > limit:
        raise ConfigError(
            f"--max-length is {max_length}, but the model has {limit} positions; set it to at most"
            " that number"
        )
    policy = tree["policy"]
    longest = policy.setdefault("max_total_sequence_length", limit or _UNKNOWN_LIMIT)
    default = max(min(_MAX_NEW_TOKENS, longest // 2), 1)
    policy.setdefault("generation", {}).setdefault("max_new_tokens", default)


def _without_lengths(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return `policy` without the limits on tokens."""
    generation = dict(policy.get("generation", {}))
    generation.pop("max_new_tokens", None)
    others = {name: value for name, value in policy.items() if name != "max_total_sequence_length"}
    return others | {"generation": generation}


def _built(tree: Mapping[str, Any]) -> AnswerRunConfig:
    """Build the config. Raises ConfigError for a value of the wrong type."""
    config, problems = build_config(AnswerRunConfig, tree)
    raise_problems(problems)
    assert config is not None
    return resolve_paths(config)


def _single_device(config: AnswerRunConfig) -> AnswerRunConfig:
    """Return the config without tensor parallelism, which a training run has only on Ray."""
    generation = config.policy.generation
    vllm = replace(generation.vllm, tensor_parallel_size=1)
    return replace(config, policy=replace(config.policy, generation=replace(generation, vllm=vllm)))


def _columns(given: list[str]) -> dict[str, str]:
    """Return `data.columns` of `--column MEANING=COLUMN`."""
    columns = {}
    for text in given:
        meaning, separator, column = text.partition("=")
        if not separator or not column:
            raise ConfigError(f"--column is {text!r}; write MEANING=COLUMN, e.g. prompt=problem")
        columns[meaning] = column
    check_columns(columns, "--column")
    return columns


def _has_gpu(device: str) -> bool:
    """Return whether a GPU is used. Raises ConfigError if one is requested and there is none."""
    if device == "cpu":
        return False
    # Imported on demand: `nemo-like --help` needs this module and not torch.
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("--device is cuda, but torch finds no GPU; use --device cpu")
    return has_gpu


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of nested mappings."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _named(text: str, arguments: argparse.Namespace) -> str:
    """Return an error text with the options in place of the keys that they set."""
    # The longest keys first: another key may be the beginning of one.
    for option, key in sorted(_KEYS.items(), key=lambda item: -len(item[1])):
        if hasattr(arguments, option) and "." in key:
            text = text.replace(key, f"--{option.replace('_', '-')}")
    return text


def described_settings(config: AnswerRunConfig) -> dict[str, Any]:
    """Return the settings that determine the answers, as JSON values."""
    policy = to_dict(config.policy)
    settings = {name: policy[name] for name in _POLICY_KEYS}
    # They have no influence on the answers, up to rounding.
    for name in ("hf", "vllm", "check_weights", "max_restarts", "progress_timeout_s"):
        del settings["generation"][name]
    settings |= {
        "seed": config.seed,
        "system_prompt": config.data.system_prompt,
        "prompt_template": config.data.prompt_template,
        "environment": to_dict(config.environment),
        "weights": weight_files(config.policy.model_name),
    }
    return settings


def weight_files(directory: str) -> dict[str, list[int]]:
    """Return size and time of change of the weight files of a local model, by name."""
    files = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        status = path.stat()
        files[path.name] = [status.st_size, status.st_mtime_ns]
    return files
