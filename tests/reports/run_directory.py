"""A run directory as a GRPO run leaves it, written by the code that a run writes with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemo_like.config.schema import LoggerConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import PlanSpec, plan_batch
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.rollout.records import RolloutRecord
from nemo_like.run.directory import RunDirectory, open_run_directory, write_config
from nemo_like.run.files import AppendedFile, write_json_lines, write_text
from nemo_like.run.tracking import Tracker, run_log

ROWS = 8


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    policy = {"model_name": str(folder / "tokenizer"), "tokenizer_name": None}
    return {"run_name": "run", "policy": policy, "grpo": {"max_num_steps": 4}, "seed": 0, **changes}


def metrics_of(step: int) -> dict[str, float]:
    """Every metric of the charts of a GRPO run on GPUs."""
    wave = math.sin(step / 7)
    values = {
        "policy/loss": 1 / step, "policy/grad_norm": 1 + wave, "policy/lr": 1e-5,
        "policy/entropy": 2 - step / 1e4, "policy/entropy_estimate": 2.0,
        "policy/approx_kl_k3": 0.0,
        "policy/reference_kl_k3": 1e-3 * step, "policy/clip_fraction_high": 0.1,
        "policy/clip_fraction_low": 0.0, "policy/peak_memory_gb": 61.0,
        "policy/peak_memory_mean_gb": 60.0, "policy/rank_time_worst_over_mean": 1.05,
        "reward/mean": 0.5 + wave / 4, "reward/std": 0.2, "reward/frac_groups_zero_std": 0.1,
        "reward/frac_groups_all_best": 0.1, "reward/frac_groups_all_worst": 0.0,
        "reward/answer_mean": 0.5, "reward/answer_std": 0.1, "reward/format_mean": 1.0,
        "reward/format_std": 0.0, "generation/completion_length_mean": 300 + wave,
        "generation/completion_length_p90": 500.0, "generation/completion_length_max": 1024.0,
        "generation/truncated_share": 0.05, "staleness/mean": 1.0, "staleness/max": 2.0,
        "conversation/turns_mean": 2.0, "episodes/num_done": 3.0, "episodes/calls_mean": 2.0,
        "environment/hits": 3.0, "mismatch/gen_kl_k3": 1e-4,
        "mismatch/token_mult_prob_error": 1.01, "mismatch/logprob_diff_max": 0.3,
        "mismatch/importance_ratio_mean": 1.0, "importance/out_of_bounds_share": 0.0,
        "performance/tokens_per_s": 50_000 + 1000 * wave, "performance/train_tokens_per_s": 9e4,
        "performance/generation_tokens_per_s": 7e4, "performance/train_mfu": 0.4,
        "timing/generator_busy_s": 4.0, "timing/generator_idle_s": 1.0, "weight_sync/seconds": 0.1,
        "packing/utilization": 0.9, "packing/efficiency": 0.99, "packing/bin_balance": 0.95,
        "packing/padding_share": 0.02, "packing/rank_imbalance_tokens": 1.01,
        "packing/rank_imbalance_flops": 1.02, "packing/num_microbatches": 4.0,
        "packing/num_dummies": 0.0, "packing/shared_token_share": 0.3,
        "packing/shared_work_share": 0.3, "timing/step_s": 5.0, "timing/rollout_wait_s": 2.0,
        "timing/plan_s": 0.1, "timing/shard_s": 0.1, "timing/train_s": 2.0 + wave,
        "timing/weight_sync_s": 0.2, "progress/num_tokens": 1000.0 * step,
    }  # fmt: skip
    if step % 10 == 1:
        values |= {
            "validation/reward_mean": 0.6,
            "validation/pass_at_1": 0.6,
            "validation/x/loss": 1,
        }
    if step % 4 == 0:
        values |= {"timing/checkpoint_s": 1.0, "reward/mean": math.nan}
    return values


def write_run(
    folder: Path,
    name: str = "run",
    *,
    num_steps: int = 4,
    texts: Sequence[str] = ("2+2=", "4"),
    token_steps: Sequence[int] = (1, 4),
    messages: list[dict[str, str]] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a finished run; `texts` are the prompt and the completion of its rollouts."""
    write_tokenizer(folder / "tokenizer")
    plain = config or config_of(folder)
    lengths = np.random.default_rng(0).integers(5, 90, 32)
    plan = plan_batch(lengths, PlanSpec(max_tokens=128, num_ranks=4))
    with (
        open_run_directory(str(folder), name, resume=False) as directory,
        run_log(directory.logs / "driver.log") as log,
        Tracker(directory, LoggerConfig(tensorboard=False), plain) as tracker,
    ):
        log.note_start()
        write_config(directory, plain)
        write_text(directory.plan(0), plan.to_json())
        counts = AppendedFile(directory.lengths)
        for step in range(1, num_steps + 1):
            tracker.log(step, metrics_of(step))
            counts.append_json({"step": step, **TokenCounts(lengths).to_dict()})
        counts.close()
        for step in sorted({1, *token_steps}):
            write_rollout(directory, step, texts, messages, with_tokens=step in token_steps)
        log.note(f"done: {num_steps} steps")
    return directory.path


def write_rollout(
    directory: RunDirectory,
    step: int,
    texts: Sequence[str],
    messages: list[dict[str, str]] | None = None,
    *,
    with_tokens: bool,
) -> None:
    prompt, completion = texts
    rows = []
    for row in range(ROWS):
        record: dict[str, Any] = {"group": row // 4, "prompt": prompt, "completion": completion}
        record |= {"answer": prompt, "reward": row / ROWS, "reward_answer": 1.0, "advantage": 0.5}
        record |= {"completion_tokens": 3, "finish_reason": "stop", "source": f"{prompt}:1"}
        if messages is not None:
            record["messages"] = messages
        rows.append(record)
    write_json_lines(directory.rollouts(step), rows)
    if not with_tokens:
        return
    tokenizer = Tokenizer.from_file(str(directory.path.parent / "tokenizer" / "tokenizer.json"))
    prompt_ids, completion_ids = (tokenizer.encode(text).ids for text in texts)
    size = len(prompt_ids) + len(completion_ids)
    mask = np.array([0] * len(prompt_ids) + [1] * len(completion_ids), dtype=np.uint8)
    sizes = np.full(ROWS, size)
    sampled = -np.linspace(0.1, 0.9, ROWS * size, dtype=np.float32)
    columns = {
        "input_ids": Jagged.from_lengths(
            np.tile(np.array(prompt_ids + completion_ids, dtype=np.int32), ROWS), sizes
        ),
        "token_mask": Jagged.from_lengths(np.tile(mask, ROWS), sizes),
        "generation_logprobs": Jagged.from_lengths(sampled, sizes),
        "prev_logprobs": Jagged.from_lengths(1.01 * sampled, sizes),
        "advantages": np.linspace(-1, 1, ROWS, dtype=np.float32),
    }
    written = RolloutRecord(
        step=step, weights_version=step - 1, config={}, optimizer_steps=[], columns=columns
    )
    written.save(directory.rollout_tokens(step))


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, so that any text has tokens."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
