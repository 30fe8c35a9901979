"""Training on filtered sampling, in layouts of the DTensor engine, against transformers in
float64.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import GenerationConfig, ParallelConfig, PolicyConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.models.spec import load_spec
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.sampling_filter import SamplingFilter
from tests.filter_definition import kept_tokens
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import context, random_batch, relative_error, run_ranks, saved_tensors

GENERATION = GenerationConfig(temperature=0.8, top_k=40, top_p=0.9, min_p=0.002)
KL_WEIGHT, ENTROPY_WEIGHT = 0.1, 0.05
FILTERED_LOSS = ClippedPolicyGradientLoss(
    config=PolicyGradientLossConfig(
        reference_policy_kl_penalty=KL_WEIGHT,
        entropy_coefficient=ENTROPY_WEIGHT,
        ratio_clip_max=3.0,
    )
)
PARALLEL = {
    "one rank": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2 + sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "cp2": (2, ParallelConfig(context=2)),
}
PACKED, DYNAMIC = "packed, 2 microbatches", "dynamic, 2 microbatches"


def filtered(layout: str, model: str) -> PolicyConfig:
    return dataclasses.replace(LAYOUTS[layout], model_name=model, generation=GENERATION)


def gradients_by_definition(
    model_name: str, batch: BatchedDataDict
) -> tuple[dict[str, Tensor], float, float]:
    """Gradients, loss and the share of trained tokens that the filter removes; each row by itself,
    float64 autograd.
    """
    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="eager").double()
    token_filter = SamplingFilter(
        top_k=GENERATION.top_k, top_p=GENERATION.top_p, min_p=GENERATION.min_p
    )
    total, count, outside = torch.zeros((), dtype=torch.float64), 0, 0
    for row in np.flatnonzero(batch["row_mask"]):
        ids = torch.from_numpy(batch["input_ids"][row].astype(np.int64))
        logits = model(ids[None]).logits[0, :-1] / GENERATION.temperature
        for position in np.flatnonzero(batch["token_mask"][row][1:]):
            label = int(ids[position + 1])
            kept = kept_tokens(logits[position].tolist(), token_filter)
            outside += label not in kept
            index = torch.tensor(sorted(kept | {label}))
            full = logits[position].log_softmax(0)
            logprob = logits[position, label] - logits[position, index].logsumexp(0)
            prev, reference = (
                float(batch[f"{name}_logprobs"][row][position + 1])
                for name in ("prev", "reference")
            )
            advantage = float(batch["advantages"][row])
            ratio = torch.exp(logprob - prev)
            surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 4.0))
            difference = reference - float(full[label].detach())
            kl = float(np.clip(np.exp(difference) - 1 - difference, -10, 10))
            kl_gradient = float(np.clip(-difference, -10, 10))
            kl = kl + kl_gradient * (full[label] - full[label].detach())
            entropy = -(full.exp() * full).sum()
            total, count = total + surrogate + KL_WEIGHT * kl - ENTROPY_WEIGHT * entropy, count + 1
    loss = total / count
    loss.backward()
    gradients = {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients, float(loss.detach()), outside / count


def train_dtensor(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    batch: BatchedDataDict,
    out: Path,
) -> dict[str, float]:
    """One optimizer step; the gradient is in the checkpoint `out` as `exp_avg`."""
    worker = DTensorPolicyWorker(
        worker_context, config=config, start=PolicyStart(parallel=parallel)
    )
    parallel_layout = build_layout(parallel, worker_context.world_size)
    spec = plan_spec(
        config, purpose="train", parallel_layout=parallel_layout, model=load_spec(config.model_name)
    )
    shard = batch.shard(plan_batch(batch["length"], spec))[
        parallel_layout.dp_rank(worker_context.rank)
    ]
    (metrics,) = worker.train(shard, None, FILTERED_LOSS)
    worker.save(out)
    process_groups.destroy()
    return {name: metric.value for name, metric in metrics.items()}


def test_dtensor_trains_the_filtered_distribution(model_dir, rank_pool, tmp_path):
    batch = random_batch(LENGTHS)
    expected, loss, outside = gradients_by_definition(model_dir("qwen3_tied"), batch)
    assert 0.1 < outside < 0.9, "labels on both sides of the filter"
    for parallel, (world_size, degrees) in PARALLEL.items():
        for layout in (PACKED, DYNAMIC) if world_size == 1 else (PACKED,):
            out = tmp_path / f"{parallel} {layout}"
            config = filtered(layout, model_dir("qwen3_tied"))
            if world_size == 1:
                metrics = [train_dtensor(context(), degrees, config, batch, out)]
            else:
                meeting = tmp_path / f"meeting of {out.name}"
                metrics = run_ranks(
                    rank_pool, train_dtensor, world_size, meeting, degrees, config, batch, out
                )
            assert metrics[-1]["policy/loss"] == pytest.approx(loss, rel=TOLERANCE), (
                parallel,
                layout,
            )
            assert relative_error(saved_tensors(out, "exp_avg"), expected) < TOLERANCE, (
                parallel,
                layout,
            )
