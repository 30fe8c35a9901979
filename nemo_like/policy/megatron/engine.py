"""Tensor, pipeline, context and expert parallelism by Megatron-Core: `MegatronPolicyWorker`'s
engine.

It runs microbatches through Megatron-Core's schedules; it knows no loss and no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.config.schema import AdapterConfig, OutputHead, PolicyConfig
from nemo_like.integer_math import block_index
from nemo_like.models.adapters import adapter_names, adapter_shapes, is_adapter
from nemo_like.models.output_head import meta_model, open_config
from nemo_like.models.spec import SCORE_WEIGHT
from nemo_like.policy.checkpoint.hf_reader import open_model
from nemo_like.policy.checkpoint.sharded import Block
from nemo_like.policy.checkpoint.sharded_reader import EMA, WEIGHT, CheckpointReader
from nemo_like.policy.decoder_layers import frozen_names
from nemo_like.policy.engine import Engine, ResultT, StepFunction
from nemo_like.policy.heads.row_outputs import ScoreHead, SequenceShare
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.lora import open_initial, stored_head
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.groups import Groups, ScheduleTimers
from nemo_like.policy.megatron.lora import EngineAdapters, adapter_map, check_lora
from nemo_like.policy.megatron.model import VocabularyHead, build_model
from nemo_like.policy.megatron.optimizer import (
    ShardedAdamW,
    fill_weights,
    read_kind,
    trained_blocks,
)
from nemo_like.policy.megatron.param_map import (
    EMBEDDING,
    ModelSharding,
    ParamMap,
    Shape,
    parallel_coords,
)
from nemo_like.policy.megatron.parameters import FullWeightGatherer, ReadBlock, frozen_blocks
from nemo_like.policy.megatron.schedule import run_schedule
from nemo_like.policy.outputs import PLAIN, TokenDistribution


class MegatronEngine(Engine[ShardedAdamW]):
    """Implements `Engine`. With `trainable=False` it has no optimizer: the frozen reference."""

    def __init__(
        self,
        config: PolicyConfig,
        groups: Groups,
        *,
        trainable: bool,
        seed: int = 0,
        head: OutputHead = "vocabulary",
    ) -> None:
        """Load the model; every rank calls. All engines of the process share `groups`.

        `seed` determines the initial adapters and the initial score head.
        """
        super().__init__(config, groups)
        self.groups = groups
        layout = groups.layout
        self._model_config, initial_weights = open_config(
            config.model_name, head, trainable=trainable, seed=seed
        )
        family = family_of(self.spec, config.model_name)
        # On the meta device, for its names and shapes.
        self._causal_lm = meta_model(self._model_config, dtype=torch.float32)
        sharding = ModelSharding.of(self.spec, layout)
        stage, tp_rank, ep_rank = parallel_coords(layout, groups.rank)
        self._dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        self.chunks = build_model(
            family,
            sharding,
            groups,
            self._causal_lm,
            dtype=self._dtype,
            recompute=config.checkpointing if trainable else "none",
        )
        rank_params = family.rank_params(sharding, stage, tp_rank, ep_rank)
        self._param_map = rank_params.specs
        self._buffers = rank_params.buffers
        self.model = self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
        """All chunks of this rank as one module, which gives each parameter its name."""
        self.parameters = dict(self.model.named_parameters())
        self._check_param_map()
        self._frozen: frozenset[str] = frozenset()
        """Hugging Face names of the weights without gradients in a trainable engine."""
        self.trained = self.parameters
        self.trained_map = self._param_map
        """Parameters with gradients; of a frozen engine all its weights."""
        self.adapters: EngineAdapters | None = None
        self.model.requires_grad_(trainable)
        if trainable:
            self._choose_trained(family, sharding, stage)
            self._optimizer = ShardedAdamW(
                self.chunks,
                dict(self.model.named_parameters()),
                self._param_map | self.trained_map,
                groups,
                config.optimizer,
            )
        self.gatherer = FullWeightGatherer(
            partial(_param_map, family, config.adapter if trainable else None),
            sharding,
            layout,
            groups.rank,
            groups.device,
        )
        self._check_names()
        # The schedules start and stop these timers around each microbatch's forward and backward.
        self.chunks[0].config.timers = ScheduleTimers(self.clock)
        self._head = self._build_head(head, sharding, tp_rank)
        if self.adapters is not None and head == "scores":
            initial_weights |= stored_head(config.lora, self.spec.hidden_size)
        self._load_initial(initial_weights, seed)
        if trainable:
            self.start_ema()

    def _choose_trained(self, family: Family, sharding: ModelSharding, stage: int) -> None:
        """Exclude weights that `policy.freeze` matches from training; add adapters."""
        if self.config.freeze:
            self._freeze(family, sharding, stage)
        adapter = self.config.adapter
        if adapter is None:
            return
        check_lora(family, sharding, adapter)
        self.model.requires_grad_(False)
        _, tp_rank, _ = parallel_coords(self.groups.layout, self.groups.rank)
        self.adapters = EngineAdapters(
            self.model,
            self._param_map,
            adapter,
            sharding,
            tp_rank,
            sequence_parallel=self.groups.layout.sequence_parallel,
        )
        self._adapter_state = self.adapters.state
        self.chunks[0].is_embedding_frozen = True
        self.trained = self.adapters.parameters
        self.trained_map = self.adapters.param_map

    def _build_head(
        self, head: OutputHead, sharding: ModelSharding, tp_rank: int
    ) -> ScoreHead | VocabularyHead:
        """Return the head that computes a microbatch's outputs on the last stage."""
        if head == "vocabulary":
            chunk_size = self.config.chunk_size(self.device.type)
            return VocabularyHead(self.chunks[-1], sharding, tp_rank, self.groups, chunk_size)
        share = None
        if self.groups.layout.sequence_parallel:
            share = SequenceShare(self.groups.tp, tp_rank)
        return ScoreHead(self.chunks[-1], share)

    def _load_initial(self, initial_weights: Mapping[str, Tensor], seed: int) -> None:
        """Read the weights from the model's files and initialize the adapters.

        `initial_weights` [...] have the values of weights that the files need not have.
        """
        shapes = self.weight_shapes()
        with open_model(self.config.model_name, self._causal_lm) as files:
            files.check({name: shapes[name] for name in shapes if name not in initial_weights})
            read_weight = partial(_read_weight, initial_weights, files.read)
            fill_weights(self.parameters, self._param_map, read_weight, self._optimizer)
            for name, hf_name in self._buffers.items():
                # transformers does not require them either.
                if hf_name in files:
                    buffer = self.model.get_buffer(name)
                    files.read_into(buffer, hf_name, (0,) * buffer.ndim)
        if self.adapters is None:
            return
        # The values of a score head come from the model's files, or from `initial_weights`.
        shapes = {name: shape for name, shape in self.saved_shapes().items() if is_adapter(name)}
        matrices = {name: spec for name, spec in self.trained_map.items() if is_adapter(name)}
        with open_initial(self.config.lora, shapes, seed) as read:
            fill_weights(self.trained, matrices, read, self._optimizer)

    @property
    def model_config(self) -> Any:
        """See `Engine.model_config`."""
        return self._model_config

    def run(
        self,
        microbatches: Iterable[ModelInputs],
        step_fn: StepFunction[ResultT],
        distribution: TokenDistribution = PLAIN,
        *,
        backward: bool,
    ) -> list[ResultT]:
        """See `Engine.run`."""
        # A list, because the schedule needs the number of microbatches in advance.
        inputs = [microbatch.flattened() for microbatch in microbatches]
        if not inputs:
            return []
        if backward:
            # Gradients of further microbatches would not be reduced any more.
            self.optimizer.check_not_reduced()

        def loss_step(microbatch: ModelInputs, hidden: Tensor) -> tuple[Tensor, ResultT]:
            """Return loss (scalar) and result of `step_fn`; see `LossStep`."""
            outputs = self._head(hidden, microbatch, distribution)
            loss, result = step_fn(microbatch, outputs)
            if backward:
                assert loss is not None, "a step function gives a loss when run with backward"
            return hidden.new_zeros(()) if loss is None else loss, result

        chunks = self.chunks if self._optimizer is None else self._optimizer.chunks
        return run_schedule(chunks, inputs, loss_step, backward=backward)

    def local_weights(self) -> Iterable[Tensor]:
        """Return this rank's parameters in compute precision, each with the shape of its shard."""
        # With adapters the trained parameters are these, and at most a score head of the model.
        return (self.parameters | self.trained).values()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Engine.weight_shapes`."""
        return {
            name: tuple(parameter.shape) for name, parameter in self._causal_lm.named_parameters()
        }

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Engine.saved_shapes`."""
        shapes = self.weight_shapes()
        if self.adapters is None:
            return shapes
        layers = {}
        for name, shape in shapes.items():
            if adapter_names(name).a in self.gatherer.names:
                layers[name.removesuffix(".weight")] = shape
        head = {name: shape for name, shape in shapes.items() if name == SCORE_WEIGHT}
        return adapter_shapes(layers, self.config.lora) | head

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.full_weights`; on rank 0 each has its full shape."""
        parameters = self.parameters | self.trained
        specs = self._param_map | self.trained_map
        # q, k and v are parts of one parameter, and gathered one after the other.
        last: tuple[str, Tensor] | None = None

        def local(name: str) -> Tensor:
            """Return this rank's parameter without gradient, in the shape of its spec."""
            nonlocal last
            if last is None or last[0] != name:
                parameter = parameters[name].detach()
                if self.adapters is not None:
                    parameter = self.adapters.merge(name, parameter)
                last = name, parameter
            return last[1].view(specs[name].shape)

        shapes = self.weight_shapes() | self.saved_shapes()
        return self.gatherer.gather(names, shapes, self._dtype, local)

    def _trained_names(self) -> list[str]:
        """See `Engine`."""
        return [name for name in self.saved_shapes() if name not in self._frozen]

    def _blocks(self) -> Iterator[Block]:
        """See `Engine`."""
        shapes = self.saved_shapes()
        if self._optimizer is not None:
            yield from trained_blocks(self.trained_map, self._optimizer, shapes, self.ema)
        yield from frozen_blocks(self.parameters, self._frozen_map, self.groups, shapes)

    def _restore(self, reader: CheckpointReader) -> None:
        """See `Engine`."""
        read_weight = partial(read_kind, reader.read, WEIGHT)
        saved = self.trained_map | self._frozen_map
        fill_weights(self.parameters | self.trained, saved, read_weight, self._optimizer)
        if self._optimizer is None:
            return
        num_steps = reader.num_optimizer_steps if reader.has_moments else None
        self._optimizer.restore(num_steps, reader.read)
        if self.ema is None:
            return
        # Averages that the checkpoint does not have begin with the weights.
        kind = EMA if EMA in reader.states else WEIGHT
        for name, shard in self.ema.shards.items():
            values = self._optimizer.read_shard(name, partial(read_kind, reader.read, kind))
            assert values is not None, "this rank updates the shard"
            shard.copy_(values)

    def _gather_adapters(self) -> dict[str, Tensor]:
        """See `Engine._gather_adapters`."""
        shapes = self.saved_shapes()
        local = {name: parameter.detach() for name, parameter in self.trained.items()}
        return dict(self.gatherer.gather(list(shapes), shapes, torch.float32, local.__getitem__))

    def _freeze(self, family: Family, sharding: ModelSharding, stage: int) -> None:
        """Exclude the weights that `policy.freeze` matches from training."""
        self._frozen = frozen_names(self._causal_lm, self.config.freeze)
        frozen = family.frozen_parameters(self._frozen, sharding, stage, self._param_map)
        for name in frozen:
            self.parameters[name].requires_grad_(False)
        self.trained = {name: each for name, each in self.parameters.items() if name not in frozen}
        self.trained_map = {name: self._param_map[name] for name in self.trained}
        # Without recomputation and later stages, no gradient of the embedding's output is needed.
        is_gradient_needed = sharding.pp > 1 or self.config.checkpointing == "full"
        self.chunks[0].is_embedding_frozen = EMBEDDING in self._frozen and is_gradient_needed

    @property
    def _frozen_map(self) -> ParamMap:
        """Weights in checkpoints that no optimizer updates; none with adapters."""
        if self._optimizer is None:
            return self._param_map
        if self.adapters is not None:
            return {}
        return {name: each for name, each in self._param_map.items() if name not in self.trained}

    def _check_names(self) -> None:
        """Check that the parameter maps of all ranks together name every Hugging Face weight."""
        # A weight that the family forgets would keep its initial value in every export.
        mapped = {name for name in self.gatherer.names if not is_adapter(name)}
        unknown = sorted(mapped ^ set(self.weight_shapes()))
        assert not unknown, f"weights in the family's map or in transformers only: {unknown[:4]}"

    def _check_param_map(self) -> None:
        assert self.parameters.keys() == self._param_map.keys(), "the map has all parameters"
        for name, spec in self._param_map.items():
            # The spec of a single expert has a leading 1 that the parameter does not have.
            shapes = (spec.shape, spec.shape[1:]) if spec.is_expert else (spec.shape,)
            assert tuple(self.parameters[name].shape) in shapes, f"the map has the shape of {name}"

    def move_to_host(self) -> None:
        """See `Engine.move_to_host`; gradients are dropped."""
        if self._optimizer is not None:
            self._optimizer.free_gradients()
        super().move_to_host()

    def move_to_device(self) -> None:
        """See `Engine.move_to_device`; gradients are 0."""
        super().move_to_device()
        if self._optimizer is not None:
            self._optimizer.allocate_gradients()

    def frozen_weights(self) -> Iterator[Tensor]:
        """See `Engine`; [...] each."""
        for parameter in self.parameters.values():
            if not parameter.requires_grad:
                yield parameter.detach()

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`; flat shards [n] by Megatron-Core name."""
        for name, shard in self.optimizer.shards():
            yield name, shard.main.detach()

    def _publish_masters(self) -> None:
        """See `Engine`."""
        self.optimizer.publish_masters()


def _param_map(
    family: Family,
    adapter: AdapterConfig | None,
    sharding: ModelSharding,
    stage: int,
    tp_rank: int,
    ep_rank: int,
) -> ParamMap:
    """Return the specs of a rank's weights and adapters."""
    weights = family.param_map(sharding, stage, tp_rank, ep_rank)
    if adapter is None:
        return weights
    return weights | adapter_map(weights, adapter, sharding.spec, tp_rank)


def _read_weight(
    initial_weights: Mapping[str, Tensor], read: ReadBlock, name: str, offset: Shape, shape: Shape
) -> Tensor:
    """Return a block [*shape] of a weight, of `initial_weights` [...] or else of the files."""
    if name not in initial_weights:
        return read(name, offset, shape)
    return initial_weights[name][block_index(offset, shape)]
