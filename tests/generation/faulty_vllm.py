"""A vLLM worker whose weight updates may have the faults that vLLM accepts silently."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nemo_like.generation.vllm_extension import VLLMWorkerExtension
from nemo_like.generation.vllm_worker import VLLMGenerationWorker
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec

_IN_PROCESS = ChannelSpec(transport="in_process", layouts=(), slot_bytes=0, timeout_s=60.0)


class FaultyExtension(VLLMWorkerExtension):
    def set_fault(self, fault: str) -> None:
        self._fault = fault

    def _refresh_output_head(self) -> None:
        if self._fault != "stale head":
            super()._refresh_output_head()


class FaultyVLLMWorker(VLLMGenerationWorker):
    extension = "tests.generation.faulty_vllm.FaultyExtension"
    _fault = ""

    def update(self, named: Sequence[tuple[str, Tensor]], version: int, fault: str) -> None:
        """Load all weights in two buckets."""
        self._fault = fault
        self._llm.collective_rpc("set_fault", args=(fault,))
        if fault == "omitted tensor":
            named = [pair for pair in named if "layers.1.mlp.down_proj" not in pair[0]]
        self.open_weight_channel(_IN_PROCESS, (0,))
        self.begin_update([name for name, _ in named])
        middle = len(named) // 2
        self.load_bucket(BucketMessage(0, tuple(named[:middle])))
        if fault == "begun twice":
            self.begin_update([name for name, _ in named])
            self.load_bucket(BucketMessage(0, tuple(named[:middle])))
        self.load_bucket(BucketMessage(1, tuple(named[middle:])))
        self.finish_update(version)
        self.close_weight_channel()

    def allow_sleep(self) -> None:
        """Have `offload` put the engine to sleep, which vLLM does on CPU without freeing memory."""
        self._can_sleep = True

    def asleep(self) -> set[str]:
        """What vLLM itself counts as asleep."""
        return set(self._engine.model_executor.sleeping_tags)

    def _reset_prefix_cache(self) -> None:
        if self._fault != "stale cache":
            super()._reset_prefix_cache()
