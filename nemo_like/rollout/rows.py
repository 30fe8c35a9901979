"""Rollouts: a group of scored completions per prompt, and the training rows built of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.environments.reward import RewardProblem, RewardSample
from nemo_like.generation.requests import Completions
from nemo_like.rollout.conversations import ConversationRow, Prompt


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
    """Of each row why a reward function failed, None if none did."""

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
            problem = self.reward_problems[i]
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
                conversation = self.conversations[i]
                record |= {
                    "messages": conversation.messages,
                    "num_turns": conversation.num_turns,
                    "ended_by": conversation.ended_by,
                    "environment_metrics": conversation.metrics,
                }
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
        segments = [conversation.segments for conversation in conversations]
    batch = _training_rows(segments, completions)
    batch["reward"] = rewards
    prompt_indices = np.arange(len(prompts) // group_size, dtype=np.int64)
    batch["group"] = np.repeat(prompt_indices, group_size)
    problems = problems or [None] * len(prompts)
    is_rewarded = [problem is None or not drops_problems for problem in problems]
    batch["reward_mask"] = np.array(is_rewarded, dtype=bool)
    batch["row_mask"] = batch["reward_mask"].copy()
    return Rollout(batch, samples, components, completions, conversations, problems)


def select_rows(rollout: Rollout, rows: np.ndarray) -> Rollout:
    """Return the given rows (int64 [n]) of a rollout in the given order; `group` is unchanged."""
    conversations = None
    if rollout.conversations is not None:
        conversations = [rollout.conversations[row] for row in rows.tolist()]
    return replace(
        rollout,
        conversations=conversations,
        reward_problems=[rollout.reward_problems[row] for row in rows.tolist()],
        batch=rollout.batch.select_indices(rows),
        samples=[rollout.samples[row] for row in rows.tolist()],
        components={name: values[rows] for name, values in rollout.components.items()},
        completions=rollout.completions.take(rows),
    )


def concat_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate the rows of rollouts; each prompt of the result has its own `group`.

    A component of the reward that a part lacks is 0 in its rows. Raises ValueError for no parts.
    """
    if not parts:
        raise ValueError("concat_rollouts needs at least one rollout")
    batches = []
    num_groups = 0
    for part in parts:
        groups = part.batch["group"]
        batches.append({**part.batch, "group": groups + num_groups})
        num_groups += int(groups.max(initial=-1)) + 1
    samples = []
    conversations = []
    problems = []
    for part in parts:
        samples += part.samples
        conversations += part.conversations or []
        problems += part.reward_problems
    has_conversations = parts[0].conversations is not None
    return replace(
        parts[0],
        conversations=conversations if has_conversations else None,
        reward_problems=problems,
        batch=BatchedDataDict.from_batches(batches),
        samples=samples,
        components=_concat_components(parts),
        completions=Completions.concat([part.completions for part in parts]),
    )


def _concat_components(parts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return the components of the reward of all rows, float32 [B] each."""
    names = dict.fromkeys(name for part in parts for name in part.components)
    components = {}
    for name in names:
        columns = []
        for part in parts:
            missing = np.zeros(part.batch.size, dtype=np.float32)
            columns.append(part.components.get(name, missing))
        components[name] = np.concatenate(columns)
    return components


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
    )
