"""Offloading frees the memory of tensors and restores their bits, in buffers that are reused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.config.schema import OptimizerConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.device import HostMemory, piece_sizes
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from nemo_like.policy.worker import PolicyWorker
from tests.policy.tiny import random_batch, run_ranks


def buffer_pointers(memory: HostMemory) -> list[int]:
    return [buffer.data_ptr() for each in memory.offloaded for buffer in each.buffers]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), num_cycles=st.integers(1, 3))
def test_cycles_restore_the_bits_in_the_same_buffers(sizes, num_cycles):
    tensors = [torch.randn(size) for size in sizes]
    tensors.append(torch.arange(7, dtype=torch.bfloat16))
    # A view shares its storage, which is copied once and keeps its layout.
    views = [tensors[-1][2:5], tensors[-1].view(7, 1)]
    memory = HostMemory(pinned=False)
    num_bytes = storage_bytes(tensors)
    pointers = None
    for _ in range(num_cycles):
        for tensor in tensors:
            tensor.mul_(2)
        expected = [tensor.clone() for tensor in [*tensors, *views]]
        memory.offload([*tensors, *views])
        assert memory.is_offloaded
        assert storage_bytes(tensors) == 0
        assert memory.num_bytes == num_bytes
        pointers = pointers or buffer_pointers(memory)
        assert buffer_pointers(memory) == pointers
        memory.onload()
        assert not memory.is_offloaded
        for tensor, wanted in zip([*tensors, *views], expected, strict=True):
            assert torch.equal(tensor, wanted)
    assert views[0].data_ptr() == tensors[-1][2:5].data_ptr()
    memory.onload()  # nothing is offloaded


@given(num_bytes=st.integers(0, 2**40))
def test_pieces_are_powers_of_two(num_bytes):
    sizes = piece_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    assert all(size.bit_count() == 1 for size in sizes[:-1])
    # What the allocator adds to the last one.
    assert not sizes or sizes[-1].bit_count() == 1 or sizes[-1] < 2**20


def test_a_storage_in_several_buffers_is_restored():
    weight = torch.randn(3 * 2**18 + 5)
    expected = weight.clone()
    memory = HostMemory(pinned=False)
    for _ in range(2):
        memory.offload([weight])
        assert [len(each.buffers) for each in memory.offloaded] == [3]
        assert memory.num_bytes == 4 * len(expected)
        memory.onload()
        assert torch.equal(weight, expected)
    assert memory.num_bytes == 4 * len(expected)


def test_more_tensors_later_get_buffers_of_their_own():
    memory = HostMemory(pinned=False)
    weight = torch.randn(8)
    memory.offload([weight])
    first = buffer_pointers(memory)
    memory.onload()
    moment = torch.randn(8)
    memory.offload([weight, moment])
    assert buffer_pointers(memory)[0] == first[0]
    assert len(set(buffer_pointers(memory))) == 2
    memory.onload()


def test_constant_tensors_are_copied_once():
    memory = HostMemory(pinned=False, constant=True)
    weight = torch.randn(8)
    expected = weight.clone()
    memory.offload([weight])
    memory.onload()
    ((buffer,),) = (each.buffers for each in memory.copied)
    pointer = buffer.data_ptr()
    weight.zero_()  # a second copy would have these values
    memory.offload([weight])
    assert buffer_pointers(memory) == [pointer]
    memory.onload()
    assert torch.equal(weight, expected)


def test_a_second_offload_is_refused():
    memory = HostMemory(pinned=False)
    weight = torch.randn(8)
    memory.offload([weight])
    with pytest.raises(RuntimeError, match="offloaded already"):
        memory.offload([weight])


def train_with_and_without_offload(
    worker_context: WorkerContext, engine: str, config: PolicyConfig, offloads: bool
) -> tuple[list[float], list[Tensor], list[int]]:
    """(losses of three steps, weights and moments, buffers of each offload)."""
    worker_class = MegatronPolicyWorker if engine == "megatron" else DTensorPolicyWorker
    worker: PolicyWorker = worker_class(
        worker_context, config=config, start=PolicyStart(needs_reference=True)
    )
    engines: list[Any] = worker.engines
    losses = []
    pointers = []
    batch = random_batch([7, 12, 3, 9], seed=0)
    spec = plan_spec(
        config,
        purpose="train",
        parallel_layout=ParallelLayout(dp=worker_context.world_size),
        model=load_spec(config.model_name),
    )
    shard = batch.shard(plan_batch(batch["length"], spec))[worker_context.rank]
    for _ in range(3):
        (metrics,) = worker.train(shard, None, NllLoss())
        losses.append(metrics["policy/loss"].value)
        worker.compute_logprobs(shard)
        if offloads:
            for each in engines:
                # `offload` does nothing on the CPU.
                each.move_to_host()
                assert storage_bytes(each.resident_tensors()) == 0
                memories = (each.constant_memory, each.host_memory)
                buffers = [pointer for memory in memories for pointer in buffer_pointers(memory)]
                assert buffers
                pointers.append(tuple(buffers))
            with pytest.raises(RuntimeError, match="is offloaded; call onload first"):
                engines[0].is_finite()
            for each in engines:
                each.move_to_device()
    state = [tensor.clone() for each in engines for tensor in each.resident_tensors()]
    process_groups.destroy()
    return losses, state, pointers


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["dtensor", "megatron"])
def test_training_with_offloading_is_bit_equal(rank_pool, model_dir, tmp_path, engine, precision):
    config = PolicyConfig(
        model_name=model_dir("qwen2_tied"),
        train_global_batch_size=4,
        precision=precision,
        sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=32),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    results = {}
    for offloads in (False, True):
        meeting = tmp_path / f"meeting {offloads}"
        arguments = (engine, dataclasses.replace(config), offloads)
        results[offloads] = run_ranks(
            rank_pool, train_with_and_without_offload, 2, meeting, *arguments
        )
    for (losses, state, pointers), (expected, wanted, _) in zip(
        results[True], results[False], strict=True
    ):
        assert losses == expected
        assert len(state) == len(wanted)
        assert all(torch.equal(tensor, other) for tensor, other in zip(state, wanted, strict=True))
        # Policy and reference take turns; each has the same buffers every time.
        assert pointers[0::2] == [pointers[0]] * 3
        assert pointers[1::2] == [pointers[1]] * 3
