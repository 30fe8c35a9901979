"""Warnings about completions that train the policy badly: truncated, or with equal rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nemo_like.config.schema import RunConfig


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
