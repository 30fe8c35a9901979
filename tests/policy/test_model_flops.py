"""Model FLOPs of a step against the matrix products that torch counts while the step runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.schema import AdapterConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.columns import num_trained_tokens
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import NllLoss
from nemo_like.losses.likelihood import DistillationLoss
from nemo_like.metrics import Timers, metric_values
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.training.reporting import StepWork, throughput_metrics
from tests.policy.distillation import SETTINGS, save_teachers
from tests.policy.tiny import VOCABULARY, context

LENGTHS = np.array([24, 20, 17, 30])
FEW = np.array([2, 0, 3, 1])
MANY = LENGTHS - 1
PACKED = PolicyConfig(
    model_name="",
    train_global_batch_size=len(LENGTHS),
    # Several chunks of the vocabulary head in a microbatch.
    logprob_chunk_size=16,
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=60, logprob_mb_tokens=60),
)


def batch_of(num_trained: np.ndarray) -> BatchedDataDict:
    """Rows that end with their trained tokens; the second is masked where it has none of FEW."""
    ids = np.random.default_rng(0).integers(2, 60, LENGTHS.sum()).astype(np.int32)
    input_ids = Jagged.from_lengths(ids, LENGTHS)
    num_left = input_ids.offsets[1:].repeat(LENGTHS) - np.arange(len(ids))
    # A row without trained tokens has a mask of ones, and is excluded as a row.
    wanted = np.where(num_trained == 0, LENGTHS, num_trained).repeat(LENGTHS)
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=Jagged((num_left <= wanted).astype(np.uint8), input_ids.offsets),
        length=LENGTHS,
        row_mask=num_trained > 0,
        teacher=np.array([0, 1, 0, 1]),
        pair=np.array([0, 0, 1, 1]),
        is_chosen=np.array([True, False, True, False]),
    )


def planned(worker: DTensorPolicyWorker, batch: BatchedDataDict) -> BatchPlan:
    spec = plan_spec(
        worker.config,
        purpose="train",
        parallel_layout=ParallelLayout(),
        model=load_spec(worker.config.model_name),
    )
    counts = TokenCounts(batch["length"], num_trained_tokens(batch))
    return plan_batch(counts, spec, batch["pair"])


def counted(run: Callable[[], Any]) -> int:
    """FLOPs of the products with weights; those of attention are other operators."""
    # torch counts no products that are added in place.
    in_place = {torch.ops.aten.addmm_: lambda total, left, right, **_: mm_flop(left, right)}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    products = ("aten.mm", "aten.addmm", "aten.addmm_")
    return sum(flops for name, flops in counts.items() if str(name) in products)


def reported(work: StepWork, cost: CostModel, **options: Any) -> float:
    """FLOPs from which the rate is computed that a run logs, without attention."""
    timers = Timers()
    timers.add("train", 1.0)
    without_attention = dataclasses.replace(cost, quadratic=0.0)
    metrics = throughput_metrics(
        work, without_attention, timers, peak_flops=1.0, num_workers=1, **options
    )
    return metric_values(metrics)["performance/train_mfu"]


@pytest.mark.parametrize("num_trained", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2_tied"])
def test_a_step_is_the_products_that_run_less_those_that_run_again(
    model_dir: Any, architecture: str, checkpointing: Any, num_trained: np.ndarray
) -> None:
    config = dataclasses.replace(
        PACKED, model_name=model_dir(architecture), activation_checkpointing=checkpointing
    )
    worker = DTensorPolicyWorker(context(), config=config)
    batch = batch_of(num_trained)
    plan = planned(worker, batch)
    shard = batch.shard(plan)[0]
    spec = load_spec(config.model_name)
    cost = CostModel.from_spec(spec)
    forward = counted(lambda: worker.compute_logprobs(shard, ["prev_logprobs"]))
    one_pass = reported(StepWork.of(plan, num_epochs=0, num_logprob_passes=1), cost)
    assert one_pass == forward
    # The backward of the head computes its logits again, chunk by chunk.
    again = 2 * spec.vocab_size * spec.hidden_size * int(num_trained.sum())
    if checkpointing == "full":
        layers = forward - again
        # torch stops recomputing a layer before its last product, whose result is not needed.
        last = 2 * spec.num_layers * spec.hidden_size * spec.intermediate_size * LENGTHS.sum()
        again += layers - int(last)
    executed = counted(lambda: worker.train(shard, None, NllLoss()))
    assert reported(StepWork.of(plan), cost) == executed - again


def test_with_frozen_weights_a_trained_token_costs_two_products_of_the_head(model_dir: Any) -> None:
    # The adapters and the first layer, which has no gradient to pass on, are equal in both steps.
    lora = AdapterConfig(enabled=True, rank=2)
    config = dataclasses.replace(PACKED, model_name=model_dir("llama"), lora=lora)
    worker = DTensorPolicyWorker(context(), config=config)
    cost = CostModel.from_spec(load_spec(config.model_name))
    found = []
    for num_trained in (FEW, MANY):
        batch = batch_of(num_trained)
        plan = planned(worker, batch)
        shard = batch.shard(plan)[0]
        executed = counted(lambda: worker.train(shard, None, NllLoss()))  # noqa: B023
        again = cost.head * num_trained.sum()
        found.append((reported(StepWork.of(plan), cost, has_frozen_weights=True), executed - again))
    (few, executed_few), (many, executed_many) = found
    assert many - few == executed_many - executed_few


@pytest.mark.parametrize("name", ["jsd", "top-k"])
def test_teachers_compute_their_head_for_trained_tokens(
    model_dir: Any, tmp_path: Path, name: str
) -> None:
    config = dataclasses.replace(PACKED, model_name=model_dir("llama"))
    teachers = save_teachers(tmp_path)
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(teachers=teachers))
    cost = CostModel.from_spec(load_spec(config.model_name))
    batch = batch_of(FEW)
    plan = planned(worker, batch)
    shard = batch.shard(plan)[0]

    def step() -> None:
        targets = worker.compute_targets(shard, SETTINGS[name])
        worker.train(shard, None, DistillationLoss(), targets)

    flops = 0.0
    again = cost.head * FEW.sum()
    for index, teacher in enumerate(teachers):
        spec = load_spec(teacher)
        # Vocabulary that the student does not have is padding, and not computed.
        spec = dataclasses.replace(spec, vocab_size=min(spec.vocab_size, VOCABULARY))
        of_teacher = dataclasses.replace(CostModel.from_spec(spec), quadratic=0.0)
        is_own = batch["teacher"] == index
        flops += of_teacher.of(LENGTHS[is_own], FEW[is_own]).sum()
        # Logits of a teacher are computed twice: in forward and backward of the student, or for
        # the largest ones and for the labels.
        again += of_teacher.head * FEW[is_own].sum()
    work = dataclasses.replace(StepWork.of(plan), teacher_flops=float(flops))
    assert reported(work, cost) == counted(step) - again


def test_a_reward_model_has_one_product_per_row(model_dir: Any) -> None:
    config = dataclasses.replace(PACKED, model_name=model_dir("llama"))
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(head="scores"))
    spec = load_spec(config.model_name).with_output_head("scores")
    batch = batch_of(MANY)
    plan = planned(worker, batch)
    shard = batch.shard(plan)[0]
    executed = counted(lambda: worker.train(shard, None, BradleyTerryLoss()))
    of_scores = 3 * 2 * spec.hidden_size * len(LENGTHS)
    assert reported(StepWork.of(plan), CostModel.from_spec(spec)) == executed - of_scores
