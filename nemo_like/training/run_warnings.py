"""Warnings about settings that are legal and probably not intended, and about bad completions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_like.config.optimization import EmaConfig, SchedulerConfig
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import MAIN_SET, RunConfig
from nemo_like.config.text import counted
from nemo_like.data.datasets import conversation
from nemo_like.data.rows import Rows
from nemo_like.integer_math import nearest_multiples
from nemo_like.training.run_data import training_files, training_name

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo for bfloat16 instructions: x86 (the first two) and ARM (the last)."""

_LARGE_SHARE = 0.1
"""Share of the initial weights in an average above which a run warns."""


def config_warnings(config: RunConfig) -> Iterator[str]:
    """Yield the warnings that follow from the config and this machine."""
    yield from precision_warnings(config)
    yield from _directory_warnings(config)
    yield from _replica_warnings(config)


def rows_warnings(config: RunConfig, rows: Rows) -> Iterator[str]:
    """Yield the warnings that follow from the training rows."""
    key, batch_size = config.examples_per_step
    num_rows = len(rows)
    if config.has_fixed_batches and num_rows < batch_size:
        yield (
            f"{training_name(config)} has {counted(num_rows, 'row')}, fewer than one"
            f" batch ({key} {batch_size}); set {key} to at most {num_rows}, or add rows"
        )


def answer_warnings(config: RunConfig, rows: Rows) -> Iterator[str]:
    """Warn of training sets in which every assistant turn is empty."""
    for name, indices in rows.sources.items():
        if any(_has_answer(rows[index]) for index in indices):
            continue
        path = training_files(config)[name or MAIN_SET]
        yield (
            f"every assistant turn of {path} is empty, so the model learns to"
            " give empty answers; check which columns have the answers"
        )


def precision_warnings(config: RunConfig, cpu_flags: set[str] | None = None) -> Iterator[str]:
    """Warn of bfloat16 where small LoRA updates are lost, and on a CPU without instructions for it.

    `cpu_flags` are the flags of /proc/cpuinfo, by default the flags of this machine.
    """
    if config.policy.precision != "bfloat16":
        return
    lora = config.policy.lora
    # The generator has no 4-bit weights, so with quantization there is no other choice.
    can_send_adapters = lora.enabled and not lora.is_quantized
    sends_adapters = lora.sends_adapters(config.policy.precision)
    if config.generates and can_send_adapters and not sends_adapters:
        yield _merged_bfloat16_warning(config)
    if config.cluster.gpus_per_node > 0:
        return
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    if flags and not flags & _BFLOAT16_FLAGS:
        yield (
            "policy.precision is bfloat16, but this CPU has no bfloat16 instructions (avx512_bf16,"
            " amx_bf16), so the run is about 20 times slower than in float32; set policy.precision"
            " to float32, or use GPUs (cluster.gpus_per_node)"
        )


def _merged_bfloat16_warning(config: RunConfig) -> str:
    lora = config.policy.lora
    choice = f"policy.lora.weight_sync is {lora.weight_sync}"
    if lora.weight_sync == "auto":
        choice += f", with policy.lora.rank {lora.rank} the same as merged,"
    solution = "set policy.lora.weight_sync to adapter"
    max_rank = config.policy.generation.engine.max_adapter_rank
    if max_rank is not None and lora.rank > max_rank:
        # The engine has no adapters of this rank.
        solution = (
            f"set policy.lora.rank to at most {max_rank} and policy.lora.weight_sync to adapter"
        )
    return (
        f"{choice} and policy.precision is bfloat16, so the generator loses the part of LoRA"
        " updates below the last bit of its weights, in the first steps nearly all;"
        f" {solution}"
    )


def _has_answer(row: dict) -> bool:
    # Token ids show no turns.
    if row.get("input_ids") is not None:
        return True
    for message in conversation(row):
        text = str(message.get("content") or "").strip()
        # A turn that only calls tools is an answer as well.
        if message["role"] == "assistant" and (text or message.get("tool_calls")):
            return True
    return False


def step_warnings(config: RunConfig, num_steps: int) -> Iterator[str]:
    """Warn of lengths that do not fit to a run of `num_steps` optimizer steps."""
    warmup = config.policy.scheduler.warmup_steps
    # The schedule is legal: the learning rate just never reaches its maximum.
    if warmup > num_steps:
        yield (
            f"policy.scheduler.warmup_steps is {warmup}, but the run has"
            f" {counted(num_steps, 'optimizer step')}, so the learning rate ends at"
            f" {num_steps / warmup:.0%} of policy.optimizer.lr; set it to {num_steps} or less"
        )

    yield from _decay_warnings(config.policy.scheduler, num_steps)
    if config.policy.ema.enabled:
        yield from _ema_warnings(config.policy.ema, num_steps)


def _decay_warnings(scheduler: SchedulerConfig, num_steps: int) -> Iterator[str]:
    """Warn of a decay or of cycles that do not fit to the steps after warm-up."""
    num_decaying = (scheduler.decay_steps or num_steps) - scheduler.warmup_steps
    decay = scheduler.wsd_decay_steps
    if scheduler.kind == "wsd" and decay is not None and decay > num_decaying > 0:
        yield (
            f"policy.scheduler.wsd_decay_steps is {decay}, but the run has"
            f" {counted(num_decaying, 'optimizer step')} after warm-up, so it decays in all of"
            f" them and has no stable part; set it to less than {num_decaying}"
        )
    is_cyclic = scheduler.kind == "cosine_restarts"
    if is_cyclic and scheduler.num_cycles > num_decaying > 0:
        yield (
            f"policy.scheduler.num_cycles is {scheduler.num_cycles}, but the run has"
            f" {counted(num_decaying, 'optimizer step')} after warm-up, so the learning rate stays"
            f" near its maximum; set it to much less than {num_decaying}"
        )


def _ema_warnings(ema: EmaConfig, num_steps: int) -> Iterator[str]:
    """Warn of an average that is mostly the first weights."""
    share = ema.decay**num_steps
    if share > _LARGE_SHARE:
        decay = 1 - 10 / num_steps
        yield (
            f"policy.ema.decay is {ema.decay}, and the run has"
            f" {counted(num_steps, 'optimizer step')}, so {share:.0%} of the averaged weights come"
            f" from its beginning; set it to {max(decay, 0):.3g} or less"
        )


def _replica_warnings(config: RunConfig) -> Iterator[str]:
    batch_size = config.policy.train_global_batch_size
    layout = policy_layout(config)
    replicas = layout.dp
    if config.has_fixed_batches and batch_size % replicas:
        noun = "workers" if layout.replica_size == 1 else "model replicas"
        sizes = nearest_multiples(batch_size, replicas)
        yield (
            f"policy.train_global_batch_size {batch_size} does not divide by the {replicas} {noun},"
            f" so some have more rows than others in every step; {sizes} would divide"
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
            # A check of permissions is not enough: root has them all, also on a read-only file
            # system.
            with tempfile.TemporaryDirectory(prefix=".nemo-like-", dir=path):
                pass
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    if problem is not None:
        yield (
            f"output_dir {config.output_dir!r} cannot be written to ({problem}); set another"
            " directory"
        )


def _cpu_flags() -> set[str]:
    """Return the instruction sets that Linux reports; empty if it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    for line in lines:
        # "flags" on x86, "Features" on ARM. All cores have the same.
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


@dataclass
class _Watch:
    """Tells when a share becomes large: once, and again after a change."""

    threshold: float
    warned_share: float | None = None

    def is_new(self, share: float) -> bool:
        """Return True if a share above the threshold was not reported yet.

        It counts as changed if it grew by 25 % of all completions or groups since the warning, or
        was below half of the threshold in between.
        """
        if share < self.threshold / 2:
            self.warned_share = None
        if share < self.threshold:
            return False
        if self.warned_share is not None and share < self.warned_share + 0.25:
            return False
        self.warned_share = share
        return True


class RolloutWarnings:
    """Watches the metrics of a run's completions."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._truncated = _Watch(0.5)
        self._equal = _Watch(0.8)

    def observe(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that the metrics of `step` give a reason for."""
        share = metrics.get("generation/truncated_share")
        if share is None:
            share = metrics.get("validation/generation_truncated_share")
        if share is not None and self._truncated.is_new(share):
            yield (
                f"step {step}: {share:.0%} of the completions were cut off at the length limit;"
                f" raise {self._limits(metrics)}, or check that the model ends its answers with"
                " an end token of its chat template"
            )
        share = metrics.get("reward/frac_groups_zero_std")
        advice = self._config.equal_rewards_advice
        if share is not None and advice is not None and self._equal.is_new(share):
            zero_share = metrics.get("reward/frac_groups_all_zero", 0.0)
            yield (
                f"step {step}: {share:.0%} of the groups have equal rewards, which do not train"
                f" the policy ({zero_share:.0%} have only rewards of 0); {advice}"
            )

    def _limits(self, metrics: Mapping[str, float]) -> str:
        """Return the keys that limit the completions, with their values."""
        policy = self._config.policy
        max_new_tokens = policy.generation.max_new_tokens
        key = f"policy.generation.max_new_tokens (now {max_new_tokens})"
        total = f"policy.max_total_sequence_length (now {policy.max_total_sequence_length})"
        if self._config.environment.path is not None:
            if self._config.environment.max_tokens is not None:
                total = f"environment.max_tokens (now {self._config.environment.max_tokens})"
            return f"{key} or {total}"
        if metrics.get("generation/completion_length_max", max_new_tokens) < max_new_tokens:
            return total
        return key
