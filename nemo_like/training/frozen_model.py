"""The identity of frozen weights, which are read from the model's files at every start of a run.

A checkpoint of LoRA adapters, or of a run with a reference, continues only with the model that it
was trained with, and has none of its frozen weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.schema import RunConfig
from nemo_like.models.weight_digest import weights_digest

_DIGEST = "frozen_weights"


def frozen_model(config: RunConfig) -> dict[str, str]:
    """Return the identity of the frozen weights of a run for its checkpoints.

    It is empty for a run without frozen weights. Raises ConfigError for a file that cannot be read.
    """
    directory = Path(config.policy.model_name).expanduser()
    is_frozen = config.policy.lora.enabled or config.needs_reference
    if not is_frozen or not directory.is_dir():
        return {}
    try:
        return {_DIGEST: weights_digest(directory)}
    except OSError as error:
        raise ConfigError(
            f"policy.model_name: {shown_path(directory)} cannot be read: {error}"
        ) from error


def check_frozen_model(
    saved: Mapping[str, str],
    current: Mapping[str, str],
    config: RunConfig,
    checkpoint: Path,
) -> None:
    """Raise ConfigError if `saved`, the identity in a checkpoint, is not `current`.

    Both are those of `frozen_model`. An identity that one of them lacks is not compared.
    """
    if _DIGEST not in saved or _DIGEST not in current or saved[_DIGEST] == current[_DIGEST]:
        return
    role = "the reference policy"
    if config.policy.lora.enabled:
        role = "the frozen weights of its adapters"
    raise ConfigError(
        f"policy.model_name is {config.policy.model_name!r}, whose weights differ from the weights"
        f" that {shown_path(checkpoint)} was trained with as {role}: set it back, or restore the"
        " files, or start a new run"
    )
