"""FSDP2 over dp x cp with tensor, sequence and context parallelism: `DTensorPolicyWorker`'s engine.

It runs microbatches; it knows no loss and no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.config.schema import PolicyConfig
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.checkpoint.sharded import PendingSave
from nemo_like.policy.dtensor import checkpoint as dtensor_checkpoint
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.loading import load_weights
from nemo_like.policy.dtensor.model import (
    build_model,
    exclude_fsdp_communication,
    fsdp_modules,
)
from nemo_like.policy.dtensor.optimizer import ShardedAdamW
from nemo_like.policy.dtensor.parameters import (
    ShardedParameter,
    gather_parameters,
    local_shard,
)
from nemo_like.policy.engine import ResultT, StepFunction
from nemo_like.policy.engine_base import EngineBase
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.sampling_filter import SamplingFilter


class DTensorEngine(EngineBase[ShardedAdamW]):
    """Implements `Engine`. One process without mixed precision runs the plain module, without FSDP.

    With `trainable=False` it has no optimizer: the frozen reference.
    """

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        parallel_layout: ParallelLayout,
        rank: int,
        *,
        trainable: bool,
        groups: Groups | None = None,
    ) -> None:
        """Load the model; every rank calls.

        `groups` are those of another engine of the same layout, so that both use the same
        communicators.
        """
        if groups is None:
            groups = Groups.join(
                parallel_layout,
                rank,
                device,
                mixed_precision=config.precision != "float32",
            )
        super().__init__(config, device, parallel_layout, rank, groups, trainable=trainable)
        self.groups = groups
        self._model, specs = build_model(
            config, parallel_layout, groups, device, trainable=trainable
        )
        # A tied weight appears once, under the name of the input embedding.
        self.parameters = [
            ShardedParameter(
                name,
                parameter,
                specs[name],
                groups,
            )
            for name, parameter in self._model.causal_lm.named_parameters()
        ]
        load_weights(config.model_name, self._model.causal_lm, self.parameters)
        self._fsdp_modules = fsdp_modules(self._model)
        exclude_fsdp_communication(self._fsdp_modules, self.clock)
        self._keeps_unsharded = parallel_layout.keeps_unsharded("dtensor", self.spec.num_params)
        if trainable:
            self._optimizer = ShardedAdamW(self.parameters, groups, device, config.optimizer)

    @property
    def model_config(self) -> Any:
        """See `Engine.model_config`."""
        return self._model.causal_lm.config

    def run(
        self,
        microbatches: Iterable[ModelInputs],
        step_fn: StepFunction[ResultT],
        *,
        backward: bool,
        temperature: float = 1.0,
        with_entropy: bool = False,
        token_filter: SamplingFilter | None = None,
    ) -> list[ResultT]:
        """See `Engine.run`."""
        results = []
        with torch.set_grad_enabled(backward), self.clock.running():
            for inputs, is_last in _mark_last(microbatches):
                if backward:
                    self._set_gradient_sync(is_last)
                outputs = self._model(inputs, temperature, with_entropy, token_filter)
                loss, result = step_fn(inputs, outputs)
                if backward:
                    assert loss is not None, "a step function gives a loss when run with backward"
                    loss.backward()
                results.append(result)
        if not backward:
            # Without a backward the root, and all units of a small model, are still unsharded. The
            # next optimizer step updates the shards only and would leave these copies stale.
            for module in self._fsdp_modules:
                module.reshard()
        return results

    def local_weights(self) -> Iterator[Tensor]:
        """Yield this rank's shard of each weight, float32 with the shape of the shard."""
        for sharded in self.parameters:
            yield local_shard(sharded.parameter)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Engine.weight_shapes`."""
        return {sharded.name: sharded.spec.full_shape for sharded in self.parameters}

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.full_weights`; on rank 0 each has the shape of `weight_shapes`."""
        by_name = {sharded.name: sharded for sharded in self.parameters}
        for name in names:
            sharded = by_name[name]
            yield name, sharded.gather_full(self._compute_shard(sharded))

    def gather_weights(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        targets: Sequence[Tensor] | None,
    ) -> None:
        """See `Engine.gather_weights`; `targets` are [*shape] each, of `dtype`."""
        by_name = {sharded.name: sharded for sharded in self.parameters}
        parameters = [by_name[name] for name in names]
        # Cast before the transfer, which then moves no more bytes than the targets have.
        shards = [self._compute_shard(sharded).to(dtype) for sharded in parameters]
        gather_parameters(parameters, shards, targets)

    def _compute_shard(self, sharded: ShardedParameter) -> Tensor:
        """Return this rank's shard, [m, ...], in compute precision."""
        shard = local_shard(sharded.parameter)
        if self.config.precision == "bfloat16":
            shard = shard.to(torch.bfloat16)
        return shard

    def save(self, directory: Path, *, in_background: bool) -> PendingSave:
        """See `Engine.save`."""
        return dtensor_checkpoint.save(
            directory,
            self.parameters,
            self._adamw(),
            rank=self.rank,
            num_optimizer_steps=self.num_optimizer_steps,
            barrier=self.barrier,
            buffers=self.save_buffers,
            in_background=in_background,
        )

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        self.num_optimizer_steps = dtensor_checkpoint.load(
            directory, self.parameters, self._adamw()
        )
        self._host_memory.discard_copies()

    def _adamw(self) -> torch.optim.AdamW | None:
        """Return the optimizer; None of a frozen engine."""
        return None if self._optimizer is None else self._optimizer.adamw

    def _set_gradient_sync(self, is_last: bool) -> None:
        """Choose whether FSDP reduces gradients and reshards weights after the next backward.

        A small model reduces once, after the last microbatch. A large one reduces after each, so
        that only shards of its gradients are in memory.
        """
        sync = is_last or not self._keeps_unsharded
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(sync, recurse=False)
            # With several copies of the weights, gradients are summed over them only once.
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_reshard_after_backward(sync, recurse=False)

    def move_to_host(self) -> None:
        """See `EngineBase.move_to_host`; unsharded weights are freed."""
        for module in self._fsdp_modules:
            module.reshard()
        super().move_to_host()

    def _resident_tensors(self) -> Iterator[Tensor]:
        """See `EngineBase`; the shards of weights and moments, [m, ...] each."""
        yield from self.local_weights()
        if self._optimizer is not None:
            yield from self._optimizer.moments()


def _mark_last(items: Iterable[ModelInputs]) -> Iterator[tuple[ModelInputs, bool]]:
    """Yield each item with True for the last one; reads one item ahead."""
    previous = None
    for item in items:
        if previous is not None:
            yield previous, False
        previous = item
    if previous is not None:
        yield previous, True
