"""Answers to prompts, yielded prompt by prompt as they are complete with their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_like.generation.requests import FinishReason, SamplingParams
from nemo_like.rollout.collector import RolloutCollector, RolloutJob
from nemo_like.rollout.conversations import Prompt


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One sampled completion."""

    text: str
    """Without special tokens; in a conversation with an environment the last turn."""
    token_ids: np.ndarray
    """int32 [T], the end token included; in a conversation all turns of the model."""
    logprob: float
    """Sum of the log-probs of the tokens under the distribution that they were sampled from."""
    finish_reason: FinishReason
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function."""
    problem: str | None = None
    """Why a reward function failed."""
    is_scored: bool = True
    """False if the answer is left out because a reward function failed."""


def answer_prompts(
    collector: RolloutCollector,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    sampling: SamplingParams,
    max_total_length: int,
    seeds: np.ndarray,
) -> Iterator[tuple[int, list[Answer]]]:
    """Yield (index of the prompt, its `num_samples` answers) as soon as all of them are complete.

    `seeds` is uint64 [P x num_samples], prompt-major. Prompts are yielded in the order in which
    they end. No other job may run on the collector. Raises RewardError and WorkerFailure as
    `RolloutCollector.advance` does.
    """
    if not prompts:
        return
    job = collector.start(
        prompts,
        group_size=num_samples,
        sampling=sampling,
        max_total_length=max_total_length,
        seeds=seeds,
    )
    num_seen = 0
    num_missing = [num_samples] * len(prompts)
    while num_seen < len(job.prompts):
        collector.advance()
        completed = job.scored_rows[num_seen:]
        num_seen += len(completed)
        for row in completed:
            prompt = row // num_samples
            num_missing[prompt] -= 1
            if num_missing[prompt] == 0:
                first = prompt * num_samples
                yield prompt, [_answer(job, each) for each in range(first, first + num_samples)]


def _answer(job: RolloutJob, row: int) -> Answer:
    """Return the answer of a complete row."""
    part, position = job.places[row]
    problem = job.reward_problems.get(row)
    return Answer(
        text=job.samples[row].completion,
        token_ids=part.token_ids[position],
        logprob=float(part.logprobs[position].sum(dtype=np.float64)),
        finish_reason=part.finish_reasons[position],
        reward=float(job.rewards[row]),
        components={name: float(values[row]) for name, values in job.components.items()},
        problem=None if problem is None else str(problem),
        is_scored=problem is None or not job.drops_problems,
    )
