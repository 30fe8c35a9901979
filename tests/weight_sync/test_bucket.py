from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.weight_sync.channel import (
    ALIGNMENT,
    BucketLayout,
    num_bytes_of,
    plan_buckets,
    plan_layouts,
)

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

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def buckets(draw: Any) -> list[Tensor]:
    """Tensors of one dtype and any shape, 0-dim and empty included, with random bits (so also NaN
    and denormals), some of them not contiguous.
    """
    dtype = draw(st.sampled_from(DTYPES))
    tensors = []
    for shape in draw(st.lists(SHAPES, max_size=6)):
        size = num_bytes_of(shape, dtype)
        raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).copy()
        if dtype == torch.bool:
            raw %= 2
        tensor = torch.empty(shape, dtype=dtype)
        if size:
            tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
        if len(shape) > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, -1)
        tensors.append(tensor)
    return tensors


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(buckets(), st.integers(0, 3))
@settings(max_examples=150)
def test_every_tensor_comes_back_bit_by_bit(tensors: list[Tensor], unused_bytes: int) -> None:
    dtype = tensors[0].dtype if tensors else torch.float32
    shapes = {f"layer.{index}": tuple(tensor.shape) for index, tensor in enumerate(tensors)}
    layout = BucketLayout.of(shapes, dtype)
    # Of an earlier bucket, which was larger.
    buffer = torch.full((layout.num_bytes + unused_bytes,), 255, dtype=torch.uint8)
    for (_, view), tensor in zip(layout.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    received = list(layout.views(buffer.clone()))
    assert [name for name, _ in received] == list(shapes)
    for (_, after), before in zip(received, tensors, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert bits(after) == bits(before)


@given(st.dictionaries(st.text(max_size=3), SHAPES, max_size=12), st.sampled_from(DTYPES))
@settings(max_examples=100)
def test_tensors_are_aligned_and_do_not_overlap(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    layout = BucketLayout.of(shapes, dtype)
    end = 0
    for shape, start in zip(layout.shapes, layout.starts, strict=True):
        assert start % ALIGNMENT == 0
        assert start >= end
        end = start + num_bytes_of(shape, dtype)
    assert layout.num_bytes == end


def test_the_documented_layout() -> None:
    layout = BucketLayout.of({"w": (2, 3), "b": ()}, torch.bfloat16)
    assert (layout.starts, layout.num_bytes, layout.dtype) == ((0, 64), 66, "bfloat16")


def test_a_buffer_that_is_too_small_is_refused() -> None:
    layout = BucketLayout.of({"w": (3,)}, torch.float32)
    with pytest.raises(ValueError, match="needs 12 bytes; the buffer has 8"):
        list(layout.views(torch.zeros(8, dtype=torch.uint8)))


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 500))
@settings(max_examples=150)
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], max_bytes: int) -> None:
    shapes = {str(index): (size,) for index, size in enumerate(sizes)}
    layouts = plan_layouts(shapes, torch.uint8, max_bytes)
    assert [name for layout in layouts for name in layout.names] == list(shapes)
    for layout in layouts:
        assert layout.num_bytes <= max_bytes or len(layout.names) == 1


def test_a_large_model_has_enough_buckets_to_overlap_and_a_small_one_a_single_one() -> None:
    shapes = {str(index): (2**20,) for index in range(64)}
    layouts = plan_layouts(shapes, torch.float32, 2**40)
    assert [layout.num_bytes for layout in layouts] == [32 * 2**20] * 8
    assert len(plan_layouts({"0": (1000,), "1": (2000,)}, torch.float32, 2**40)) == 1


def test_the_documented_plan() -> None:
    assert plan_buckets([3, 4, 9, 2], 128) == (range(2), range(2, 4))
    assert plan_buckets([64, 300, 16], 128) == (range(1), range(1, 2), range(2, 3))
    assert plan_buckets([], 8) == ()
    with pytest.raises(ValueError, match="max_bytes is 0"):
        plan_buckets([1], 0)
