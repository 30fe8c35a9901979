"""How long the rows of a config's first steps are, read with its own data, tokenizer and loader, before anything runs."""

from __future__ import annotations

import numpy as np

from nemo_like.algorithms.source import PromptSource, SftSource, open_encoder
from nemo_like.config.schema import DataConfig, GrpoRunConfig, PolicyConfig, RunConfig, SftRunConfig
from nemo_like.data.datasets import load_rows


def first_lengths(config: RunConfig, num_rows: int | None, num_steps: int) -> tuple[np.ndarray, str]:
    """(row lengths int64 [B] in the order of the run, where they come from) of about `num_rows` rows, default `num_steps`.

    GRPO's completions are not sampled yet: each is taken to be of any length up to what fits, evenly. Raises ConfigError
    for files that cannot be read.
    """
    encoder = open_encoder(config, local_files_only=True)
    path, limit = config.data.train_path, config.data.max_train_rows
    if isinstance(config, GrpoRunConfig):
        prompts = PromptSource(config, encoder, load_rows(path, purpose="rl", max_rows=limit), None).loader()
        group_size, rng = config.grpo.num_generations_per_prompt, np.random.default_rng(config.seed % 2**64)
        steps = _num_batches(num_rows, num_steps, config.grpo.num_prompts_per_step * group_size)
        before = np.array([len(prompt.token_ids) for _ in range(steps) for prompt in next(prompts)], dtype=np.int64)
        before = np.repeat(before, group_size)
        room = np.minimum(config.policy.max_total_sequence_length - before, config.policy.generation.max_new_tokens)
        wanted = config.policy.generation.max_new_tokens
        return before + rng.integers(1, room + 1), f"prompts of {path}, completions guessed even from 1 to {wanted:,} tokens"
    assert isinstance(config, SftRunConfig)
    source = SftSource(config, encoder, load_rows(path, purpose="sft", max_rows=limit), None)
    steps = min(_num_batches(num_rows, num_steps, config.policy.train_global_batch_size), source.num_steps)
    rows = source.loader()
    lengths = [len(row.input_ids) for _ in range(max(steps, 1)) for row in next(rows)]
    return np.array(lengths, dtype=np.int64), path


def file_config(path: str, tokenizer: str, batch_size: int, seed: int, *, shuffle: bool) -> SftRunConfig:
    """A config that only says which rows and which tokenizer."""
    policy = PolicyConfig(
        model_name=tokenizer, tokenizer_name=tokenizer, train_global_batch_size=batch_size, max_total_sequence_length=2**40
    )
    return SftRunConfig(run_name="plan", seed=seed, policy=policy, data=DataConfig(train_path=path, shuffle=shuffle))


def _num_batches(num_rows: int | None, num_steps: int, batch_size: int) -> int:
    return num_steps if num_rows is None else max(num_rows // batch_size, 1)
