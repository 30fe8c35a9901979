"""The identity of frozen models, which are read from their files at every start of a run.

A checkpoint has no weights of frozen models: the model below LoRA adapters, the reference, teachers
and reward models. It continues only with the models that it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.schema import RunConfig
from nemo_like.models.weight_files import weights_digest

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

    Both are those of `frozen_models`. An identity that one of them lacks is not compared.
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
