"""Streaming batch formation, and the names that users know from the systems it replaces.

The library for plain PyTorch loops is `nemo_like.torch_data`. It needs torch, which the planners
here do not, so its names are imported at their first use.
"""

from importlib import import_module

_TORCH_DATA = {
    "LoadBalancedDataset": "datasets",
    "ShardedIterableDataset": "datasets",
    "OnlineBatchLoader": "online",
    "VariableBatchSizeLR": "learning_rate",
    "PackingCollator": "packed_collate",
    "pad_packed_input": "packed_batch",
    "sample_sort": "curriculum",
}
"""Name -> its module in `nemo_like.torch_data`."""


def __getattr__(name: str) -> object:
    if name not in _TORCH_DATA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nemo_like.torch_data.{_TORCH_DATA[name]}"), name)
