"""Smaller microbatches for a run that ran out of memory (`policy.oom`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemo_like.config.check import batching_section, padding_multiples
from nemo_like.config.needs import BatchNeeds
from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed.errors import WorkerError, is_out_of_memory
from nemo_like.metrics import Max, Metrics
from nemo_like.parallel_layout import ParallelLayout

MAX_REDUCTIONS = 5
_FACTOR = 0.8


@dataclass
class MemoryPolicy:
    """`policy.oom` applied to the failures of one run, in order."""

    num_reductions: int = 0

    def next_policy(
        self, policy: PolicyConfig, layout: ParallelLayout, batch: BatchNeeds, error: Exception
    ) -> PolicyConfig | None:
        """Return `policy` with smaller microbatches, or None if `error` has another consequence.

        If the microbatches cannot be smaller, the reason is added to the notes of the cause.
        """
        if (
            policy.oom == "stop"
            or not isinstance(error, WorkerError)
            or error.group != "policy"
            or not is_out_of_memory(error.cause)
        ):
            return None
        if self.num_reductions == MAX_REDUCTIONS:
            _add_note(
                error.cause,
                f"policy.oom is shrink, and the run has had {MAX_REDUCTIONS} reductions already.",
            )
            return None
        smaller = smaller_microbatches(policy, layout, batch)
        if smaller == policy:
            limits = ", ".join(f"{key}={value}" for key, value in microbatch_limits(policy))
            _add_note(
                error.cause,
                f"policy.oom is shrink, but {limits} cannot be smaller: a"
                f" {batch.example} of policy.max_total_sequence_length="
                f"{policy.max_total_sequence_length} has to fit in a microbatch. Lower"
                " policy.max_total_sequence_length.",
            )
            return None
        self.num_reductions += 1
        return smaller


def _add_note(error: Exception, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def smaller_microbatches(
    policy: PolicyConfig, layout: ParallelLayout, batch: BatchNeeds
) -> PolicyConfig:
    """Return the policy with 0.8 times the tokens, or rows, per microbatch.

    A budget does not become smaller than the longest row, where a longer one would end the run.
    """
    mode = batching_section(policy)
    if mode is None:
        return replace(
            policy,
            train_micro_batch_size=_smaller(policy.train_micro_batch_size, 1),
            logprob_batch_size=_smaller(policy.logprob_batch_size, 1),
        )
    name, section = mode
    multiples = padding_multiples(layout, section)
    longest = multiples.min_tokens
    if policy.oversize_rows in ("error", "drop"):
        row = multiples.tokens_of_row(policy.max_total_sequence_length)
        longest = batch.rows_per_example * row
    smaller = replace(
        section,
        train_mb_tokens=_smaller(section.train_mb_tokens, longest),
        logprob_mb_tokens=_smaller(section.logprob_mb_tokens, longest),
    )
    return replace(policy, **{name.removeprefix("policy."): smaller})


def _smaller(limit: int, minimum: int) -> int:
    return max(int(_FACTOR * limit), min(limit, minimum))


def microbatch_limits(policy: PolicyConfig) -> Iterator[tuple[str, int]]:
    """Yield key and value of the limits of a microbatch, training before log-probs."""
    mode = batching_section(policy)
    if mode is None:
        yield "policy.train_micro_batch_size", policy.train_micro_batch_size
        yield "policy.logprob_batch_size", policy.logprob_batch_size
        return
    name, section = mode
    yield f"{name}.train_mb_tokens", section.train_mb_tokens
    yield f"{name}.logprob_mb_tokens", section.logprob_mb_tokens


def limit_metrics(policy: PolicyConfig) -> Metrics:
    """Return the limit of a training microbatch as a metric, in runs that may lower it."""
    if policy.oom == "stop":
        return {}
    _, limit = next(microbatch_limits(policy))
    return {"policy/microbatch_limit": Max(limit)}
