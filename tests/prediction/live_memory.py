"""What a forward and backward of a small real model keep alive, byte by byte, on CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from nemo_like.config.schema import ActivationCheckpointing
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.decoder_layers import checkpoint_layers
from nemo_like.policy.dtensor.experts import ExpertLoads
from nemo_like.policy.dtensor.model import LogprobModel, VocabularyHead, backbone, decoder_layers
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.outputs import PLAIN


class LiveStorage(TorchDispatchMode):
    """Bytes of the storages made inside the block that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._sizes:
                storage = leaf.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def peak_bytes(
    model: PreTrainedModel,
    inputs: ModelInputs,
    *,
    chunk_size: int,
    checkpointing: ActivationCheckpointing,
) -> int:
    """Peak of what a step needs besides weights and gradients."""
    groups = Groups(layout=ParallelLayout(), rank=0, device=torch.device("cpu"))
    head = VocabularyHead(model, groups, chunk_size, compile=False)
    logprob_model = LogprobModel(model, head, groups, ExpertLoads([], torch.device("cpu")))
    if checkpointing != "none":
        checkpoint_layers(decoder_layers(model), checkpointing)
    for parameter in logprob_model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveStorage() as live:
        logprobs = logprob_model(inputs, PLAIN).logprobs
        logprobs.sum().backward()
    return live.peak


def forward_peak_bytes(model: PreTrainedModel, inputs: ModelInputs) -> int:
    """Peak of a forward pass without gradients, besides the weights."""
    with torch.no_grad(), LiveStorage() as live:
        backbone(model)(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            cu_seqlens=inputs.cu_seqlens,
            max_seqlen=inputs.max_seqlen,
        )
    return live.peak
