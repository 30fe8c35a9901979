from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.weight_sync.stream import Bucket, plan_buckets

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@st.composite
def tensors(draw: Any) -> Tensor:
    """Any type and shape, 0-dim and empty included, with random bits (so also NaN and
    denormals).
    """
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).copy()
    if dtype == torch.bool:
        raw %= 2
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(st.lists(tensors(), max_size=6))
@settings(max_examples=150)
def test_every_tensor_comes_back_bit_by_bit(values: list[Tensor]) -> None:
    named = [(f"layer.{index}", value) for index, value in enumerate(values)]
    bucket = Bucket.encode(named)
    assert bucket.data.dtype == np.uint8
    decoded = list(bucket.decode())
    assert [name for name, _ in decoded] == [name for name, _ in named]
    for (_, before), (_, after) in zip(named, decoded, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert bits(after) == bits(before)


def test_the_documented_layout() -> None:
    bucket = Bucket.encode(
        [("w", torch.ones(2, 3, dtype=torch.bfloat16)), ("b", torch.tensor(1.0))]
    )
    assert (bucket.names, bucket.shapes, bucket.dtypes) == (
        ("w", "b"),
        ((2, 3), ()),
        ("bfloat16", "float32"),
    )
    assert bucket.data.nbytes == 20


def test_it_pickles_as_plain_arrays_and_strings() -> None:
    bucket = Bucket.encode([("w", torch.ones(1000, dtype=torch.bfloat16))])
    buffers: list[pickle.PickleBuffer] = []
    inband = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    assert b"torch" not in inband
    assert (len(inband) < 500, sum(buffer.raw().nbytes for buffer in buffers)) == (True, 2000)


def test_decoded_tensors_are_copies_and_a_read_only_buffer_will_do() -> None:
    weight = torch.ones(4)
    bucket = Bucket.encode([("w", weight)])
    bucket.data.flags.writeable = False
    [(_, first)] = bucket.decode()
    first.zero_()
    [(_, second)] = bucket.decode()
    assert second.tolist() == weight.tolist() == [1, 1, 1, 1]


def test_parameters_are_encoded_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    [(_, decoded)] = Bucket.encode([("w", parameter * 2)]).decode()
    assert decoded.tolist() == [2, 2]
    assert not decoded.requires_grad


def test_a_buffer_that_does_not_match_its_shapes_is_refused() -> None:
    bucket = Bucket(("w",), ((3,),), ("float32",), np.zeros(8, dtype=np.uint8))
    with pytest.raises(ValueError, match="a bucket of 1 tensors has 8 bytes; its shapes need 12"):
        list(bucket.decode())


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 300))
@settings(max_examples=150)
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], max_bytes: int) -> None:
    buckets = plan_buckets(sizes, max_bytes)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        encoded = Bucket.encode(
            [(str(index), torch.zeros(sizes[index], dtype=torch.uint8)) for index in bucket]
        )
        assert encoded.data.nbytes <= max_bytes or len(bucket) == 1


def test_the_documented_plan() -> None:
    assert plan_buckets([16, 32, 90, 16], 64) == (range(2), range(2, 3), range(3, 4))
    assert plan_buckets([], 8) == ()
    with pytest.raises(ValueError, match="max_bytes is 0"):
        plan_buckets([1], 0)
