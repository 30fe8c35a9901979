"""Communication of the interleaved pipeline schedule.

With two stages both neighbors of a stage are the same rank. Megatron-Core sends tensors in an order
that is right for this, but not the shapes that it sends ahead of them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nemo_like.policy.megatron.layers import untyped

_NUM_DIMS = 3


class _Communicator(P2PCommunicator):
    """Sends shapes in the order of tensors."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._device = device

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the shapes of the tensors, [T, 1, D], from the previous and the next stage."""
        device = self._device
        received = []
        for is_received in (recv_prev, recv_next):
            shape = torch.zeros(_NUM_DIMS, dtype=torch.int64, device=device)
            received.append(shape if is_received else None)
        sent = []
        for tensor in (tensor_send_prev, tensor_send_next):
            sent.append(None if tensor is None else torch.tensor(tensor.shape, device=device))
        requests = _p2p_ops(
            tensor_send_prev=sent[0],
            tensor_recv_prev=received[0],
            tensor_send_next=sent[1],
            tensor_recv_next=received[1],
            group=self.pp_group,
            prev_pipeline_rank=untyped(self.prev_rank),
            next_pipeline_rank=untyped(self.next_rank),
        )
        for request in requests.values():
            untyped(request).wait()
        first, second = ([0] * _NUM_DIMS if each is None else each.tolist() for each in received)
        return first, second


def schedule_groups(config: TransformerConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments of the schedule for its communication; all other groups are usual."""
    state: Any = parallel_state
    groups: Any = ProcessGroupCollection()
    groups.tp = state.get_tensor_model_parallel_group()
    groups.cp = state.get_context_parallel_group()
    groups.pp = state.get_pipeline_model_parallel_group()
    groups.embd = state.get_embedding_group(check_initialized=False)
    groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    return {"p2p_communicator": _Communicator(config, device), "pg_collection": groups}
