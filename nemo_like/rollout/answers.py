"""Answers to prompts, yielded prompt by prompt as they are complete with their rewards, their means
and pass@k, and confidence intervals.

The answers to one prompt depend on each other, so the prompt is the unit of an interval: a prompt
has a sum and a weight (its number of answers, or 1), and a mean is the ratio of both summed over
prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np

from nemo_like.generation.requests import FinishReason, SamplingParams
from nemo_like.metrics import Mean, Metrics
from nemo_like.rollout.collector import RolloutCollector, RolloutJob
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.rows import Rollout

_ROUNDING = 1e-6
"""A reward that is lower by this still counts as correct: float32 sums are not exact."""
NUM_RESAMPLES = 2000
_BLOCK_COUNTS = 2**22
"""Counts that are drawn at a time."""

Method = Literal["wilson", "bootstrap", "none"]


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
    """Unweighted value of each reward function; NaN if it does not apply."""
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
    conversation = job.rows[row]
    problem = job.reward_problems.get(row)
    return Answer(
        text=conversation.text,
        token_ids=conversation.model_token_ids,
        logprob=sum(float(turn.sum(dtype=np.float64)) for turn in conversation.logprobs),
        finish_reason=conversation.finish_reason,
        reward=float(job.rewards[row]),
        components={name: float(values[row]) for name, values in job.components.items()},
        problem=None if problem is None else str(problem),
        is_scored=row not in job.dropped_rows,
    )


@dataclass(frozen=True, kw_only=True)
class PromptMeans:
    """Contributions of P prompts to a mean."""

    totals: np.ndarray
    """float64 [P]"""
    weights: np.ndarray
    """float64 [P]"""
    is_share: bool = False
    """The totals are between 0 and 1 and the weights 1."""

    @property
    def value(self) -> float:
        """The mean; NaN without weight."""
        weight = float(self.weights.sum())
        return float(self.totals.sum()) / weight if weight else math.nan


@dataclass(frozen=True, kw_only=True)
class ScoredAnswers:
    """n answers to each of P prompts, [P, n] each."""

    rewards: np.ndarray
    """float; 0 for an answer without a reward."""
    is_scored: np.ndarray
    """bool: False for an answer without a reward."""
    lengths: np.ndarray
    """int64: tokens."""
    is_truncated: np.ndarray
    """bool: the answer reached the limit on tokens."""
    components: Mapping[str, np.ndarray]
    """float each: values of the reward functions, by name."""


def answer_means(answers: ScoredAnswers, *, pass_reward: float) -> dict[str, PromptMeans]:
    """Return the means of `answer_metrics` by prompt, of which intervals can be computed.

    avg@n and pass@k are there for any number of samples; with one they are the share of correct
    answers.
    """
    num_prompts, num_samples = answers.rewards.shape
    ones = np.ones(num_prompts)
    is_scored = answers.is_scored
    scored = is_scored.sum(axis=1).astype(np.float64)
    means: dict[str, PromptMeans] = {}
    if is_scored.any():
        rewards = np.where(is_scored, answers.rewards, 0.0)
        means["reward_mean"] = PromptMeans(totals=rewards.sum(axis=1), weights=scored)
        for name, values in answers.components.items():
            is_valued = is_scored & ~np.isnan(values)
            totals = np.where(is_valued, values, 0.0).sum(axis=1)
            num_values = is_valued.sum(axis=1).astype(np.float64)
            if is_valued.any():
                means[f"{name}_mean"] = PromptMeans(totals=totals, weights=num_values)
        is_correct = is_scored & (answers.rewards >= pass_reward - _ROUNDING)
        num_correct = is_correct.sum(axis=1)
        share = num_correct / num_samples
        means[f"avg_at_{num_samples}"] = PromptMeans(totals=share, weights=ones, is_share=True)
        for k in powers_of_two(num_samples):
            totals = pass_at_k(num_samples, num_correct, k)
            means[f"pass_at_{k}"] = PromptMeans(totals=totals, weights=ones, is_share=True)
    means["generation_completion_length_mean"] = PromptMeans(
        totals=answers.lengths.sum(axis=1), weights=ones * num_samples
    )
    means["generation_truncated_share"] = PromptMeans(
        totals=answers.is_truncated.mean(axis=1), weights=ones, is_share=True
    )
    return means


def answer_metrics(
    rollout: Rollout, rows: np.ndarray, *, num_samples: int, pass_reward: float
) -> Metrics:
    """Return the means over `rows` (int64 [n], prompt-major) of reward, components and lengths.

    With several samples per prompt also avg@n and pass@k, where an answer with a reward of at least
    `pass_reward` is correct. A row without a reward (`reward_mask` False) counts in none of the
    means of rewards, and as not correct; without rewards there are no such means. `rows` of
    programs are episodes.
    """
    first_rows = rollout.first_rows[rows]

    def by_prompt(values: np.ndarray) -> np.ndarray:
        return values[first_rows].reshape(-1, num_samples)

    answers = ScoredAnswers(
        rewards=by_prompt(rollout.batch["reward"]),
        is_scored=by_prompt(np.asarray(rollout.batch["reward_mask"], dtype=bool)),
        lengths=rollout.episode_lengths[rows].reshape(-1, num_samples),
        is_truncated=by_prompt(rollout.finish_reasons != "stop"),
        components={name: by_prompt(values) for name, values in rollout.components.items()},
    )
    metrics: Metrics = {}
    for name, mean in answer_means(answers, pass_reward=pass_reward).items():
        if num_samples > 1 or not name.startswith(("avg_at_", "pass_at_")):
            metrics[name] = Mean(float(mean.totals.sum()), float(mean.weights.sum()))
    return metrics


def pass_at_k(num_samples: int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """Return the probability that k of the samples of a prompt have a correct one, float64 [P].

    `num_correct` is int [P], of `num_samples` samples each. With n samples of which c are correct
    it is 1 - C(n - c, k) / C(n, k): the mean over all subsets of k samples, and an unbiased
    estimate of the probability that k new samples have a correct one. Raises ValueError for k
    outside 1 to n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; pass@k of {num_samples} samples needs k from 1 to that number")
    # C(n - c, k) / C(n, k) is the product of (n - c - i) / (n - i) over i < k; a factor is 0 where
    # fewer than k samples are wrong.
    fail = np.ones(len(num_correct))
    for i in range(k):
        wrong_left = np.maximum(num_samples - num_correct - i, 0)
        fail *= wrong_left / (num_samples - i)
    return 1.0 - fail


def powers_of_two(largest: int) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`."""
    powers = [1]
    while powers[-1] * 2 <= largest:
        powers.append(powers[-1] * 2)
    return powers


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and its confidence interval."""

    value: float
    low: float | None
    high: float | None
    method: Method
    """`wilson`, `bootstrap` over prompts, or `none` where neither applies; see `estimates`."""


def estimates(
    means: Mapping[str, PromptMeans], *, confidence: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """Return the mean and the interval of each of `means`, which are over the same P prompts.

    A share of prompts that are right or wrong has the Wilson interval; any other mean the
    percentile interval of a bootstrap that resamples prompts. Where all prompts are right, or all
    wrong, a bootstrap would have an interval of length 0, and the Wilson interval of P trials is
    taken. Another mean of prompts with equal values, or of one prompt, has no interval. Means
    without weight are left out. Raises ValueError for a confidence outside of (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence is {confidence}; it must be between 0 and 1")
    found: dict[str, Estimate] = {}
    resampled: dict[str, PromptMeans] = {}
    for name, mean in means.items():
        if math.isnan(mean.value):
            continue
        num_prompts = len(mean.totals)
        if mean.is_share and _is_binary(mean.totals):
            low, high = wilson_interval(float(mean.totals.sum()), num_prompts, confidence)
            found[name] = Estimate(value=mean.value, low=low, high=high, method="wilson")
        elif num_prompts < 2 or _is_constant(mean):
            found[name] = Estimate(value=mean.value, low=None, high=None, method="none")
        else:
            resampled[name] = mean
    for name, (low, high) in bootstrap_intervals(resampled, confidence, seed).items():
        value = resampled[name].value
        found[name] = Estimate(value=value, low=low, high=high, method="bootstrap")
    # In the order of the argument.
    return {name: found[name] for name in means if name in found}


def wilson_interval(num_correct: float, num_trials: int, confidence: float) -> tuple[float, float]:
    """Return the Wilson score interval of a share (Wilson 1927).

    With z the quantile of the normal distribution and p = c / n it is
    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_correct / num_trials
    ratio = z * z / num_trials
    center = share + ratio / 2
    variance = share * (1 - share) / num_trials
    half = z * math.sqrt(variance + ratio / (4 * num_trials))
    scale = 1 + ratio
    # The bounds of 0 and n are exact, up to rounding.
    low = 0.0 if num_correct == 0 else (center - half) / scale
    high = 1.0 if num_correct == num_trials else (center + half) / scale
    return low, high


def bootstrap_intervals(
    means: Mapping[str, PromptMeans],
    confidence: float,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> dict[str, tuple[float, float]]:
    """Return the percentile intervals of `means` over the same P prompts (Efron 1979).

    A resample draws P prompts with replacement; all means use the same draws.
    """
    if not means:
        return {}
    totals = np.stack([mean.totals for mean in means.values()]).astype(np.float64)
    weights = np.stack([mean.weights for mean in means.values()]).astype(np.float64)
    num_prompts = totals.shape[1]
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK_COUNTS // num_prompts)
    parts = []
    for start in range(0, num_resamples, block):
        size = min(block, num_resamples - start)
        # How often a resample has each prompt.
        shares = np.full(num_prompts, 1 / num_prompts)
        counts = generator.multinomial(num_prompts, shares, size=size).astype(np.float64)
        sums = counts @ totals.T
        resampled_weights = counts @ weights.T
        # A resample of prompts without weight has no mean.
        missing = resampled_weights == 0
        parts.append(np.where(missing, np.nan, sums / np.where(missing, 1, resampled_weights)))
    values = np.concatenate(parts)
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail], axis=0)
    bounds = zip(low.tolist(), high.tolist(), strict=True)
    return dict(zip(means, bounds, strict=True))


def _is_constant(mean: PromptMeans) -> bool:
    """Return True if all prompts with a weight have the same value."""
    has_weight = mean.weights > 0
    values = mean.totals[has_weight] / mean.weights[has_weight]
    return bool((values == values[0]).all())


def _is_binary(totals: np.ndarray) -> bool:
    """Return True if all of `totals` [P] are 0 or 1, so that they are outcomes of P trials."""
    return bool(np.isin(totals, (0.0, 1.0)).all())
