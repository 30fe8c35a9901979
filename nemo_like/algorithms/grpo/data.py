"""The training prompts of GRPO, and the optimizer steps on their completions."""

from __future__ import annotations

import math

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.rows import open_data, row_settings
from nemo_like.data.formats import PROMPT_ROWS, RowSchema
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.encoding import encode_question
from nemo_like.training.prompts import prompt_examples
from nemo_like.training.run_data import ExampleSource, RunData


def row_schemas(config: GrpoRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    return PROMPT_ROWS, PROMPT_ROWS


def open_source(config: GrpoRunConfig, data: RunData | None = None) -> ExampleSource[Prompt]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    return ExampleSource(row_settings(config), data, encode_question, prompt_examples)


def num_optimizer_steps(config: GrpoRunConfig, source: ExampleSource[Prompt]) -> int:
    """Return the optimizer steps of the run.

    With dynamic sampling and prompt selection it is the number without short steps, which cannot be
    known in advance.
    """
    if config.grpo.dynamic_sampling.enabled or config.grpo.prompt_selection.enabled:
        return config.grpo.max_num_steps * updates_per_step(
            config, config.grpo.num_prompts_per_step
        )
    num_prompts = source.rows.num_kept
    num_full, num_prompts_left = divmod(num_prompts, config.grpo.num_prompts_per_step)
    per_full_step = updates_per_step(config, config.grpo.num_prompts_per_step)
    per_epoch = num_full * per_full_step
    if config.data.last_batch == "keep":
        # The last step of an epoch may have fewer prompts, and so fewer optimizer steps.
        per_epoch += updates_per_step(config, num_prompts_left)
    num_epochs, num_later_steps = divmod(config.grpo.max_num_steps, source.steps_per_epoch())
    # The last, incomplete epoch ends before the smaller step at its end.
    return num_epochs * per_epoch + num_later_steps * per_full_step


def updates_per_step(config: GrpoRunConfig, num_prompts: int) -> int:
    """Return the number of optimizer steps on the completions of `num_prompts` prompts."""
    num_rows = num_prompts * config.grpo.num_generations_per_prompt
    num_updates = math.ceil(num_rows / config.policy.train_global_batch_size)
    return num_updates * config.grpo.num_epochs_per_rollout
