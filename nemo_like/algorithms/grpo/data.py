"""The training prompts of GRPO, their checks, and guesses of the lengths of rollouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nemo_like.algorithms.grpo.config import GrpoRunConfig, asynchronous_warnings
from nemo_like.config.import_path import check_module
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.formats import PROMPT_ROWS, RowSchema
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.prediction.lengths import RowLengths
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.diagnostics import (
    Diagnostics,
    check_prompts,
    check_prompts_agree,
    check_texts,
    describe_plan,
    encode_prompt_of,
    encode_sample,
    prompt_messages,
)
from nemo_like.training.reporting import step_warnings
from nemo_like.training.row_sample import NUM_SAMPLES, length_lines
from nemo_like.training.run_data import (
    ExampleSource,
    RunData,
    describe_epoch,
    encode_question,
    open_data,
    prompt_examples,
    training_name,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


encode_row = encode_question


def row_schemas(config: GrpoRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    return PROMPT_ROWS, PROMPT_ROWS


def open_source(config: GrpoRunConfig, data: RunData | None = None) -> ExampleSource[Prompt]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    return ExampleSource(config, data, encode_row, prompt_examples)


def num_optimizer_steps(config: GrpoRunConfig, source: ExampleSource[Prompt]) -> int:
    """Return the optimizer steps of the run.

    With dynamic sampling it is the number without short steps, which cannot be known in advance.
    """
    if config.grpo.dynamic_sampling.enabled:
        return config.grpo.max_num_steps * _num_updates(config, config.grpo.num_prompts_per_step)
    num_prompts = source.rows.num_kept
    num_full, num_prompts_left = divmod(num_prompts, config.grpo.num_prompts_per_step)
    per_full_step = _num_updates(config, config.grpo.num_prompts_per_step)
    per_epoch = num_full * per_full_step
    if config.data.last_batch == "keep":
        # The last step of an epoch may have fewer prompts, and so fewer optimizer steps.
        per_epoch += _num_updates(config, num_prompts_left)
    num_epochs, num_later_steps = divmod(config.grpo.max_num_steps, source.steps_per_epoch())
    # The last, incomplete epoch ends before the smaller step at its end.
    return num_epochs * per_epoch + num_later_steps * per_full_step


def _num_updates(config: GrpoRunConfig, num_prompts: int) -> int:
    """Return the number of optimizer steps on the completions of `num_prompts` prompts."""
    num_rows = num_prompts * config.grpo.num_generations_per_prompt
    num_updates = math.ceil(num_rows / config.policy.train_global_batch_size)
    return num_updates * config.grpo.num_epochs_per_rollout


def check_rows(
    config: GrpoRunConfig, data: RunData, model: PretrainedConfig | None, diagnostics: Diagnostics
) -> None:
    """Check texts, prompt lengths and budgets; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    check_texts(encoder, data.train, prompt_messages, diagnostics)
    check_prompts_agree(encoder, diagnostics)
    num_prompts = config.grpo.num_prompts_per_step
    epoch = diagnostics.check(
        lambda: describe_epoch(config.data, len(data.train), num_prompts, "prompts")
    )
    if epoch is not None:
        diagnostics.add_lines("data", epoch)
    updates_per_step = _num_updates(config, num_prompts)
    diagnostics.warnings += asynchronous_warnings(config)
    loss_path = config.loss_fn.path
    if loss_path is not None:
        # Without the import, because a loss imports torch.
        diagnostics.check(lambda: check_module("loss_fn.path", loss_path))
    diagnostics.warnings += step_warnings(config, config.grpo.max_num_steps * updates_per_step)
    for rows in (data.train, *data.validation.values()):
        encoded = encode_sample(rows, lambda row: encode_prompt_of(encoder, row), diagnostics)
        lengths = {index: len(token_ids) for index, token_ids in encoded.items()}
        check_prompts(config, rows, lengths, diagnostics)
        if rows is data.train:
            diagnostics.add_lines("lengths", *length_lines(rows, lengths, config.policy))
    if len(diagnostics.problems) > num_problems_before:
        return
    source = open_source(config, data)
    prompts = diagnostics.check(lambda: next(source.loader())) or []
    for prompt in prompts[:NUM_SAMPLES]:
        diagnostics.samples.append(_prompt_sample(config, encoder, prompt))
    prompt_lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
    uniform, longest = rollout_lengths(config, prompt_lengths)
    uniform_title = "a step with completions of uniformly random length"
    describe_plan(config, uniform_title, uniform, model, diagnostics)
    longest_title = "a step with completions of the max length"
    describe_plan(config, longest_title, longest, model, diagnostics)


def _prompt_sample(config: GrpoRunConfig, encoder: ChatEncoder, prompt: Prompt) -> Sample:
    text = str(encoder.tokenizer.decode(prompt.token_ids.tolist()))
    completion = f"up to {config.policy.generation.max_new_tokens} sampled tokens"
    return Sample(((text, False), (completion, True)), notes={"answer": str(prompt.answer)})


def first_lengths(
    config: GrpoRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return row lengths of the first steps, with completion lengths drawn at random."""
    prompts = open_source(config, data).first_examples(num_steps, progress)
    prompt_lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
    counts, _ = rollout_lengths(config, prompt_lengths)
    max_new_tokens = config.policy.generation.max_new_tokens
    description = (
        f"prompts of {training_name(config)}, completion lengths drawn uniformly from 1 to"
        f" {max_new_tokens:,} tokens"
    )
    return RowLengths(counts, description, is_ordered=True)


def rollout_lengths(
    config: GrpoRunConfig, prompt_lengths: np.ndarray
) -> tuple[TokenCounts, TokenCounts]:
    """Return two guesses of the tokens of P x G rows of rollouts, of which completions have a loss.

    `prompt_lengths` is int [P]. In the first guess completion lengths are drawn uniformly from 1 to
    `max_new_tokens`, or to the tokens left in the row; in the second all have that maximum.
    The rows of a prompt have it in common. With an environment the turns and observations of a
    conversation may take all tokens left.
    """
    prompts = np.repeat(prompt_lengths, config.grpo.num_generations_per_prompt)
    max_completions = config.policy.max_total_sequence_length - prompts
    if config.environment.path is None:
        max_new_tokens = config.policy.generation.max_new_tokens
        max_completions = np.minimum(max_completions, max_new_tokens)
    groups = np.repeat(np.arange(len(prompt_lengths)), config.grpo.num_generations_per_prompt)
    prefixes = SharedPrefixes.of_groups(groups, prompts)
    rng = np.random.default_rng(config.seed % 2**64)
    completions = rng.integers(1, max_completions + 1)
    return (
        TokenCounts(prompts + completions, completions, prefixes),
        TokenCounts(prompts + max_completions, max_completions, prefixes),
    )
