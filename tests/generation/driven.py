"""Runs a batch of prompts on one generation worker, as `Generator` does on several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_like.data.images import RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.generation.requests import (
    Completions,
    GenerationRequests,
    GenerationWorkerProtocol,
    SamplingParams,
)


def generate(
    worker: GenerationWorkerProtocol,
    prompt_ids: Jagged,
    seeds: np.ndarray,
    sampling: SamplingParams,
    max_total_length: int,
    poll_s: float = 0.0,
    images: Sequence[Sequence[RowImage]] = (),
) -> Completions:
    """Completions of all prompts, in order."""
    ids = np.arange(len(prompt_ids), dtype=np.int64)
    requests = GenerationRequests(ids, prompt_ids, seeds, sampling, max_total_length, images)
    worker.submit(requests)
    rows: list[int] = []
    parts = [Completions.from_rows([], [], [], [])]
    while True:
        progress = worker.poll(poll_s)
        rows += progress.request_ids.tolist()
        parts.append(progress.completions)
        if progress.num_unfinished == 0:
            break
    assert sorted(rows) == ids.tolist(), "every request is answered once"
    return Completions.concat(parts).take(np.argsort(rows))
