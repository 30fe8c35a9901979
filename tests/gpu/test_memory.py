"""Memory of a CUDA device: transfers from the host, offload and onload, the clock and the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.device_transfer import fetch_scalars, tensor_to_device, to_device
from nemo_like.distributed.local_group import LocalGroup
from nemo_like.losses import NllLoss
from nemo_like.policy.device import ComputeClock, peak_memory_bytes, reset_peak_memory
from nemo_like.policy.policy import Policy
from tests.gpu.steps import open_policy, some_rows


def test_transfers_keep_values_shapes_and_dtypes() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "ids": rng.integers(0, 100, (3, 7)),
        "mask": rng.random(13) > 0.5,
        "none": np.zeros((0, 4), dtype=np.float32),
        "values": rng.random((5, 2)).astype(np.float32),
        "bounds": np.arange(6, dtype=np.int32),
    }
    expected = {name: array.copy() for name, array in arrays.items()}
    tensors = to_device(arrays, "cuda")
    for array in arrays.values():
        # The arrays may be changed while the copy is still queued.
        array[...] = 0
    for name, array in expected.items():
        assert tensors[name].is_cuda
        assert tensors[name].data_ptr() % 16 == 0
        np.testing.assert_array_equal(tensors[name].cpu().numpy(), array)
        assert tensors[name].cpu().numpy().dtype == array.dtype
    moved = tensor_to_device(torch.arange(5), "cuda")
    assert moved.is_cuda and moved.tolist() == [0, 1, 2, 3, 4]
    torch.cuda._sleep(200_000_000)
    assert tensor_to_device(moved + 1, "cpu").tolist() == [1, 2, 3, 4, 5], "read before the copy"
    assert fetch_scalars([moved[1], moved[2].float() / 4]) == [1.0, 0.5]


def tensors_of(policy: Policy) -> Iterator[Tensor]:
    """Weights and moments of a policy in this process."""
    assert isinstance(policy.group, LocalGroup)
    worker: Any = policy.group.worker
    engine: Any = worker.engine
    yield from engine.local_weights()
    yield from engine.optimizer.moments()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.usefixtures("deterministic")
def test_an_offload_and_onload_change_nothing(
    model_dir: Callable[[str], str], precision: str
) -> None:
    losses: dict[bool, list[float]] = {}
    for is_offloaded in (False, True):
        policy = open_policy("dtensor", model_dir("llama_tied"), "cuda:0", precision)
        sharded = policy.shard(some_rows(), policy.plan(some_rows()["length"]))
        losses[is_offloaded] = []
        for _ in range(3):
            metrics = policy.train(sharded, None, NllLoss())[0]
            losses[is_offloaded].append(metrics["policy/loss"].value)
            if is_offloaded:
                policy.group.run_all_workers("offload")
                policy.group.run_all_workers("onload")
        policy.shutdown()
    assert losses[True] == losses[False], "weights or optimizer moments were lost on the way"


@pytest.mark.usefixtures("deterministic")
def test_weights_and_moments_leave_the_device(model_dir: Callable[[str], str]) -> None:
    policy = open_policy("dtensor", model_dir("llama"), "cuda:0", "float32")
    sharded = policy.shard(some_rows(), policy.plan(some_rows()["length"]))
    policy.train(sharded, None, NllLoss())
    before = policy.fetch_logprobs(policy.compute_logprobs(sharded))["prev_logprobs"]
    assert {tensor.device.type for tensor in tensors_of(policy)} == {"cuda"}
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors_of(policy)]
    assert min(sizes) > 0
    policy.group.run_all_workers("offload")
    # The tensors stay as they are; only the memory of their storages is freed.
    assert {tensor.untyped_storage().nbytes() for tensor in tensors_of(policy)} == {0}
    policy.group.run_all_workers("onload")
    assert [tensor.untyped_storage().nbytes() for tensor in tensors_of(policy)] == sizes
    after = policy.fetch_logprobs(policy.compute_logprobs(sharded))["prev_logprobs"]
    np.testing.assert_array_equal(after.values, before.values)
    policy.shutdown()


def test_the_clock_times_kernels_and_not_what_is_excluded() -> None:
    """`_sleep` occupies the stream as waiting for a collective does."""
    device = torch.device("cuda")
    clock = ComputeClock(device)

    def occupy() -> None:
        torch.cuda._sleep(200_000_000)

    with clock.running():
        occupy()
    busy_s = clock.pop_seconds()
    with clock.running():
        clock.excluded(occupy)()
    assert busy_s > 0.02
    assert clock.pop_seconds() < busy_s / 4


def test_peak_memory_is_that_since_the_reset() -> None:
    device = torch.device("cuda")
    large = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    with_large = peak_memory_bytes(device)
    del large
    reset_peak_memory(device)
    without_large = peak_memory_bytes(device)
    assert with_large is not None and without_large is not None
    assert with_large - without_large >= 64 << 20
