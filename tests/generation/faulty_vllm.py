"""A vLLM worker whose weight updates may have the faults that vLLM accepts silently."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_like.generation.engine_thread import between_steps
from nemo_like.generation.requests import GenerationProgress
from nemo_like.generation.vllm_extension import VLLMWorkerExtension, other_tensors
from nemo_like.generation.vllm_worker import VLLMGenerationWorker
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec

_BUCKET_TENSORS = 4
"""Not a divisor of the number of tensors of a layer."""

_IN_PROCESS = ChannelSpec(transport="in_process", layouts=(), slot_bytes=0, timeout_s=60.0)


class FaultyExtension(VLLMWorkerExtension):
    def set_fault(self, fault: str) -> None:
        self._fault = fault

    def lose_memory(self) -> None:
        """Overwrite what sleep level 2 does not keep."""
        model = self.model_runner.model
        for tensor in [*model.parameters(), *other_tensors(model, self.device)]:
            tensor.data.fill_(torch.nan)

    def _refresh_packed_embeddings(self) -> None:
        if self._fault != "stale head":
            super()._refresh_packed_embeddings()


class FaultyVLLMWorker(VLLMGenerationWorker):
    extension = "tests.generation.faulty_vllm.FaultyExtension"
    _fault = ""
    _steps_in_polls = False
    _is_polled = False
    sleep_levels: Sequence[int] = ()

    def step_in_polls(self, only: bool) -> None:
        """Step inside of `poll` only, so that a test knows the number of steps."""
        self._steps_in_polls = only

    @between_steps
    def poll(self, max_seconds: float, min_seconds: float | None = None) -> GenerationProgress:
        self._is_polled = True
        try:
            return super().poll(max_seconds, min_seconds)
        finally:
            self._is_polled = False

    def advance(self) -> bool:
        if self._steps_in_polls and not self._is_polled:
            return False
        if self._fault == "failing step":
            self._fault = ""
            raise ArithmeticError("a step failed")
        return super().advance()

    def fail_next_step(self) -> None:
        self._fault = "failing step"

    @between_steps
    def schedule_ahead(self, ahead: bool) -> None:
        """Keep a step in flight between two calls, as asynchronous scheduling does on GPUs."""
        core: Any = self._core()
        core.batch_queue_size = 1 + ahead
        core.batch_queue = deque(maxlen=2) if ahead else None
        core.step_fn = core.step_with_batch_queue if ahead else core.step

    @between_steps
    def freeze_tower(self, frozen: bool) -> None:
        """Whether a weight update leaves the vision tower as it is."""
        assert self._images is not None
        self._images.tower_changes = not frozen

    @between_steps
    def num_in_flight(self) -> int:
        return len(self._core().batch_queue)

    @between_steps
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no request uses."""
        return self._core().scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _core(self) -> Any:
        client: Any = self._engine.engine_core
        return client.engine_core

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
        sleep = self._llm.sleep
        levels = self.sleep_levels = []

        def noted(level: int, mode: Any) -> None:
            levels.append(level)
            sleep(level=level, mode=mode)
            if level == 2:
                self._llm.collective_rpc("lose_memory")

        self._llm.sleep = noted  # pyright: ignore[reportAttributeAccessIssue]

    def levels(self) -> list[int]:
        """Levels of all sleeps."""
        return list(self.sleep_levels)

    def sleeping(self) -> set[str]:
        """Parts of the engine that vLLM has put to sleep."""
        return set(self._engine.model_executor.sleeping_tags)

    def _reset_prefix_cache(self) -> None:
        if self._fault != "stale cache":
            super()._reset_prefix_cache()
