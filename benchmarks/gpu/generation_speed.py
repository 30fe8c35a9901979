"""Tokens per second of the generation backends alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cells import require_modules
from benchmarks.gpu.training_steps import synchronize
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams

_WARMUP_TOKENS = 4


def time_generation(
    folder: Path, device: str, backend: str, *, num_rows: int, prompt_tokens: int, new_tokens: int
) -> Mapping[str, Any]:
    """Sample `new_tokens` tokens for each of `num_rows` random prompts, all started together."""
    if backend == "vllm":
        require_modules("vllm")
    worker = _start(folder, device, backend, num_rows, prompt_tokens + new_tokens)
    try:
        _generate(worker, num_rows, prompt_tokens, _WARMUP_TOKENS, seed=1)
        synchronize(device)
        start = time.perf_counter()
        num_tokens = _generate(worker, num_rows, prompt_tokens, new_tokens, seed=2)
        synchronize(device)
        seconds = time.perf_counter() - start
    finally:
        close = getattr(worker, "close", None)
        if close is not None:
            close()
    return {
        "num_rows": num_rows,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "ms_per_token_step": seconds * 1e3 / new_tokens,
    }


def _start(folder: Path, device: str, backend: str, num_rows: int, max_length: int) -> Any:
    context = local_context(device=device)
    if backend == "hf":
        from nemo_like.generation.hf_worker import HFGenerationWorker

        return HFGenerationWorker(
            context,
            batch_size=num_rows,
            start=GenerationStart(model_name=str(folder), precision="bfloat16"),
        )
    from nemo_like.generation.vllm_worker import VLLMGenerationWorker

    return VLLMGenerationWorker(
        context,
        max_total_length=max_length,
        config=VLLMGenerationConfig(max_num_seqs=num_rows),
        start=GenerationStart(model_name=str(folder), precision="bfloat16"),
    )


def _generate(worker: Any, num_rows: int, prompt_tokens: int, new_tokens: int, seed: int) -> int:
    """Return the number of sampled tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 64, prompt_tokens) for _ in range(num_rows)]
    requests = GenerationRequests(
        np.arange(num_rows, dtype=np.int64),
        Jagged.from_rows(prompts, np.int32),
        rng.integers(0, 2**63, num_rows).astype(np.uint64),
        SamplingParams(max_new_tokens=new_tokens),
        prompt_tokens + new_tokens,
    )
    worker.start_rollout()
    worker.submit(requests)
    lengths: list[int] = []
    while len(lengths) < num_rows:
        lengths += worker.poll(1.0).completions.token_ids.lengths.tolist()
    return sum(lengths)
