"""The embedded generation worker, with a record of where its weights are."""

from __future__ import annotations

from nemo_like.generation.hf_worker import HFGenerationWorker


class TrackedWorker(HFGenerationWorker):
    is_offloaded = False

    def offload(self, discards_weights: bool = False) -> None:
        super().offload(discards_weights)
        self.is_offloaded = True

    def onload(self) -> None:
        super().onload()
        self.is_offloaded = False
