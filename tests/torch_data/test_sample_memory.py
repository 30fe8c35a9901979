"""Samples that DataLoader workers send."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding

from nemo_like.torch_data.samples import PipedTensor, from_pipe, to_pipe


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.tensor(3.5),
        torch.zeros(0, 4, dtype=torch.bool),
        torch.randn(5).bfloat16(),
        torch.randn(5, requires_grad=True),
        torch.arange(2**16),
    ],
)
def test_tensors_keep_their_values(tensor: torch.Tensor) -> None:
    sample: OrderedDict[str, Any] = OrderedDict(
        a=tensor, b=[tensor, (1, "x", tensor)], c=Pair(tensor, {"d": tensor})
    )
    sent = pickle.loads(pickle.dumps(to_pipe(sample)))
    # The data set may keep the containers that it returned.
    assert sample["a"] is sample["b"][0] is sample["c"].second["d"] is tensor
    received = from_pipe(sent)
    assert type(received) is OrderedDict
    tensors = [received["a"], received["b"][0], received["b"][1][2], received["c"].second["d"]]
    for found in tensors:
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.detach())
    with torch.no_grad():
        tensors[0].fill_(1)
    assert received["b"][1][:2] == (1, "x")


def test_only_the_elements_of_a_view_are_sent() -> None:
    view = torch.zeros(10**6)[10:20]
    piped = to_pipe(view)
    assert isinstance(piped, PipedTensor)
    assert len(pickle.dumps(piped)) < 1000


def test_shared_tensors_are_copied() -> None:
    shared = torch.arange(3).share_memory_()
    received = from_pipe([shared])
    assert not received[0].is_shared()
    assert torch.equal(received[0], shared)


def test_encodings_of_tokenizers_are_searched() -> None:
    encoding = BatchEncoding({"input_ids": torch.arange(3)})
    piped = to_pipe(encoding)
    assert isinstance(piped["input_ids"], PipedTensor)
    assert isinstance(encoding["input_ids"], torch.Tensor)
    received = from_pipe(piped)
    assert isinstance(received, BatchEncoding)
    assert received["input_ids"].tolist() == [0, 1, 2]
