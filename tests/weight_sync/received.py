"""The weights that a policy worker sends, received in its own process through shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.weight_sync.channel import ChannelRequest, WeightSource
from nemo_like.weight_sync.transfer import WeightReceiver


def received_weights(
    worker: WeightSource, dtype: str, max_bytes: int
) -> tuple[int, dict[str, Tensor]]:
    """Number of buckets, and by name the tensors [*shape] that receivers get; every rank calls.

    Ranks other than 0 have no tensors.
    """
    plan = worker.plan_weights(dtype, max_bytes)
    request = ChannelRequest(
        transport="shared_memory", num_receivers=1, host="127.0.0.1", timeout_s=60.0
    )
    spec = worker.open_weight_channel(request)
    receiver = WeightReceiver(torch.device("cpu"))
    weights: dict[str, Tensor] = {}
    if spec is not None:
        assert receiver.open(spec, 0) == ""
    for index in range(plan.num_buckets):
        sent = worker.send_weight_bucket(index)
        assert sent.broken == ""
        if spec is not None:
            for name, tensor in receiver.receive(sent.message):
                weights[name] = tensor.clone()
    assert spec is None or tuple(weights) == plan.names
    receiver.close()
    worker.close_weight_channel()
    return plan.num_buckets, weights
