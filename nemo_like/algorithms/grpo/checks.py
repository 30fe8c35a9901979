"""Checks of the prompts of GRPO by `validate`, and guesses of the lengths of rollouts."""

from __future__ import annotations

import numpy as np

from nemo_like.algorithms.grpo.config import GrpoRunConfig, asynchronous_warnings
from nemo_like.algorithms.grpo.data import open_source, updates_per_step
from nemo_like.config.import_path import check_module
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.policy.batching import with_image_work
from nemo_like.prediction.lengths import RowLengths
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.reporting import step_warnings
from nemo_like.training.row_checks import RowChecks, encode_prompt_of, prompt_messages
from nemo_like.training.row_sample import NUM_SAMPLES, length_lines
from nemo_like.training.run_data import RunData, describe_epoch, training_name


def check_rows(config: GrpoRunConfig, data: RunData, checks: RowChecks) -> None:
    """Check texts, prompt lengths and budgets; if all are fine, plan the first step."""
    diagnostics = checks.diagnostics
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    checks.check_texts(encoder, data.train, prompt_messages)
    checks.check_prompts_agree(encoder)
    num_prompts = config.grpo.num_prompts_per_step
    epoch = diagnostics.check(
        lambda: describe_epoch(config.data, len(data.train), num_prompts, "prompts")
    )
    if epoch is not None:
        diagnostics.add_lines("data", epoch)
    num_steps = config.grpo.max_num_steps * updates_per_step(config, num_prompts)
    diagnostics.warnings += asynchronous_warnings(config)
    num_visits = config.grpo.max_num_steps * config.grpo.max_prompts_per_step
    diagnostics.warnings += config.grpo.prompt_selection.warnings(num_visits, len(data.train))
    loss_path = config.loss_fn.path
    if loss_path is not None:
        # Without the import, because a loss imports torch.
        diagnostics.check(lambda: check_module("loss_fn.path", loss_path))
    diagnostics.warnings += step_warnings(config.policy, num_steps)
    for rows in (data.train, *data.validation.values()):
        encoded = checks.encode_sample(rows, lambda row: encode_prompt_of(encoder, row))
        lengths = {index: len(token_ids) for index, token_ids in encoded.items()}
        checks.check_prompts(rows, lengths)
        checks.check_unknown(encoder, rows, encoded)
        if rows is data.train:
            diagnostics.add_lines("lengths", *length_lines(rows, lengths, config.policy))
    if len(diagnostics.problems) > num_problems_before:
        return
    source = open_source(config, data)
    prompts = diagnostics.check(lambda: next(source.loader())) or []
    for prompt in prompts[:NUM_SAMPLES]:
        diagnostics.samples.append(
            _prompt_sample(config.policy.generation.max_new_tokens, encoder, prompt)
        )
    prompt_lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
    uniform, longest = rollout_lengths(config, prompt_lengths)
    uniform_title = "a step with completions of uniformly random length"
    checks.describe_plan(uniform_title, uniform)
    longest_title = "a step with completions of the max length"
    checks.describe_plan(longest_title, longest)


def _prompt_sample(max_new_tokens: int, encoder: ChatEncoder, prompt: Prompt) -> Sample:
    text = str(encoder.tokenizer.decode(prompt.token_ids.tolist()))
    completion = f"up to {max_new_tokens} sampled tokens"
    return Sample(((text, False), (completion, True)), notes={"answer": str(prompt.answer)})


def first_lengths(
    config: GrpoRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return row lengths of the first steps, with completion lengths drawn at random."""
    prompts = open_source(config, data).first_examples(num_steps, progress)
    prompt_lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
    counts, _ = rollout_lengths(config, prompt_lengths)
    num_rows = config.grpo.num_generations_per_prompt
    images = [prompt.images for prompt in prompts for _ in range(num_rows)]
    counts = with_image_work(counts, images, config.policy, data.encoder.vision)
    max_new_tokens = config.policy.generation.max_new_tokens
    description = (
        f"prompts of {training_name(config.data)}, completion lengths drawn uniformly from 1 to"
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
    if not config.environment.is_used:
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
