"""FSDP2 over dp x cp, with tensor, sequence and context parallelism: the engine of
`DTensorPolicyWorker`.

It runs microbatches; it knows no loss and no plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.files import FileRecord
from nemo_like.policy.checkpoint.hf_export import write_hf
from nemo_like.policy.checkpoint.sharded import MOMENTS
from nemo_like.policy.collectives import gather_objects, gather_rows
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.dtensor import checkpoint as dtensor_checkpoint
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.model import (
    build_scorer,
    exclude_fsdp_communication,
    fsdp_modules,
    keeps_whole,
)
from nemo_like.policy.dtensor.parameters import Weight, local
from nemo_like.policy.engine import ResultT, StepFunction, Sync
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.policy.optim import LARGEST, all_within, build_optimizer, clip_factor
from nemo_like.sampling_filter import SamplingFilter


class DTensorEngine:
    """See `Engine`. One process without mixed precision runs the plain module.

    With `trainable=False` there are no gradients and no optimizer: the frozen reference.
    """

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        topology: Topology,
        rank: int,
        *,
        sequence_parallel: bool,
        trainable: bool,
        groups: Groups | None = None,
    ) -> None:
        """Every rank of the process group calls. `groups` are another engine's of the same layout,
        to share its channels.
        """
        self.config = config
        self.device = device
        self.topology = topology
        self.rank = rank
        self.num_optimizer_steps = 0
        self.groups = groups or Groups.join(
            topology,
            rank,
            device,
            sequence_parallel=sequence_parallel,
            mixed_precision=config.precision != "float32",
        )
        self._scorer, cuts = build_scorer(config, self.groups, rank, device, trainable=trainable)
        self._weights = [
            Weight(name, parameter, cuts[name], self.groups)
            for name, parameter in self._scorer.causal_lm.named_parameters()
        ]
        self._fsdp_modules = fsdp_modules(self._scorer)
        self.clock = ComputeClock(device)
        exclude_fsdp_communication(self._fsdp_modules, self.clock)
        self._keeps_whole = keeps_whole(self._scorer, device)
        self._optimizer = (
            build_optimizer(self._scorer.parameters(), config.optimizer) if trainable else None
        )

    @property
    def sync(self) -> Sync:
        return "step" if self._keeps_whole else "microbatch"

    @property
    def model_config(self) -> Any:
        return self._scorer.causal_lm.config

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
        results = []
        with torch.set_grad_enabled(backward), self.clock.running():
            for inputs, is_last in _mark_last(microbatches):
                if backward:
                    self._set_synchronises(is_last)
                outputs = self._scorer(inputs, temperature, with_entropy, token_filter)
                loss, result = step_fn(inputs, outputs)
                if backward:
                    assert loss is not None, "a step function gives a loss when run with backward"
                    loss.backward()
                results.append(result)
        if not backward:
            # The root, and small models altogether, are still whole; the next optimizer step would
            # leave them stale.
            for module in self._fsdp_modules:
                module.reshard()
        return results

    def optimizer_step(self, lr: float, *, is_loss_finite: bool = True) -> float:
        optimizer = self._trained
        self._sum_partial_gradients()
        norm = self._gradient_norm(is_loss_finite)
        factor = clip_factor(norm, self.config.max_grad_norm)
        if factor is not None:
            if factor < 1:
                for _, gradient in self._local_gradients():
                    gradient.mul_(factor)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self.num_optimizer_steps += 1
        optimizer.zero_grad(set_to_none=True)
        return norm

    def is_finite(self, *, with_moments: bool = False) -> bool:
        is_finite = all_within((local(weight.parameter) for weight in self._weights), LARGEST)
        if with_moments:
            states = self._trained.state.values()
            is_finite &= all_within(local(state[moment]) for state in states for moment in MOMENTS)
        (num_not_finite,) = self._sum([0.0 if is_finite else 1.0], self.groups.world)
        return num_not_finite == 0

    def sum_over_dp(self, values: Sequence[float]) -> list[float]:
        return self._sum(values, self.groups.dp)

    def gather_over_dp_cp(self, value: Any) -> list[Any]:
        group = self.groups.dp_cp
        return [value] if group is None else gather_objects(group, value)

    def gather_over_world(self, value: Any) -> list[Any]:
        group = self.groups.world
        return [value] if group is None else gather_objects(group, value)

    def gather_over_cp(self, values: Tensor) -> Tensor:
        group = self.groups.cp
        return values if group is None else gather_rows(group, values.detach())

    def barrier(self) -> None:
        """Every rank has come this far. Through the ranks' own collectives, which carry the
        collective timeout.
        """
        self._sum([0.0], self.groups.world)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {weight.name: weight.cut.full_shape for weight in self._weights}

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for weight in self._named(names):
            value = local(weight.parameter)
            if self.config.precision == "bfloat16":
                value = value.to(torch.bfloat16)  # before the gather: half the bytes
            yield weight.name, weight.whole(value)

    def full_gradients(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named weights' gradients since the last optimizer step, float32, one at a time: whole
        on rank 0, elsewhere perhaps an empty tensor. Every rank calls.
        """
        for weight in self._named(names):
            gradient = weight.parameter.grad
            part = (
                torch.zeros_like(local(weight.parameter)) if gradient is None else local(gradient)
            )
            whole = weight.whole(part).float()
            if weight.cut.has_partial_grad and self.groups.tensor is not None:
                whole = whole.clone()
                dist.all_reduce(whole, group=self.groups.tensor.group)
            yield weight.name, whole

    def save(self, directory: Path) -> dict[str, FileRecord]:
        return dtensor_checkpoint.save(
            directory,
            self._weights,
            self._trained,
            rank=self.rank,
            num_optimizer_steps=self.num_optimizer_steps,
            barrier=self.barrier,
        )

    def load(self, directory: Path) -> None:
        self.num_optimizer_steps = dtensor_checkpoint.load(directory, self._weights, self._trained)

    def export_hf(self, directory: Path) -> None:
        write_hf(self, self.model_config, self.config, directory, is_writer=self.rank == 0)

    def offload(self) -> None:
        if self.device.type != "cpu":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self.device.type != "cpu":
            self._move(self.device)

    @property
    def _trained(self) -> torch.optim.AdamW:
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer

    def _set_synchronises(self, is_last: bool) -> None:
        """Small models reduce gradients once, after the last microbatch; large ones after each, to
        hold only shards.
        """
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(is_last or not self._keeps_whole, recurse=False)
            module.set_reshard_after_backward(is_last or not self._keeps_whole, recurse=False)

    def _local_gradients(self) -> Iterator[tuple[Weight, Tensor]]:
        for weight in self._weights:
            if weight.parameter.grad is not None:
                yield weight, local(weight.parameter.grad)

    def _sum_partial_gradients(self) -> None:
        """Add up over the tp ranks what each has of its own heads or tokens only, in one
        message.
        """
        tensor = self.groups.tensor
        partial = [
            gradient for weight, gradient in self._local_gradients() if weight.cut.has_partial_grad
        ]
        if tensor is None or not partial:
            return
        total = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(total, group=tensor.group)
        for gradient, part in zip(
            partial, total.split([gradient.numel() for gradient in partial]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def _gradient_norm(self, is_loss_finite: bool) -> float:
        """Norm of the whole gradient, each element counted once; NaN if the loss of any rank is not
        finite.
        """
        gradients = [
            gradient for weight, gradient in self._local_gradients() if weight.is_counted_here
        ]
        norm = (
            float(torch.nn.utils.get_total_norm(gradients, foreach=True))
            if is_loss_finite
            else math.nan
        )
        (square,) = self._sum([norm**2], self.groups.world)
        return math.sqrt(square)

    def _sum(self, values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
        if group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=group)
        return total.tolist()

    def _named(self, names: Sequence[str]) -> Iterator[Weight]:
        weights = {weight.name: weight for weight in self._weights}
        return (weights[name] for name in names)

    def _move(self, device: torch.device) -> None:
        self._scorer.to(device)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if name != "step":
                        state[name] = value.to(device)


def _mark_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last."""
    held: list[Any] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True
