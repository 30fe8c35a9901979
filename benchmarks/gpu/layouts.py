"""Training steps of the 1B model on the same rows: by layout of the microbatches, and with common
prompts computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.policies import PolicyHolder, policy_config
from benchmarks.gpu.rows import random_rows
from benchmarks.gpu.training_steps import throughput, time_calls
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import DynamicBatchingConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import NllLoss, rollout_loss
from nemo_like.policy.policy import Policy

LAYOUTS = ("packed", "dynamic", "padded")
_PADDED_ROWS = 4
"""Rows of a padded microbatch."""
_COMPLETION_SIGMA = 0.25
"""Standard deviation of the logarithm of completion lengths."""


def short_lengths(num_tokens: int, mean: int, longest: int) -> np.ndarray:
    """Return lengths like questions with answers in GSM8K have, int64 [B].

    Their coefficient of variation is about 0.45.
    """
    rng = np.random.default_rng(0)
    sigma = 0.43
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_tokens // mean)
    return np.clip(drawn, 2, longest).astype(np.int64)


def time_layout(
    folder: Path, layout: str, lengths: np.ndarray, budget: int, holder: PolicyHolder, device: str
) -> Mapping[str, Any]:
    """Time steps over rows of `lengths`, int64 [B], in one of `LAYOUTS`.

    Packed and dynamic microbatches have `budget` tokens, padded ones 4 rows in the given order.
    """
    config = policy_config(
        folder, budget=budget, num_rows=len(lengths), longest=int(lengths.max()), options={}
    )
    policy = holder.get(config)
    if layout != "packed":
        dynamic = DynamicBatchingConfig(
            enabled=layout == "dynamic", train_mb_tokens=budget, logprob_mb_tokens=budget
        )
        config = dataclasses.replace(
            config,
            sequence_packing=SequencePackingConfig(),
            dynamic_batching=dynamic,
            train_micro_batch_size=_PADDED_ROWS,
        )
        policy = Policy(policy.group, config, policy.model)
    batch = random_rows(lengths, policy.model.vocab_size)
    plan = policy.plan(batch["length"])
    sharded = policy.shard(batch, plan)
    metrics: dict[str, Any] = {}

    def train() -> None:
        nonlocal metrics
        metrics = policy.train(sharded, None, NllLoss())[0]

    seconds = time_calls(train, device, 2, 2)["median_s"]
    packing = plan.metrics()
    return throughput(folder, lengths, seconds, device) | {
        "step_s": seconds,
        "loss": float(metrics["policy/loss"].value),
        "num_microbatches": packing["packing/num_microbatches"],
        "utilization": packing["packing/utilization"],
        **_peak(metrics),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCase:
    """Groups of rows with a common prompt."""

    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Max tokens of a completion."""
    group: int
    num_groups: int
    budget: int

    def rows(self, vocab_size: int) -> BatchedDataDict:
        """Return rows of random tokens, of which the completions are trained."""
        rng = np.random.default_rng(0)
        rows = []
        for _ in range(self.num_groups):
            start = rng.integers(2, vocab_size, self.prompt)
            drawn = self.completion * rng.lognormal(0, _COMPLETION_SIGMA, self.group)
            for length in np.clip(drawn, 2, self.completion).astype(int):
                rows.append(np.concatenate((start, rng.integers(2, vocab_size, length))))
        lengths = np.array([len(row) for row in rows])
        jagged = Jagged.from_lengths(np.concatenate(rows).astype(np.int32), lengths)
        mask = np.concatenate([np.arange(length) >= self.prompt for length in lengths])
        return BatchedDataDict(
            input_ids=jagged,
            token_mask=Jagged(mask.astype(np.uint8), jagged.offsets),
            generation_logprobs=Jagged(np.full(len(mask), -5.0, np.float32), jagged.offsets),
            advantages=rng.normal(size=len(rows)).astype(np.float32),
            length=lengths,
            row_mask=np.ones(len(rows), dtype=bool),
            group=np.repeat(np.arange(self.num_groups), self.group),
        )


def time_shared_prefix(
    folder: Path, case: PrefixCase, holder: PolicyHolder, device: str
) -> Mapping[str, Any]:
    """Time a log-prob pass and a training step with and without shared prefixes."""
    longest = case.prompt + case.completion
    num_rows = case.num_groups * case.group
    config = policy_config(
        folder, budget=case.budget, num_rows=num_rows, longest=longest, options={}
    )
    policy = holder.get(config)
    batch = case.rows(policy.model.vocab_size)
    values: dict[str, Any] = {"num_tokens": int(batch["length"].sum()), "num_rows": num_rows}
    for is_shared in (False, True):
        variant = Policy(
            policy.group, dataclasses.replace(config, shared_prefix=is_shared), policy.model
        )
        for name, value in _time_variant(variant, batch, longest, device).items():
            values[f"{str(is_shared).lower()} {name}"] = value
    for kind in ("logprob_s", "train_s"):
        values[f"{kind} ratio"] = values[f"false {kind}"] / values[f"true {kind}"]
    return values


def _time_variant(
    policy: Policy, batch: BatchedDataDict, longest: int, device: str
) -> Mapping[str, Any]:
    loss = rollout_loss(PolicyGradientLossConfig(), longest)
    plan = policy.plan_rows(batch)
    sharded = policy.shard(batch, plan)
    metrics: dict[str, Any] = {}
    logprobs: Any = None

    def score() -> None:
        nonlocal logprobs
        logprobs = policy.compute_logprobs(sharded)

    def train() -> None:
        nonlocal metrics
        metrics = policy.train(sharded, None, loss, logprobs)[0]

    timed: dict[str, Callable[[], None]] = {"logprob_s": score, "train_s": train}
    seconds = {name: time_calls(each, device, 2, 2)["median_s"] for name, each in timed.items()}
    return {
        **seconds,
        "computed_tokens": int(plan.num_tokens.sum()),
        "loss": float(metrics["policy/loss"].value),
        **_peak(metrics),
    }


def _peak(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the peak memory in GB, on a GPU."""
    peak = metrics.get("policy/peak_memory_gb")
    return {} if peak is None else {"peak_gb": round(float(peak.value), 2)}
