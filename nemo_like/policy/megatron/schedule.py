"""Megatron-Core's pipeline schedules: without a pipeline, 1F1B, and interleaved 1F1B.

In the interleaved schedule a rank has several model chunks, so that a pipeline fills and empties in
the time of a chunk per stage instead of a complete stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nemo_like.policy.engine import ResultT
from nemo_like.policy.inputs.model_inputs import ModelInputs

_GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
LossStep = Callable[[ModelInputs, Tensor], tuple[Tensor, ResultT]]
"""Maps a microbatch and the output of the last virtual stage, [T, 1, D], with sequence parallelism
[T / tp, 1, D], to its loss, a scalar, and its result."""


def run_schedule(
    chunks: Sequence[nn.Module],
    inputs: Sequence[ModelInputs],
    loss_step: LossStep[ResultT],
    *,
    backward: bool,
) -> list[ResultT]:
    """Run forward (and backward) of each microbatch through the chunks of all stages.

    Return the results in the order of `inputs`, on all pipeline stages but the last an empty list.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
    microbatches = list(inputs)
    if len(chunks) > 1:
        # The interleaved schedule takes groups of pp microbatches. Plans have such groups; the
        # isolation check has single microbatches.
        smallest = min(inputs, key=_num_positions)
        microbatches += [smallest] * (-len(inputs) % groups.pp.size())

    def forward_step(
        stream: Iterator[tuple[int, ModelInputs]], chunk: nn.Module
    ) -> tuple[Tensor, Any]:
        """Return a chunk's output, [T, 1, D], and the function that computes its loss.

        With sequence parallelism the output is [T / tp, 1, D].
        """
        index, microbatch = next(stream)
        return chunk(microbatch), partial(output_step, index, microbatch)

    def output_step(
        index: int, microbatch: ModelInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor, ResultT | None]:
        """Return loss (scalar), token count (int scalar, not used) and result of `loss_step`."""
        # Given three values, the schedule differentiates the loss as it is. Given two, it would
        # divide the loss by the number of microbatches.
        num_tokens = torch.zeros((), dtype=torch.int)
        if index >= len(inputs):
            # Fills a group, and has no gradient.
            return 0.0 * hidden.sum(), num_tokens, None
        loss, result = loss_step(microbatch, hidden)
        return loss, num_tokens, result

    config: Any = chunks[0].config
    num_shares = groups.tp.size() if config.sequence_parallel else 1
    sizes = [_num_positions(each) // num_shares for each in microbatches]
    with torch.set_grad_enabled(backward):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[enumerate(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=1,  # not used: each microbatch has its own
            micro_batch_size=1,
            forward_only=not backward,
            p2p_communicator=KnownShapes(groups.pp, config, sizes),
            pg_collection=groups,
        )
    return results[: len(inputs)]


def _num_positions(inputs: ModelInputs) -> int:
    """Return the positions of a microbatch on this context-parallel rank."""
    return inputs.input_ids.shape[-1]


class KnownShapes(P2PCommunicator):
    """Communication of activations and gradients, of microbatches of different sizes.

    Every stage has all microbatches and therefore knows what it receives. Megatron-Core would send
    each shape ahead of its tensor, which the interleaved schedule on two stages does not support.
    """

    def __init__(self, group: ProcessGroup, config: Any, sizes: Sequence[int]) -> None:
        """`sizes` are the positions of each microbatch on this rank."""
        super().__init__(group, config)
        num_chunks = config.virtual_pipeline_model_parallel_size or 1
        # All stages compute in this order, the backward with the chunks reversed. The last chunk of
        # the last stage, and in the backward the first chunk of the first one, sends nothing.
        order = get_schedule_table(len(sizes), num_chunks, group.size())
        inner = [microbatch for microbatch, chunk in order if chunk < num_chunks - 1]
        complete = [microbatch for microbatch, _ in order]
        is_first = group.rank() == 0
        is_last = group.rank() == group.size() - 1
        self._from_prev = iter([sizes[each] for each in (inner if is_first else complete)])
        self._from_next = iter([sizes[each] for each in (inner if is_last else complete)])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the shapes [T, 1, D] of the next tensors from both neighbours."""
        width = self.config.hidden_size  # type: ignore[attr-defined]
        from_prev = next(self._from_prev) if recv_prev else 0
        from_next = next(self._from_next) if recv_next else 0
        return [from_prev, 1, width], [from_next, 1, width]

    def _communicate(
        self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **kwargs: Any
    ) -> Any:
        """See the base class; tensors are [T, 1, D]."""
        # The schedule frees the memory of an output when the next forward begins. A send that is
        # not yet complete then keeps the memory by a tensor of its own.
        return super()._communicate(
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            **kwargs,
        )
