"""Names that users know from the seed documents."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("LoadBalancedDataset", "datasets"),
        ("ShardedIterableDataset", "datasets"),
        ("OnlineBatchLoader", "online"),
        ("VariableBatchSizeLR", "learning_rate"),
        ("PackingCollator", "packed_collate"),
        ("pad_packed_input", "packed_batch"),
        ("sample_sort", "curriculum"),
    ],
)
def test_names_of_the_library_can_be_imported_from_streaming(name: str, module: str) -> None:
    streaming = import_module("nemo_like.data.streaming")
    assert getattr(streaming, name) is getattr(
        import_module(f"nemo_like.torch_data.{module}"), name
    )


def test_another_name_is_an_error() -> None:
    with pytest.raises(ImportError, match="LoadBalanced"):
        from nemo_like.data.streaming import LoadBalanced  # noqa: F401
