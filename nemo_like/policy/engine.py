"""The training engine: the worker knows losses and metrics, the engine parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nemo_like.config.schema import PolicyConfig
from nemo_like.metrics import Metrics
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.checkpoint import sharded
from nemo_like.policy.checkpoint.hf_export import write_hf
from nemo_like.policy.checkpoint.sharded import Block, Contents, HostBuffers, PendingSave
from nemo_like.policy.checkpoint.sharded_reader import (
    EMA,
    MOMENTS,
    CheckpointReader,
    States,
    open_checkpoint,
)
from nemo_like.policy.device import ComputeClock, HostMemory, keep_freed_memory
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.lora import ADAPTER_DIRECTORY, AdapterState, write_adapter
from nemo_like.policy.optim import LARGEST, Masters, WeightCopy, WeightEma, all_within, clip_factor
from nemo_like.policy.outputs import PLAIN, TokenDistribution, TokenLogprobs
from nemo_like.policy.rank_groups import RankGroups, ResultT

StepFunction = Callable[[ModelInputs, TokenLogprobs], tuple[Tensor | None, ResultT]]
"""Maps a microbatch's outputs to (loss or None without backward, one result of `run`)."""


class EngineOptimizer(Protocol):
    """Gradients and AdamW state of one rank's shards."""

    has_moments: bool
    """True after the first step."""

    def reduce_gradients(self) -> None:
        """Sum gradients over all ranks that contribute to them; called once before a step."""
        ...

    def gradient_norm(self, *, is_loss_finite: bool) -> float:
        """Global L2 norm of the reduced gradients; NaN if any rank passes False."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply all reduced gradients by `factor`."""
        ...

    def step(self, lr: float) -> None:
        """Update the weights with learning rate `lr`, then clear the gradients."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients."""
        ...

    def moments(self) -> Iterable[Tensor]:
        """Return both Adam moments of every local shard, in the shape of the shard.

        Empty before the first step.
        """
        ...


OptimizerT = TypeVar("OptimizerT", bound=EngineOptimizer)


class Engine(ABC, Generic[OptimizerT]):
    """One model, sharded over the ranks of the process group. All ranks call every method.

    This class has what does not depend on how the model is sharded.
    """

    def __init__(self, config: PolicyConfig, ranks: RankGroups) -> None:
        self.config = config
        self.ranks = ranks
        """The groups of this rank. Subclasses have them under `groups` too, with their own type."""
        self.rank = ranks.rank
        self.device = ranks.device
        self.num_optimizer_steps = 0
        self.clock = ComputeClock(self.device)
        self._optimizer: OptimizerT | None = None
        self.ema: WeightEma | None = None
        self._adapter_state: AdapterState | None = None
        self._spec: ModelSpec | None = None
        if self.device.type == "cpu":
            keep_freed_memory()
        is_pinned = self.device.type == "cuda"
        self.save_buffers = HostBuffers(pinned=is_pinned)
        """Host memory of checkpoints that are being written."""
        self.host_memory = HostMemory(pinned=is_pinned)
        # Of frozen weights: they differ from their first copy only after `copy_weights` and `load`,
        # which discard it.
        self.constant_memory = HostMemory(pinned=is_pinned, constant=True)

    @property
    @abstractmethod
    def model_config(self) -> Any:
        """The Hugging Face configuration."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """Sizes and properties of the model."""
        # Read on the first use: the configuration is opened by the constructor of the subclass.
        if self._spec is None:
            self._spec = ModelSpec.from_config(self.model_config, self.config.model_name)
        return self._spec

    @abstractmethod
    def run(
        self,
        microbatches: Iterable[ModelInputs],
        step_fn: StepFunction[ResultT],
        distribution: TokenDistribution = PLAIN,
        *,
        backward: bool,
    ) -> list[ResultT]:
        """Run forward (and backward) of each microbatch; results in the given order.

        The engine chooses the order of execution. Every rank passes the same number of
        microbatches; the ranks of one dp rank pass the same ones, each with its own
        context-parallel share. `step_fn` runs only on the last pipeline stage: elsewhere the result
        is an empty list. All tp ranks see the same outputs. Gradients are *summed* over
        microbatches and over dp and cp ranks and kept until `optimizer_step`; the loss is already
        divided.
        """
        ...

    def expert_metrics(self) -> Metrics:
        """Return the load of the experts in the last `run` with backward; every rank calls.

        Empty for an engine or a model without counts.
        """
        return {}

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> full shape of each distinct weight, in a fixed order.

        A tied weight appears once. Adapters are part of the weights that they change.
        """
        ...

    def constant_weights(self) -> Collection[str]:
        """Return the names of weights that no training changes and that are sent once."""
        return ()

    @abstractmethod
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> full shape of each tensor in checkpoints, in a fixed order.

        These are all weights; of a model with adapters both matrices of each, named by
        `adapter_names`, and a score head.
        """
        ...

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return `saved_shapes` of a model with adapters; empty without."""
        return {} if self._adapter_state is None else self.saved_shapes()

    @abstractmethod
    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named weights in compute precision, one at a time.

        `names` are of `weight_shapes`, whose weights have their adapters merged, or all of
        `adapter_shapes`. On rank 0 the tensors are [*shape]; elsewhere a tensor may be smaller or
        empty.
        """
        ...

    @abstractmethod
    def _gather_adapters(self) -> dict[str, Tensor]:
        """Return the adapters and a trained score head in float32; every rank calls.

        On rank 0 each has its full shape.
        """
        ...

    def gather_weights(
        self, names: Sequence[str], dtype: torch.dtype, targets: Sequence[Tensor] | None
    ) -> None:
        """Gather the named weights, in compute precision, into `targets` of rank 0.

        The names are as in `full_weights`. `targets` are [*shape] each, of `dtype`; None on all
        other ranks. Every rank calls.
        """
        for index, (_, weight) in enumerate(self.full_weights(names)):
            if targets is not None:
                targets[index].copy_(weight)

    @abstractmethod
    def local_weights(self) -> Iterable[Tensor]:
        """Return this rank's shard of each weight in a fixed order, with the shape of the shard."""
        ...

    def resident_tensors(self) -> Iterator[Tensor]:
        """Yield the plain tensors, [...] each, of this rank's weights and optimizer state.

        Some share memory, as float32 weights and their masters.
        """
        for weight in self.local_weights():
            yield weight.detach()
        if self._optimizer is not None:
            for _, master in self.masters():
                yield master
            yield from self._optimizer.moments()
        if self.ema is not None:
            yield from self.ema.shards.values()

    @abstractmethod
    def frozen_weights(self) -> Iterable[Tensor]:
        """Return the resident tensors that have no gradients."""
        ...

    @torch.no_grad()
    def copy_weights(self, source: Engine) -> None:
        """Copy the weights of an engine of the same class, model and layout, without moments."""
        for own, other in zip(self.local_weights(), source.local_weights(), strict=True):
            own.copy_(other)
        self.constant_memory.discard_copies()

    def move_to_host(self) -> None:
        """Copy weights and optimizer state to host memory and free them on the device."""
        # First, as tensors without memory are left out of the other one.
        self.constant_memory.offload(self.frozen_weights())
        self.host_memory.offload(self.resident_tensors())

    def move_to_device(self) -> None:
        """Undo `move_to_host`."""
        self.constant_memory.onload()
        self.host_memory.onload()

    @property
    def optimizer(self) -> OptimizerT:
        """The optimizer of a trainable engine."""
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer

    @abstractmethod
    def masters(self) -> Masters:
        """Yield name and float32 shard [...] of each weight that the optimizer updates."""
        ...

    def _publish_masters(self) -> None:
        """Let the model compute with changed values of `masters`; every rank calls."""

    def start_ema(self) -> None:
        """Keep averages of the weights, beginning with their values, if the config enables it."""
        if self.config.ema.enabled:
            self.ema = WeightEma(self.masters(), self.config.ema)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are their moving averages; see `swapped`.

        Raises RuntimeError for a model without averages.
        """
        if self.ema is None:
            raise RuntimeError("this model has no average of its weights (policy.ema.enabled)")
        return self.swapped(self.ema)

    @contextmanager
    def swapped(self, copy: WeightCopy) -> Iterator[None]:
        """Return a context in which the trained weights have the values of `copy`.

        Every rank enters it. Only for forward passes, exports and transfers of weights.
        """
        self._swap(copy)
        try:
            yield
        finally:
            self._swap(copy)

    def _swap(self, copy: WeightCopy) -> None:
        copy.swap(self.masters())
        self._publish_masters()

    def optimizer_step(self, lr: float, *, is_loss_finite: bool = True) -> float:
        """Clip, update, clear gradients; returns the gradients' global norm before clipping.

        The step is skipped where `clip_factor` returns None, and when any rank passes
        `is_loss_finite=False` (the norm is then NaN). A skipped step clears the gradients and
        changes neither weights nor moments nor `num_optimizer_steps`, so the learning rate does not
        advance either. All ranks decide the same.
        """
        optimizer = self.optimizer
        optimizer.reduce_gradients()
        norm = optimizer.gradient_norm(is_loss_finite=is_loss_finite)
        factor = clip_factor(norm, self.config.max_grad_norm)
        if factor is None:
            # Not finite or too large: skip the step. All ranks have the same norm.
            optimizer.zero_grad()
            return norm
        if factor < 1:
            optimizer.scale_gradients(factor)
        optimizer.step(lr)
        self.num_optimizer_steps += 1
        if self.ema is not None:
            self.ema.update(self.masters())
        return norm

    def gradient_norm(self, *, is_loss_finite: bool = True) -> float:
        """Clear the gradients without an update; returns their global norm.

        NaN when any rank passes `is_loss_finite=False`.
        """
        self.optimizer.reduce_gradients()
        norm = self.optimizer.gradient_norm(is_loss_finite=is_loss_finite)
        self.optimizer.zero_grad()
        return norm

    def is_finite(self, *, with_moments: bool = False) -> bool:
        """Return True if no weight of any rank is larger than `optim.LARGEST`.

        With `with_moments` all moments of the optimizer must be finite as well. The result is the
        same on every rank.
        """
        if self.host_memory.is_offloaded or self.constant_memory.is_offloaded:
            raise RuntimeError("the model is offloaded; call onload first")
        is_finite = all_within(self.local_weights(), LARGEST)
        if with_moments:
            is_finite &= all_within(self.optimizer.moments())
        # Summed over the ranks, so that all of them raise or none.
        num_not_finite = 0.0 if is_finite else 1.0
        (total,) = self.ranks.sum_over_world([num_not_finite])
        return total == 0

    def base_model(self) -> AbstractContextManager[None]:
        """Return a context in which `run` computes the model without its adapters.

        Only for forward passes. Raises RuntimeError for a model without adapters.
        """
        if self._adapter_state is None:
            raise RuntimeError("this model has no adapters (policy.lora.enabled is false)")
        return self._adapter_state.disabled()

    def save(self, directory: Path, *, in_background: bool) -> PendingSave:
        """Write this rank's shard of weights and optimizer state, of a frozen engine the weights.

        Of a model with adapters these are written, and not its frozen weights. With `in_background`
        a thread writes copies of them, and training may continue. The checkpoint is complete after
        `PendingSave.finish`, which every rank calls.
        """
        has_moments = self._optimizer is not None and self._optimizer.has_moments
        states = dict(self._optimizer_states()) if has_moments else {}
        if self.ema is not None:
            states[EMA] = self._trained_names()
        return sharded.save(
            directory,
            self._blocks(),
            Contents(
                num_optimizer_steps=self.num_optimizer_steps,
                has_moments=has_moments,
                shapes=self.saved_shapes(),
                states=states,
            ),
            self.ranks,
            buffers=self.save_buffers,
            in_background=in_background,
        )

    def load(self, directory: Path) -> None:
        """Restore in place what `save` wrote, in any layout and by either engine.

        A checkpoint without moments restarts the optimizer. Raises CheckpointError for a directory
        that is not such a checkpoint, ConfigError for one of another model.
        """
        with open_checkpoint(directory) as reader:
            reader.check_model(self.saved_shapes())
            if self._optimizer is not None and reader.has_moments:
                reader.check_states(self._optimizer_states())
            self._restore(reader)
            self.num_optimizer_steps = reader.num_optimizer_steps
        self.constant_memory.discard_copies()

    @abstractmethod
    def _trained_names(self) -> list[str]:
        """Return the Hugging Face names of the tensors that the optimizer updates, on all ranks."""
        ...

    def _optimizer_states(self) -> States:
        """Return kind of state -> names of the tensors that have it after a step."""
        return dict.fromkeys(MOMENTS, self._trained_names())

    @abstractmethod
    def _blocks(self) -> Iterable[Block]:
        """Return this rank's blocks of weights, averages and optimizer state; all ranks iterate."""
        ...

    @abstractmethod
    def _restore(self, reader: CheckpointReader) -> None:
        """Read this rank's part of a checkpoint of this model."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Write a transformers model directory on rank 0; adapters also in `adapter`."""
        write_hf(self, self.model_config, self.config, directory, is_writer=self.rank == 0)
        if self._adapter_state is None:
            return
        adapters = self._gather_adapters()
        if self.rank == 0:
            write_adapter(directory / ADAPTER_DIRECTORY, adapters, self.config)

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; does nothing on CPU."""
        if self.device.type != "cpu":
            self.move_to_host()
            # The caching allocator keeps freed memory; another process needs it.
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move weights and optimizer state back to the device; does nothing on CPU."""
        if self.device.type != "cpu":
            self.move_to_device()
