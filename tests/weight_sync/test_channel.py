from __future__ import annotations

import os
import pickle

import pytest
import torch

from nemo_like.weight_sync.channel import (
    BucketLayout,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    WeightSyncError,
)
from nemo_like.weight_sync.cuda_ipc import CudaIpcAddress, handles_of_gpu
from nemo_like.weight_sync.shared_memory import SharedMemoryAddress
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


def test_each_receiver_opens_the_handles_of_its_gpu() -> None:
    address = CudaIpcAddress({"g0": ((0, 1), (0, 2)), "g1": ((1, 1), (1, 2))})
    assert handles_of_gpu(address, "g1") == ((1, 1), (1, 2))
    with pytest.raises(WeightSyncError, match=r"no policy rank uses GPU g7 .* g0, g1"):
        handles_of_gpu(address, "g7")


def test_results_of_several_processes_of_one_rank_are_merged() -> None:
    merged = LoadedBucket.merge(
        [
            LoadedBucket(transfer_s=2.0, load_s=1.0),
            LoadedBucket(transfer_s=1.0, load_s=3.0, broken="gone"),
        ]
    )
    assert merged == LoadedBucket(transfer_s=1.0, load_s=3.0, broken="gone")


def test_a_sender_that_ended_is_reported() -> None:
    layout = BucketLayout.of({"w": (2,)}, torch.float32)
    # Descriptor 0 is no slot, and 9999 does not exist.
    for pid, descriptor in ((os.getpid(), 0), (os.getpid(), 9999)):
        spec = ChannelSpec(
            transport="shared_memory",
            layouts=(layout,),
            slot_bytes=8,
            timeout_s=1.0,
            address=SharedMemoryAddress(pid, (descriptor,), "nemo_like_weights_0"),
        )
        receiver = WeightReceiver(torch.device("cpu"))
        assert "has ended or its slots have" in receiver.open(spec, 0)
