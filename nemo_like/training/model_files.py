"""Opens and checks the files of a run's model: tokenizer, chat template, configuration, weights."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.config.errors import ConfigError, raise_problems, shown_path
from nemo_like.config.parallel import named_by_keys, policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import is_possible_path, shown_value
from nemo_like.data.chat import ChatEncoder
from nemo_like.models.layout_check import model_problems, vllm_problems
from nemo_like.models.pretrained import load_model_config, load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


def open_encoder(config: RunConfig, *, local_files_only: bool = False) -> ChatEncoder:
    """Load the policy's tokenizer with its chat template, or with `policy.chat_template`.

    With `local_files_only` a hub name must be in this machine's cache. Raises ConfigError for
    missing or unusable files.
    """
    key = "policy.tokenizer_name" if config.policy.tokenizer_name else "policy.model_name"
    name = config.policy.tokenizer_name or config.policy.model_name
    try:
        tokenizer = load_tokenizer(
            name, local_files_only=local_files_only or not _is_hub_name(name)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: no tokenizer can be loaded from {name!r} ({error}); give the directory of a"
            " Hugging Face model with its tokenizer, or a hub name such as"
            " HuggingFaceTB/SmolLM2-135M-Instruct"
        ) from error
    if config.policy.chat_template is not None:
        tokenizer.chat_template = _read_chat_template(Path(config.policy.chat_template))
    data = config.data
    try:
        return ChatEncoder(
            tokenizer,
            system_prompt=data.system_prompt,
            prompt_template=data.prompt_template,
            train_on=data.train_on,
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


def _read_chat_template(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(
            f"policy.chat_template: there is no file {str(path)!r}; give a Jinja file or leave"
            " it null"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"policy.chat_template: {shown_path(path)} cannot be read as UTF-8 text: {error}"
        ) from error


def open_model_config(config: RunConfig, *, local_files_only: bool = False) -> PretrainedConfig:
    """Load the model's configuration and check it against its files, the engine and `parallel`.

    With `local_files_only` a hub name must be in this machine's cache. Raises ConfigError for a
    missing or damaged file, and for a model that the engine, `parallel` or vLLM does not support.
    """
    name = config.policy.model_name
    path = Path(name).expanduser()
    subject = f"policy.model_name is {name!r}, "
    if not is_possible_path(str(path)):
        raise ConfigError(f"policy.model_name is {shown_value(name)}, which is too long for a path")
    if path.is_dir():
        _check_model_directory(path, subject)
    model_config = _load_model_config(name, subject, local_files_only=local_files_only)
    spec = ModelSpec.from_config(model_config, name)
    if config.policy.engine == "megatron":
        # megatron-core is an optional dependency.
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                "policy.engine is megatron, but megatron-core is not installed: pip install"
                " 'nemo-like[megatron]'"
            )
        family_of(spec, name)
    layout_problems = model_problems(policy_layout(config), config.policy.engine, spec)
    problems = named_by_keys(layout_problems, config.cluster)
    generation = config.policy.generation
    if config.generates and generation.backend == "vllm":
        problems += vllm_problems(
            spec,
            generation.vllm,
            max_total_length=config.policy.max_total_sequence_length,
            is_on_cpu=config.cluster.gpus_per_node == 0,
        )
    raise_problems(problems)
    return model_config


def open_model_spec(config: RunConfig) -> ModelSpec:
    """Read the sizes of the model, without further checks. Raises ConfigError as above."""
    name = config.policy.model_name
    subject = f"policy.model_name is {name!r}, "
    model_config = _load_model_config(name, subject, local_files_only=False)
    return ModelSpec.from_config(model_config, name)


def weight_file_problem(path: Path) -> str | None:
    """Return the problem of a safetensors file, or None if its header and its size agree.

    The header is a JSON object after its length in 8 bytes; the tensors follow without a gap
    (https://github.com/huggingface/safetensors, "Format").
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            # Checked before the read: a damaged length could exceed the memory.
            if header_size > min(size, MAX_HEADER_BYTES):
                raise ValueError("the length of the header exceeds the file")
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected_size = 8 + header_size + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "is damaged: it does not begin with the header of a safetensors file"
    if size != expected_size:
        return f"is damaged: it has {size:,} bytes and should have {expected_size:,}"
    return None


def _load_model_config(
    name: str,
    subject: str,
    *,
    local_files_only: bool,
) -> PretrainedConfig:
    """Load config.json from a directory or the hub. `subject` begins the error message."""
    try:
        return load_model_config(name, local_files_only=local_files_only or not _is_hub_name(name))
    except (OSError, ValueError) as error:
        # transformers raises ValueError for a bad config.json, also for one in the cache.
        if Path(name).expanduser().is_dir() or isinstance(error, ValueError):
            raise ConfigError(f"{subject}whose config.json cannot be used: {error}") from error
        raise ConfigError(
            f"{subject}but there is no such directory, and no model of that name in this"
            " machine's Hugging Face cache"
        ) from error


def _check_model_directory(path: Path, subject: str) -> None:
    """Raise ConfigError for missing or damaged files. `subject` begins the message."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{subject}a directory without config.json; give that of a Hugging Face model"
        )
    if not any(path.glob("*.safetensors")):
        gguf = next(path.glob("*.gguf"), None)
        solution = "save the model as safetensors"
        if gguf is not None:
            solution = f"nemo-like convert {gguf} --out DIR makes some of the GGUF file"
        raise ConfigError(f"{subject}a directory without *.safetensors weights; {solution}")
    for file in _weight_files(path, subject):
        problem = weight_file_problem(file)
        if problem is not None:
            raise ConfigError(
                f"{subject}but its file {shown_path(file)} {problem}; download or export the model"
                " again"
            )


def _weight_files(directory: Path, subject: str) -> list[Path]:
    """Return the safetensors files of a model directory and those that its index names.

    Raises ConfigError for a bad index. `subject` begins the message.
    """
    names = {file.name for file in directory.glob("*.safetensors")}
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names |= _indexed_names(index, subject)
    return [directory / name for name in sorted(names)]


def _indexed_names(index: Path, subject: str) -> set[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        is_plain = all(name == Path(name).name for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{subject}but its file {shown_path(index)} is not an index of weight files"
            f" ({type(error).__name__}: {error})"
        ) from error
    # An index comes with a downloaded model: it must not direct reads to other directories.
    if not is_plain:
        raise ConfigError(
            f"{subject}but its file {shown_path(index)} names files outside of the directory"
        )
    return names


def _is_hub_name(name: str) -> bool:
    """Return True for `owner/model`, unless a local path has that name.

    Only such names are looked up over the network: for a mistyped path the look-up would wait
    for the timeout of the connection.
    """
    return not Path(name).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
