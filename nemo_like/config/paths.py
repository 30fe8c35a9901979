"""Paths of a config mean the same in every process: relative ones are made absolute once, by the
driver, and models of the Hugging Face hub are downloaded there.

Workers run in another working directory, where a relative path would not be found. A hub name is
downloaded to the cache of the library, where the path of a directory has the commit:
`<cache>/models--OWNER--NAME/snapshots/COMMIT`. Workers get this path. A node without these files
downloads the same commit; the library locks each file, so the processes of a node download it once.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_like.config.errors import (
    ConfigError,
    is_possible_path,
    printable,
    shortened,
    shown_path,
    shown_value,
    similar_path_text,
)
from nemo_like.config.rollout import RewardModelConfig
from nemo_like.config.schema import PolicyConfig, RunConfig

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

_HUB_NAME = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+")
_SNAPSHOT = re.compile(r"/.+/models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/[0-9a-f]{40}")
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Configuration and tokenizer. Pickle files (*.bin, *.pt, *.pth) are never downloaded."""
_WEIGHTS = "model*.safetensors"
_FOLDERS = "*/*"


def model_directory(key: str, name: str, *, weights: bool) -> str:
    """Return the absolute path of the model or tokenizer that `key` names.

    A directory has priority over the hub's model of that name; links are kept. For a hub name, the
    files that are not in the cache are downloaded, with `weights` also the weights.
    Raises ConfigError if there is no such model, or if it cannot be downloaded.
    """
    if not is_possible_path(name):
        raise ConfigError(f"{key} is {shown_value(name)}, which is too long for a path")
    # `Path.resolve` would follow links, which may point to a new version later.
    path = os.path.abspath(os.path.expanduser(name))
    repository = hub_name(path)
    if repository is not None:
        snapshots = Path(path).parent
        return _download(
            key, repository, Path(path).name, str(snapshots.parents[1]), weights=weights
        )
    if os.path.isdir(path):
        return path
    # A mistyped path of another form is not looked up, which could take as long as a timeout.
    if _HUB_NAME.fullmatch(name) is not None:
        return _download(key, name, None, None, weights=weights)
    solution = "give the directory of a Hugging Face model, or the name of one on the hub"
    if path.endswith(".gguf") and os.path.isfile(path):
        solution = f"nemo-like convert {name} --out DIR makes one of this file"
    elif re.fullmatch(r"[\d.]+[mb]", name.lower()):
        solution = f"a size is for `nemo-like plan` only; {solution}"
    raise ConfigError(
        f"{key} is {name!r}, but there is no such directory{similar_path_text(Path(path))};"
        f" {solution} (OWNER/NAME, e.g. HuggingFaceTB/SmolLM2-135M-Instruct)"
    )


def require_model_directory(key: str, path: str, *, weights: bool = True) -> None:
    """Make sure that a path of `model_directory` is a directory on this node. For workers.

    Raises ConfigError if it is not, and cannot be downloaded.
    """
    if hub_name(path) is not None:
        model_directory(key, path, weights=weights)
    elif not os.path.isdir(path):
        raise ConfigError(
            f"{key}: {path} is not a directory on node {socket.gethostname()}, where a worker needs"
            " it; put the model on a file system that all nodes mount at the same path"
        )


def hub_name(path: str) -> str | None:
    """Return the name of the model in a directory of the library's cache; None for other paths."""
    snapshot = _SNAPSHOT.fullmatch(path)
    return None if snapshot is None else f"{snapshot['owner']}/{snapshot['name']}"


def hub_error_text(error: Exception, repository: str, *, is_model: bool = True) -> str:
    """Return what an exception of huggingface_hub means for the user, and the fix."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    kind = "model" if is_model else "data set"
    page = f"{constants.ENDPOINT}/{'' if is_model else 'datasets/'}{repository}"
    if isinstance(error, GatedRepoError):
        return (
            f"it is gated: accept the license of this {kind} at {page}, and set HF_TOKEN to a token"
            f" of the account that accepted it ({constants.ENDPOINT}/settings/tokens)"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the hub {constants.ENDPOINT} has no such {kind}: correct the name, or set HF_TOKEN to"
            " a token that can read it if it is private"
        )
    copy = f"hf download {'' if is_model else '--repo-type dataset '}{repository}"
    elsewhere = f"run `{copy}` on a machine that can, and give the path of the files"
    if constants.HF_HUB_OFFLINE:
        return (
            f"its files are not all in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE"
            f" forbids to download them: unset it, or {elsewhere}"
        )
    # The library describes a failed connection in several sentences.
    cause = error.__cause__ or error
    reason = shortened(printable(" ".join(str(cause).split())), 300)
    return (
        f"it cannot be downloaded from {constants.ENDPOINT} ({type(cause).__name__}: {reason});"
        f" check the connection, HF_ENDPOINT and HF_TOKEN, or {elsewhere}"
    )


def connection_error(repository: str, *, is_model: bool = True) -> Exception | None:
    """Return why the hub does not answer; None if it does, with the repository or an error.

    The requests of `snapshot_download` have no time limit; it is then called for the cache alone.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    kind = "model" if is_model else "dataset"
    try:
        HfApi().repo_info(repository, repo_type=kind, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HfHubHTTPError:
        return None
    except Exception as error:  # noqa: BLE001 (of the network library below huggingface_hub)
        return error
    return None


def _download(
    key: str, repository: str, commit: str | None, cache: str | None, *, weights: bool
) -> str:
    """Download what is missing of `commit`, by default the newest; return its directory."""
    # On demand: its import takes half a second, and few runs need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    # A commit that is in the cache needs no request.
    unreachable = None if commit is not None else connection_error(repository)
    fetch = partial(
        snapshot_download,
        repository,
        cache_dir=cache,
        ignore_patterns=_FOLDERS,
        local_files_only=unreachable is not None,
    )
    subject = f"{key} is {repository!r}"
    try:
        path = fetch(revision=commit, allow_patterns=list(_DESCRIPTION), tqdm_class=_hidden_bar())
        if weights and _has_missing_weights(repository, path, cache, subject):
            fetch(revision=Path(path).name, allow_patterns=_WEIGHTS)
    except ConfigError:
        raise
    except Exception as error:
        # They depend on the network library below huggingface_hub.
        if commit is None and not isinstance(error, GatedRepoError):
            # The name may as well be a mistyped path.
            subject += f", which is not a directory{_nearby_text(Path(repository).absolute())}"
        text = hub_error_text(unreachable or error, repository)
        raise ConfigError(f"{subject}; {text}") from error
    return path


def _nearby_text(path: Path) -> str:
    """Return the suggestion of a directory with the name of `path`, of a similar path, or the
    models beside it.
    """
    models = sorted(Path.cwd().glob(f"*/{path.name}/config.json"))
    if models:
        return f" (did you mean {shown_path(models[0].parent)!r}?)"
    beside = [file.parent.name for file in sorted(path.parent.glob("*/config.json"))]
    has_models = f" ({shown_path(path.parent)} has {', '.join(beside[:10])})" if beside else ""
    return similar_path_text(path) or has_models


def _has_missing_weights(repository: str, path: str, cache: str | None, subject: str) -> bool:
    """Return whether weights must be downloaded, and print their size.

    Raises ConfigError for a model without weights in safetensors. `subject` begins its message.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    try:
        tree = get_cached_repo_tree(repository, revision=Path(path).name, cache_dir=cache)
    except CachedRepoTreeNotFoundError:
        # An older version of the library filled the cache, and the hub cannot be reached.
        return True
    patterns = {"allow_patterns": _WEIGHTS, "ignore_patterns": _FOLDERS}
    files: list[RepoFile] = list(filter_repo_objects(tree, **patterns, key=lambda file: file.path))
    if not files:
        others = [file.path for file in tree if file.path.endswith((".bin", ".gguf"))]
        raise ConfigError(
            f"{subject}, which has no {_WEIGHTS} ({shortened(', '.join(others)) or 'no weights'});"
            " pickle files can execute code and are not read: use a model that has safetensors, or"
            " save it with `save_pretrained` of transformers and give the directory"
        )
    missing = [file.size for file in files if not os.path.isfile(os.path.join(path, file.path))]
    if missing:
        print(
            f"downloading {repository} ({sum(missing) / 1e6:,.0f} MB) to {path}",
            file=sys.stderr,
            flush=True,
        )
    return bool(missing)


def _hidden_bar() -> Any:
    """Return a progress bar that shows nothing, for the small files."""
    from huggingface_hub.utils import tqdm

    class HiddenBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

    return HiddenBar


HUB_PREFIX = "hf://"
"""Beginning of a data set of the Hugging Face hub."""

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def resolve_paths(config: ConfigT) -> ConfigT:
    """Return the config with `~` expanded and absolute paths, relative ones taken from the working
    directory of this process; links are kept.

    Models and tokenizers on the hub are downloaded, and their names replaced by their directories.
    Raises ConfigError for a model that does not exist; see `model_directory`.
    """
    data = config.data
    models = {name: _reward_model(name, model) for name, model in config.reward.models.items()}
    validation_path = data.validation_path
    if validation_path is not None:
        validation_path = _data(validation_path)
    return replace(
        config,
        output_dir=_absolute(config.output_dir),
        policy=resolve_policy(config.policy),
        data=replace(
            data,
            train_path=_data(data.train_path),
            train_sets={name: _data(path) for name, path in data.train_sets.items()},
            validation_path=validation_path,
            validation_sets={name: _data(path) for name, path in data.validation_sets.items()},
        ),
        reward=replace(config.reward, models=models),
    )


def resolve_policy(policy: PolicyConfig, *, weights: bool = True) -> PolicyConfig:
    """Return `policy` with absolute paths; see `resolve_paths`. `weights` is for its model."""
    lora = policy.lora
    if lora.adapter_path is not None:
        lora = replace(lora, adapter_path=_absolute(lora.adapter_path))
    return replace(
        policy,
        model_name=model_directory("policy.model_name", policy.model_name, weights=weights),
        tokenizer_name=_tokenizer("policy", policy.tokenizer_name),
        chat_template=_template(policy.chat_template),
        lora=lora,
    )


def _reward_model(name: str, model: RewardModelConfig) -> RewardModelConfig:
    key = f"reward.models.{name}"
    return replace(
        model,
        model_name=model_directory(f"{key}.model_name", model.model_name, weights=True),
        tokenizer_name=_tokenizer(key, model.tokenizer_name),
        chat_template=_template(model.chat_template),
    )


def _tokenizer(section: str, name: str | None) -> str | None:
    if name is None:
        return None
    return model_directory(f"{section}.tokenizer_name", name, weights=False)


def _template(path: str | None) -> str | None:
    return None if path is None else _absolute(path)


def _data(path: str) -> str:
    """Return the path of a data file or directory; a name of the hub is not changed."""
    return path if path.startswith(HUB_PREFIX) else _absolute(path)


def _absolute(path: str) -> str:
    # `Path.resolve` would follow links, which may point to a new version later.
    return os.path.abspath(os.path.expanduser(path))
