"""Batch formation for PyTorch training loops: one function for an existing DataLoader.

`online_batches(dataloader, stream_spec(max_tokens=8192))` is all that most loops need;
`hf_trainer`, `accelerate` and `lightning` connect it to those libraries. docs/library.md has
examples, and the equivalents of the names of other systems.
"""

from nemo_like.torch_data.drop_in import (
    OnlineBatches,
    OnlineMicrobatch,
    online_batches,
    stream_spec,
)
from nemo_like.torch_data.online import OnlineBatchLoader, OnlineStep
from nemo_like.torch_data.packed_collate import PackingCollator

__all__ = [
    "OnlineBatchLoader",
    "OnlineBatches",
    "OnlineMicrobatch",
    "OnlineStep",
    "PackingCollator",
    "online_batches",
    "stream_spec",
]
