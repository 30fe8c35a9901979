"""Two training steps of each kind of training beside SFT of all weights; also a program.

    python -m tests.gpu.features WORKER DEVICE PRECISION MODEL TEACHER TEACHER

The program prints the values of all features. It is the reference in a process of its own, because
Megatron-Core on the CPU changes its modules for the rest of a process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.schema import AdapterConfig, EmaConfig, OptimizerConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup
from nemo_like.losses import Loss, NllLoss
from nemo_like.losses.likelihood import DistillationLoss, Divergence
from nemo_like.policy.heads.targets import TargetSettings
from nemo_like.policy.policy import Logprobs, Policy, ShardedBatch
from tests.gpu.steps import open_policy, some_rows
from tests.policy.tiny import VOCABULARY

Values = dict[str, list[float]]
NUM_STEPS = 2
_LR = OptimizerConfig(lr=1e-3)
_LORA = AdapterConfig(enabled=True, rank=4, alpha=8.0)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One kind of training: settings of the policy, arguments of its worker, loss and targets."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss = field(default_factory=NllLoss)
    targets: TargetSettings | None = None
    """Of two teachers."""
    is_megatron: bool = True
    """Both engines have it."""
    package: str | None = None
    """A package that it needs."""


def _distilled(settings: TargetSettings) -> Feature:
    return Feature(loss=DistillationLoss(sft_weight=0.25), targets=settings)


FEATURES: dict[str, Feature] = {
    "lora": Feature(settings={"lora": _LORA}, worker={"needs_reference": True}),
    "lora, selective checkpointing": Feature(
        settings={"lora": _LORA, "activation_checkpointing": "selective"}
    ),
    "lora, full checkpointing": Feature(
        settings={"lora": _LORA, "activation_checkpointing": "full"}
    ),
    "freeze": Feature(settings={"freeze": ("model.embed_tokens.*", "model.layers.0.*")}),
    "ema": Feature(settings={"ema": EmaConfig(enabled=True, decay=0.5)}),
    "muon": Feature(
        settings={"optimizer": dataclasses.replace(_LR, name="muon")}, is_megatron=False
    ),
    "adamw_8bit": Feature(
        settings={"optimizer": dataclasses.replace(_LR, name="adamw_8bit")},
        is_megatron=False,
        package="torchao",
    ),
    "scores": Feature(worker={"head": "scores"}, loss=BradleyTerryLoss(center_coefficient=0.01)),
    "distillation": _distilled(TargetSettings(divergence=Divergence(kind="jsd"))),
    "distillation, temperatures": _distilled(
        TargetSettings(divergence=Divergence(temperature=1.3))
    ),
    "distillation, top-k": _distilled(
        TargetSettings(divergence=Divergence(kind="mixed_kl"), top_k=5)
    ),
}


def features_of(worker: str) -> list[str]:
    """Return the names of the features that an engine has and whose package is installed."""
    names = []
    for name, feature in FEATURES.items():
        is_missing = feature.package is not None and (
            importlib.util.find_spec(feature.package) is None
        )
        if (worker == "dtensor" or feature.is_megatron) and not is_missing:
            names.append(name)
    return names


def save_teachers(folder: Path) -> list[str]:
    """Two models of other sizes than the student, one of them with padding rows.

    Their heads have sizes that the attention kernels of CUDA take.
    """
    directories = []
    for index, (hidden_size, vocab_size) in enumerate([(64, VOCABULARY + 5), (32, VOCABULARY)]):
        torch.manual_seed(20 + index)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
        LlamaForCausalLM(config).save_pretrained(folder / str(index))
        directories.append(str(folder / str(index)))
    return directories


def feature_rows() -> BatchedDataDict:
    """The rows of `some_rows` as pairs, and with the teacher of each row."""
    batch = some_rows()
    num_rows = len(batch["length"])
    batch["pair"] = np.repeat(np.arange(num_rows // 2, dtype=np.int64), 2)
    batch["is_chosen"] = np.tile([True, False], num_rows // 2)
    batch["teacher"] = np.arange(num_rows, dtype=np.int64) % 3 % 2
    return batch


def open_feature(
    name: str,
    worker: str,
    model: str,
    teachers: Sequence[str],
    device: str,
    precision: str,
    mb_tokens: int = 256,
) -> Policy:
    """Return a policy of one worker with the settings of a feature."""
    feature = FEATURES[name]
    arguments = dict(feature.worker)
    if feature.targets is not None:
        arguments["teachers"] = list(teachers)
    settings = {"optimizer": _LR, **feature.settings}
    return open_policy(worker, model, device, precision, mb_tokens, settings, arguments)


def engine_of(policy: Policy) -> Any:
    """Return the engine of the policy."""
    return worker_of(policy).engine


def worker_of(policy: Policy) -> Any:
    """Return the worker of a policy in this process."""
    assert isinstance(policy.group, LocalGroup)
    return policy.group.worker


def sharded_rows(policy: Policy) -> ShardedBatch:
    """Return `feature_rows` on the worker; the rows of a pair share a microbatch."""
    batch = feature_rows()
    return policy.shard(batch, policy.plan(batch["length"], groups=batch["pair"]))


def targets_of(policy: Policy, name: str, sharded: ShardedBatch) -> Logprobs | None:
    """Run the teachers of a feature that has some."""
    settings = FEATURES[name].targets
    return None if settings is None else policy.compute_targets(sharded, settings)


def feature_values(policy: Policy, name: str) -> Values:
    """Return losses and gradient norms of two steps, and what the model computes after them."""
    sharded = sharded_rows(policy)
    values: Values = {"loss": [], "grad_norm": []}
    for _ in range(NUM_STEPS):
        targets = targets_of(policy, name, sharded)
        metrics = policy.train(sharded, None, FEATURES[name].loss, targets)[0]
        values["loss"].append(metrics["policy/loss"].value)
        values["grad_norm"].append(metrics["policy/grad_norm"].value)
        if targets is not None:
            values.setdefault("divergence", []).append(metrics["policy/divergence"].value)
    values |= _outputs(policy, name, sharded)
    return values


def _outputs(policy: Policy, name: str, sharded: ShardedBatch) -> Values:
    """Return the scores or mean log-probs of some rows, also with averaged weights."""
    if name == "scores":
        return {"scores": policy.compute_scores(sharded).tolist()}

    def means() -> Values:
        columns = policy.fetch_logprobs(policy.compute_logprobs(sharded))
        return {column: _row_means(logprobs) for column, logprobs in columns.items()}

    values = means()
    if name == "ema":
        with engine_of(policy).ema_weights():
            values["averaged"] = means()["prev_logprobs"]
    return values


def _row_means(logprobs: Jagged) -> list[float]:
    return [float(np.mean(row)) for row in logprobs]


def all_values(
    worker: str,
    device: str,
    precision: str,
    model: str,
    teachers: Sequence[str],
    names: Sequence[str] | None = None,
) -> dict[str, Values]:
    """Return the values of each feature."""
    found = {}
    for name in features_of(worker) if names is None else names:
        policy = open_feature(name, worker, model, teachers, device, precision)
        try:
            found[name] = feature_values(policy, name)
        finally:
            policy.shutdown()
    return found


def check_values(name: str, found: Values, expected: Values, precision: str) -> None:
    """Assert that the values of two devices are equal up to rounding."""
    is_exact = precision == "float32"
    # Muon orthogonalizes in bfloat16, and 8-bit moments round.
    if name in ("muon", "adamw_8bit"):
        is_exact = False
    relative = 1e-4 if is_exact else 3e-2
    assert found.keys() == expected.keys()
    for key, values in found.items():
        reference = np.array(expected[key])
        assert np.isfinite(values).all(), (name, key)
        # Relative to the largest: a score may be near 0.
        limit = relative * float(np.abs(reference).max())
        np.testing.assert_allclose(values, reference, rtol=0, atol=limit, err_msg=f"{name} {key}")


def counted_waits(policy: Policy, name: str, count: Callable[[], Any]) -> tuple[int, list[str]]:
    """Return the number of microbatches, and the waits of a step, as `count()` records them.

    `count` returns a context manager with the list `places`. The second step is counted.
    """
    sharded = sharded_rows(policy)

    def step() -> None:
        policy.train(sharded, None, FEATURES[name].loss, targets_of(policy, name, sharded))

    step()
    with count() as waits:
        step()
    return int(sharded.plan.metrics()["packing/num_microbatches"]), waits.places


if __name__ == "__main__":
    _worker, _device, _precision, _model, *_teachers = sys.argv[1:]
    print(json.dumps(all_values(_worker, _device, _precision, _model, _teachers)))
