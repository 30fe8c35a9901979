"""FSDP2 over the dp axis: the engine of `DTensorPolicyWorker`. It runs microbatches; it knows no loss and no plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from nemo_like.config.schema import PolicyConfig
from nemo_like.data.packing.layout import ModelInputs
from nemo_like.policy import dtensor_checkpoint, dtensor_export
from nemo_like.policy.dtensor_model import build_scorer, fsdp_modules, keeps_whole
from nemo_like.policy.engine import ResultT, StepFunction, Sync, TokenScores
from nemo_like.policy.optim import build_optimizer, local_tensors


class DTensorEngine:
    """See `Engine`. One process without mixed precision runs the plain module; everything else goes through FSDP2.

    With `trainable=False` there are no gradients and no optimizer: the frozen reference.
    """

    def __init__(self, config: PolicyConfig, device: torch.device, world_size: int, *, trainable: bool) -> None:
        self.config = config
        self.device = device
        self.world_size = world_size
        self.num_optimizer_steps = 0
        self._mesh = _dp_mesh(device, world_size) if world_size > 1 or config.precision != "float32" else None
        self._scorer = build_scorer(config, self._mesh, device, trainable=trainable)
        self._fsdp_modules = fsdp_modules(self._scorer)
        self._keeps_whole = keeps_whole(self._scorer, device)
        self._optimizer = build_optimizer(self._scorer.parameters(), config.optimizer) if trainable else None

    @property
    def dp_rank(self) -> int:
        return self._mesh.get_local_rank() if self._mesh is not None else 0

    @property
    def sync(self) -> Sync:
        return "step" if self._keeps_whole else "microbatch"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Hugging Face name -> each distinct parameter, sharded as it is."""
        return dict(self._scorer.causal_lm.named_parameters())

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
    ) -> list[ResultT]:
        results = []
        with torch.set_grad_enabled(backward):
            for inputs, is_last in _mark_last(microbatches):
                if backward:
                    self._set_synchronises(is_last)
                logprobs, entropy = self._scorer(inputs, temperature, with_entropy)
                loss, result = step_fn(inputs, TokenScores(logprobs, entropy))
                if backward:
                    assert loss is not None, "a step function gives a loss when run with backward"
                    loss.backward()
                results.append(result)
        if not backward:
            # The root, and small models altogether, are still whole; the next optimizer step would leave them stale.
            for module in self._fsdp_modules:
                module.reshard()
        return results

    def optimizer_step(self, lr: float) -> float:
        """Raises FloatingPointError, before any weight is touched, when the gradients are not finite."""
        optimizer = self._trained
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} at optimizer step {self.num_optimizer_steps}: no weight was changed; "
                "lower policy.optimizer.lr, or look at the rows of this step"
            )
        limit = self.config.max_grad_norm
        if 0 < limit < norm:
            gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            for gradient in local_tensors(gradients):
                gradient.mul_(limit / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.num_optimizer_steps += 1
        return norm

    def sum_over_dp(self, values: Sequence[float]) -> list[float]:
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def gather_over_dp(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def barrier(self) -> None:
        """Every rank has come this far. Through the ranks' own collectives, which carry the collective timeout."""
        self.sum_over_dp([0.0])

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        parameters = self.parameters
        for name in names:
            parameter = parameters[name].detach()
            if self.config.precision == "bfloat16":
                parameter = parameter.to(torch.bfloat16)  # before the gather: half the bytes
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def save(self, directory: Path) -> None:
        dtensor_checkpoint.save(
            directory,
            self.parameters,
            self._trained,
            num_optimizer_steps=self.num_optimizer_steps,
            rank=self.dp_rank,
            world_size=self.world_size,
            barrier=self.barrier,
        )

    def load(self, directory: Path) -> None:
        self.num_optimizer_steps = dtensor_checkpoint.load(
            directory, self.parameters, self._trained, rank=self.dp_rank, world_size=self.world_size
        )

    def export_hf(self, directory: Path) -> None:
        dtensor_export.export_hf(self, self._scorer.causal_lm, self.config, directory, is_writer=self.dp_rank == 0)

    def sleep(self) -> None:
        if self.device.type != "cpu":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.device.type != "cpu":
            self._move(self.device)

    @property
    def _trained(self) -> torch.optim.AdamW:
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._mesh is not None
        return self._mesh.get_group()

    def _set_synchronises(self, is_last: bool) -> None:
        """Small models reduce gradients once, after the last microbatch; large ones after each, to hold only shards."""
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(is_last or not self._keeps_whole, recurse=False)
            module.set_reshard_after_backward(is_last or not self._keeps_whole, recurse=False)

    def _gradient_norm(self) -> float:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(list(local_tensors(gradients)), foreach=True)
        (square,) = self.sum_over_dp([float(norm) ** 2])
        return math.sqrt(square)

    def _move(self, device: torch.device) -> None:
        self._scorer.to(device)
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if name != "step":
                        state[name] = value.to(device)


def _dp_mesh(device: torch.device, world_size: int) -> DeviceMesh:
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))


def _mark_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last."""
    held: list[Any] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True
