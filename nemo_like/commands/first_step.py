"""How long the rows of a config's first steps are, read with its own data, tokenizer and loader,
before anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from nemo_like.config.schema import DataConfig, GrpoRunConfig, PolicyConfig, RunConfig, SftRunConfig
from nemo_like.progress import Progress
from nemo_like.training.dataset import PromptSource, SftSource, load_training
from nemo_like.training.model_files import open_encoder

Value = TypeVar("Value")


def first_lengths(
    config: RunConfig, num_rows: int | None, num_steps: int
) -> tuple[np.ndarray, str]:
    """(row lengths int64 [B] in the order of the run, where they come from) of about `num_rows`
    rows, default `num_steps`.

    GRPO's completions are not sampled yet: each is taken to be of any length up to what fits,
    evenly. Raises ConfigError for files that cannot be read.
    """
    encoder = open_encoder(config, local_files_only=True)
    path, progress = config.data.train_path, Progress(sys.stderr)
    if isinstance(config, GrpoRunConfig):
        prompts = PromptSource(
            config, encoder, load_training(config, "rl", progress), None
        ).loader()
        group_size, rng = (
            config.grpo.num_generations_per_prompt,
            np.random.default_rng(config.seed % 2**64),
        )
        steps = _num_batches(num_rows, num_steps, config.grpo.num_prompts_per_step * group_size)
        taken = whole_batches(_take(prompts, steps, progress))
        before = np.repeat(
            np.array([len(prompt.token_ids) for prompt in taken], dtype=np.int64), group_size
        )
        room = np.minimum(
            config.policy.max_total_sequence_length - before,
            config.policy.generation.max_new_tokens,
        )
        wanted = config.policy.generation.max_new_tokens
        return before + rng.integers(
            1, room + 1
        ), f"prompts of {path}, completions guessed even from 1 to {wanted:,} tokens"
    assert isinstance(config, SftRunConfig)
    source = SftSource(config, encoder, load_training(config, "sft", progress), None)
    steps = min(
        _num_batches(num_rows, num_steps, config.policy.train_global_batch_size), source.num_steps
    )
    rows = source.loader()
    taken = whole_batches(_take(rows, max(steps, 1), progress))
    return np.array([len(row.input_ids) for row in taken], dtype=np.int64), path


def _take(loader: Iterator[list[Value]], num_batches: int, progress: Progress) -> list[list[Value]]:
    with progress.phase("encoding rows", num_batches, unit="batches") as phase:
        batches = []
        for batch in islice(loader, num_batches):
            batches.append(batch)
            phase.advance()
        return batches


def whole_batches(batches: Sequence[Sequence[Value]]) -> list[Value]:
    """The rows of the batches of the greatest size: the last batch of an epoch may be shorter."""
    size = max(map(len, batches))
    return [row for batch in batches if len(batch) == size for row in batch]


def file_config(
    path: str, tokenizer: str, batch_size: int, seed: int, *, shuffle: bool
) -> SftRunConfig:
    """A config that only says which rows and which tokenizer."""
    policy = PolicyConfig(
        model_name=tokenizer,
        tokenizer_name=tokenizer,
        train_global_batch_size=batch_size,
        max_total_sequence_length=2**40,
    )
    return SftRunConfig(
        run_name="plan", seed=seed, policy=policy, data=DataConfig(train_path=path, shuffle=shuffle)
    )


def _num_batches(num_rows: int | None, num_steps: int, batch_size: int) -> int:
    return num_steps if num_rows is None else max(num_rows // batch_size, 1)
