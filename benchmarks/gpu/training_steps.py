"""Timing of optimizer steps: tokens/s, MFU, and measured memory beside the prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.policies import (
    Options,
    PolicyHolder,
    option_defaults,
    policy_config,
    predicted_peak_gb,
)
from benchmarks.gpu.profile import profile_call
from benchmarks.gpu.rows import random_rows
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.spec import CostModel
from nemo_like.losses import Loss, NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.policy.device import peak_flops
from nemo_like.policy.policy import Policy

COMPILE = "policy.compile"
"""Key of the compilation of layers, in versions that have it."""


class OutOfMemory(RuntimeError):
    """A step needs more memory than the device has."""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One training step to be timed."""

    folder: Path
    lengths: np.ndarray
    """int64 [B]"""
    budget: int
    """Tokens per microbatch."""
    longest: int
    options: Options
    num_steps: int
    """Timed steps."""
    engine: Any = "dtensor"

    @property
    def num_warmup_steps(self) -> int:
        """Steps before the timed ones: with compilation the first few compile."""
        return 3 if is_compiled(self.options) else 1


def time_steps(case: StepCase, holder: PolicyHolder, device: str) -> dict[str, Any]:
    """Return the medians of a policy's steps. Raises OutOfMemory, with the prediction."""
    config = policy_config(
        case.folder,
        budget=case.budget,
        num_rows=len(case.lengths),
        longest=case.longest,
        options=case.options,
    )
    predicted = predicted_peak_gb(config, case.engine, device, case.options, case.budget)
    start = time.perf_counter()
    try:
        policy = holder.get(config, options=case.options)
        load_s = time.perf_counter() - start
        batch = random_rows(case.lengths, policy.model.vocab_size)
        plan = policy.plan(batch["length"])
        sharded = policy.shard(batch, plan)
        largest = int(plan.num_tokens.max())
        predicted = predicted_peak_gb(config, case.engine, device, case.options, largest)
        metrics: dict[str, Any] = {}

        if device.startswith("cuda"):
            # Otherwise memory that earlier cases left in the allocator is counted as reserved.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def step() -> None:
            nonlocal metrics
            metrics = policy.train(sharded, None, NllLoss())[0]

        seconds = time_calls(step, device, case.num_steps, case.num_warmup_steps)
        packing = plan.metrics()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory; the predicted peak is {predicted:.1f} GB") from None
    values = throughput(case.folder, case.lengths, seconds["median_s"], device)
    values |= {
        "load_s": round(load_s, 2),
        "first_step_s": seconds["first_s"],
        "step_s": seconds["median_s"],
        "all_step_s": seconds["all_s"],
        "loss": float(metrics["policy/loss"].value),
        "num_microbatches": packing["packing/num_microbatches"],
        "utilization": packing["packing/utilization"],
        "predicted_peak_gb": round(predicted, 2),
    }
    peak = metrics.get("policy/peak_memory_gb")
    if peak is not None:
        values["peak_gb"] = round(float(peak.value), 2)
        values["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        values["predicted_over_measured"] = round(predicted / float(peak.value), 3)
    return values


def profile_steps(case: StepCase, holder: PolicyHolder, *, is_cuda: bool) -> dict[str, Any]:
    """Return the profile of one step after warm-up; see `profile.summarize`."""
    policy, plan, sharded = _opened(case, holder)

    def step() -> None:
        policy.train(sharded, None, NllLoss())

    for _ in range(case.num_warmup_steps):
        step()
    return profile_call(step, plan.metrics()["packing/num_microbatches"], is_cuda=is_cuda)


def _opened(case: StepCase, holder: PolicyHolder) -> tuple[Policy, BatchPlan, Any]:
    """Return the policy of a case, the plan of its rows, and their shards."""
    config = policy_config(
        case.folder,
        budget=case.budget,
        num_rows=len(case.lengths),
        longest=case.longest,
        options=case.options,
    )
    policy = holder.get(config, options=case.options)
    batch = random_rows(case.lengths, policy.model.vocab_size)
    plan = policy.plan(batch["length"])
    return policy, plan, policy.shard(batch, plan)


def is_compiled(options: Options) -> bool:
    """Return True if a policy with these options compiles a part of the model."""
    default, _ = option_defaults().get(COMPILE, ("none", ()))
    return options.get(COMPILE, default) != "none"


def time_loss(case: StepCase, holder: PolicyHolder, device: str, loss: Loss) -> dict[str, Any]:
    """Return the median seconds of a policy's steps with another loss, and of a log-prob pass."""
    policy, _, sharded = _opened(case, holder)
    train = time_calls(lambda: policy.train(sharded, None, loss), device, case.num_steps, 1)
    score = time_calls(lambda: policy.compute_logprobs(sharded), device, case.num_steps, 1)
    num_tokens = float(case.lengths.sum())
    return throughput(case.folder, case.lengths, train["median_s"], device) | {
        "step_s": train["median_s"],
        "logprob_pass_s": score["median_s"],
        "logprob_tokens_per_s": num_tokens / score["median_s"],
    }


def throughput(folder: Path, lengths: np.ndarray, seconds: float, device: str) -> dict[str, Any]:
    """Return tokens/s and MFU of a step over rows of `lengths`, int64 [B]."""
    peak, source = peak_flops(torch.device(device))
    # No position predicts the first token of a row. The backward pass is twice the forward.
    flops = 3.0 * CostModel.from_spec(load_spec(str(folder))).of(lengths, lengths - 1).sum()
    return {
        "num_rows": len(lengths),
        "num_tokens": int(lengths.sum()),
        "longest_row": int(lengths.max()),
        "tokens_per_s": round(float(lengths.sum()) / seconds, 1),
        "mfu": round(flops / seconds / peak, 4),
        "peak_flops": peak,
        "peak_flops_source": source,
    }


def time_calls(
    function: Callable[[], Any], device: str, num_calls: int, num_warmup_calls: int
) -> dict[str, Any]:
    """Return seconds of `function`: of the first call, and the median of those after warm-up."""
    seconds = []
    for _ in range(num_warmup_calls + num_calls):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    timed = seconds[num_warmup_calls:]
    return {
        "first_s": round(seconds[0], 4),
        "median_s": statistics.median(timed),
        "all_s": [round(each, 4) for each in timed],
    }


def median_seconds(function: Callable[[], Any], device: str) -> float:
    """Return the median seconds of a short function: between events on CUDA, else of the host."""
    if device.startswith("cuda"):
        from triton.testing import do_bench

        return float(do_bench(function, return_mode="median")) / 1e3  # pyright: ignore[reportArgumentType]
    return time_calls(function, device, 10, 3)["median_s"]


def synchronize(device: str) -> None:
    """Wait for the device; does nothing on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error, or one of its causes, is that the device has no memory left."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return True
        seen = seen.__cause__
    return False
