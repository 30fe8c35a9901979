"""At most one wait for the device per microbatch, in training and in log-prob passes."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.preferences.config import PreferenceLossConfig
from nemo_like.algorithms.preferences.loss import BradleyTerryLoss, PreferenceLoss
from nemo_like.config.loss import ImportanceCorrectionConfig, PolicyGradientLossConfig
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.losses import ClippedPolicyGradientLoss, Loss, NllLoss
from nemo_like.losses.likelihood import DistillationLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from tests.policy import fake_device
from tests.policy.distillation import SETTINGS, save_teachers
from tests.policy.host_waits import HostWaits
from tests.policy.preferences import pair_batch
from tests.policy.test_worker import DYNAMIC, PACKED
from tests.policy.tiny import context

FEW, MANY = 1, 3
"""Microbatches of the passes that are compared."""
LOSSES: dict[str, Loss] = {
    "sft": NllLoss(),
    "grpo": ClippedPolicyGradientLoss(
        config=PolicyGradientLossConfig(
            reference_policy_kl_penalty=0.1, ratio_clip_c=3.0, entropy_coefficient=0.01
        )
    ),
    "grpo, corrected": ClippedPolicyGradientLoss(
        config=PolicyGradientLossConfig(
            normalization="sequence",
            importance_correction=ImportanceCorrectionConfig(kind="sequence_mask", upper=2.0),
        )
    ),
    "dpo": PreferenceLoss(config=PreferenceLossConfig(sft_loss_weight=0.5)),
}


def batch_of(num_microbatches: int) -> BatchedDataDict:
    """Pairs of rows with all columns; each pair fills a packed microbatch of 48 tokens."""
    lengths = [24, 20] * num_microbatches
    batch = pair_batch(lengths)
    batch["version_gap"] = Jagged.from_lengths(
        np.arange(sum(lengths), dtype=np.float32) % 3, np.asarray(lengths)
    )
    return batch


def shard_of(worker: DTensorPolicyWorker, num_microbatches: int) -> SlicedDataDict:
    batch = batch_of(num_microbatches)
    spec = plan_spec(
        worker.config,
        purpose="train",
        parallel_layout=ParallelLayout(),
        model=load_spec(worker.config.model_name),
    )
    spec = dataclasses.replace(spec, global_batch_size=len(batch["length"]))
    plan = plan_batch(batch["length"], spec, groups=batch["pair"])
    shard = batch.shard(plan)[0]
    assert shard.plan is not None
    assert len(shard.plan.microbatches) == num_microbatches
    return shard


def waits_per_microbatch(counted: dict[int, HostWaits]) -> float:
    """Waits that each further microbatch adds; a step has some of its own."""
    (few, waits_of_few), (many, waits_of_many) = sorted(counted.items())
    return (len(waits_of_many.places) - len(waits_of_few.places)) / (many - few)


@pytest.fixture(scope="module", params=["llama", "qwen3_window"])
def worker(request: pytest.FixtureRequest, model_dir: Any) -> DTensorPolicyWorker:
    config = dataclasses.replace(
        PACKED, model_name=model_dir(request.param), activation_checkpointing="full"
    )
    return DTensorPolicyWorker(context(), config=config, start=PolicyStart(needs_reference=True))


@pytest.mark.parametrize("name", LOSSES)
def test_training_waits_at_the_end_of_a_step_only(worker: DTensorPolicyWorker, name: str) -> None:
    counted = {}
    for num_microbatches in (FEW, MANY):
        shard = shard_of(worker, num_microbatches)
        with HostWaits() as counted[num_microbatches]:
            worker.train(shard, None, LOSSES[name])
    assert counted[FEW].places, "the norm of a step is read"
    assert waits_per_microbatch(counted) == 0, sorted(set(counted[MANY].places))


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_waits_at_its_end_only(worker: DTensorPolicyWorker, name: str) -> None:
    counted = {}
    for num_microbatches in (FEW, MANY):
        shard = shard_of(worker, num_microbatches)
        with HostWaits() as counted[num_microbatches]:
            worker.evaluate(shard, LOSSES[name])
    assert waits_per_microbatch(counted) == 0, sorted(set(counted[MANY].places))


def test_log_prob_passes_wait_at_their_end_only(worker: DTensorPolicyWorker) -> None:
    counted = {}
    for num_microbatches in (FEW, MANY):
        shard = shard_of(worker, num_microbatches)
        with HostWaits() as counted[num_microbatches]:
            worker.compute_logprobs(shard)
    # One transfer for each of policy and reference.
    assert len(counted[FEW].places) == 2, counted[FEW].places
    assert waits_per_microbatch(counted) == 0, sorted(set(counted[MANY].places))


def test_padded_microbatches_do_not_wait_either(model_dir: Any) -> None:
    config = dataclasses.replace(DYNAMIC, model_name=model_dir("llama"))
    config = dataclasses.replace(
        config, dynamic_batching=dataclasses.replace(config.dynamic_batching, train_mb_tokens=48)
    )
    worker = DTensorPolicyWorker(context(), config=config)
    counted = {}
    for num_microbatches in (FEW, MANY):
        shard = shard_of(worker, num_microbatches)
        with HostWaits() as counted[num_microbatches]:
            worker.train(shard, None, NllLoss())
    assert waits_per_microbatch(counted) == 0, sorted(set(counted[MANY].places))


@pytest.fixture(scope="module")
def student(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> DTensorPolicyWorker:
    events: list[str] = []

    def load(engine: DTensorEngine, config: PolicyConfig, *args: Any, **kwargs: Any) -> None:
        events.append(f"load {config.model_name}")
        load_engine(engine, config, *args, **kwargs)

    load_engine = DTensorEngine.__init__
    model = model_dir("llama")
    teachers = save_teachers(tmp_path_factory.mktemp("teachers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensorEngine, "__init__", load)
        patch.setattr(
            DTensorEngine,
            "offload",
            lambda engine: events.append(f"offload {engine.config.model_name}"),
        )
        worker = DTensorPolicyWorker(
            context(),
            config=dataclasses.replace(PACKED, model_name=model),
            start=PolicyStart(teachers=teachers),
        )
    expected = [f"load {model}"]
    for teacher in teachers:
        expected += [f"load {teacher}", f"offload {teacher}"]
    assert events == expected, "one teacher at a time is on the device"
    return worker


@pytest.mark.parametrize("name", ["jsd", "top-k"])
def test_distillation_waits_at_the_end_of_a_pass_only(
    student: DTensorPolicyWorker, name: str
) -> None:
    passes: dict[str, dict[int, HostWaits]] = {"teachers": {}, "train": {}, "evaluate": {}}
    for num_microbatches in (FEW, MANY):
        shard = shard_of(student, num_microbatches)
        shard["teacher"] = np.arange(2 * num_microbatches, dtype=np.int64) % 2
        with HostWaits() as passes["teachers"][num_microbatches]:
            handle = student.compute_targets(shard, SETTINGS[name])
        with HostWaits() as passes["train"][num_microbatches]:
            student.train(shard, None, DistillationLoss(sft_weight=0.5), handle)
        with HostWaits() as passes["evaluate"][num_microbatches]:
            student.evaluate(shard, DistillationLoss(), handle)
    for each, counted in passes.items():
        assert waits_per_microbatch(counted) == 0, (each, sorted(set(counted[MANY].places)))


def test_scores_wait_at_the_end_of_a_pass_only(model_dir: Any) -> None:
    config = dataclasses.replace(PACKED, model_name=model_dir("llama"))
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(head="scores"))
    passes: dict[str, dict[int, HostWaits]] = {"scores": {}, "train": {}}
    for num_microbatches in (FEW, MANY):
        shard = shard_of(worker, num_microbatches)
        with HostWaits() as passes["scores"][num_microbatches]:
            worker.compute_scores(shard)
        with HostWaits() as passes["train"][num_microbatches]:
            worker.train(shard, None, BradleyTerryLoss())
    for each, counted in passes.items():
        assert waits_per_microbatch(counted) == 0, (each, sorted(set(counted[MANY].places)))


def test_no_operator_mixes_devices(model_dir: Any, tmp_path: Path) -> None:
    """Steps of all kinds on a fake device: the CPU would not notice a tensor of the wrong one."""
    out = tmp_path / "found"
    arguments = (model_dir("llama"), save_teachers(tmp_path), out)
    # Forked from a process that has imported everything, see tests/conftest.py.
    process = multiprocessing.get_context("forkserver").Process(
        target=fake_device.run, args=arguments
    )
    process.start()
    process.join(timeout=300)
    if process.exitcode is None:
        process.kill()
    text = out.read_text()
    assert process.exitcode == 0, text[-3000:]
    found = text.splitlines()
    assert found[:3] == [
        "mixed: FakeTensorDeviceMismatchError",
        "item: DataDependentOutputException",
        "mask: DynamicOutputShapeException",
    ]
    assert found[3:] == ["grpo", "lora, averaged", "muon", "scores", "jsd", "top-k"]


def test_the_counter_sees_every_kind_of_wait() -> None:
    values = torch.arange(4.0)
    operations = {
        "item": values[0].item,
        "float": lambda: float(values[0]),
        "bool": lambda: bool(values[0] > 0),
        "tolist": values.tolist,
        "nonzero": values.nonzero,
        "numpy": values.numpy,
        "cpu": values.cpu,
        "mask": lambda: values[values > 1],
        "equal": lambda: torch.equal(values, values),
        "unique": values.unique,
        "repeats": lambda: values.repeat_interleave(torch.tensor([1, 2, 3, 4])),
        "built": lambda: torch.tensor([1.0], device="cpu"),
        "to the device and back": lambda: values.add(1).cpu().to(torch.device("cpu")),
    }
    for name, operation in operations.items():
        with HostWaits() as waits:
            operation()
        assert len(waits.places) == (2 if "back" in name else 1), name
        assert waits.places[0].startswith("test_host_waits.py"), name
    with HostWaits() as waits:
        fetched = values.add(1).to("cpu")
        fetched.numpy()
        fetched[1:].tolist()
        values.index_select(0, torch.arange(2)).mul(2)
    assert len(waits.places) == 1
