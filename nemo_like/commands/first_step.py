"""Row lengths of the first steps of a config, read with its own data, tokenizer and loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from nemo_like.config.schema import DataConfig, GrpoRunConfig, PolicyConfig, RunConfig, SftRunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.progress import Progress
from nemo_like.training.dataset import PromptSource, SftSource, load_training
from nemo_like.training.model_files import open_encoder

Value = TypeVar("Value")


def first_lengths(
    config: RunConfig, num_rows: int | None, num_steps: int
) -> tuple[np.ndarray, str]:
    """Return (row lengths int64 [B] in the order of the run, description of their source).

    The rows are those of about `num_rows` rows, or of `num_steps` steps if it is None. Completions
    of GRPO are not sampled yet: their lengths are drawn, see `rollout_lengths`. Raises ConfigError
    for files that cannot be read.
    """
    encoder = open_encoder(config, local_files_only=True)
    progress = Progress(sys.stderr)
    path = config.data.train_path
    if isinstance(config, GrpoRunConfig):
        prompt_lengths = _prompt_lengths(config, encoder, num_rows, num_steps, progress)
        lengths, _ = rollout_lengths(config, prompt_lengths)
        max_new_tokens = config.policy.generation.max_new_tokens
        source = (
            f"prompts of {path}, completion lengths drawn uniformly from 1 to"
            f" {max_new_tokens:,} tokens"
        )
        return lengths, source
    assert isinstance(config, SftRunConfig)
    return _sft_lengths(config, encoder, num_rows, num_steps, progress), path


def rollout_lengths(
    config: GrpoRunConfig, prompt_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return two guesses of the row lengths of rollouts, int64 [P x G] each.

    `prompt_lengths` is int [P]. In the first guess completion lengths are drawn uniformly from 1 to
    `max_new_tokens`, or to the tokens left in the row; in the second all have that maximum.
    """
    prompts = np.repeat(prompt_lengths, config.grpo.num_generations_per_prompt)
    tokens_left = config.policy.max_total_sequence_length - prompts
    max_completions = np.minimum(tokens_left, config.policy.generation.max_new_tokens)
    rng = np.random.default_rng(config.seed % 2**64)
    completions = rng.integers(1, max_completions + 1)
    return prompts + completions, prompts + max_completions


def _prompt_lengths(
    config: GrpoRunConfig,
    encoder: ChatEncoder,
    num_rows: int | None,
    num_steps: int,
    progress: Progress,
) -> np.ndarray:
    """Return the prompt lengths of the first steps, int64 [P]."""
    source = PromptSource(config, encoder, load_training(config, "rl", progress), None)
    rows_per_step = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    num_batches = _num_batches(num_rows, num_steps, rows_per_step)
    prompts = full_batches(_take(source.loader(), num_batches, progress))
    return np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)


def _sft_lengths(
    config: SftRunConfig,
    encoder: ChatEncoder,
    num_rows: int | None,
    num_steps: int,
    progress: Progress,
) -> np.ndarray:
    """Return the row lengths of the first steps, int64 [B]."""
    source = SftSource(config, encoder, load_training(config, "sft", progress), None)
    num_batches = _num_batches(num_rows, num_steps, config.policy.train_global_batch_size)
    num_batches = max(min(num_batches, source.num_steps), 1)
    rows = full_batches(_take(source.loader(), num_batches, progress))
    return np.array([len(row.input_ids) for row in rows], dtype=np.int64)


def _take(loader: Iterator[list[Value]], num_batches: int, progress: Progress) -> list[list[Value]]:
    with progress.phase("encoding rows", num_batches, unit="batches") as phase:
        batches = []
        for batch in islice(loader, num_batches):
            batches.append(batch)
            phase.advance()
        return batches


def full_batches(batches: Sequence[Sequence[Value]]) -> list[Value]:
    """Return the rows of the batches of the largest size.

    The last batch of an epoch may be smaller; a plan of it would not be typical.
    """
    max_size = max(map(len, batches))
    rows: list[Value] = []
    for batch in batches:
        if len(batch) == max_size:
            rows.extend(batch)
    return rows


def file_config(
    path: str, tokenizer: str, batch_size: int, seed: int, *, shuffle: bool
) -> SftRunConfig:
    """Return a config that only names rows and tokenizer, for `nemo-like plan --data`."""
    policy = PolicyConfig(
        model_name=tokenizer,
        tokenizer_name=tokenizer,
        train_global_batch_size=batch_size,
        # No row is oversize here; the plan applies its own max tokens.
        max_total_sequence_length=2**40,
    )
    data = DataConfig(train_path=path, shuffle=shuffle)
    return SftRunConfig(run_name="plan", seed=seed, policy=policy, data=data)


def _num_batches(num_rows: int | None, num_steps: int, batch_size: int) -> int:
    return num_steps if num_rows is None else max(num_rows // batch_size, 1)
