"""One buffer for all arrays of a microbatch gives back their values, shapes and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from nemo_like.device_transfer import (
    fetch_scalars,
    pack,
    slots_of,
    tensor_to_device,
    to_device,
    unpack,
)

DTYPES = [np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64, np.float16]
ARRAYS = st.lists(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays_of.arrays(
            dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(arrays=ARRAYS)
def test_a_packed_buffer_gives_back_every_array(arrays: list[np.ndarray]) -> None:
    named = {f"array {index}": array for index, array in enumerate(arrays)}
    slots, num_bytes = slots_of(named)
    buffer = torch.full((num_bytes,), 255, dtype=torch.uint8)
    pack(named, slots, buffer)
    unpacked = unpack(buffer, slots)
    assert unpacked.keys() == named.keys()
    for name, array in named.items():
        found = unpacked[name].numpy()
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(found, array)
        assert slots[name].start % 256 == 0


def test_on_the_cpu_arrays_are_tensors() -> None:
    ids = np.arange(6).reshape(2, 3)
    tensors = to_device({"ids": ids, "transposed": ids.T}, "cpu")
    assert tensors["ids"].tolist() == ids.tolist()
    assert tensors["transposed"].tolist() == ids.T.tolist()
    assert to_device({}, "cpu") == {}
    assert torch.equal(tensor_to_device(torch.arange(3), "cpu"), torch.arange(3))


def test_scalars_of_several_dtypes_are_fetched_exactly() -> None:
    scalars = [
        torch.tensor(1 / 3),
        torch.tensor(2**40 + 1),
        torch.tensor(True),
        torch.tensor(float("inf")),
    ]
    assert fetch_scalars(scalars) == [float(np.float32(1 / 3)), 2.0**40 + 1, 1.0, float("inf")]
    assert fetch_scalars([]) == []
    gradient = torch.tensor(2.0, requires_grad=True)
    assert fetch_scalars([gradient * 2]) == [4.0]
    assert np.isnan(fetch_scalars([torch.tensor(float("nan"))])[0])


def test_a_scalar_must_be_one() -> None:
    with pytest.raises(RuntimeError):
        fetch_scalars([torch.tensor(1.0), torch.arange(2.0)])
