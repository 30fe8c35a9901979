"""Training steps on a device that has no memory, in a process of its own, as it registers the
device for good.

Tensors are those of `FakeTensorMode`, on a device that Python registers. An operator with tensors
of two devices is an error there, as on CUDA, and so is reading a value or a shape that depends on
values, for which the host would wait. On the CPU both pass unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import (
    AdapterConfig,
    EmaConfig,
    OptimizerConfig,
    OutputHead,
    PolicyConfig,
)
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.losses import ClippedPolicyGradientLoss, Loss, NllLoss
from nemo_like.losses.likelihood import DistillationLoss, Divergence
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor import engine as engine_module
from nemo_like.policy.dtensor import model as model_module
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.frozen_models import Teachers
from nemo_like.policy.heads.targets import Targets, TargetSettings
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.loss_step import LossStep
from nemo_like.policy.outputs import TokenDistribution
from nemo_like.policy.shard_rows import ShardRows
from tests.policy.preferences import pair_batch
from tests.policy.test_gradient_equality import dynamic

DEVICE = "fake"
LORA = AdapterConfig(enabled=True, rank=4)
POLICIES: dict[str, tuple[dict[str, Any], OutputHead, Loss]] = {
    "grpo": ({}, "vocabulary", ClippedPolicyGradientLoss(config=PolicyGradientLossConfig())),
    "lora, averaged": ({"lora": LORA, "ema": EmaConfig(enabled=True)}, "vocabulary", NllLoss()),
    "muon": ({"optimizer": OptimizerConfig(name="muon")}, "vocabulary", NllLoss()),
    "scores": ({}, "scores", BradleyTerryLoss(center_coefficient=0.1)),
}
TARGETS = {
    "jsd": TargetSettings(divergence=Divergence(kind="jsd", temperature=1.5)),
    "top-k": TargetSettings(divergence=Divergence(kind="mixed_kl"), top_k=3),
}


def taught_pairs() -> BatchedDataDict:
    """Pairs of rows, some of each teacher."""
    batch = pair_batch()
    batch["teacher"] = np.arange(len(batch["length"]), dtype=np.int64) % 2
    return batch


def shard_of(config: PolicyConfig) -> SlicedDataDict:
    """The rows of one rank, padded: packed rows need a kernel of CUDA."""
    batch = taught_pairs()
    spec = plan_spec(
        config,
        purpose="train",
        parallel_layout=ParallelLayout(),
        model=load_spec(config.model_name),
    )
    plan = plan_batch(batch["length"], spec, groups=batch["pair"])
    return batch.shard(plan)[0]


def open_engine(
    config: PolicyConfig, *, trainable: bool = True, head: OutputHead = "vocabulary"
) -> DTensorEngine:
    """An engine whose weights are not read: they have no memory."""
    groups = Groups(layout=ParallelLayout(), rank=0, device=torch.device(DEVICE))
    return DTensorEngine(config, groups, trainable=trainable, head=head)


def inputs_of(rows: ShardRows, shard: SlicedDataDict) -> Iterator[ModelInputs]:
    assert shard.plan is not None
    return map(rows.inputs, shard.plan.microbatches)


def take_step(
    engine: DTensorEngine, shard: SlicedDataDict, loss: Loss, targets: Targets | None = None
) -> None:
    """Forward, backward and update; what reads numbers at the end of a step is left out."""
    assert shard.plan is not None
    rows = ShardRows(shard, shard.plan.spec, 0, engine.device, targets)
    step = LossStep(loss, 8.0, engine.ranks)
    inputs = inputs_of(rows, shard)
    results = engine.run(
        inputs, step, TokenDistribution(with_entropy=loss.needs_entropy), backward=True
    )
    assert len(results) == len(shard.plan.microbatches)
    engine.optimizer.scale_gradients(0.5)
    engine.optimizer.step(1e-3)
    if engine.ema is not None:
        engine.ema.update(engine.masters())
        with engine.ema_weights():
            pass
    check_devices(engine.local_weights())
    check_devices(engine.optimizer.moments())


def check_devices(tensors: Iterator[Tensor]) -> None:
    devices = {tensor.device.type for tensor in tensors}
    assert devices == {DEVICE}, devices


def check_detection() -> None:
    """Mixed devices and waits are errors."""
    values = torch.randn(3, 4, device=DEVICE)
    operations = {
        "mixed": lambda: values.index_select(0, torch.arange(2)),
        "item": lambda: float(values.sum()),
        "mask": lambda: values[values > 0],
    }
    for name, operation in operations.items():
        try:
            operation()
        except Exception as error:  # noqa: BLE001 (of several kinds)
            print(f"{name}: {type(error).__name__}")
            continue
        raise AssertionError(f"{name} is not noticed")


def _do_nothing(self: DTensorEngine) -> None:
    pass


def main(model: str, teachers: Sequence[str]) -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    # Tensors of one element would be real ones on the device.
    fake_tensor.CONSTANT_NUMEL_LIMIT = 0
    # Both compare values.
    model_module.check_head = lambda *args: None
    engine_module.load_weights = lambda *args: None
    # There is no memory to be moved.
    DTensorEngine.offload = _do_nothing
    DTensorEngine.onload = _do_nothing
    base = dataclasses.replace(dynamic(256), model_name=model)
    shard = shard_of(base)
    with FakeTensorMode(allow_non_fake_inputs=True):
        check_detection()
        for name, (settings, head, loss) in POLICIES.items():
            engine = open_engine(dataclasses.replace(base, **settings), head=head)
            take_step(engine, shard, loss)
            print(name)
        student = open_engine(base)
        frozen = [open_engine(base.frozen(each), trainable=False) for each in teachers]
        assert shard.plan is not None
        rows = ShardRows(shard, shard.plan.spec, 0, student.device)
        for name, settings in TARGETS.items():
            targets = Teachers(frozen, student).compute(rows, shard.plan.microbatches, settings)
            take_step(student, shard, DistillationLoss(sft_weight=0.1), targets)
            print(name)


def run(model: str, teachers: Sequence[str], out: Path) -> None:
    """Write what `main` prints, or the traceback of its error, to `out` and end the process."""
    status = 1
    with out.open("w") as file, contextlib.redirect_stdout(file):
        try:
            main(model, teachers)
            status = 0
        except Exception:  # noqa: BLE001 (the test prints it)
            traceback.print_exc(file=file)
    # Without the destructors of the threads that autograd started for the device.
    os._exit(status)
