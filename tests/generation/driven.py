"""Runs a batch of prompts on one generation worker, as `Generator` does on several."""

from __future__ import annotations

import numpy as np

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
) -> Completions:
    """Completions of all prompts, in order."""
    ids = np.arange(len(prompt_ids), dtype=np.int64)
    worker.submit(GenerationRequests(ids, prompt_ids, seeds, sampling, max_total_length))
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
