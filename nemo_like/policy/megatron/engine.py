"""Tensor, pipeline, context and expert parallelism by Megatron-Core: `MegatronPolicyWorker`'s
engine.

It runs microbatches through Megatron-Core's schedules; it knows no loss and no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_like.config.paths import is_local
from nemo_like.config.schema import PolicyConfig
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.checkpoint import sharded as sharded_checkpoint
from nemo_like.policy.checkpoint.hf_reader import open_model
from nemo_like.policy.checkpoint.sharded import PendingSave
from nemo_like.policy.engine import ResultT, StepFunction
from nemo_like.policy.engine_base import EngineBase
from nemo_like.policy.megatron import checkpoint as megatron_checkpoint
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.megatron.model import build_model
from nemo_like.policy.megatron.optimizer import ShardedAdamW
from nemo_like.policy.megatron.param_map import ModelSharding, parallel_coords
from nemo_like.policy.megatron.parameters import FullWeightGatherer
from nemo_like.policy.megatron.timers import ScheduleTimers
from nemo_like.policy.megatron.vocab_head import VocabularyHead
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.sampling_filter import SamplingFilter


class MegatronEngine(EngineBase[ShardedAdamW]):
    """Implements `Engine`. With `trainable=False` it has no optimizer: the frozen reference."""

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        parallel_layout: ParallelLayout,
        rank: int,
        *,
        groups: Groups,
        trainable: bool,
    ) -> None:
        """Load the model; every rank calls. All engines of the process share `groups`."""
        super().__init__(config, device, parallel_layout, rank, groups, trainable=trainable)
        self.groups = groups
        self._model_config = AutoConfig.from_pretrained(
            config.model_name,
            trust_remote_code=False,
            local_files_only=is_local(config.model_name),
        )
        family = family_of(self.spec, config.model_name)
        self._causal_lm = _meta_model(self._model_config)
        sharding = ModelSharding(
            self.spec,
            pp=parallel_layout.pp,
            tp=parallel_layout.tp,
            ep=parallel_layout.ep,
        )
        stage, tp_rank, ep_rank = parallel_coords(parallel_layout, rank)
        self._dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        self._model = build_model(
            family,
            sharding,
            _rotary_embedding(self._causal_lm),
            padding_id=getattr(self._causal_lm.get_input_embeddings(), "padding_idx", None),
            dtype=self._dtype,
            device=device,
            sequence_parallel=parallel_layout.sequence_parallel,
            recompute=config.activation_checkpointing if trainable else "none",
        )
        self._model.requires_grad_(trainable)
        self._param_map = family.param_map(sharding, stage, tp_rank, ep_rank)
        self._parameters = dict(self._model.named_parameters())
        self._check_param_map()
        if trainable:
            self._optimizer = ShardedAdamW(self._model, self._param_map, groups, config.optimizer)
        self._gatherer = FullWeightGatherer(family, sharding, parallel_layout, rank, device)
        self._check_names()
        # The schedules start and stop these timers around each microbatch's forward and backward.
        self._model.config.timers = ScheduleTimers(self.clock)
        self._head = VocabularyHead(
            self._model,
            sharding,
            tp_rank,
            groups,
            config.chunk_size(device.type),
        )
        with open_model(config.model_name) as files:
            files.check(self.weight_shapes())
            megatron_checkpoint.fill_weights(
                self._parameters,
                self._param_map,
                files.read,
                self._optimizer,
            )

    @property
    def model_config(self) -> Any:
        """See `Engine.model_config`."""
        return self._model_config

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
        # A list, because the schedule needs the number of microbatches in advance.
        inputs = [microbatch.flattened() for microbatch in microbatches]
        if not inputs:
            return []
        if backward:
            # Gradients of further microbatches would not be reduced any more.
            self.optimizer.check_not_reduced()

        def forward_step(stream: Iterator[ModelInputs], module: nn.Module) -> tuple[Tensor, Any]:
            """Return this stage's output, [T, 1, D], and the function that computes its loss.

            With sequence parallelism the output is [T / tp, 1, D].
            """
            microbatch = next(stream)
            return module(microbatch), partial(loss_step, microbatch)

        def loss_step(microbatch: ModelInputs, hidden: Tensor) -> tuple[Tensor, Tensor, ResultT]:
            """Return loss (scalar), token count (int scalar, not used) and result of `step_fn`.

            `hidden` is [T, 1, D], with sequence parallelism [T / tp, 1, D].
            """
            outputs = self._head(hidden, microbatch, temperature, with_entropy, token_filter)
            loss, result = step_fn(microbatch, outputs)
            if backward:
                assert loss is not None, "a step function gives a loss when run with backward"
            if loss is None:
                loss = hidden.new_zeros(())
            # Given three values, the schedule differentiates the loss as it is. Given two, it
            # would divide the loss by the number of microbatches.
            num_tokens = torch.zeros((), dtype=torch.int)
            return loss, num_tokens, result

        model = self._model if self._optimizer is None else self._optimizer.ddp
        with torch.set_grad_enabled(backward):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(inputs),
                model=[model],
                num_microbatches=len(inputs),
                seq_length=1,  # not used: each microbatch's shape is sent ahead of it
                micro_batch_size=1,
                forward_only=not backward,
            )

    def local_weights(self) -> Iterable[Tensor]:
        """Return this rank's parameters in compute precision, each with the shape of its shard."""
        return self._parameters.values()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Engine.weight_shapes`."""
        return {
            name: tuple(parameter.shape) for name, parameter in self._causal_lm.named_parameters()
        }

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.full_weights`; on rank 0 each has the shape of `weight_shapes`."""

        def local(name: str) -> Tensor:
            """Return this rank's parameter without gradient, in the shape of its spec."""
            return self._parameters[name].detach().view(self._param_map[name].shape)

        return self._gatherer.gather(
            names,
            self.weight_shapes(),
            self._dtype,
            local,
        )

    def save(self, directory: Path, *, in_background: bool) -> PendingSave:
        """See `Engine.save`."""
        shapes = self.weight_shapes()
        if self._optimizer is None:
            blocks = megatron_checkpoint.frozen_blocks(
                self._parameters, self._param_map, self.groups, shapes
            )
        else:
            blocks = megatron_checkpoint.trained_blocks(self._param_map, self._optimizer, shapes)
        return sharded_checkpoint.save(
            directory,
            blocks,
            has_moments=self._optimizer is not None and self._optimizer.has_moments,
            shapes=shapes,
            rank=self.rank,
            num_optimizer_steps=self.num_optimizer_steps,
            barrier=self.barrier,
            buffers=self.save_buffers,
            in_background=in_background,
        )

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        self.num_optimizer_steps = megatron_checkpoint.load(
            directory,
            self._parameters,
            self._param_map,
            self._optimizer,
            self.weight_shapes(),
        )
        self._host_memory.discard_copies()

    def _check_names(self) -> None:
        """Check that the parameter maps of all ranks together name every Hugging Face weight."""
        # A weight that the family forgets would keep its initial value in every export.
        mapped = self._gatherer.names
        unknown = sorted(mapped ^ set(self.weight_shapes()))
        assert not unknown, f"weights in the family's map or in transformers only: {unknown[:4]}"

    def _check_param_map(self) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        # The spec of an expert has a leading 1 that the parameter does not have.
        mapped = {name: spec.shape[spec.is_expert :] for name, spec in self._param_map.items()}
        assert shapes == mapped, "the parameter map and the model have the same parameters"

    def move_to_host(self) -> None:
        """See `EngineBase.move_to_host`; gradients are dropped."""
        if self._optimizer is not None:
            self._optimizer.free_gradients()
        super().move_to_host()

    def move_to_device(self) -> None:
        """See `EngineBase.move_to_device`; gradients are 0."""
        super().move_to_device()
        if self._optimizer is not None:
            self._optimizer.allocate_gradients()

    def _resident_tensors(self) -> Iterator[Tensor]:
        """See `EngineBase`; weights [...], and flat master weights and moments [n] each."""
        for parameter in self._parameters.values():
            yield parameter.detach()
        if self._optimizer is not None:
            # In float32 the masters are views of the weights, which are copied once.
            for _, shard in self._optimizer.shards():
                yield shard.main.detach()
            yield from self._optimizer.moments()


def _meta_model(model_config: PretrainedConfig) -> PreTrainedModel:
    """Build the Hugging Face model on the meta device, for its names and shapes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.tie_weights()
    return model


def _rotary_embedding(causal_lm: Any) -> nn.Module:
    """Build the Hugging Face model's rotary embedding with real buffers instead of meta ones."""
    return type(causal_lm.base_model.rotary_emb)(config=causal_lm.config)
