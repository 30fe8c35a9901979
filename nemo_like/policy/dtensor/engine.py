"""FSDP2 over dp x cp with tensor, sequence and context parallelism: `DTensorPolicyWorker`'s engine.

It runs microbatches; it knows no loss and no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_like.config.schema import OutputHead, PolicyConfig
from nemo_like.metrics import Metrics
from nemo_like.models.adapters import is_adapter
from nemo_like.models.output_head import open_config
from nemo_like.policy.checkpoint.sharded import Block
from nemo_like.policy.checkpoint.sharded_reader import EMA, WEIGHT, CheckpointReader, States
from nemo_like.policy.dtensor.lora import (
    Adapter,
    QuantizedParameter,
    initialize,
    quantized_parameters,
    sharded_adapters,
)
from nemo_like.policy.dtensor.model import (
    build_model,
    decoder_layers,
    exclude_fsdp_communication,
    fsdp_modules,
    load_weights,
)
from nemo_like.policy.dtensor.optimizer import ShardedOptimizer, hidden_matrices
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.parameters import ShardedParameter, gather_parameters, local_shard
from nemo_like.policy.dtensor.vision import is_of_tower
from nemo_like.policy.engine import Engine, ResultT, StepFunction
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.lora import stored_head
from nemo_like.policy.outputs import PLAIN, TokenDistribution


class DTensorEngine(Engine[ShardedOptimizer]):
    """Implements `Engine`. One process without mixed precision runs the plain module, without FSDP.

    With `trainable=False` it has no optimizer: the frozen reference.
    """

    def __init__(
        self,
        config: PolicyConfig,
        groups: Groups,
        *,
        trainable: bool,
        seed: int = 0,
        head: OutputHead = "vocabulary",
    ) -> None:
        """Load the model; every rank calls.

        All engines of a process share `groups`, so that they use the same communicators. `seed`
        determines the initial adapters and the initial score head.
        """
        super().__init__(config, groups)
        self.groups = groups
        model_config, initial_weights = open_config(
            config.model_name, head, trainable=trainable, seed=seed
        )
        self.model, specs, self._adapter_state = build_model(
            config, model_config, groups, trainable=trainable
        )
        # A tied weight appears once, under the name of the input embedding.
        self.parameters = [
            ShardedParameter(name, parameter, specs[name], groups)
            for name, parameter in self.model.causal_lm.named_parameters()
        ]
        self.quantized = list(quantized_parameters(self.model.causal_lm, specs, groups))
        """Frozen weights in 4 bits, which are no parameters."""
        self._by_name = {each.name: each for each in [*self.parameters, *self.quantized]}
        # In the order of the model.
        names = [name for name in specs if name in self._by_name and not is_adapter(name)]
        self._weights = [self._by_name[name] for name in names]
        """Parameters of the model without adapters."""
        self.trained = [each for each in self.parameters if each.parameter.requires_grad]
        """Parameters with gradients."""
        self.adapters: dict[str, Adapter] = {}
        """By the name of the weight."""
        if self._adapter_state is not None:
            self.adapters = sharded_adapters(self._by_name, config.lora)
            initialize(self.adapters.values(), config.lora, seed)
            if head == "scores":
                initial_weights |= stored_head(config.lora, self.spec.hidden_size)
        load_weights(config.model_name, self.model.causal_lm, self._weights, initial_weights)
        self.fsdp_modules = fsdp_modules(self.model)
        exclude_fsdp_communication(self.fsdp_modules, self.clock)
        self._keeps_unsharded = groups.layout.keeps_unsharded("dtensor", self.spec.num_params)
        if trainable:
            self._optimizer = ShardedOptimizer(
                self.trained,
                groups,
                config.optimizer,
                hidden_matrices(decoder_layers(self.model.causal_lm)),
            )
            self.start_ema()

    @property
    def model_config(self) -> Any:
        """See `Engine.model_config`."""
        return self.model.causal_lm.config

    def run(
        self,
        microbatches: Iterable[ModelInputs],
        step_fn: StepFunction[ResultT],
        distribution: TokenDistribution = PLAIN,
        *,
        backward: bool,
    ) -> list[ResultT]:
        """See `Engine.run`."""
        results = []
        if backward:
            self.model.expert_loads.reset()
        with torch.set_grad_enabled(backward), self.clock.running():
            for inputs, is_last in _mark_last(microbatches):
                if backward:
                    self._set_gradient_sync(is_last)
                outputs = self.model(inputs, distribution)
                loss, result = step_fn(inputs, outputs)
                if backward:
                    assert loss is not None, "a step function gives a loss when run with backward"
                    loss.backward()
                results.append(result)
        if backward and self.spec.vision is not None:
            # A step without an image leaves the tower without gradients; all parameters have
            # optimizer state of the same age.
            for sharded in self.trained:
                if sharded.parameter.grad is None:
                    sharded.parameter.grad = torch.zeros_like(sharded.parameter)
        if not backward:
            # Without a backward the root, and all units of a small model, are still unsharded. The
            # next optimizer step updates the shards only and would leave these copies stale.
            for module in self.fsdp_modules:
                module.reshard()
        return results

    def expert_metrics(self) -> Metrics:
        """See `Engine.expert_metrics`."""
        return self.model.expert_loads.metrics(self.groups)

    def local_weights(self) -> Iterator[Tensor]:
        """Yield this rank's shard of each weight, with the shape of the shard.

        It is float32, or in compute precision for a frozen model. Of a weight in NF4 it is both
        tensors, which are not sharded by FSDP.
        """
        for sharded in self.parameters:
            yield local_shard(sharded.parameter)
        yield from self._quantized_tensors()

    def _quantized_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the weights in NF4: codes [m, n / 2] and scales [m, n / 64]."""
        for quantized in self.quantized:
            yield from quantized.stored

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Engine.weight_shapes`."""
        return {sharded.name: sharded.spec.full_shape for sharded in self._weights}

    def constant_weights(self) -> list[str]:
        """See `Engine.constant_weights`."""
        tower = [sharded for sharded in self._weights if is_of_tower(sharded.name)]
        is_trained = any(sharded.parameter.requires_grad for sharded in tower)
        return [] if is_trained else [sharded.name for sharded in tower]

    @property
    def _saved(self) -> list[ShardedParameter]:
        """Parameters in checkpoints: all weights, or the adapters and a score head."""
        return self.parameters if self._adapter_state is None else self.trained

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Engine.saved_shapes`."""
        return {sharded.name: sharded.spec.full_shape for sharded in self._saved}

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.full_weights`; on rank 0 each has the shape of `weight_shapes`."""
        for name in names:
            sharded = self._by_name[name]
            yield name, sharded.gather_full(self._compute_shard(sharded))

    def gather_weights(
        self, names: Sequence[str], dtype: torch.dtype, targets: Sequence[Tensor] | None
    ) -> None:
        """See `Engine.gather_weights`; `targets` are [*shape] each, of `dtype`."""
        parameters = [self._by_name[name] for name in names]
        # Cast before the transfer, which then moves no more bytes than the targets have.
        shards = [self._compute_shard(sharded).to(dtype) for sharded in parameters]
        gather_parameters(parameters, shards, targets)

    def _compute_shard(self, sharded: ShardedParameter) -> Tensor:
        """Return this rank's shard, [m, ...], in compute precision; of a weight with its adapter.

        Every FSDP rank calls.
        """
        if isinstance(sharded, QuantizedParameter):
            shard = sharded.dequantized()
        else:
            shard = local_shard(sharded.parameter)
        adapter = self.adapters.get(sharded.name)
        if adapter is not None:
            shard = adapter.merged(shard)
        if self.config.precision == "bfloat16":
            shard = shard.to(torch.bfloat16)
        return shard

    def _trained_names(self) -> list[str]:
        """See `Engine`."""
        return [sharded.name for sharded in self.trained]

    def _optimizer_states(self) -> States:
        """See `Engine`."""
        return self.optimizer.states()

    def _blocks(self) -> Iterator[Block]:
        """See `Engine`."""
        for sharded in self._saved:
            if not sharded.is_owner:
                # Another tp rank has the same values and writes them.
                continue
            offset, _ = sharded.block()
            tensors: dict[str, Tensor] = {WEIGHT: sharded.parameter}
            if self._optimizer is not None:
                tensors |= self._optimizer.state(sharded)
            if self.ema is not None and sharded.name in self.ema.shards:
                tensors[EMA] = self.ema.shards[sharded.name]
            for kind, tensor in tensors.items():
                name = f"{kind}/{sharded.name}"
                yield Block(name, sharded.spec.full_shape, offset, local_shard(tensor))

    def _restore(self, reader: CheckpointReader) -> None:
        """See `Engine`."""
        optimizer = self._optimizer
        if optimizer is not None:
            optimizer.reset()
        for sharded in self._saved:
            _read_into(sharded.parameter, reader, WEIGHT, sharded)
            if self.ema is not None and sharded.name in self.ema.shards:
                # An average that the checkpoint does not have begins with the weight.
                kind = EMA if sharded.name in reader.states.get(EMA, ()) else WEIGHT
                _read_into(self.ema.shards[sharded.name], reader, kind, sharded)
            if optimizer is None or not reader.has_moments:
                continue
            state = {}
            for kind in optimizer.kinds(sharded):
                state[kind] = torch.zeros_like(sharded.parameter, requires_grad=False)
                _read_into(state[kind], reader, kind, sharded)
            if state:
                optimizer.restore(sharded, state, reader.num_optimizer_steps)

    def _gather_adapters(self) -> dict[str, Tensor]:
        """See `Engine._gather_adapters`."""
        return {
            sharded.name: sharded.gather_full(local_shard(sharded.parameter))
            for sharded in self.trained
        }

    def _set_gradient_sync(self, is_last: bool) -> None:
        """Choose whether FSDP reduces gradients and reshards weights after the next backward.

        A small model reduces once, after the last microbatch. A large one reduces after each, so
        that only shards of its gradients are in memory.
        """
        sync = is_last or not self._keeps_unsharded
        for module in self.fsdp_modules:
            module.set_requires_gradient_sync(sync, recurse=False)
            # With several copies of the weights, gradients are summed over them only once.
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_reshard_after_backward(sync, recurse=False)

    def move_to_host(self) -> None:
        """See `Engine.move_to_host`; unsharded weights are freed."""
        for module in self.fsdp_modules:
            module.reshard()
        super().move_to_host()

    def frozen_weights(self) -> Iterator[Tensor]:
        """See `Engine`; shards, [m, ...] each."""
        for sharded in self.parameters:
            if not sharded.parameter.requires_grad:
                yield local_shard(sharded.parameter)
        yield from self._quantized_tensors()

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`; the shards [m, ...] by Hugging Face name."""
        for sharded in self.trained:
            yield sharded.name, local_shard(sharded.parameter)


def _read_into(
    target: Tensor, reader: CheckpointReader, kind: str, sharded: ShardedParameter
) -> None:
    """Copy this rank's shard of `kind` (weight or moment) into `target`.

    `target` has the same shape and sharding as the parameter, or is a shard of the same kind.
    """
    offset, shape = sharded.block()
    local_shard(target).copy_(reader.read(f"{kind}/{sharded.name}", offset, shape))


def _mark_last(items: Iterable[ModelInputs]) -> Iterator[tuple[ModelInputs, bool]]:
    """Yield each item with True for the last one; reads one item ahead."""
    previous = None
    for item in items:
        if previous is not None:
            yield previous, False
        previous = item
    if previous is not None:
        yield previous, True
