"""Seconds of a step without a save and of the step after a save, on CPU, in one run.

    python benchmarks/checkpoint.py                     # 135 million parameters, 4 rounds
    python benchmarks/checkpoint.py --rounds 6 --tokens 1024

One process trains a random Llama of the shape of SmolLM2-135M (float32, AdamW). A round is one step
without a save, a save in the background, and the step after it, at whose end the checkpoint is
finished; the first round is not counted. The last save is synchronous, for comparison. Columns:
seconds of the call that saves (the copy), of the two steps with the processor time of all threads,
from the end of the copy until the files are durable, and the ratios of the steps. Where other load
disturbs the wall time, the ratio of the processor times bounds the ratio of the steps on busy
cores. The files are on the disk of `--folder`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.config.schema import (
    CheckpointingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import NllLoss
from nemo_like.metrics import Timers
from nemo_like.models.spec import load_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy, ShardedBatch
from nemo_like.run.checkpoint import Checkpointer, TrainingState
from nemo_like.training.saving import CheckpointSaver
from nemo_like.training.workers import RunWorkers

ROW_TOKENS = 256


def write_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def open_policy(folder: Path, num_tokens: int) -> Policy:
    config = PolicyConfig(
        model_name=str(folder),
        train_global_batch_size=num_tokens // ROW_TOKENS,
        max_total_sequence_length=ROW_TOKENS,
        sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=num_tokens),
        optimizer=OptimizerConfig(lr=1e-4),
    )
    group = LocalGroup(DTensorPolicyWorker, {"config": config}, local_context())
    return Policy(group, config, load_spec(str(folder)))


def shard_rows(policy: Policy, num_tokens: int) -> ShardedBatch:
    """Shard rows of `ROW_TOKENS` random tokens each, all of them trained."""
    lengths = np.full(num_tokens // ROW_TOKENS, ROW_TOKENS, dtype=np.int64)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, policy.model.vocab_size, num_tokens).astype(np.int32)
    batch = BatchedDataDict(
        input_ids=Jagged.from_lengths(ids, lengths),
        token_mask=Jagged.from_lengths(np.ones(num_tokens, dtype=np.uint8), lengths),
        length=lengths,
        row_mask=np.ones(len(lengths), dtype=bool),
    )
    return policy.shard(batch, policy.plan(lengths))


class Seconds(NamedTuple):
    """Duration of a call."""

    wall: float
    cpu: float
    """Processor time of all threads of this process, the writing thread included."""


def seconds_of(function: Callable[[], object]) -> Seconds:
    wall = time.perf_counter()
    cpu = time.process_time()
    function()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def measure(folder: Path, num_rounds: int, num_tokens: int) -> None:
    write_model(folder / "model")
    policy = open_policy(folder / "model", num_tokens)
    rows = shard_rows(policy, num_tokens)
    workers = RunWorkers(policy=policy, rollout_workers=None)
    checkpointer = Checkpointer(folder, CheckpointingConfig(keep_latest=1))
    saver = CheckpointSaver(checkpointer, workers, Timers())

    def train() -> None:
        policy.train(rows, None, NllLoss())

    def save(step: int, *, in_background: bool) -> None:
        saver.save(TrainingState(step=step), prunes=True, in_background=in_background)

    print(f"{policy.model.num_params / 1e6:.0f}M parameters, {num_tokens} tokens a step")
    print("          copy   plain step    step after save   written   ratio of")
    print("round      s     wall    cpu      wall    cpu       s      wall   cpu")
    rounds = []
    for index in range(num_rounds + 1):
        plain = seconds_of(train)
        copy = seconds_of(lambda step=index: save(step, in_background=True))
        start = time.perf_counter()
        after = seconds_of(train)
        # At the end of the step, if it took longer than the write.
        saver.finish()
        values = (copy.wall, *plain, *after, time.perf_counter() - start)
        print_row(str(index), values)
        if index > 0:
            rounds.append(values)
    print_row("median", [median(column) for column in zip(*rounds, strict=True)])
    synchronous = seconds_of(lambda: save(num_rounds + 1, in_background=False))
    num_bytes = sum(path.stat().st_size for path in checkpointer.path.rglob("*.safetensors"))
    print(f"synchronous save {synchronous.wall:.2f} s, {num_bytes / 1e9:.2f} GB")


def print_row(name: str, values: Sequence[float]) -> None:
    copy, plain, plain_cpu, after, after_cpu, written = values
    print(
        f"{name:6s} {copy:7.2f} {plain:8.2f} {plain_cpu:6.2f} {after:9.2f} {after_cpu:6.2f}"
        f" {written:9.2f} {after / plain:8.3f} {after_cpu / plain_cpu:6.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a step after a save.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--folder", default=None, help="parent of the checkpoints")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.rounds, options.tokens)


if __name__ == "__main__":
    main()
