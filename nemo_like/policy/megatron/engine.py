"""Megatron-Core's tensor, pipeline and context parallelism: the engine of `MegatronPolicyWorker`.
It runs microbatches through Megatron-Core's schedules; it knows no loss and no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.paths import is_local
from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.files import FileRecord
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.checkpoint import sharded as sharded_checkpoint
from nemo_like.policy.checkpoint.hf_export import write_hf
from nemo_like.policy.checkpoint.sharded import MOMENTS, WEIGHT, Block
from nemo_like.policy.collectives import gather_objects, gather_rows
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.engine import ResultT, StepFunction, Sync
from nemo_like.policy.megatron import groups as megatron_groups
from nemo_like.policy.megatron.model import build_model
from nemo_like.policy.megatron.optimizer import ShardedAdamW
from nemo_like.policy.megatron.param_map import geometry_of, place_of
from nemo_like.policy.megatron.parameters import Outbox, Read, assemble, open_model
from nemo_like.policy.megatron.support import check_model_spec
from nemo_like.policy.megatron.timers import ScheduleTimers
from nemo_like.policy.megatron.vocab_head import VocabularyHead
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.policy.optim import LARGEST, all_within, clip_factor
from nemo_like.sampling_filter import SamplingFilter


class MegatronEngine:
    """See `Engine`. The process groups of `megatron_groups.join` are shared by all engines of the
    process.

    With `trainable=False` there are no gradients and no optimizer: the frozen reference.
    """

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        topology: Topology,
        rank: int,
        *,
        sequence_parallel: bool = False,
        trainable: bool,
    ) -> None:
        self.config = config
        self.device = device
        self.topology = topology
        self.rank = rank
        self.num_optimizer_steps = 0
        self._groups = megatron_groups.joined()
        self._causal_lm = _empty(config.model_name)
        spec = ModelSpec.from_config(self.model_config, config.model_name)
        geometry = geometry_of(spec, pp=topology.pp, tp=topology.tp, ep=self._groups.ep.size())
        stage, tp_rank, ep_rank = place_of(topology, geometry.ep, rank)
        self._dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        self._model = build_model(
            spec,
            geometry,
            _rotary_embedding(self._causal_lm),
            padding_id=getattr(self._causal_lm.get_input_embeddings(), "padding_idx", None),
            dtype=self._dtype,
            device=device,
            sequence_parallel=sequence_parallel,
            recompute=config.activation_checkpointing and trainable,
        ).requires_grad_(trainable)
        self._table = geometry.table(stage, tp_rank, ep_rank)
        self._parameters = dict(self._model.named_parameters())
        assert {name: tuple(parameter.shape) for name, parameter in self._parameters.items()} == {
            name: entry.shape[entry.is_expert :] for name, entry in self._table.items()
        }, "the table and the model have the same parameters"
        self._optimizer = (
            ShardedAdamW(self._model, self._table, config.optimizer) if trainable else None
        )
        self._outbox = Outbox(geometry, topology, rank, device)
        self.clock = ComputeClock(device)
        # The schedules start and stop these timers around the forward and the backward of each
        # microbatch.
        self._model.config.timers = ScheduleTimers(self.clock)
        self._head = VocabularyHead(self._model, geometry, tp_rank, config.logprob_chunk_size)
        with open_model(config.model_name) as files:
            files.check(self.weight_shapes())
            self._fill(files.read)

    @property
    def sync(self) -> Sync:
        return "microbatch" if self.topology.pp > 1 or self._groups.ep.size() > 1 else "step"

    @property
    def model_config(self) -> Any:
        return self._causal_lm.config

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
        inputs = [microbatch.flattened() for microbatch in microbatches]
        if not inputs:
            return []
        if backward:
            self._trained.check_may_accumulate()

        def forward(stream: Iterator[ModelInputs], module: nn.Module) -> tuple[Tensor, Any]:
            microbatch = next(stream)
            return module(microbatch), partial(finish, microbatch)

        def finish(microbatch: ModelInputs, hidden: Tensor) -> tuple[Tensor, Tensor, ResultT]:
            """Three values: a loss that comes with its number of tokens is differentiated as it
            is.
            """
            outputs = self._head(hidden, microbatch, temperature, with_entropy, token_filter)
            loss, result = step_fn(microbatch, outputs)
            if backward:
                assert loss is not None, "a step function gives a loss when run with backward"
            return (
                hidden.new_zeros(()) if loss is None else loss,
                torch.zeros((), dtype=torch.int),
                result,
            )

        with torch.set_grad_enabled(backward):
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(inputs),
                model=[self._model if self._optimizer is None else self._optimizer.ddp],
                num_microbatches=len(inputs),
                seq_length=1,  # each microbatch's own shape is sent ahead of it
                micro_batch_size=1,
                forward_only=not backward,
            )

    def optimizer_step(self, lr: float, *, is_loss_finite: bool = True) -> float:
        optimizer = self._trained
        norm = optimizer.norm(is_loss_finite)
        factor = clip_factor(norm, self.config.max_grad_norm)
        if factor is None:
            optimizer.clear()
            return norm
        if factor < 1:
            optimizer.scale(factor)
        optimizer.step(lr)
        self.num_optimizer_steps += 1
        return norm

    def is_finite(self, *, with_moments: bool = False) -> bool:
        is_finite = all_within(self._parameters.values(), LARGEST)
        if with_moments:
            is_finite &= all_within(self._trained.moments())
        num_not_finite = torch.tensor(0.0 if is_finite else 1.0, device=self.device)
        dist.all_reduce(num_not_finite)
        return num_not_finite.item() == 0

    def sum_over_dp(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._groups.dp)
        return total.tolist()

    def gather_over_dp_cp(self, value: Any) -> list[Any]:
        return gather_objects(self._groups.dp_cp, value)

    def gather_over_world(self, value: Any) -> list[Any]:
        world = dist.group.WORLD
        assert world is not None, "an engine is in a process group"
        return gather_objects(world, value)

    def gather_over_cp(self, values: Tensor) -> Tensor:
        return gather_rows(self._groups.cp, values.detach())

    def barrier(self) -> None:
        """Every rank has come this far. Through the ranks' own collectives, which carry the
        collective timeout.
        """
        dist.all_reduce(torch.zeros((), device=self.device))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(parameter.shape) for name, parameter in self._causal_lm.named_parameters()
        }

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        def local(name: str) -> Tensor:
            return self._parameters[name].detach().view(self._table[name].shape)

        return self._outbox.whole(names, self.weight_shapes(), self._dtype, local)

    def full_gradients(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named weights' gradients, float32 and one at a time: whole on rank 0, elsewhere an
        empty tensor.

        They are added up over the ranks by this, so what follows is the optimizer step.
        """
        return self._outbox.whole(
            names, self.weight_shapes(), torch.float32, self._trained.gradient
        )

    def save(self, directory: Path) -> dict[str, FileRecord]:
        return sharded_checkpoint.save(
            directory,
            self._blocks(),
            rank=self.rank,
            num_optimizer_steps=self.num_optimizer_steps,
            barrier=self.barrier,
            has_moments=self._trained.has_moments,
            shapes=self.weight_shapes(),
        )

    def load(self, directory: Path) -> None:
        optimizer = self._trained
        with sharded_checkpoint.open_checkpoint(directory) as reader:
            reader.check_model(self.weight_shapes())
            self._fill(lambda name, offset, shape: reader.read(f"{WEIGHT}/{name}", offset, shape))
            optimizer.restore(
                reader.num_optimizer_steps if reader.has_moments else None, reader.read
            )
            self.num_optimizer_steps = reader.num_optimizer_steps

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
    def _trained(self) -> ShardedAdamW:
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer

    @torch.no_grad()
    def _fill(self, read: Read) -> None:
        """Weights, and the optimizer's float32 pieces of them, from the blocks of the full
        tensors.
        """
        for name, parameter in self._parameters.items():
            whole = assemble(self._table[name], read)
            parameter.copy_(whole.view(parameter.shape))
            if self._optimizer is not None:
                self._optimizer.set_weight(name, whole)

    def _blocks(self) -> Iterator[Block]:
        """This rank's share of weights and moments; the dp and cp ranks put a parameter together
        and one of them has it.
        """
        optimizer = self._trained
        shapes = self.weight_shapes()
        kinds = (WEIGHT, *MOMENTS) if optimizer.has_moments else (WEIGHT,)
        for index, (name, entry) in enumerate(self._table.items()):
            if not entry.is_owner:
                continue
            for kind in kinds:
                whole = optimizer.collect(name, kind, writer=index)
                if whole is None:
                    continue
                for piece in entry.pieces:
                    yield Block(
                        f"{kind}/{piece.name}", shapes[piece.name], piece.offset, whole[piece.local]
                    )

    def _move(self, device: torch.device) -> None:
        if self._optimizer is None:
            self._model.to(device)
        else:
            self._optimizer.move(device)


def _empty(model_name: str) -> PreTrainedModel:
    """The Hugging Face model without memory: names, shapes and configuration. Raises ConfigError
    for one of another kind.
    """
    model_config = AutoConfig.from_pretrained(
        model_name, trust_remote_code=False, local_files_only=is_local(model_name)
    )
    check_model_spec(ModelSpec.from_config(model_config, model_name), model_name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.tie_weights()
    return model


def _rotary_embedding(causal_lm: Any) -> nn.Module:
    """The Hugging Face model's own, with real numbers: cosine and sine of any positions,
    frequencies scaled as it says.
    """
    return type(causal_lm.base_model.rotary_emb)(config=causal_lm.config)
