"""The weights that a policy worker sends, received in its own process through shared memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from nemo_like.weight_sync.channel import BucketMessage, ChannelRequest, WeightSource
from nemo_like.weight_sync.transfer import NamedTensors, WeightReceiver


def received_weights(
    worker: WeightSource, dtype: str, max_bytes: int
) -> tuple[int, dict[str, Tensor]]:
    """Number of buckets, and by name the tensors [*shape] that receivers get; every rank calls.

    Ranks other than 0 have no buckets and no tensors.
    """
    request = ChannelRequest(
        transport="shared_memory",
        dtype=dtype,
        max_bytes=max_bytes,
        num_receivers=1,
        host="127.0.0.1",
        timeout_s=60.0,
    )
    spec = worker.open_weight_channel(request)
    receiver = WeightReceiver(torch.device("cpu"))
    weights: dict[str, Tensor] = {}

    def keep(named: NamedTensors) -> None:
        for name, tensor in named:
            weights[name] = tensor.clone()

    def receive() -> None:
        for index in range(num_buckets):
            message = BucketMessage(index, is_last=index + 1 == num_buckets)
            assert receiver.load(message, keep).broken == ""

    num_buckets = 0
    if spec is not None:
        num_buckets = len(spec.layouts)
        assert receiver.open(spec, 0) == ""
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        assert worker.send_weights(True).broken == ""
        received.result()
    assert spec is None or tuple(weights) == spec.names
    receiver.close()
    worker.close_weight_channel()
    return num_buckets, weights
