"""The keys of `data.batching`: how the rows of an optimizer step are chosen.

The first kind plans a fixed number of rows. The others fill microbatches of a token budget from a
window of rows, so the number of rows of a step varies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from nemo_like.config.constraints import IMPORT_PATH, Ge
from nemo_like.config.errors import Problem
from nemo_like.config.schema import DataConfig, PolicyConfig, SchedulerConfig

BatchingKind = Literal["fixed", "pool", "online", "token_budget", "dyn_bsz"]

_STREAMING_KEYS = (
    "microbatches_per_step",
    "window_rows",
    "window_tokens",
    "tail",
    "max_rows",
    "count_mode",
    "warmup_steps",
)
"""Keys without effect for `kind=fixed`."""
_DEFAULT_WINDOW_ROWS = {"pool": 32, "online": 256, "token_budget": 256, "dyn_bsz": 200}


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How the rows of a step are chosen. All kinds but `fixed` need `policy.sequence_packing` or
    `policy.dynamic_batching`, whose `train_mb_tokens` is the budget of a microbatch.
    """

    kind: BatchingKind = "fixed"
    """`fixed` takes `policy.train_global_batch_size` rows. The others fill microbatches:
    `pool` with the rows of a pool that add the least padding (Cosmos-RL), `online` with the
    combination of waiting rows that leaves the fewest tokens unused (ODB), `token_budget` with
    consecutive rows (DeepSpeed), `dyn_bsz` with the oldest rows that fit (VeOmni)."""
    microbatches_per_step: Annotated[int, Ge(1)] = 1
    """Microbatches of each data-parallel rank in one optimizer step (not `fixed`)."""
    window_rows: Annotated[int | None, Ge(1)] = None
    """Rows per data-parallel rank from which a microbatch is formed, if they also have the tokens
    of a full one, or if `window_tokens` is 0; null is 32 for `pool`, 200 for `dyn_bsz`, else
    256."""
    window_tokens: Annotated[int | None, Ge(0)] = None
    """Tokens per data-parallel rank from which a microbatch is formed although fewer than
    `window_rows` wait; 0 means no such limit. null is 0 for `pool`, else 4 x `train_mb_tokens` with
    packing and 16 x with dynamic batching."""
    strategy: Literal["prefer_closest", "prefer_first"] = "prefer_closest"
    """`pool` with dynamic batching: among rows that add equal padding, take the one of the closest
    length or the oldest."""
    tail: Literal["emit", "drop", "wrap"] = "emit"
    """Treatment of rows at the end of an epoch that do not fill a step (not `fixed`): a smaller
    step, left out, or filled with rows of the next epoch."""
    max_rows: Annotated[int | None, Ge(1)] = None
    """Max rows of a microbatch (not `fixed`); null means no limit."""
    count_mode: Literal["total", "effective"] = "total"
    """`dyn_bsz`: tokens that count for the budget, all or those with loss."""
    physical_overflow_ratio: Annotated[float, Ge(1)] = 1.5
    """`dyn_bsz` with `count_mode=effective`: max tokens of a microbatch, those without loss
    included, as a multiple of the budget. Memory must suffice for it."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps in which the budget grows linearly from `warmup_init_tokens` (not `fixed`)."""
    warmup_init_tokens: Annotated[int, Ge(1)] = 200
    """Budget of the first step of the warm-up."""

    @property
    def is_streaming(self) -> bool:
        """True if the rows of a step are chosen from a window."""
        return self.kind != "fixed"

    @property
    def num_window_rows(self) -> int:
        """`window_rows`, or the default of the kind."""
        return self.window_rows or _DEFAULT_WINDOW_ROWS[self.kind]


@dataclass(frozen=True, kw_only=True)
class StreamableDataConfig(DataConfig):
    """Training and validation files, and how the rows of a step are chosen."""

    batching: BatchingConfig = field(default_factory=BatchingConfig)
    curriculum: str | None = None
    """Visit the rows of every epoch by increasing difficulty: `length`, `column:NAME` (a number of
    each row) or the import path of a function `(row) -> float`."""


def batching_problems(
    policy: PolicyConfig, data: StreamableDataConfig, max_num_steps: int | None
) -> Iterator[Problem]:
    """Yield the problems of `data.batching`, `data.curriculum` and the keys they depend on."""
    yield from _curriculum_problems(data.curriculum)
    batching = data.batching
    if not batching.is_streaming:
        yield from _unused_problems(data)
        return
    if not (policy.sequence_packing.enabled or policy.dynamic_batching.enabled):
        yield Problem(
            ("data.batching.kind", "policy.sequence_packing.enabled"),
            f"data.batching.kind is {batching.kind}, which fills microbatches up to a token budget:"
            " set policy.sequence_packing.enabled or policy.dynamic_batching.enabled to true",
        )
    if data.last_batch != "keep":
        yield Problem(
            ("data.last_batch", "data.batching.tail"),
            f"data.last_batch is {data.last_batch}, which data.batching.kind fixed uses; with"
            f" {batching.kind} set data.batching.tail to drop instead",
        )
    if batching.tail == "wrap" and max_num_steps is None:
        yield Problem(
            ("data.batching.tail", "sft.max_num_steps"),
            "data.batching.tail is wrap, so the run has no last epoch: set sft.max_num_steps",
        )
    if _needs_num_steps(policy.scheduler) and max_num_steps is None:
        yield Problem(
            ("policy.scheduler.decay_steps", "sft.max_num_steps"),
            f"policy.scheduler.kind is {policy.scheduler.kind}, which decays up to the last step,"
            f" and with data.batching.kind {batching.kind} the number of steps is not known in"
            " advance: set policy.scheduler.decay_steps or sft.max_num_steps",
        )
    if batching.count_mode == "effective" and batching.kind != "dyn_bsz":
        yield Problem(
            ("data.batching.count_mode",),
            "data.batching.count_mode is effective, which data.batching.kind dyn_bsz supports, not"
            f" {batching.kind}",
        )


def _curriculum_problems(curriculum: str | None) -> Iterator[Problem]:
    if curriculum is None or curriculum == "length":
        return
    is_column = curriculum.startswith("column:") and len(curriculum) > len("column:")
    if not (is_column or IMPORT_PATH.accepts(curriculum)):
        yield Problem(
            ("data.curriculum",),
            f"data.curriculum is {curriculum!r}; write length, column:NAME, or the import path of a"
            " function (row) -> float such as my_package.difficulty",
        )


def _needs_num_steps(scheduler: SchedulerConfig) -> bool:
    return scheduler.kind != "constant" and scheduler.decay_steps is None


def _unused_problems(data: StreamableDataConfig) -> Iterator[Problem]:
    """Yield keys that have no effect with a fixed number of rows per step."""
    defaults = BatchingConfig()
    for key in _STREAMING_KEYS:
        value = getattr(data.batching, key)
        if value != getattr(defaults, key):
            yield Problem(
                (f"data.batching.{key}", "data.batching.kind"),
                f"data.batching.{key} is {value}, but data.batching.kind is fixed, which does not"
                f" use it; set data.batching.kind to pool, online, token_budget or dyn_bsz, or"
                f" remove {key}",
            )
