"""Prompts in, scored rows out: sample a group of completions per prompt, score them, and lay them
out as training rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.environments.reward import RewardEnvironment, RewardSample
from nemo_like.generation.generator import Completions, Generator, SamplingParams
from nemo_like.metrics import Max, Mean, Metrics, Min, Sum, Timers
from nemo_like.rollout.prompt import Prompt
from nemo_like.rollout.reward_metrics import reward_metrics


@dataclass(frozen=True)
class Rollout:
    """P prompts x G completions = B rows, prompt-major.

    `batch` columns: `input_ids`, `token_mask`, `generation_logprobs` (Jagged over prompt +
    completion), `length`, `reward`, `group`, `row_mask` ([B]).
    """

    batch: BatchedDataDict
    samples: list[RewardSample]
    components: dict[str, np.ndarray]
    completions: Completions

    def metrics(self) -> Metrics:
        """Rewards, completion lengths and how completions ended."""
        lengths = self.completions.token_ids.lengths
        stopped = np.array([reason == "stop" for reason in self.completions.finish_reasons])
        prompt_lengths = self.batch["length"] - lengths
        metrics: Metrics = reward_metrics(
            self.batch["reward"], self.batch["group"], self.components
        )
        metrics |= {
            "generation/completion_length_mean": Mean(float(lengths.sum()), len(lengths)),
            "generation/completion_length_max": Max(float(lengths.max())),
            "generation/completion_length_min": Min(float(lengths.min())),
            "generation/completion_length_p90": Max(float(np.quantile(lengths, 0.9))),
            "generation/completion_length_stopped_mean": Mean(
                float(lengths[stopped].sum()), int(stopped.sum())
            ),
            "generation/truncated_share": Mean(float((~stopped).sum()), len(stopped)),
            "generation/prompt_length_mean": Mean(float(prompt_lengths.sum()), len(lengths)),
            "generation/num_tokens": Sum(float(lengths.sum())),
        }
        return metrics

    def records(self, advantages: np.ndarray | None = None) -> list[dict[str, Any]]:
        """One JSON object per row, for `rollouts/step_<N>.jsonl`."""
        rewards, groups, lengths = (
            self.batch["reward"],
            self.batch["group"],
            self.completions.token_ids.lengths,
        )
        return [
            {
                "group": int(groups[i]),
                "prompt": sample.prompt,
                "completion": sample.completion,
                "answer": sample.answer,
                "reward": float(rewards[i]),
                **{f"reward_{name}": float(values[i]) for name, values in self.components.items()},
                **({} if advantages is None else {"advantage": float(advantages[i])}),
                "completion_tokens": int(lengths[i]),
                "finish_reason": self.completions.finish_reasons[i],
                "weight_version": self.completions.weight_version,
            }
            for i, sample in enumerate(self.samples)
        ]


def row_seeds(seed: int, step: int, num_rows: int) -> np.ndarray:
    """uint64 [num_rows]: the sampling stream of each row, a function of the run's seed and the
    step, so resume is exact.
    """
    return np.random.SeedSequence((seed, step)).generate_state(num_rows, np.uint64)


def collect(
    prompts: Sequence[Prompt],
    generator: Generator,
    rewards: RewardEnvironment,
    tokenizer: PreTrainedTokenizerBase,
    *,
    group_size: int,
    sampling: SamplingParams,
    max_total_length: int,
    seeds: np.ndarray,
    weight_version: int,
    timers: Timers,
) -> Rollout:
    """Sample `group_size` completions per prompt (`seeds` uint64 [P x G]), score them and build
    rows.

    Raises RuntimeError if the generator's weights are not of `weight_version`.
    """
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    prompt_ids = Jagged.from_rows([prompt.token_ids for prompt in repeated], np.int32)
    with timers("generation"):
        completions = generator.generate(
            prompt_ids, seeds, sampling, max_total_length=max_total_length
        )
    if completions.weight_version != weight_version:
        raise RuntimeError(
            f"the completions were sampled with weights of version {completions.weight_version},"
            f" but step"
            f" {weight_version} needs version {weight_version}; the weights were not pushed to the"
            f" generator"
        )
    texts = tokenizer.batch_decode(
        [ids.tolist() for ids in completions.token_ids], skip_special_tokens=True
    )
    samples = [
        RewardSample(prompt=prompt.text, completion=text, answer=prompt.answer, row=prompt.row)
        for prompt, text in zip(repeated, texts, strict=True)
    ]
    with timers("reward"):
        reward, components = rewards.score(samples)
    batch = _training_rows(prompt_ids, completions)
    batch["reward"] = reward
    batch["group"] = np.repeat(np.arange(len(prompts), dtype=np.int64), group_size)
    return Rollout(batch, samples, components, completions)


def _training_rows(prompt_ids: Jagged, completions: Completions) -> BatchedDataDict:
    """Prompt and completion end to end; only completion tokens are trained and carry the sampler's
    log-probs.
    """
    rows = range(len(prompt_ids))
    prompts = prompt_ids.lengths
    input_ids = Jagged.from_rows(
        [np.concatenate([prompt_ids[i], completions.token_ids[i]]) for i in rows], np.int32
    )
    mask = np.ones(len(input_ids.values), dtype=np.uint8)
    logprobs = np.zeros(len(input_ids.values), dtype=np.float32)
    position_in_row = np.arange(len(mask)) - np.repeat(input_ids.offsets[:-1], input_ids.lengths)
    is_completion = position_in_row >= np.repeat(prompts, input_ids.lengths)
    mask[~is_completion] = 0
    logprobs[is_completion] = completions.logprobs.values
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=Jagged(mask, input_ids.offsets),
        generation_logprobs=Jagged(logprobs, input_ids.offsets),
        length=input_ids.lengths,
        row_mask=np.ones(len(input_ids), dtype=bool),
    )
