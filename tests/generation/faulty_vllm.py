"""A vLLM worker whose weight updates may have the faults that vLLM accepts silently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_like.generation.vllm_extension import VLLMWorkerExtension
from nemo_like.generation.vllm_worker import VLLMGenerationWorker
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec

_BUCKET_TENSORS = 4
"""Not a divisor of the number of tensors of a layer."""

_IN_PROCESS = ChannelSpec(transport="in_process", layouts=(), slot_bytes=0, timeout_s=60.0)


class FaultyExtension(VLLMWorkerExtension):
    def set_fault(self, fault: str) -> None:
        self._fault = fault

    def _refresh_packed_embeddings(self) -> None:
        if self._fault != "stale head":
            super()._refresh_packed_embeddings()


class FaultyVLLMWorker(VLLMGenerationWorker):
    extension = "tests.generation.faulty_vllm.FaultyExtension"
    _fault = ""

    def update(self, named: Sequence[tuple[str, Tensor]], version: int, fault: str) -> None:
        """Load all weights in small buckets, which end within layers."""
        self._fault = fault
        self._llm.collective_rpc("set_fault", args=(fault,))
        if fault == "omitted tensor":
            named = [pair for pair in named if "layers.1.mlp.down_proj" not in pair[0]]
        if fault == "omitted embedding":
            named = [pair for pair in named if "embed_tokens" not in pair[0]]
        self.open_weight_channel(_IN_PROCESS, (0,))
        names = [name for name, _ in named]
        self.begin_update(names)
        if fault == "begun twice":
            tensors = tuple((name, tensor.clone()) for name, tensor in named[:_BUCKET_TENSORS])
            self._load(tensors)
            self.begin_update(names)
        for start in range(0, len(named), _BUCKET_TENSORS):
            self._load(tuple(named[start : start + _BUCKET_TENSORS]))
        self.finish_update(version)
        self.close_weight_channel()

    def _load(self, tensors: tuple[tuple[str, Tensor], ...]) -> None:
        """Load a bucket of tensors, [*shape] each, and overwrite its memory, as the next one does.

        With tensor parallelism the tensors are copied to the ranks.
        """
        self.load_bucket(BucketMessage(0, tensors))
        for _, tensor in tensors:
            tensor.fill_(torch.nan)

    def allow_sleep(self) -> None:
        """Have `offload` put the engine to sleep, which vLLM does on CPU without freeing memory."""
        self._can_sleep = True

    def sleeping(self) -> set[str]:
        """Parts of the engine that vLLM has put to sleep."""
        return set(self._engine.model_executor.sleeping_tags)

    def _reset_prefix_cache(self) -> None:
        if self._fault != "stale cache":
            super()._reset_prefix_cache()
