"""Rollouts: a group of scored completions per prompt, and the training rows built of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.environments.reward import RewardProblem, RewardSample
from nemo_like.generation.requests import Completions
from nemo_like.metrics import Max, Mean, Metrics, Min, Sum
from nemo_like.rollout.conversation_metrics import conversation_metrics
from nemo_like.rollout.conversations import ConversationRow, conversation_record, row_segments
from nemo_like.rollout.prompt import Prompt
from nemo_like.rollout.reward_metrics import reward_metrics
from nemo_like.rollout.reward_problems import problem_metrics, reward_mask


@dataclass(frozen=True)
class Rollout:
    """Scored completions: P prompts x G completions = B rows, prompt-major.

    `batch` columns: `input_ids`, `token_mask`, `generation_logprobs` (Jagged over prompt +
    completion, or over prompt, turns and observations of a conversation), `length`, `reward`,
    `group`, `row_mask`, `reward_mask` ([B]). A row without a reward (`reward_mask` False) is not
    trained.
    """

    batch: BatchedDataDict
    samples: list[RewardSample]
    components: dict[str, np.ndarray]
    """The named parts of the reward, float [B] each."""
    completions: Completions
    """The tokens of the model only: in a conversation all its turns, concatenated."""
    conversations: Sequence[ConversationRow] | None = None
    """B conversations, in rollouts of several turns."""
    reward_problems: Sequence[RewardProblem | None] = ()
    """Of each row why a reward function failed; empty if none did."""

    def metrics(self) -> Metrics:
        """Return metrics of rewards, lengths, and completions that reached the length limit."""
        lengths = self.completions.token_ids.lengths
        reasons = np.array(self.completions.finish_reasons)
        is_stopped = reasons == "stop"
        # Without the completions that reached the limit, whose length is that of the limit.
        stopped_lengths = lengths[is_stopped]
        prompt_lengths = self.batch["length"] - lengths
        if self.conversations is not None:
            prompt_lengths = np.array([len(each.segments[0]) for each in self.conversations])
        num_rows = len(lengths)
        num_tokens = float(lengths.sum())
        num_prompt_tokens = float(prompt_lengths.sum())
        num_stopped_tokens = float(stopped_lengths.sum())
        num_truncated = float(num_rows - len(stopped_lengths))
        p90 = float(np.quantile(lengths, 0.9))
        mask = self.batch["reward_mask"]
        metrics = problem_metrics(self.reward_problems, mask)
        if mask.any():
            metrics |= reward_metrics(
                self.batch["reward"][mask],
                self.batch["group"][mask],
                {name: values[mask] for name, values in self.components.items()},
            )
        metrics |= {
            "generation/completion_length_mean": Mean(num_tokens, num_rows),
            "generation/completion_length_max": Max(float(lengths.max())),
            "generation/completion_length_min": Min(float(lengths.min())),
            "generation/completion_length_p90": Max(p90),
            "generation/completion_length_stopped_mean": Mean(
                num_stopped_tokens, len(stopped_lengths)
            ),
            "generation/truncated_share": Mean(num_truncated, num_rows),
            "generation/prompt_length_mean": Mean(num_prompt_tokens, num_rows),
            "generation/num_tokens": Sum(num_tokens),
        }
        if self.conversations is not None:
            metrics |= conversation_metrics(self.conversations)
        return metrics

    def check_versions(self, oldest: int, newest: int) -> None:
        """Raise RuntimeError if a token was sampled with weights outside of these versions.

        Training on such tokens would be off-policy by more than the run allows, without an error.
        """
        low, high = self.completions.versions
        if low < oldest or high > newest:
            allowed = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
            raise RuntimeError(
                f"the completions were sampled with weights of versions {low} to {high}, but step"
                f" {newest} needs version {allowed}; the weights were not synchronized"
            )

    def version_gaps(self, version: int) -> Jagged:
        """Return `version` minus the weight version of each completion token, float32.

        Over the tokens of the rows; 0 on prompts. Raises ValueError for weights newer than
        `version`.
        """
        gaps = np.zeros(len(self.batch["input_ids"].values), dtype=np.float32)
        is_completion = self.batch["token_mask"].values.astype(bool)
        gaps[is_completion] = version - self.completions.weight_versions.values
        if gaps.min(initial=0.0) < 0:
            raise ValueError(
                f"version_gap has the value {gaps.min():g}; it must be at least 0: a token cannot"
                " be sampled with newer weights than the weights that train on it"
            )
        return Jagged(gaps, self.batch["input_ids"].offsets)

    def records(self, advantages: np.ndarray | None = None) -> list[dict[str, Any]]:
        """Return one JSON object per row, for `rollouts/step_<N>.jsonl`. `advantages` is [B]."""
        lengths = self.completions.token_ids.lengths
        groups = self.batch["group"]
        rewards = self.batch["reward"]
        records = []
        for i, sample in enumerate(self.samples):
            # NumPy scalars are not JSON.
            record: dict[str, Any] = {
                "group": int(groups[i]),
                "prompt": sample.prompt,
                "completion": sample.completion,
                "answer": sample.answer,
                "reward": float(rewards[i]),
            }
            for name, values in self.components.items():
                record[f"reward_{name}"] = float(values[i])
            problem = self.reward_problems[i] if self.reward_problems else None
            if problem is not None:
                record["error"] = str(problem)
                record["dropped"] = not self.batch["reward_mask"][i]
            if advantages is not None:
                record["advantage"] = float(advantages[i])
            record["completion_tokens"] = int(lengths[i])
            record["finish_reason"] = self.completions.finish_reasons[i]
            versions = self.completions.weight_versions[i]
            record["weight_versions"] = np.unique(versions).tolist()
            if self.conversations is not None:
                record |= conversation_record(self.conversations[i])
            records.append(record)
        return records


def row_seeds(seed: int, step: int, num_rows: int, refill: int = 0) -> np.ndarray:
    """Return the seed of each row's sampling stream, uint64 [num_rows].

    It depends on the run's seed, the step and the number of its refill only, so a resumed run
    samples the same completions.
    """
    entropy = (seed, step, refill) if refill else (seed, step)
    sequence = np.random.SeedSequence(entropy)
    return sequence.generate_state(num_rows, np.uint64)


def build_rollout(
    prompts: Sequence[Prompt],
    group_size: int,
    completions: Completions,
    samples: list[RewardSample],
    rewards: np.ndarray,
    components: dict[str, np.ndarray],
    conversations: Sequence[ConversationRow] | None = None,
    problems: Sequence[RewardProblem | None] = (),
    *,
    drops_problems: bool = False,
) -> Rollout:
    """Build the training rows of B scored completions.

    `prompts` has one entry per completion, prompt-major; `rewards` and each of the `components` are
    float32 [B]. With `conversations` the rows are theirs, and `completions` has their turns of the
    model. `problems` has B entries, or none. With `drops_problems` rows with one are not trained.
    """
    if conversations is None:
        pairs = zip(prompts, completions.token_ids, strict=True)
        segments = [[prompt.token_ids, token_ids] for prompt, token_ids in pairs]
    else:
        segments = row_segments(conversations)
    batch = _training_rows(segments, completions)
    batch["reward"] = rewards
    prompt_indices = np.arange(len(prompts) // group_size, dtype=np.int64)
    batch["group"] = np.repeat(prompt_indices, group_size)
    mask = reward_mask(problems or [None] * len(prompts), drops=drops_problems)
    batch["reward_mask"] = mask
    batch["row_mask"] = batch["row_mask"] & mask
    return Rollout(batch, samples, components, completions, conversations, problems)


def _training_rows(
    segments: Sequence[Sequence[np.ndarray]], completions: Completions
) -> BatchedDataDict:
    """Concatenate the segments of each of B rows, int32 [L] each.

    They alternate between given tokens (the prompt, observations) and turns of the model, which are
    the rows of `completions`. Only the model's tokens are trained and have the log-probs of the
    sampler. Token columns are [T] over the tokens of all rows, row columns [B].
    """
    rows = []
    masks = []
    for parts in segments:
        rows.append(np.concatenate(parts))
        is_model = (np.arange(len(parts)) % 2).astype(np.uint8)
        masks.append(np.repeat(is_model, [len(segment) for segment in parts]))
    input_ids = Jagged.from_rows(rows, np.int32)
    token_mask = Jagged.from_rows(masks, np.uint8)
    logprobs = np.zeros(len(input_ids.values), dtype=np.float32)
    # Both sides are in row order, so the completions' log-probs fit the selected positions.
    logprobs[token_mask.values.astype(bool)] = completions.logprobs.values
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=token_mask,
        generation_logprobs=Jagged(logprobs, input_ids.offsets),
        length=input_ids.lengths,
        row_mask=np.ones(len(rows), dtype=bool),
    )
