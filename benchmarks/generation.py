"""Tokens per second of the generation backends, in one run on the same prompts.

    python -m benchmarks.generation --model DIR --data gsm8k/train.jsonl

Each backend runs in a process of its own with all cores; they take turns, round by round.
Completions end naturally or at the token limit. The random streams of the backends differ, so
tokens per second and not seconds are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams

BACKENDS = ("vllm", "hf")


def start_worker(backend: str, model: str, max_length: int, batch_size: int) -> Any:
    context = local_context()
    if backend == "hf":
        from nemo_like.generation.hf_worker import HFGenerationWorker

        return HFGenerationWorker(
            context, batch_size=batch_size, start=GenerationStart(model_name=model)
        )
    from nemo_like.generation.vllm_worker import VLLMGenerationWorker

    return VLLMGenerationWorker(
        context,
        max_total_length=max_length,
        config=VLLMGenerationConfig(max_num_seqs=batch_size),
        start=GenerationStart(model_name=model),
    )


def serve(connection: Connection, backend: str, model: str, max_length: int, size: int) -> None:
    """Answer each batch of requests with (seconds, tokens, lengths)."""
    worker = start_worker(backend, model, max_length, size)
    connection.send("started")
    while True:
        try:
            requests = connection.recv()
        except EOFError:
            return
        worker.start_rollout()
        start = time.perf_counter()
        worker.submit(requests)
        lengths: list[int] = []
        while len(lengths) < len(requests):
            lengths += worker.poll(1.0).completions.token_ids.lengths.tolist()
        connection.send((time.perf_counter() - start, sum(lengths), lengths))


def read_prompts(data: Path, tokenizer: Any, num_prompts: int, skip: int) -> list[list[int]]:
    prompts = []
    with data.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            if index < skip:
                continue
            if len(prompts) == num_prompts:
                break
            row = json.loads(line)
            text = row.get("prompt") or row["question"]
            message = [{"role": "user", "content": text}]
            encoded = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            prompts.append(list(encoded))
    return prompts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    num_rows = arguments.prompts * arguments.group_size
    max_length = 1024
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    for backend in BACKENDS:
        connection, other = context.Pipe()
        settings = (other, backend, arguments.model, max_length, num_rows)
        context.Process(target=serve, args=settings, daemon=True).start()
        assert connection.recv() == "started"
        connections[backend] = connection
    rates: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    # The first round warms up.
    for round_index in range(arguments.rounds + 1):
        skip = round_index * arguments.prompts
        prompts = read_prompts(arguments.data, tokenizer, arguments.prompts, skip)
        repeated = [prompt for prompt in prompts for _ in range(arguments.group_size)]
        requests = GenerationRequests(
            np.arange(num_rows, dtype=np.int64),
            Jagged.from_rows(repeated, np.int32),
            np.arange(num_rows, dtype=np.uint64) + round_index * num_rows,
            SamplingParams(max_new_tokens=arguments.max_new_tokens),
            max_length,
        )
        for backend in BACKENDS:
            connections[backend].send(requests)
            seconds, num_tokens, lengths = connections[backend].recv()
            rate = num_tokens / seconds
            name = "warm-up" if round_index == 0 else f"round {round_index}"
            print(
                f"{name} {backend}: {num_tokens} tokens in {seconds:.1f} s = {rate:.0f} tokens/s,"
                f" mean length {np.mean(lengths):.0f}, longest {max(lengths)}",
                flush=True,
            )
            if round_index > 0:
                rates[backend].append(rate)
    medians = {backend: statistics.median(values) for backend, values in rates.items()}
    ratio = medians["vllm"] / medians["hf"]
    print(f"median tokens/s: {medians}; vllm / hf = {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
