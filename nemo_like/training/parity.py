"""Compares engine and parallel layout with transformers on a tiny model.

The same rows are trained by workers in the layout (real process groups on the CPU, float32) and by
transformers in this process, one unpadded row at a time. Compared are the loss, the gradient of
every parameter, the log-probs, the weights after several optimizer steps, and the loss after a
resume from the layout's checkpoint in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import (
    AdapterConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    SchedulerConfig,
    VisionConfig,
)
from nemo_like.data.images import RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict, unshard
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import ModelSpec
from nemo_like.models.vision import VisionSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.isolation import IsolationError
from nemo_like.policy.optim import build_optimizer
from nemo_like.policy.worker import PolicyWorker
from nemo_like.training.parity_images import transformers_images, with_images
from nemo_like.training.policy_backends import policy_backend
from nemo_like.training_engines import ENGINES

LIMIT = 1e-5
"""Max relative difference that counts as equal: some hundred float32 roundings."""
NUM_STEPS = 4
ISOLATION = "isolation of rows"
"""A name of a comparison."""
_LENGTHS = (37, 5, 64, 12, 3, 29, 50, 18, 41, 7, 2, 23)
_BUDGET = 160
_TIMEOUT_S = 300.0
_LR = 1e-3
_EPSILON = 1e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One compared quantity.

    Example: `Comparison("packed", "loss", 2.1e-06)`.
    """

    mode: str
    what: str
    difference: float
    """Relative; infinite if the two sides have different shapes or names."""
    detail: str = ""
    is_rounding: bool = False
    """A larger difference is one of rounding, as a computation in float64 shows."""

    @property
    def is_equal(self) -> bool:
        """True within `LIMIT` and for rounding; False for NaN."""
        return self.difference <= LIMIT or self.is_rounding


@dataclass(frozen=True, kw_only=True)
class TinyRun:
    """The sections that a comparison needs: of a tiny model on CPU workers in float32."""

    policy: PolicyConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_workers: int = 1

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the workers. Raises LayoutError if there is none."""
        return build_layout(self.parallel, self.num_workers)


class Trained(NamedTuple):
    """Results of some optimizer steps."""

    losses: list[float]
    """Before each step, and after the last one."""
    gradients: dict[str, Tensor]
    """Gradients of the first step, by Hugging Face name."""
    weights: dict[str, Tensor]
    """Weights after the last step, by Hugging Face name."""
    logprobs: Jagged
    """Log-probs of every row before the first step, float32."""


_Selected = Mapping[str, Any]
FIRST_STEP = ("loss", "log-probs of every token", "gradient of every parameter")
"""What is compared after one step, each before what depends on it."""
_QUANTITIES: dict[str, Callable[[Trained], _Selected]] = {
    "loss": lambda trained: {"": trained.losses[:1]},
    "gradient of every parameter": lambda trained: trained.gradients,
    "log-probs of every token": lambda trained: {"": trained.logprobs.values},
    f"losses of {NUM_STEPS} optimizer steps": lambda trained: {"": trained.losses},
    f"weights after {NUM_STEPS} optimizer steps": lambda trained: trained.weights,
}
"""What is compared -> its values by name; a single one has no name."""


class _InDouble(TorchFunctionMode):
    """Computes in float64 where a model converts to float32, as in norms."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        values = (kwargs or {}).items()
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in values})


class Reference:
    """What transformers computes, in float32 and, where that is needed, in float64."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: BatchedDataDict,
        run: TinyRun,
        num_steps: int = NUM_STEPS,
    ) -> None:
        """Train copies of the float32 `model`, when their results are needed."""
        self._model = model
        self._batch = batch
        self._run = run
        self._num_steps = num_steps

    @cached_property
    def single(self) -> Trained:
        """The results in float32."""
        return self._train(copy.deepcopy(self._model))

    @cached_property
    def double(self) -> Trained:
        """The same in float64."""
        with _InDouble():
            model = copy.deepcopy(self._model).double()
            # The products of groups have no kernel in float64.
            model.set_experts_implementation("eager")
            return self._train(model)

    def _train(self, model: PreTrainedModel) -> Trained:
        optimizer = build_optimizer(model.named_parameters(), self._run.policy.optimizer)
        return train_with_transformers(model, self._batch, optimizer, self._num_steps)

    def compare(self, mode: str, what: str, found: Trained) -> Comparison:
        """Compare one of `_QUANTITIES`; where it differs in float32, both sides with float64.

        A difference is rounding if the error of `found` is at most twice that of transformers.
        """
        select = _QUANTITIES[what]
        difference, name = worst(select(found), select(self.single))
        detail = f"worst at {name}" if name else ""
        if difference <= LIMIT or not np.isfinite(difference):
            return Comparison(mode, what, difference, detail)
        errors = differences(select(found), select(self.double))
        allowed = differences(select(self.single), select(self.double))
        is_rounding = all(errors[each] <= 2 * allowed[each] + LIMIT for each in errors)
        detail = (
            f"{detail}, {errors[name]:.1e} from float64, transformers {allowed[name]:.1e}"
        ).removeprefix(", ")
        return Comparison(mode, what, difference, detail, is_rounding)


def tiny_run(
    policy: PolicyConfig, parallel: ParallelConfig, num_replicas: int, model: Path
) -> TinyRun:
    """Return a run with the tiny model in `model` and the same engine, layout and recomputation.

    Its data-parallel size is at most 2, or what expert parallelism needs, and it trains all weights
    with a learning rate at which a few steps change the loss.
    """
    # Expert parallelism divides context x data, with Megatron-Core also tensor, so it may need more
    # than two replicas.
    tensor = parallel.tensor if ENGINES[policy.engine].experts_span_tensor else 1
    min_replicas = parallel.expert // gcd(parallel.expert, tensor * parallel.context)
    num_tiny_replicas = max(min(2, num_replicas), min_replicas)
    tiny = replace(
        policy,
        model_name=str(model),
        precision="float32",
        train_global_batch_size=len(_LENGTHS),
        max_total_sequence_length=max(_LENGTHS),
        logprob_chunk_size=32,
        # Adam's first moment is then the gradient itself, which the checkpoint has under Hugging
        # Face names.
        # A gradient that is zero up to rounding, such as that of the bias of keys without rotary
        # embedding, must not become a complete step of Adam.
        optimizer=OptimizerConfig(lr=_LR, weight_decay=0.1, beta1=0.0, eps=_EPSILON),
        scheduler=SchedulerConfig(),
        max_grad_norm=0.0,
        # transformers has the gradients of all weights and no adapters.
        lora=AdapterConfig(),
        freeze=(),
        vision=VisionConfig(train="all"),
    )
    num_workers = num_tiny_replicas * parallel.tensor * parallel.context * parallel.pipeline
    return TinyRun(policy=tiny, parallel=parallel, num_workers=num_workers)


def in_mode(policy: PolicyConfig, mode: str) -> PolicyConfig:
    """Return `policy` with the microbatches of `packed` or `dynamic`, or those of neither."""
    budgets: dict[str, int] = {"train_mb_tokens": _BUDGET, "logprob_mb_tokens": _BUDGET}
    packing = replace(policy.sequence_packing, **budgets, enabled=mode == "packed")
    dynamic = replace(policy.dynamic_batching, **budgets, enabled=mode == "dynamic")
    return replace(policy, sequence_packing=packing, dynamic_batching=dynamic)


def check_mode(
    run: TinyRun,
    mode: str,
    batch: BatchedDataDict,
    expected: Reference,
    folder: Path,
    pool: ProcessPoolExecutor,
) -> list[Comparison]:
    """Train in one mode on the ranks of the layout and compare with `expected`."""
    run = replace(run, policy=in_mode(run.policy, mode))
    found, leak = train_layout(run, batch, folder / mode, pool)
    # Another layout reads the same blocks only if they are in Hugging Face coordinates.
    resumed_loss = _resume_on_one_rank(run, batch, folder / mode)
    resumed = abs(resumed_loss / found.losses[-1] - 1)
    return [
        Comparison(mode, ISOLATION, np.inf if leak else 0.0, leak),
        *(expected.compare(mode, what, found) for what in _QUANTITIES),
        Comparison(mode, "resume of the checkpoint on one rank", resumed),
    ]


def train_layout(
    run: TinyRun,
    batch: BatchedDataDict,
    folder: Path,
    pool: ProcessPoolExecutor,
    num_steps: int = NUM_STEPS,
) -> tuple[Trained, str]:
    """Train on the ranks of the layout; return the results and the message of a leak, or "".

    Checkpoints are saved in `folder`.
    """
    layout = run.layout
    futures = []
    for context in contexts(layout.world_size, folder.with_suffix(".rendezvous")):
        futures.append(pool.submit(train_rank, context, run, batch, folder, num_steps))
    results = [future.result(timeout=_TIMEOUT_S) for future in futures]
    # Any rank may find a leak; the message of one is enough.
    leak = next((message for *_, message in results if message), "")
    losses, _, _ = results[layout.output_rank(0)]
    # The other ranks of a replica have no outputs, or the same ones.
    parts = []
    for dp_rank in range(layout.dp):
        _, outputs, _ = results[layout.output_rank(dp_rank)]
        parts.append(outputs["prev_logprobs"])
    logprobs = unshard(parts, _plan(run, batch))
    assert isinstance(logprobs, Jagged)
    gradients = saved_tensors(folder / "first", "exp_avg")
    weights = saved_tensors(folder / "last", "weight")
    return Trained(losses, gradients, weights, logprobs), leak


def train_rank(
    context: WorkerContext,
    run: TinyRun,
    batch: BatchedDataDict,
    folder: Path,
    num_steps: int = NUM_STEPS,
) -> tuple[list[float], dict[str, Jagged], str]:
    """Train on one rank; return its losses, its log-probs and the message of the isolation check.

    Checkpoints after the first and the last step are saved in `folder`. Log-probs are float32, [L]
    per row.
    """
    transformers_logging.disable_progress_bar()
    # The differences are to come from the layout, not from the order of atomic additions.
    torch.use_deterministic_algorithms(True)
    try:
        worker = policy_backend(run.policy).worker()(
            context, config=run.policy, start=PolicyStart(parallel=run.parallel)
        )
        dp_rank = run.layout.dp_rank(context.rank)
        shard = batch.shard(_plan(run, batch))[dp_rank]
        try:
            worker.probe_isolation()
            leak = ""
        except IsolationError as error:
            leak = str(error)
        outputs = worker.fetch_logprobs(shard, worker.compute_logprobs(shard))
        losses = [_loss(worker, shard, train=True)]
        # After one step Adam's first moment is the gradient, see `tiny_run`.
        worker.save(folder / "first")
        losses += [_loss(worker, shard, train=True) for _ in range(num_steps - 1)]
        losses.append(_loss(worker, shard, train=False))
        worker.save(folder / "last")
    finally:
        process_groups.destroy()
    return losses, outputs, leak


def _resume_on_one_rank(run: TinyRun, batch: BatchedDataDict, folder: Path) -> float:
    """Return the loss of the last checkpoint in `folder`, loaded into one DTensor process."""
    alone = TinyRun(policy=replace(run.policy, engine="dtensor"))
    (context,) = contexts(1, folder.with_suffix(".alone"))
    worker = policy_backend(alone.policy).worker()(context, config=alone.policy)
    worker.load(folder / "last")
    return _loss(worker, batch.shard(_plan(alone, batch))[0], train=False)


def _loss(worker: PolicyWorker, shard: Any, *, train: bool) -> float:
    """Return the loss of the batch; NaN on pipeline stages that do not compute it."""
    if train:
        metrics, *_ = worker.train(shard, None, NllLoss())
    else:
        metrics = worker.evaluate(shard, NllLoss())
    return metric_values(metrics).get("policy/loss", float("nan"))


def _plan(run: TinyRun, batch: BatchedDataDict) -> BatchPlan:
    spec = plan_spec(
        run.policy,
        purpose="train",
        parallel_layout=run.layout,
        # The split of the rows must not matter, so any work per row will do.
        model=None,
    )
    images = TokenCounts.of_batch(batch, with_prefixes=False).image_tokens
    return plan_batch(TokenCounts(batch["length"], image_tokens=images), spec)


def train_with_transformers(
    model: PreTrainedModel, batch: BatchedDataDict, optimizer: Optimizer, num_steps: int
) -> Trained:
    """Run the same steps with transformers and AdamW, one unpadded row at a time."""
    rows = [each.detach().numpy() for each in _logprobs(model, batch)]
    logprobs = Jagged.from_rows(rows, rows[0].dtype)
    # The workers return 0 for tokens that are not trained.
    is_trained = batch["token_mask"].values != 0
    masked = Jagged(logprobs.values * is_trained, logprobs.offsets)
    losses = []
    gradients: dict[str, Tensor] = {}
    for step in range(num_steps + 1):
        loss = transformers_loss(model, batch)
        losses.append(loss.item())
        # The last loss is that after the last step, which is not followed by another one.
        if step == num_steps:
            break
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                # An expert that no token is routed to has no gradient.
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trained(losses, gradients, weights, masked)


def transformers_loss(model: PreTrainedModel, batch: BatchedDataDict) -> Tensor:
    """Return the mean negative log-likelihood of the trained tokens, a float32 scalar."""
    total = torch.zeros(())
    num_tokens = 0
    for logprobs, mask in zip(_logprobs(model, batch), batch["token_mask"], strict=True):
        is_trained = torch.from_numpy(mask.astype(bool))
        total = total - logprobs[is_trained].sum()
        num_tokens += int(is_trained.sum())
    return total / num_tokens


def _logprobs(model: PreTrainedModel, batch: BatchedDataDict) -> Iterator[Tensor]:
    """Yield the log-probs of each row, float32 [L], see `_row_logprobs`."""
    images = batch.get("images", [()] * batch.size)
    for ids, own in zip(batch["input_ids"], images, strict=True):
        yield _row_logprobs(model, ids, own)


def _row_logprobs(model: PreTrainedModel, ids: np.ndarray, images: Sequence[RowImage]) -> Tensor:
    """Return the log-prob of each token of one row int [L], float32 [L]; 0 for the first token."""
    input_ids = torch.from_numpy(ids.astype(np.int64))[None]
    if ModelSpec.from_config(model.config).rope_threshold is not None:
        # transformers keeps the dynamic rotary frequencies of a longer row until a short one.
        with torch.no_grad():
            model(input_ids=input_ids[:, :1], use_cache=False)
    # The logits at a position predict the next token.
    options = transformers_images(model.config, input_ids, images)
    logits = model(input_ids=input_ids, use_cache=False, **options).logits[0, :-1]
    labels = input_ids[0, 1:, None]
    logprobs = logits.log_softmax(-1).gather(1, labels).squeeze(1)
    return torch.cat([torch.zeros(1), logprobs])


def random_batch(model_config: Any) -> BatchedDataDict:
    """Return rows of random tokens, about two thirds of which are trained.

    The first token of a row has no context and is never trained. Rows of a model with a vision
    tower have images.
    """
    vocab_size = model_config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    lengths = np.array(_LENGTHS, dtype=np.int64)
    token_ids = rng.integers(0, vocab_size, lengths.sum()).astype(np.int32)
    input_ids = Jagged.from_lengths(token_ids, lengths)
    mask = (rng.random(lengths.sum()) < 0.67).astype(np.uint8)
    mask[input_ids.offsets[:-1]] = 0
    batch = BatchedDataDict(
        input_ids=input_ids, token_mask=Jagged(mask, input_ids.offsets), length=lengths
    )
    spec = VisionSpec.of_composite(model_config)
    return batch if spec is None else with_images(batch, spec)


def contexts(world_size: int, rendezvous: Path) -> list[WorkerContext]:
    """Return the contexts of CPU ranks that meet in the file `rendezvous`."""
    return [
        WorkerContext(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            device="cpu",
            init_method=rendezvous.as_uri(),
            collective_timeout_s=_TIMEOUT_S,
            num_threads=1,
        )
        for rank in range(world_size)
    ]


def saved_tensors(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """Return Hugging Face name -> full tensor of a kind (`weight`, `exp_avg`) in a checkpoint.

    A tensor of any kind is float32 and has the same shape as the weight.
    """
    with open_checkpoint(checkpoint) as reader:
        return {
            name: reader.read(f"{kind}/{name}", [0] * len(shape), shape)
            for name, shape in reader.shapes.items()
        }


def worst(found: _Selected, expected: _Selected) -> tuple[float, str]:
    """Return the max relative difference over all values of equal names, and the name.

    The values of a name have the same shape.
    """
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        return np.inf, f"the names differ: {differing[:3]}"
    by_name = differences(found, expected)
    name = max(by_name, key=by_name.__getitem__)
    return by_name[name], name


def differences(found: _Selected, expected: _Selected) -> dict[str, float]:
    """Return the relative difference by name."""
    return {name: _relative(found[name], value) for name, value in expected.items()}


def _relative(found: Any, expected: Any) -> float:
    """Return the L2 norm of the difference over that of `expected`.

    It is infinite for different shapes and for values that are not finite. Both sides have the same
    shape, [n] or a weight's.
    """
    found = np.asarray(found, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.inf
    # The smallest norm only avoids 0 / 0 for a gradient that is exactly 0 on both sides.
    norm = max(np.linalg.norm(expected), 1e-30)
    return float(np.linalg.norm(found - expected) / norm)
