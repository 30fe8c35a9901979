"""One model, whatever the layout of its ranks: tensor, sequence and context parallelism change
nothing but who computes.

Each layout has one process group and does everything in it: gradients, outputs and isolation of
every architecture, four optimizer steps, checkpoints, and the weights as they leave it. One process
and plain transformers is the reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like import parallel_layout as parallel_layout_module
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import (
    DynamicBatchingConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import Loss, NllLoss
from nemo_like.metrics import metric_values
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.parameters import local_shard
from nemo_like.policy.shard_rows import LogprobHandle
from nemo_like.policy.worker import PolicyWorker
from tests.exhaustive import usually
from tests.policy.planned import planned
from tests.policy.test_gradient_equality import POLICY_GRADIENT
from tests.policy.tiny import (
    ARCHITECTURES,
    GROUPED_LENGTHS,
    compute_and_fetch,
    context,
    grouped_batch,
    predictable_batch,
    random_batch,
    row_accuracy,
    row_loss,
    run_ranks,
    saved_tensors,
)
from tests.weight_sync.received import received_weights

LENGTHS = GROUPED_LENGTHS
TOLERANCE = 1e-5
BASE = PolicyConfig(
    model_name="",
    train_global_batch_size=len(LENGTHS),
    logprob_chunk_size=16,
    max_grad_norm=0.5,
    shared_prefix=False,
)
PACKED = dataclasses.replace(
    BASE, sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=48)
)
SHARED = dataclasses.replace(
    BASE,
    shared_prefix=True,
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=28, logprob_mb_tokens=40),
)
"""Common leading tokens are computed once; the largest group is divided, also in the pass of
log-probs.
"""
DYNAMIC = dataclasses.replace(
    BASE, dynamic_batching=DynamicBatchingConfig(enabled=True, train_mb_tokens=48)
)
CHECKPOINTED = dataclasses.replace(SHARED, activation_checkpointing="selective")
TRAINED = dataclasses.replace(PACKED, optimizer=OptimizerConfig(lr=1e-3))

LAYOUTS = {
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "tp 2, sequence": (2, ParallelConfig(tensor=2, sequence=True)),
    "cp 2": (2, ParallelConfig(context=2)),
    "dp 2 x tp 2": (4, ParallelConfig(tensor=2)),
    "tp 2 x cp 2": (4, ParallelConfig(tensor=2, context=2)),
    "tp 2 x cp 2, sequence": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
    "cp 4, dynamic": (4, ParallelConfig(context=4, dynamic_context=True)),
    "dp 4, replicas 2": (4, ParallelConfig(replicas=2)),
    "dp 2, ep 2": (2, ParallelConfig(expert=2)),
    "dp 4, ep 2": (4, ParallelConfig(expert=2)),
    "dp 4, replicas 2, ep 2": (4, ParallelConfig(replicas=2, expert=2)),
    "dp 2 x cp 2, ep 4": (4, ParallelConfig(context=2, expert=4)),
    "dp 2 x tp 2, ep 2, sequence": (4, ParallelConfig(tensor=2, expert=2, sequence=True)),
}
MODELS = {
    "dp 2": ("qwen2_tied", "llama"),
    "tp 2": ("qwen2_tied", "llama_biased"),
    "tp 2, sequence": ("llama_tied", "qwen3"),
    "cp 2": ("qwen3_window", "qwen2_tied"),
    "dp 2 x tp 2": ("qwen2",),
    "tp 2 x cp 2": ("qwen3_window",),
    "tp 2 x cp 2, sequence": ("llama_biased",),
    "cp 4, dynamic": ("qwen3_window", "qwen2_tied"),
    "dp 4, replicas 2": ("qwen2_tied",),
    "dp 2, ep 2": ("qwen3_moe_mixed",),
    "dp 4, ep 2": ("qwen3_moe_mixed", "mixtral"),
    "dp 4, replicas 2, ep 2": ("qwen3_moe_mixed",),
    "dp 2 x cp 2, ep 4": ("mixtral", "qwen3_moe"),
    "dp 2 x tp 2, ep 2, sequence": ("qwen3_moe", "mixtral"),
}
"""Each model, and each kind of weight and of attention where a layout treats it differently."""
WITHOUT_TRAINING = ("tp 2", "tp 2 x cp 2")
"""Layouts whose axes are those of others that train."""


@pytest.fixture(scope="module")
def models(model_dir, tmp_path_factory) -> Callable[[str], str]:
    """The directory of a tiny model; `llama_biased` has a bias in every product and a padding
    token.
    """
    biased = tmp_path_factory.mktemp("llama_biased")
    _, sizes = ARCHITECTURES["llama"]
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**sizes.to_dict(), "attention_bias": True, "mlp_bias": True, "pad_token_id": 40}
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(biased)
    return lambda name: str(biased) if name == "llama_biased" else model_dir(name)


class Rank:
    """One rank of a layout: makes workers in the process group it is in, and gives them its shard
    of a batch.
    """

    def __init__(self, worker_context: WorkerContext, parallel: ParallelConfig) -> None:
        self.rank = worker_context.rank
        self.parallel = parallel
        self.parallel_layout = build_layout(parallel, worker_context.world_size)
        self._groups: dict[bool, Groups] = {}

    def groups(self, config: PolicyConfig) -> Groups:
        """All engines share their groups, each of which has a thread that polls."""
        mixed_precision = config.precision != "float32"
        if mixed_precision not in self._groups:
            self._groups[mixed_precision] = Groups.join(
                self.parallel_layout,
                self.rank,
                torch.device("cpu"),
                mixed_precision=mixed_precision,
            )
        return self._groups[mixed_precision]

    def engine(self, config: PolicyConfig, **options: Any) -> DTensorEngine:
        return DTensorEngine(config, self.groups(config), **{"trainable": True, **options})

    def worker(self, config: PolicyConfig, **options: Any) -> PolicyWorker:
        return PolicyWorker(config, self.engine(config, **options), None)

    def shard(self, config: PolicyConfig, batch: BatchedDataDict) -> SlicedDataDict:
        spec = plan_spec(config, purpose="train", parallel_layout=self.parallel_layout, model=None)
        plan = planned(batch, spec, config.shared_prefix)
        logprob_plan = None
        if config.shared_prefix is True:
            logprob_plan = plan.with_budget(config.sequence_packing.logprob_mb_tokens)
        return batch.shard(plan, logprob_plan)[self.parallel_layout.dp_rank(self.rank)]


def full_gradients(engine: DTensorEngine) -> Iterator[tuple[str, Tensor]]:
    """Each weight's gradient since the last optimizer step, float32, full on rank 0."""
    for sharded in engine.parameters:
        gradient = sharded.parameter.grad
        shard = local_shard(sharded.parameter if gradient is None else gradient)
        if gradient is None:
            shard = torch.zeros_like(shard)
        full = sharded.gather_full(shard).float()
        if sharded.spec.has_partial_grad and engine.groups.tensor is not None:
            full = full.clone()
            dist.all_reduce(full, group=engine.groups.tensor.group)
        yield sharded.name, full


def gradients(
    worker: PolicyWorker,
    shard: SlicedDataDict,
    loss: Loss = NllLoss(),  # noqa: B008  (immutable)
    handle: LogprobHandle | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The gradient of one step that leaves every weight as it is, and the step's metrics."""
    engine: Any = worker.engine
    found: dict[str, np.ndarray] = {}

    def step(lr: float, *, is_loss_finite: bool = True) -> float:
        found.update((name, tensor.clone().numpy()) for name, tensor in full_gradients(engine))
        return DTensorEngine.optimizer_step(engine, 0.0, is_loss_finite=is_loss_finite)

    engine.optimizer_step = step
    (metrics,) = worker.train(shard, None, loss, handle)
    del engine.optimizer_step
    return found, metric_values(metrics)


def look(rank: Rank, model: str, batch: BatchedDataDict, *, recomputes: bool) -> dict[str, Any]:
    """Gradient in each layout of rows, and recomputed; outputs."""
    worker = rank.worker(dataclasses.replace(PACKED, model_name=model))
    shards = {
        name: rank.shard(config, batch)
        for name, config in (("packed", PACKED), ("dynamic", DYNAMIC), ("shared", SHARED))
    }
    found: dict[str, Any] = {name: gradients(worker, shard) for name, shard in shards.items()}
    if recomputes:
        config = dataclasses.replace(CHECKPOINTED, model_name=model)
        found["checkpointed"] = gradients(rank.worker(config), shards["shared"])
    outputs = {
        name: compute_and_fetch(worker, shard)["prev_logprobs"] for name, shard in shards.items()
    }
    rows = {name: [np.asarray(row) for row in shard["input_ids"]] for name, shard in shards.items()}
    found["outputs"] = [
        (ids, row)
        for name in shards
        for ids, row in zip(rows[name], map(np.asarray, outputs[name]), strict=True)
    ]
    return found


def evaluate(
    rank: Rank, models: Mapping[str, str], batch: BatchedDataDict, predictable: BatchedDataDict
) -> dict[str, Any]:
    """Isolation and metrics of the first model; the accuracy of `qwen2_tied`."""
    worker = rank.worker(dataclasses.replace(PACKED, model_name=next(iter(models.values()))))
    found: dict[str, Any] = {}
    found["kept"], found["sent"] = evaluate_both_ways(worker, rank, batch)
    found["isolation"] = []
    for config in (SHARED, DYNAMIC):
        worker.config = config
        found["isolation"].append(worker.probe_isolation())
    if "qwen2_tied" in models:
        worker = rank.worker(dataclasses.replace(PACKED, model_name=models["qwen2_tied"]))
        found["accuracy"] = []
        for config in (PACKED, DYNAMIC, SHARED):
            metrics = worker.evaluate(rank.shard(config, predictable), NllLoss())
            found["accuracy"].append(metrics["policy/token_accuracy"].value)
    return found


def evaluate_both_ways(
    worker: PolicyWorker, rank: Rank, batch: BatchedDataDict
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics with log-probs that stayed on the rank, and with the same ones as columns."""
    shard = rank.shard(SHARED, batch)
    handle = worker.compute_logprobs(shard)
    kept = metric_values(worker.evaluate(shard, POLICY_GRADIENT, handle))
    shard.update(worker.fetch_logprobs(shard, handle))
    return kept, metric_values(worker.evaluate(shard, POLICY_GRADIENT))


def train(worker: PolicyWorker, rank: Rank, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = random_batch(LENGTHS, seed=step)
        (metrics,) = worker.train(rank.shard(worker.config, batch), None, NllLoss())
        losses.append(metrics["policy/loss"].value)
    return losses


def replicated_weights(worker: PolicyWorker) -> dict[str, np.ndarray]:
    """Shard, on this rank, of the weights that tensor parallelism replicates."""
    engine: Any = worker.engine
    return {
        weight.name: local_shard(weight.parameter).clone().numpy()
        for weight in engine.parameters
        if weight.spec.dim is None
    }


def use(
    worker_context: WorkerContext, rank: Rank, model: str, straight: Path, out: Path
) -> dict[str, Any]:
    """Training, checkpoints, and the weights as they leave the engine."""
    config = dataclasses.replace(TRAINED, model_name=model)
    worker = rank.worker(config)
    losses = train(worker, rank, range(2))
    worker.save(out / "half")
    losses += train(worker, rank, range(2, 4))
    worker.save(out / "end")
    found: dict[str, Any] = {"losses": losses, "replicated": replicated_weights(worker)}
    worker.load(straight / "half")
    found["resumed"] = train(worker, rank, range(2, 4))
    other = Rank(
        worker_context, ParallelConfig() if rank.parallel.tensor > 1 else ParallelConfig(tensor=2)
    )
    moved = other.worker(config)
    moved.load(out / "half")
    found["moved"] = train(moved, other, range(2, 4))
    half = rank.worker(dataclasses.replace(config, precision="bfloat16"))
    found["bfloat16"] = train(half, rank, range(2))
    worker.offload()
    worker.onload()
    worker.export_hf(out / "hf")
    _, weights = received_weights(worker, "float32", 4000)
    found["weights"] = {name: tensor.numpy() for name, tensor in weights.items()}
    return found


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    models: Mapping[str, str],
    trained: str | None,
    straight: Path,
    predictable: BatchedDataDict,
    out: Path,
) -> dict[str, Any]:
    """Every operation of a layout; `use` of the model `trained`."""
    rank = Rank(worker_context, parallel)
    process_groups.init_process_group(worker_context)
    try:
        batch = grouped_batch()
        found: dict[str, Any] = {}
        for name, model in models.items():
            found[name] = look(rank, model, batch, recomputes=not found)
        found |= evaluate(rank, models, batch, predictable)
        if trained is not None:
            with pytest.MonkeyPatch.context() as patch:
                # As a model too large to stay unsharded does it.
                patch.setattr(parallel_layout_module, "MAX_UNSHARDED_BYTES", 0)
                found |= use(worker_context, rank, trained, straight, out)
        return found
    finally:
        process_groups.destroy()


@pytest.fixture(scope="module")
def straight(models, tmp_path_factory) -> Callable[[str], tuple[list[float], Path]]:
    """Losses of four steps of one process with a model, and its checkpoints after two and after
    four.
    """

    @functools.cache
    def run(model: str) -> tuple[list[float], Path]:
        out = tmp_path_factory.mktemp("straight")
        rank = Rank(context(), ParallelConfig())
        worker = rank.worker(dataclasses.replace(TRAINED, model_name=models(model)))
        losses = train(worker, rank, range(2))
        worker.save(out / "half")
        losses += train(worker, rank, range(2, 4))
        worker.save(out / "end")
        return losses, out

    return run


@pytest.fixture(scope="module")
def predictable(models) -> tuple[BatchedDataDict, float]:
    """Rows of which `qwen2_tied` predicts a part, and the share of trained tokens it predicts."""
    model = AutoModelForCausalLM.from_pretrained(models("qwen2_tied"), attn_implementation="eager")
    batch = predictable_batch(model)
    accuracy = row_accuracy(model, batch)
    assert 0.2 < accuracy < 0.8
    return batch, accuracy


def expected_of(
    model: str, batch: BatchedDataDict
) -> tuple[dict[str, np.ndarray], float, dict[bytes, np.ndarray]]:
    """Gradient, loss, and log-probs of each row's trained tokens, by plain transformers on unpadded
    rows.
    """
    reference = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    loss = row_loss(reference, batch)
    loss.backward()
    outputs = {}
    for ids, mask, trained in zip(
        batch["input_ids"], batch["token_mask"], batch["row_mask"], strict=True
    ):
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            log_probs = reference(input_ids).logits[0].log_softmax(-1)
        row = np.zeros(len(ids), dtype=np.float32)
        row[1:] = log_probs[:-1].gather(1, input_ids[0, 1:, None]).squeeze(1).numpy()
        outputs[ids.tobytes()] = row * mask * trained
    named = {
        name: parameter.grad.numpy()
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
    }
    return named, loss.item(), outputs


def worst(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative error in the 2-norm, and the tensor it is of; the names must agree."""
    assert found.keys() == expected.keys()
    return max(
        (float(np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])), name)
        for name in expected
    )


@pytest.mark.parametrize(
    "layout", usually(LAYOUTS, *("tp 2, sequence", "cp 2", "dp 4, replicas 2", "dp 2, ep 2"))
)
def test_a_layout_changes_nothing(
    layout, models, straight, predictable, rank_pool, meeting, tmp_path
):
    world_size, parallel = LAYOUTS[layout]
    names = MODELS[layout]
    trained = "qwen3_tied" if parallel.expert == 1 else "mixtral"
    straight_losses, straight_dir = straight(trained)
    trains = layout not in WITHOUT_TRAINING
    paths = {name: models(name) for name in names}
    ranks = run_ranks(
        rank_pool,
        program,
        world_size,
        meeting,
        parallel,
        paths,
        models(trained) if trains else None,
        straight_dir,
        predictable[0],
        tmp_path,
    )
    for rank in ranks:
        if "qwen2_tied" in names:
            assert rank["accuracy"] == pytest.approx([predictable[1]] * 3)
        assert rank["kept"] == rank["sent"]
        assert [report.layout for report in rank["isolation"]] == ["packed", "padded"]
    batch = grouped_batch()
    for name in names:
        gradient, loss, outputs = expected_of(paths[name], batch)
        norm = float(np.sqrt(sum(np.square(tensor).sum() for tensor in gradient.values())))
        hows = ("packed", "dynamic", "shared")
        for how in (*hows, "checkpointed") if name == names[0] else hows:
            error, where = worst(ranks[0][name][how][0], gradient)
            assert error < TOLERANCE, (name, how, where)
            for rank in ranks:
                metrics = rank[name][how][1]
                assert metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE), (name, how)
                assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=TOLERANCE), (
                    name,
                    how,
                )
        for rank in ranks:
            assert len(rank[name]["outputs"]) > 0
            for ids, row in rank[name]["outputs"]:
                np.testing.assert_allclose(row, outputs[ids.tobytes()], rtol=1e-5, atol=1e-5)
    if not trains:
        return
    assert_trained_alike(ranks, straight_losses, straight_dir, tmp_path)
    for first in range(0, world_size, parallel.tensor):
        for name, expected in ranks[first]["replicated"].items():
            for rank in ranks[first : first + parallel.tensor]:
                assert np.array_equal(rank["replicated"][name], expected), name


def assert_trained_alike(
    ranks: list[dict[str, Any]], losses: list[float], straight: Path, out: Path
) -> None:
    """Four steps; the last two after a checkpoint of one process, and of this layout in another;
    what left the engine.
    """
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=TOLERANCE)
        assert rank["resumed"] == pytest.approx(losses[2:], rel=TOLERANCE)
        assert rank["moved"] == pytest.approx(losses[2:], rel=TOLERANCE)
        assert rank["bfloat16"] == pytest.approx(losses[:2], rel=1e-2)
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for when in ("half", "end"):
            found, expected = (
                {n: t.numpy() for n, t in saved_tensors(d / when, kind).items()}
                for d in (out, straight)
            )
            error, where = worst(found, expected)
            assert error < TOLERANCE, (kind, when, where)
    weights = {
        name: tensor.numpy() for name, tensor in saved_tensors(straight / "end", "weight").items()
    }
    assert worst(ranks[0]["weights"], weights)[0] < TOLERANCE
    assert all(rank["weights"] == {} for rank in ranks[1:])
    exported = AutoModelForCausalLM.from_pretrained(out / "hf")
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), ranks[0]["weights"][name]), name
