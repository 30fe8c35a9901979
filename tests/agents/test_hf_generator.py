"""Calls that the embedded generator answers: rows have its token ids and its log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from transformers import AutoModelForCausalLM

from nemo_like.agents.calls import Call, Episode, Sampled
from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.endpoint import AgentEndpoint
from nemo_like.agents.protocol import RequestRules
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams
from tests.policy.tiny import context

MAX_TOKENS = 200
NUM_TURNS = 4


class Sampler:
    """Gives one request at a time to a generation worker."""

    def __init__(self, worker: HFGenerationWorker, max_tokens: int = MAX_TOKENS) -> None:
        self._worker = worker
        self._max_tokens = max_tokens
        self.log: list[tuple[np.ndarray, np.ndarray]] = []

    async def sample(self, call: Call) -> Sampled:
        temperature = call.options.temperature
        options = SamplingParams(
            max_new_tokens=call.options.max_tokens or 12,
            temperature=1.0 if temperature is None else temperature,
        )
        prompts = Jagged.from_rows([call.prompt_ids], np.int32)
        seeds = np.array([call.seed], dtype=np.uint64)
        self._worker.submit(
            GenerationRequests(np.zeros(1, np.int64), prompts, seeds, options, self._max_tokens)
        )
        found = self._worker.poll(60).completions
        self.log.append((call.prompt_ids, found.token_ids[0]))
        return Sampled(
            found.token_ids[0], found.logprobs[0], found.weight_versions[0], found.finish_reasons[0]
        )


async def converse(client: openai.AsyncOpenAI, **options: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "2+3"}]
    for _ in range(NUM_TURNS):
        completion = await client.chat.completions.create(model="m", messages=messages, **options)
        messages.append(completion.choices[0].message)
        messages.append({"role": "user", "content": "1+1"})


def test_rows_have_the_log_probs_of_the_model(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    build_model(0).save_pretrained(tmp_path)
    sampler = Sampler(HFGenerationWorker(context(), GenerationStart(model_name=str(tmp_path))))
    codec = ChatCodec(ChatEncoder(tokenizer))

    async def run() -> list[Episode]:
        endpoint = AgentEndpoint(sampler.sample, rules=RequestRules(sampling="request"))
        episodes = []
        async with endpoint.serving():
            for options in ({}, {"temperature": 0.5}):
                session = endpoint.start(Episode(codec, 3, max_total_tokens=MAX_TOKENS))
                async with openai.AsyncOpenAI(
                    base_url=endpoint.base_url(session), api_key="x"
                ) as client:
                    await converse(client, **options)
                episodes.append(session.episode)
        return episodes

    episode, cooled = asyncio.run(run())
    (row,) = episode.rows()
    # Byte for byte what the generator saw and sampled.
    for prompt, sampled in sampler.log[:NUM_TURNS]:
        both = np.concatenate([prompt, sampled])
        assert np.array_equal(row.token_ids[: len(both)], both)
    is_model = row.token_mask.astype(bool)
    assert is_model.sum() == sum(len(sampled) for _, sampled in sampler.log[:NUM_TURNS])
    expected = logprobs_of(tmp_path, row.token_ids, 1.0)
    assert np.abs(row.logprobs - expected)[is_model].max() < 1e-4
    assert np.all(row.logprobs[~is_model] == 0)
    # Drawn from another distribution, recorded and not trained.
    assert cooled.rows() == []
    call = cooled.calls[-1]
    assert call.sampled is not None
    expected = logprobs_of(tmp_path, call.token_ids, 0.5)[-len(call.sampled.token_ids) :]
    assert np.abs(call.sampled.logprobs - expected).max() < 1e-4


def logprobs_of(model_dir: Path, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    """Log-prob of each token after those before it, in float64; 0 for the first."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager"
    )
    ids = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1] / temperature
    found = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], found.numpy()])
