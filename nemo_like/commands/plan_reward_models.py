"""Lines of `nemo-like plan` about the reward models of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import num_policy_workers

if TYPE_CHECKING:
    from nemo_like.config.reward import RewardModelConfig
    from nemo_like.config.schema import RunConfig

_GIB = 1024**3


def reward_model_notes(config: RunConfig) -> tuple[str, ...]:
    """Return a line about the weights of each reward model and where they are."""
    if not config.generates:
        return ()
    models = config.reward.models.items()
    return tuple(_note(config, name, model) for name, model in models)


def _note(config: RunConfig, name: str, model: RewardModelConfig) -> str:
    from nemo_like.models.spec import ModelSpec
    from nemo_like.training.model_files import load_checked_config

    key = f"reward.models.{name}"
    try:
        files = load_checked_config(model.model_name, f"{key}.model_name", local_files_only=True)
    except ConfigError as error:
        # A plan is often made before the reward model is trained.
        return f"reward model {name} is not counted: {error}"
    num_workers = model.num_workers or num_policy_workers(config.cluster)
    num_value_bytes = 2 if model.precision == "bfloat16" else 4
    spec = ModelSpec.from_config(files, model.model_name)
    gib = spec.num_params * num_value_bytes / num_workers / _GIB
    where = f"on {num_workers} workers of its own"
    if model.num_workers == 0:
        where = "on each policy worker"
        if config.cluster.gpus_per_node > 0:
            where += ", in host memory while it does not score"
    return f"reward model {name}: {gib:.2g} GiB of weights {where}; its time is not predicted"
