"""What an engine with LoRA adapters computes in one layout of ranks."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.schema import (
    AdapterConfig,
    EmaConfig,
    OptimizerConfig,
    OutputHead,
    PolicyConfig,
)
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.losses import Loss, NllLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import SCORE_WEIGHT
from nemo_like.policy.worker import PolicyWorker
from tests.policy.preferences import PAIR_LENGTHS
from tests.policy.scores import CENTER, reward_batch
from tests.policy.test_gradient_equality import LENGTHS, dynamic, packed, sharing
from tests.policy.tiny import compute_and_fetch, grouped_batch, random_batch
from tests.weight_sync.received import received_weights

LORA = AdapterConfig(enabled=True, rank=5, alpha=8.0, use_rslora=True)
"""The rank divides evenly over no number of ranks."""
ALL_LINEAR = AdapterConfig(enabled=True, rank=4, alpha=6.0, target_modules=("all-linear",))
SOME = AdapterConfig(
    enabled=True,
    rank=3,
    alpha=4.0,
    target_modules=("self_attn.q_proj", "v_proj", "mlp.up_proj", "down_proj"),
)
"""Fused layers have adapters in a part of their rows."""
NF4 = AdapterConfig(
    enabled=True,
    rank=3,
    alpha=4.0,
    target_modules=("q_proj", "v_proj", "up_proj", "down_proj"),
    quantization="nf4",
)
"""Layers with and without adapters are quantized."""
LATENT = AdapterConfig(
    enabled=True,
    rank=3,
    alpha=4.0,
    target_modules=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)
LORA_OF = {
    "qwen2_tied": LORA,
    "qwen3": ALL_LINEAR,
    "llama": SOME,
    "qwen3_moe": ALL_LINEAR,
    "qwen3_moe_mixed": ALL_LINEAR,
    "qwen2_blocks": NF4,
    "deepseek_v3": LATENT,
    "gpt_oss": ALL_LINEAR,
    "llama_deep": ALL_LINEAR,
}
"""Architecture -> its adapters in these tests."""

REWARD_LOSS = BradleyTerryLoss(center_coefficient=CENTER)

PACKED = dataclasses.replace(packed(48), max_grad_norm=0.5)
DYNAMIC = dataclasses.replace(dynamic(48), max_grad_norm=0.5)
SHARED = dataclasses.replace(sharing(28), max_grad_norm=0.5)
LAYOUTS = {"packed": PACKED, "dynamic": DYNAMIC, "shared": SHARED}
RECOMPUTED = {
    "selective": dataclasses.replace(PACKED, activation_checkpointing="selective"),
    "full": dataclasses.replace(PACKED, activation_checkpointing="full"),
}
TRAINED = dataclasses.replace(
    PACKED, optimizer=OptimizerConfig(lr=1e-2), ema=EmaConfig(enabled=True, decay=0.5)
)


class Part(NamedTuple):
    """What a layout computes."""

    models: tuple[str, ...]
    """The gradients of these architectures; everything else is of the first one."""
    uses: bool = False
    """Recomputation, training, checkpoints, exports and bfloat16."""
    scores: bool = False
    """A reward model."""


class Side(Protocol):
    """An engine in a layout of ranks, on one of them."""

    def worker(
        self, config: PolicyConfig, head: OutputHead = "vocabulary", *, initial: bool = False
    ) -> PolicyWorker:
        """Return a policy that is its own reference; what LoRA trains is `adapter_values`, or as it
        is `initial`.
        """
        ...

    def shard(self, config: PolicyConfig, batch: BatchedDataDict) -> SlicedDataDict:
        """Return the rows of this rank, with their plan."""
        ...

    def gradients(self, engine: Any) -> dict[str, np.ndarray]:
        """Return the gradient of each trained parameter, full on rank 0."""
        ...

    def frozen(self, engine: Any) -> Iterable[Tensor]:
        """Return the parameters that are not trained."""
        ...

    def masters(self, engine: Any) -> Iterable[Tensor]:
        """Return what the optimizer updates."""
        ...


def adapter_values(name: str, shape: Sequence[int]) -> Tensor:
    """Random values of one trained parameter, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.05 * torch.randn(tuple(shape), generator=generator)


def is_trained(name: str) -> bool:
    """LoRA trains its matrices, and of a reward model the score head."""
    return ".lora_" in name or name == SCORE_WEIGHT


def of_architecture(config: PolicyConfig, architecture: str, model: str) -> PolicyConfig:
    return dataclasses.replace(config, lora=LORA_OF[architecture], model_name=model)


def step_gradients(
    side: Side,
    worker: PolicyWorker,
    shard: SlicedDataDict,
    loss: Loss = NllLoss(),  # noqa: B008  (immutable)
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The gradients of one step that leaves every weight as it is, and the step's metrics."""
    engine: Any = worker.engine
    found: dict[str, np.ndarray] = {}

    def step(lr: float, *, is_loss_finite: bool = True) -> float:
        found.update(side.gradients(engine))
        assert all(not each.requires_grad and each.grad is None for each in side.frozen(engine))
        return type(engine).optimizer_step(engine, 0.0, is_loss_finite=is_loss_finite)

    engine.optimizer_step = step
    (metrics,) = worker.train(shard, None, loss)
    del engine.optimizer_step
    return found, metric_values(metrics)


def outputs_of(worker: PolicyWorker, shard: SlicedDataDict) -> list[tuple[np.ndarray, ...]]:
    """(tokens, log-probs, those of the reference) of each row; none before the last stage."""
    outputs = compute_and_fetch(worker, shard)
    if not outputs:
        return []
    columns = (shard["input_ids"], outputs["prev_logprobs"], outputs["reference_logprobs"])
    return [tuple(np.asarray(each) for each in row) for row in zip(*columns, strict=True)]


def look(side: Side, architecture: str, model: str, *, recomputes: bool) -> dict[str, Any]:
    """Gradients in each layout of rows, and recomputed; outputs and isolation."""
    batch = grouped_batch()
    worker = side.worker(of_architecture(SHARED, architecture, model))
    steps = {}
    outputs = []
    for name, config in LAYOUTS.items():
        shard = side.shard(of_architecture(config, architecture, model), batch)
        steps[name] = step_gradients(side, worker, shard)
        outputs += outputs_of(worker, shard)
    report = worker.probe_isolation()
    assert report.layout == "packed"
    for name, kind in RECOMPUTED.items() if recomputes else ():
        config = of_architecture(kind, architecture, model)
        steps[name] = step_gradients(side, side.worker(config), side.shard(config, batch))
    return {"steps": steps, "outputs": outputs}


def train(side: Side, worker: PolicyWorker, steps: range) -> list[float]:
    """Losses of optimizer steps, each with its own batch; NaN before the last stage."""
    losses = []
    for step in steps:
        shard = side.shard(worker.config, random_batch(LENGTHS, seed=step))
        (metrics,) = worker.train(shard, None, NllLoss())
        losses.append(metric_values(metrics).get("policy/loss", math.nan))
    return losses


def use(side: Side, architecture: str, model: str, straight: Path, out: Path) -> dict[str, Any]:
    """Everything else that an engine does, on one architecture; `straight` are the checkpoints of
    one process, `out` gets those of this layout.
    """
    worker = side.worker(of_architecture(TRAINED, architecture, model))
    worker.export_hf(out / "hf")
    _, weights = received_weights(worker, "float32", 4000)
    found: dict[str, Any] = {"weights": {name: each.numpy() for name, each in weights.items()}}
    check_sent_adapters(worker, torch.float32)
    worker.save(out / "start")
    lora = dataclasses.replace(worker.config.lora, reference="adapter")
    engine: Any = worker.engine
    kept = PolicyWorker(dataclasses.replace(worker.config, lora=lora), engine, engine)
    losses = train(side, worker, range(2))
    worker.save(out / "half")
    # The reference is the adapter of the start, and the trained one is as before.
    before = outputs_of(worker, side.shard(kept.config, grouped_batch()))
    found["kept"] = outputs_of(kept, side.shard(kept.config, grouped_batch()))
    for (_, trained, _), (_, same, _) in zip(before, found["kept"], strict=True):
        assert np.array_equal(trained, same)
    losses += train(side, worker, range(2, 4))
    found["losses"] = losses
    averages = averages_of(worker)
    worker.load(out / "half")
    assert equal(disturbed(side, worker, range(2, 4)), losses[2:])
    for name, average in averages_of(worker).items():
        assert torch.equal(average, averages[name]), name
    if straight != out:
        worker.load(straight / "half")
        found["continued"] = train(side, worker, range(2, 4))
    if dist.is_initialized():
        check_bfloat16(side, architecture, model)
    return found


def check_sent_adapters(worker: PolicyWorker, dtype: torch.dtype) -> None:
    """A generator that receives the adapters alone gets those of `adapter_values`, and all."""
    engine: Any = worker.engine
    lora = dataclasses.replace(worker.config.lora, weight_sync="adapter")
    sending = PolicyWorker(dataclasses.replace(worker.config, lora=lora), engine, engine)
    _, received = received_weights(sending, str(dtype).removeprefix("torch."), 1000)
    wanted = {}
    for name, shape in engine.adapter_shapes().items():
        wanted[name] = adapter_values(name, shape).to(dtype)
    adapted = [name for name in engine.weight_shapes() if f"{name[:-7]}.lora_A.weight" in wanted]
    assert 2 * len(adapted) == len(wanted) > 0
    assert worker.engine.rank > 0 or received.keys() == wanted.keys()
    for name, tensor in received.items():
        assert torch.equal(tensor, wanted[name]), name


def use_scores(side: Side, architecture: str, model: str, out: Path) -> dict[str, Any]:
    """Scores, gradients and files of a reward model with adapters; `out` gets its files."""
    config = of_architecture(TRAINED, architecture, model)
    config = dataclasses.replace(config, train_global_batch_size=len(PAIR_LENGTHS))
    batch = reward_batch()
    worker = side.worker(config, head="scores")
    shard = side.shard(config, batch)
    rows = [np.asarray(row).tobytes() for row in shard["input_ids"]]
    scores = worker.compute_scores(shard)
    worker.export_hf(out / "reward_model")
    worker.save(out / "reward_start")
    losses = [_reward_loss(worker, shard) for _ in range(2)]
    after = worker.compute_scores(shard)
    assert scores is None or after is None or not np.array_equal(after, scores)
    # The adapter with its score head is the start of another run, and of this one.
    lora = dataclasses.replace(config.lora, adapter_path=str(out / "reward_model" / "adapter"))
    engine: Any = worker.engine
    engine.ranks.barrier()
    continued = side.worker(dataclasses.replace(config, lora=lora), head="scores", initial=True)
    worker.load(out / "reward_start")
    for each in (worker, continued):
        found = [_reward_loss(each, shard) for _ in range(2)]
        assert found == pytest.approx(losses, rel=1e-6, nan_ok=True)
    worker.load(out / "reward_start")
    steps = step_gradients(side, worker, shard, REWARD_LOSS)
    if dist.is_initialized():
        half = side.worker(dataclasses.replace(config, precision="bfloat16"), head="scores")
        assert {each.dtype for each in side.frozen(half.engine)} == {torch.bfloat16}
        assert {each.dtype for each in side.masters(half.engine)} == {torch.float32}
        loss = _reward_loss(half, shard)
        assert loss == pytest.approx(losses[0], rel=0.1, nan_ok=True)
    return {"rows": rows, "scores": scores, "steps": steps}


def _reward_loss(worker: PolicyWorker, shard: SlicedDataDict) -> float:
    """The loss of an optimizer step; NaN before the last stage."""
    (metrics,) = worker.train(shard, None, REWARD_LOSS)
    return metric_values(metrics).get("policy/loss", math.nan)


def averages_of(worker: PolicyWorker) -> dict[str, Tensor]:
    """Copies of this rank's averages: of the matrices of adapters, and of nothing else."""
    engine: Any = worker.engine
    names = {name for name, _ in engine.masters()}
    assert engine.ema.shards.keys() == names
    assert all(".lora_" in name for name in names)
    return {name: shard.clone() for name, shard in engine.ema.shards.items()}


def disturbed(side: Side, worker: PolicyWorker, steps: range) -> list[float]:
    """As `train`, with an offload and a skipped step before each step, which change nothing."""
    engine: Any = worker.engine
    losses = []
    for step in steps:
        engine.move_to_host()
        with pytest.raises(RuntimeError, match="offloaded"):
            engine.is_finite()
        num_constant = sum(each.num_bytes for each in engine.constant_memory.offloaded)
        engine.move_to_device()
        # Copies of frozen weights are kept, and those of everything else are written each time.
        frozen = {each.untyped_storage().data_ptr(): each for each in engine.frozen_weights()}
        assert num_constant == sum(each.untyped_storage().nbytes() for each in frozen.values())
        assert len(engine.constant_memory.copied) > 0

        def skip(lr: float, *, is_loss_finite: bool = True) -> float:
            assert is_loss_finite
            return type(engine).optimizer_step(engine, lr, is_loss_finite=False)

        num_steps = engine.num_optimizer_steps
        engine.optimizer_step = skip
        train(side, worker, range(9, 10))
        del engine.optimizer_step
        assert engine.num_optimizer_steps == num_steps
        losses += train(side, worker, range(step, step + 1))
    return losses


def check_bfloat16(side: Side, architecture: str, model: str) -> None:
    """Frozen weights exist once and in bfloat16, what is trained has float32 masters, and training
    leaves the reference as it is.
    """
    config = of_architecture(
        dataclasses.replace(TRAINED, precision="bfloat16"), architecture, model
    )
    worker = side.worker(config)
    engine: Any = worker.engine
    assert worker.engines == [engine]
    assert {each.dtype for each in side.frozen(engine)} == {torch.bfloat16}
    masters = list(side.masters(engine))
    assert {each.dtype for each in masters} == {torch.float32}
    check_sent_adapters(worker, torch.bfloat16)
    shard = side.shard(config, random_batch(LENGTHS))
    before = outputs_of(worker, shard)
    losses = train(side, worker, range(2))
    assert not before or np.isfinite(losses).all()
    after = outputs_of(worker, shard)
    for (_, prev, reference), (_, new, same) in zip(before, after, strict=True):
        assert np.array_equal(same, reference)
        assert not prev.any() or not np.array_equal(new, prev)
    # Both moments of each master, and none of a frozen weight.
    num_moments = sum(each.numel() for each in engine.optimizer.moments())
    assert num_moments == 2 * sum(each.numel() for each in masters)


def equal(found: list[float], expected: list[float]) -> bool:
    """Compare to the bit; NaN equals NaN."""
    return np.array_equal(found, expected, equal_nan=True)
