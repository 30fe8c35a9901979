"""What is legal in a config, and probably not intended: rows, steps, directories and precision. One
sentence each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.parallel import num_replicas, replica_size
from nemo_like.config.schema import GrpoRunConfig, RunConfig, SftRunConfig
from nemo_like.data.datasets import Rows, conversation

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of /proc/cpuinfo: instructions on bfloat16, on x86 (the first two) and ARM (the last)."""


def config_warnings(config: RunConfig) -> Iterator[str]:
    """What can be told from the config and this machine alone."""
    yield from precision_warnings(config)
    yield from _directory_warnings(config)
    yield from _replica_warnings(config)
    if isinstance(config, GrpoRunConfig):
        rows = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
        yield from _warmup_warnings(
            config, config.grpo.max_num_steps * (rows // config.policy.train_global_batch_size)
        )


def rows_warnings(config: RunConfig, rows: Rows) -> Iterator[str]:
    """What the training rows show besides."""
    is_grpo = isinstance(config, GrpoRunConfig)
    key = "grpo.num_prompts_per_step" if is_grpo else "policy.train_global_batch_size"
    batch = config.grpo.num_prompts_per_step if is_grpo else config.policy.train_global_batch_size
    if len(rows) < batch:
        yield (
            f"{config.data.train_path} has {len(rows)} rows, fewer than one batch ({key} {batch});"
            f" set {key} to {len(rows)} or less, or add rows"
        )
    if isinstance(config, SftRunConfig) and not any(map(_has_answer, rows.rows)):
        yield (
            f"every assistant turn of {config.data.train_path} is empty, so the model learns to"
            f" answer nothing;"
            " check which columns hold the answers"
        )


def step_warnings(config: SftRunConfig, num_steps: int) -> Iterator[str]:
    """What the length of an SFT run shows."""
    yield from _warmup_warnings(config, num_steps)


def precision_warnings(config: RunConfig, cpu_flags: set[str] | None = None) -> Iterator[str]:
    """bfloat16 on a CPU that has no instructions for it. `cpu_flags` are this machine's by
    default.
    """
    if config.policy.precision != "bfloat16" or config.cluster.gpus_per_node > 0:
        return
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    if flags and not flags & _BFLOAT16_FLAGS:
        yield (
            "policy.precision is bfloat16, but this CPU has no bfloat16 instructions (avx512_bf16,"
            " amx_bf16), so the run is"
            " about 20 times slower than in float32; set policy.precision to float32, or use GPUs"
            " (cluster.gpus_per_node)"
        )


def _has_answer(row: dict) -> bool:
    turns = [message for message in conversation(row) if message["role"] == "assistant"]
    return any(
        str(message.get("content") or "").strip() or message.get("tool_calls") for message in turns
    )


def _warmup_warnings(config: RunConfig, num_steps: int) -> Iterator[str]:
    warmup = config.policy.scheduler.warmup_steps
    if warmup > num_steps:
        yield (
            f"policy.scheduler.warmup_steps is {warmup}, but the run has {num_steps} optimizer"
            f" steps, so the learning rate"
            f" ends at {num_steps / warmup:.0%} of policy.optimizer.lr; set it to {num_steps} or"
            f" less"
        )


def _replica_warnings(config: RunConfig) -> Iterator[str]:
    batch, replicas = config.policy.train_global_batch_size, num_replicas(config)
    if batch % replicas:
        holders = "workers" if replica_size(config.parallel) == 1 else "copies of the model"
        below, above = batch // replicas * replicas, -(-batch // replicas) * replicas
        yield (
            f"policy.train_global_batch_size {batch} does not divide by the {replicas} {holders},"
            f" so some have more rows"
            f" than others in every step; {f'{below} or ' if below else ''}{above} would divide"
        )


def _directory_warnings(config: RunConfig) -> Iterator[str]:
    path = Path(config.output_dir).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    problem = None
    if not path.is_dir():
        problem = f"{path} is not a directory"
    else:
        try:
            # Asking for permissions is not enough: root has them all, also on a read-only file
            # system.
            with tempfile.TemporaryDirectory(prefix=".nemo-like-", dir=path):
                pass
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    if problem is not None:
        yield f"output_dir {config.output_dir!r} cannot be written to ({problem}); name another directory"


def _cpu_flags() -> set[str]:
    """The instruction sets that Linux reports; empty where it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    found = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return set(found[0].split()) if found else set()
