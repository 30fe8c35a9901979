from __future__ import annotations

import os
import pickle

import pytest
import torch

from nemo_like.weight_sync.channel import (
    BucketLayout,
    BucketMessage,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    WeightSyncError,
    bucket_limit,
)
from nemo_like.weight_sync.cuda_ipc import CudaIpcAddress
from nemo_like.weight_sync.transfer import WeightReceiver, select_transport


def endpoint(pid: int, machine: str = "a", gpu: str = "") -> Endpoint:
    return Endpoint(pid=pid, machine=machine, gpu=gpu)


@pytest.mark.parametrize(
    ("policy", "receivers", "transport"),
    [
        ([endpoint(1)], [endpoint(1)], "in_process"),
        ([endpoint(1, gpu="g0")], [endpoint(1, gpu="g0")], "in_process"),
        ([endpoint(1), endpoint(2)], [endpoint(3), endpoint(4)], "shared_memory"),
        # Only rank 0 sends, so another machine of the policy does not matter.
        ([endpoint(1), endpoint(1, "b")], [endpoint(3)], "shared_memory"),
        ([endpoint(1)], [endpoint(3), endpoint(3, "b")], "gloo"),
        # An equal process id on another machine is another process.
        ([endpoint(1)], [endpoint(1, "b")], "gloo"),
        ([endpoint(1, gpu="g0")], [endpoint(2, gpu="g0")], "cuda_ipc"),
        (
            [endpoint(1, gpu="g0"), endpoint(2, "b", gpu="h0")],
            [endpoint(3, gpu="g0"), endpoint(4, "b", gpu="h0")],
            "cuda_ipc",
        ),
        ([endpoint(1, gpu="g0")], [endpoint(2, gpu="g1"), endpoint(3, "b", gpu="h0")], "nccl"),
        # Through host memory where one side is on the CPU.
        ([endpoint(1, gpu="g0")], [endpoint(2)], "shared_memory"),
        ([endpoint(1)], [endpoint(2, "b", gpu="h0")], "gloo"),
    ],
)
def test_the_transport_follows_from_processes_machines_and_gpus(
    policy: list[Endpoint], receivers: list[Endpoint], transport: str
) -> None:
    assert select_transport(policy, receivers) == transport


def test_receivers_of_which_some_share_a_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 of 2 .* cluster\.generation_workers to 0"):
        select_transport(
            [endpoint(1, gpu="g0"), endpoint(2, gpu="g1")],
            [endpoint(3, gpu="g1"), endpoint(4, gpu="g2")],
        )


def test_endpoints_of_processes_on_one_machine_differ_by_pid() -> None:
    own = Endpoint.of_process(torch.device("cpu"))
    assert (own.pid, own.gpu) == (os.getpid(), "")
    assert own == Endpoint.of_process(torch.device("cpu"))
    assert pickle.loads(pickle.dumps(own)) == own


def test_each_receiver_calls_the_policy_rank_on_its_gpu() -> None:
    address = CudaIpcAddress({"g0": "first", "g1": "second"})
    assert address.on_gpu("g1") == "second"
    with pytest.raises(WeightSyncError, match=r"no policy rank uses GPU g7 .* g0, g1"):
        address.on_gpu("g7")


def test_results_of_several_processes_of_one_rank_are_merged() -> None:
    merged = LoadedBucket.merge(
        [
            LoadedBucket(transfer_s=2.0, load_s=1.0, buffer_bytes=5),
            LoadedBucket(transfer_s=1.0, load_s=3.0, buffer_bytes=6, broken="gone"),
        ]
    )
    assert merged == LoadedBucket(transfer_s=1.0, load_s=3.0, buffer_bytes=11, broken="gone")


def test_a_bucket_has_a_share_of_the_memory_that_is_free_in_every_process() -> None:
    ample = endpoint(1)
    scarce = Endpoint(pid=2, machine="a", free_bytes=5 * 2**30)
    assert bucket_limit([ample], 2**30) == 2**30
    assert bucket_limit([ample, scarce], 2**30) == int(0.02 * 5 * 2**30)
    assert bucket_limit([Endpoint(pid=2, machine="a", free_bytes=2**20)], 2**30) == 8 * 2**20
    assert bucket_limit([ample, scarce], 2000) == 2000
    assert 0 < Endpoint.of_process(torch.device("cpu")).free_bytes < 2**50


def test_a_sender_that_ended_is_reported() -> None:
    layout = BucketLayout.of({"w": (2,)}, torch.float32)
    spec = ChannelSpec(
        transport="shared_memory",
        layouts=(layout,),
        slot_bytes=8,
        timeout_s=1.0,
        address="nemo_like_weights_0",
    )
    receiver = WeightReceiver(torch.device("cpu"))
    assert "has ended, or has left the channel" in receiver.open(spec, 0)
    assert "was not opened" in receiver.load(BucketMessage(0), list).broken
