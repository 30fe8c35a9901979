"""A generator's weights move between device and host without copies that are not needed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nemo_like.generation.adapters import HostWeights, place_in_blocks


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.weight


def open_weights() -> tuple[TiedModel, HostWeights]:
    """A model with a tied weight. The device is the CPU, so that moves can be seen in pointers."""
    model = TiedModel()
    return model, HostWeights(model, torch.device("cpu"), pinned=False)


def test_cycles_keep_the_bits_and_the_buffers() -> None:
    model, weights = open_weights()
    expected = model.weight.clone()
    pointers = set()
    for _ in range(3):
        weights.offload()
        assert weights.is_offloaded
        pointers.add(model.weight.data_ptr())
        weights.offload()  # a second time changes nothing
        weights.onload()
        assert not weights.is_offloaded
        assert model.weight.data_ptr() not in pointers
        assert torch.equal(model.weight, expected)
        assert model.tied.weight is model.weight
    assert len(pointers) == 1


def test_unchanged_weights_are_dropped_and_not_copied() -> None:
    model, weights = open_weights()
    expected = model.weight.clone()
    weights.offload()
    weights.onload()
    model.weight.zero_()  # without note_change: the host copy counts
    weights.offload()
    assert torch.equal(model.weight, expected)


def test_new_weights_on_the_device_are_copied_by_the_next_offload() -> None:
    model, weights = open_weights()
    weights.offload()
    weights.onload()
    weights.note_change()
    model.weight.fill_(3)
    weights.offload()
    weights.onload()
    assert torch.equal(model.weight, torch.full((5, 3), 3.0))


def test_new_weights_that_arrive_while_offloaded_reach_the_device() -> None:
    model, weights = open_weights()
    weights.offload()
    weights.note_change()
    model.weight.fill_(4)
    weights.onload()
    weights.offload()
    assert torch.equal(model.weight, torch.full((5, 3), 4.0))


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_buffers_do_not_overlap_and_blocks_are_powers_of_two(sizes: list[int]) -> None:
    sizes = sorted(sizes, reverse=True)
    block_sizes, places = place_in_blocks(sizes)
    for size in block_sizes:
        assert size & (size - 1) == 0
    ends = dict.fromkeys(range(len(block_sizes)), 0)
    for size, (block, start) in zip(sizes, places, strict=True):
        assert start >= ends[block]
        assert start % 512 == 0
        ends[block] = start + size
        assert ends[block] <= block_sizes[block]


def test_blocks_of_a_model_take_little_more_memory_than_its_weights() -> None:
    # Llama of 7B parameters in bfloat16.
    layer = [2 * 4096 * 4096] * 4 + [2 * 4096 * 11008] * 3 + [2 * 4096] * 2
    sizes = sorted(32 * layer + 2 * [2 * 32000 * 4096], reverse=True)
    block_sizes, _ = place_in_blocks(sizes)
    assert sum(block_sizes) <= 1.1 * sum(sizes)
