"""nemo_like: post-training of language models on a Ray cluster, where batch formation is a plan.

The names of `__all__` are the interface of the library. Each is imported from its module when it is
first used, so that `import nemo_like` is fast and imports no other library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatEncoder
    from nemo_like.data.jagged import EncodedRow, Jagged
    from nemo_like.data.packing.algorithms import PackingAlgorithm, SequencePacker, get_packer
    from nemo_like.data.packing.metrics import PackingMetrics
    from nemo_like.data.planning.plan import BatchPlan, plan_batch
    from nemo_like.data.planning.prefixes import SharedPrefixes
    from nemo_like.data.planning.spec import CostModel, PlanSpec
    from nemo_like.distributed.batched_data_dict import (
        BatchedDataDict,
        DynamicBatchingArgs,
        SequencePackingArgs,
        SlicedDataDict,
    )
    from nemo_like.losses.importance import importance_weights
    from nemo_like.losses.likelihood import DistillationLoss, NllLoss
    from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss
    from nemo_like.losses.reduce import GlobalCounts, LossInputs, LossTerms
    from nemo_like.losses.sequence_packing import SequencePackingLossWrapper
    from nemo_like.models.spec import ModelSpec
    from nemo_like.torch_data.curriculum import sample_sort
    from nemo_like.torch_data.datasets import LoadBalancedDataset, ShardedIterableDataset
    from nemo_like.torch_data.drop_in import Microbatch, OnlineBatches, online_batches, stream_spec
    from nemo_like.torch_data.learning_rate import VariableBatchSizeLR
    from nemo_like.torch_data.online import OnlineBatchLoader, OnlineStep
    from nemo_like.torch_data.packed_batch import pad_packed_input
    from nemo_like.torch_data.packed_collate import PackingCollator

__version__ = "0.1.0"

_NAMES = {
    "data.chat": "ChatEncoder",
    "data.jagged": "EncodedRow Jagged",
    "data.packing.algorithms": "PackingAlgorithm SequencePacker get_packer",
    "data.packing.metrics": "PackingMetrics",
    "data.planning.plan": "BatchPlan plan_batch",
    "data.planning.prefixes": "SharedPrefixes",
    "data.planning.spec": "CostModel PlanSpec",
    "distributed.batched_data_dict": "BatchedDataDict DynamicBatchingArgs"
    " SequencePackingArgs SlicedDataDict",
    "losses.importance": "importance_weights",
    "losses.likelihood": "DistillationLoss NllLoss",
    "losses.policy_gradient": "ClippedPolicyGradientLoss",
    "losses.reduce": "GlobalCounts LossInputs LossTerms",
    "losses.sequence_packing": "SequencePackingLossWrapper",
    "models.spec": "ModelSpec",
    "torch_data.curriculum": "sample_sort",
    "torch_data.datasets": "LoadBalancedDataset ShardedIterableDataset",
    "torch_data.drop_in": "Microbatch OnlineBatches online_batches stream_spec",
    "torch_data.learning_rate": "VariableBatchSizeLR",
    "torch_data.online": "OnlineBatchLoader OnlineStep",
    "torch_data.packed_batch": "pad_packed_input",
    "torch_data.packed_collate": "PackingCollator",
}
"""Module -> its names in the interface."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"nemo_like.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
