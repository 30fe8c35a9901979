"""A generator's weights move between device and host without copies that are not needed."""

from __future__ import annotations

import torch
from torch import nn

from nemo_like.generation.hf_worker import HostWeights


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
