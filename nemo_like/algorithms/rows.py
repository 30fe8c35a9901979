"""Opens the rows of any job, from the sections of its configuration. Does not import torch."""

from __future__ import annotations

from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.data.formats import RowSchema
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec
from nemo_like.run.progress import Progress
from nemo_like.training.encoding import RowLimits
from nemo_like.training.images import open_images
from nemo_like.training.model_files import open_encoder, open_model_config
from nemo_like.training.model_warnings import check_new_tokens
from nemo_like.training.run_data import RowSettings, RunData, load_training, load_validation


def open_data(config: RunConfig, train_schema: RowSchema, validation_schema: RowSchema) -> RunData:
    """Read and check the files of a run. Raises ConfigError for a missing or bad file or row."""
    # The model first: its check is faster than reading the data.
    model = open_model_config(config.policy, config.parallel, config.cluster, config.needs)
    images = open_images(config.policy, config.data)
    train = load_training(config.data, train_schema, Progress(), images)
    validation = load_validation(config.data, validation_schema, images)
    vocab_size = model.get_text_config().vocab_size
    encoder = open_encoder(config.policy, config.data, vocab_size, images)
    check_new_tokens(config.policy, encoder)
    return RunData(encoder, train, validation)


def row_settings(config: RunConfig) -> RowSettings:
    """Return how the rows of a run are encoded and read."""
    return RowSettings(
        data=config.data,
        limits=RowLimits.of(config.policy, config.data),
        batch=config.needs.batch,
        seed=config.seed,
    )


def training_plan_spec(config: RunConfig, model: ModelSpec | None) -> PlanSpec:
    """Return how the training passes of a run are planned; `model` as in `plan_spec`."""
    layout = policy_layout(config.parallel, config.cluster)
    return plan_spec(
        config.policy, purpose="train", parallel_layout=layout, model=model, seed=config.seed
    )
