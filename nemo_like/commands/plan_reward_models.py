"""The reward models of a config in `nemo-like plan`: a line for each, and what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import num_policy_workers
from nemo_like.config.text import counted

if TYPE_CHECKING:
    from nemo_like.config.reward import RewardModelConfig
    from nemo_like.config.schema import RunConfig
    from nemo_like.models.spec import ModelSpec
    from nemo_like.prediction.grpo_request import ScoringModel


def reward_model_notes(config: RunConfig) -> tuple[str, ...]:
    """Return a line about the weights of each reward model and where they are."""
    if not config.generates:
        return ()
    models = config.reward.models.items()
    return tuple(_note(config, name, model) for name, model in models)


def scoring_models(config: RunConfig) -> list[ScoringModel]:
    """Return the reward models whose files are there; `reward_model_notes` has the others."""
    from nemo_like.data.planning.cost import CostModel
    from nemo_like.prediction.grpo_request import ScoringModel

    found = []
    for name, model in config.reward.models.items():
        try:
            spec = _spec(name, model)
        except ConfigError:
            continue
        found.append(
            ScoringModel(
                name=name,
                cost=CostModel.from_spec(spec),
                max_tokens=model.mb_tokens,
                num_workers=model.num_workers,
            )
        )
    return found


def _spec(name: str, model: RewardModelConfig) -> ModelSpec:
    """Return the sizes of a reward model. Raises ConfigError if its files are not there."""
    from nemo_like.models.spec import ModelSpec
    from nemo_like.training.model_files import load_checked_config

    key = f"reward.models.{name}.model_name"
    files = load_checked_config(model.model_name, key)
    return ModelSpec.from_config(files, model.model_name)


def _note(config: RunConfig, name: str, model: RewardModelConfig) -> str:
    from nemo_like.prediction.memory import shown_bytes

    try:
        spec = _spec(name, model)
    except ConfigError as error:
        # A plan is often made before the reward model is trained.
        return f"reward model {name} is not counted: {error}"
    num_workers = model.num_workers or num_policy_workers(config.cluster)
    num_value_bytes = 2 if model.precision == "bfloat16" else 4
    shown = shown_bytes(spec.num_params * num_value_bytes / num_workers)
    where = f"on {counted(num_workers, 'separate worker')}"
    if model.num_workers == 0:
        where = "on each policy worker"
        if config.cluster.gpus_per_node > 0:
            where += ", in host memory while it does not score"
    return f"reward model {name}: {shown} of weights {where}, not part of the predicted memory"
