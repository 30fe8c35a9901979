"""Rollouts: a group of scored completions per prompt, the training rows built of them, and metrics
of rewards, lengths and conversations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from nemo_like.data.image_rows import with_placeholders
from nemo_like.data.jagged import Jagged
from nemo_like.data.routed_experts import ROUTED_EXPERTS, join_experts
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.environments.reward import BadRewardKind, RewardProblem
from nemo_like.metrics import Max, Mean, Metrics, Min, Sum
from nemo_like.rollout.conversations import ConversationRow

EPISODE = "episode"
"""Column of the rows of programs, int64 [R]: the episode of each row, counted from 0."""
IMAGES = "images"
"""Column of prompts with images: a tuple of `RowImage` for each row; absent without any image."""
_TOLERANCE = 1e-12
"""Rewards whose difference, relative to their size, is smaller count as equal: sums of equal
components in another order differ by rounding errors of float64."""


@dataclass(frozen=True)
class Rollout:
    """Scored completions: P prompts x G completions = B rows, prompt-major.

    `batch` columns: `input_ids`, `token_mask`, `generation_logprobs` (Jagged over prompt +
    completion, or over prompt, turns and observations of a conversation), `length`, `reward`,
    `group`, `row_mask`, `reward_mask` ([B]). A row without a reward (`reward_mask` False) is not
    trained.
    """

    batch: BatchedDataDict
    components: dict[str, np.ndarray]
    """The named parts of the reward, float [B] each; NaN in rows to which one does not apply."""
    conversations: Sequence[ConversationRow]
    """The B rows as they were sampled; their texts are decoded when they are read."""
    reward_problems: Sequence[RewardProblem | None]
    """Why a reward function or the environment failed, per row; None without a failure."""
    num_started: int = 0
    """Episodes of programs that were started, also those that were replaced by another attempt."""

    @property
    def first_rows(self) -> np.ndarray:
        """The first row of each episode, int64 [E]; without programs all rows are episodes."""
        return np.unique(self.episodes, return_index=True)[1]

    @property
    def episodes(self) -> np.ndarray:
        """The episode of each row, int64 [R], counted from 0."""
        if EPISODE not in self.batch:
            return np.arange(len(self.conversations))
        return self.batch[EPISODE]

    @property
    def episode_lengths(self) -> np.ndarray:
        """Tokens of the model that are trained in each episode, int64 [E]."""
        if EPISODE not in self.batch:
            return self.completion_lengths
        lengths = np.bincount(self.batch[EPISODE], weights=self.completion_lengths)
        return lengths.astype(np.int64)

    def turn_rewards(self, row: int) -> np.ndarray:
        """Return the reward of each turn of the episode of a row, float64 [K]; their sum is its
        reward.

        What came when the episode had ended is part of the last turn. An episode without a turn has
        its reward as one.
        """
        conversation = self.conversations[row]
        num_turns = conversation.num_turns
        if conversation.outcome is not None:
            num_turns = conversation.outcome.num_calls
        rewards = np.zeros(max(num_turns, 1))
        rewards[: len(conversation.turn_rewards)] = conversation.turn_rewards
        rewards[-1] += self.batch["reward"][row] - rewards.sum()
        return rewards

    @property
    def completion_lengths(self) -> np.ndarray:
        """Tokens of the model in each row, in a conversation of all its turns: int64 [B]."""
        lengths = [row.num_model_tokens for row in self.conversations]
        return np.array(lengths, dtype=np.int64)

    @property
    def finish_reasons(self) -> np.ndarray:
        """`FinishReason` of the last turn of the model in each row, str [B]."""
        return np.array([row.finish_reason for row in self.conversations], dtype=str)

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and the highest weight version of all tokens; (0, 0) without tokens."""
        turns = [turn for row in self.conversations for turn in row.weight_versions if len(turn)]
        if not turns:
            return 0, 0
        return min(int(turn.min()) for turn in turns), max(int(turn.max()) for turn in turns)

    def check_versions(self, oldest: int, newest: int) -> None:
        """Raise RuntimeError if a token was sampled with weights outside of these versions.

        Training on such tokens would be off-policy by more than the run allows, without an error.
        """
        if not any(len(turn) for row in self.conversations for turn in row.weight_versions):
            # Programs may call no model.
            return
        low, high = self.versions
        if low < oldest or high > newest:
            allowed = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
            raise RuntimeError(
                f"the completions were sampled with weights of versions {low} to {high}, but step"
                f" {newest} needs version {allowed}; the weights were not synchronized"
            )

    def drop_stale(self, oldest: int, newest: int) -> int:
        """Leave rows with a token of weights older than `oldest` out; return their number.

        Raises RuntimeError for tokens of weights newer than `newest`, and if no row is left or no
        older weights are allowed: the weights were not synchronized then.
        """
        is_stale = np.zeros(len(self.conversations), dtype=bool)
        for index, row in enumerate(self.conversations):
            is_stale[index] = any((turn < oldest).any() for turn in row.weight_versions)
        if EPISODE in self.batch:
            episodes = self.batch[EPISODE]
            is_stale = np.isin(episodes, episodes[is_stale])
        if is_stale.all() or oldest == newest:
            self.check_versions(oldest, newest)
        self.check_versions(0, newest)
        for index in np.flatnonzero(is_stale).tolist():
            self.conversations[index].cancel()
        self.batch["reward_mask"] &= ~is_stale
        self.batch["row_mask"] &= ~is_stale
        return int(is_stale[self.first_rows].sum())

    def version_gaps(self, version: int) -> Jagged:
        """Return `version` minus the weight version of each completion token, float32.

        Over the tokens of the rows; 0 on prompts. Raises ValueError for weights newer than
        `version`.
        """
        gaps = np.zeros(len(self.batch["input_ids"].values), dtype=np.float32)
        is_completion = self.batch["token_mask"].values.astype(bool)
        turns = [turn for row in self.conversations for turn in row.trained(row.weight_versions)]
        if turns:
            gaps[is_completion] = version - np.concatenate(turns)
        if gaps.min(initial=0.0) < 0:
            raise ValueError(
                f"version_gap has the value {gaps.min():g}; it must be at least 0: a token cannot"
                " be sampled with newer weights than the weights that train on it"
            )
        return Jagged(gaps, self.batch["input_ids"].offsets)

    def recorded_rows(self, max_rows: int | None) -> np.ndarray:
        """Return the rows of a record of at most `max_rows`, int64 [n]; None: all.

        Above the limit they are groups that are spread evenly over the rollout, at least one.
        """
        num_rows = len(self.conversations)
        if max_rows is None or num_rows <= max_rows:
            return np.arange(num_rows)
        groups, sizes = np.unique(self.batch["group"], return_counts=True)
        num_groups = max(1, max_rows // int(sizes.max()))
        chosen = groups[np.linspace(0, len(groups) - 1, num_groups).astype(np.int64)]
        return np.flatnonzero(np.isin(self.batch["group"], chosen))

    def records(
        self, advantages: np.ndarray | None = None, rows: Sequence[int] | np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Return one JSON object per row, for `rollouts/step_<N>.jsonl`.

        `advantages` is [B]; `rows` int [n] selects rows, None: all.
        """
        groups = self.batch["group"]
        rewards = self.batch["reward"]
        records = []
        for i in range(len(self.conversations)) if rows is None else rows:
            conversation = self.conversations[i]
            sample = conversation.sample()
            # NumPy scalars are not JSON.
            record: dict[str, Any] = {
                "group": int(groups[i]),
                "prompt": sample.prompt,
                "completion": sample.completion,
                "answer": sample.answer,
                "reward": float(rewards[i]),
            }
            for name, values in self.components.items():
                # JSON has no NaN.
                record[f"reward_{name}"] = None if np.isnan(values[i]) else float(values[i])
            problem = self.reward_problems[i]
            if problem is not None:
                record["error"] = str(problem)
            is_dropped = not self.batch["reward_mask"][i]
            if problem is not None or is_dropped:
                record["dropped"] = is_dropped
            if advantages is not None:
                record["advantage"] = float(advantages[i])
            record["completion_tokens"] = conversation.num_model_tokens
            record["finish_reason"] = conversation.finish_reason
            versions = {int(each) for turn in conversation.weight_versions for each in turn}
            record["weight_versions"] = sorted(versions)
            if conversation.outcome is not None:
                if conversation.messages:
                    record["messages"] = with_placeholders(conversation.messages)
                else:
                    record["segments"] = conversation.segment_texts
                calls = conversation.calls or []
                record |= {
                    "calls": list(calls),
                    "trained_calls": conversation.trained(calls),
                    "num_turns": conversation.num_turns,
                    "episode": int(self.batch[EPISODE][i]),
                    "status": conversation.outcome.status.value,
                    "attempts": conversation.outcome.num_attempts,
                    "turn_rewards": self.turn_rewards(i).tolist(),
                }
            elif conversation.messages:
                record |= {
                    "messages": with_placeholders(conversation.messages),
                    "num_turns": conversation.num_turns,
                    "turn_rewards": self.turn_rewards(i).tolist(),
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
    conversations: Sequence[ConversationRow],
    group_size: int,
    rewards: np.ndarray,
    components: dict[str, np.ndarray],
    problems: Sequence[RewardProblem | None] = (),
    dropped_rows: Collection[int] = (),
) -> Rollout:
    """Build the training rows of B scored rows, prompt-major.

    The arrays of the rows become views of the columns, so that each token is in memory once.
    `rewards` and each of the `components` are float64 [B]. `problems` has B entries, or none.
    `dropped_rows` are not trained. An episode of a program becomes all its rows; they are
    consecutive and have its number in the column `episode`.
    """
    num_episodes = len(conversations)
    sizes = [len(each.rows) or 1 for each in conversations]
    episode = np.repeat(np.arange(num_episodes, dtype=np.int64), sizes)
    rows = [row for each in conversations for row in (each.rows or (each,))]
    batch = training_rows(rows)
    batch["reward"] = rewards[episode]
    batch["group"] = episode // group_size
    problems = problems or [None] * num_episodes
    is_kept = np.ones(num_episodes, dtype=bool)
    is_kept[list(dropped_rows)] = False
    batch["reward_mask"] = is_kept[episode]
    batch["row_mask"] = batch["reward_mask"].copy()
    if any(each.rows for each in conversations):
        batch[EPISODE] = episode
        # An episode may have no token to train.
        batch["row_mask"] &= np.array([row.num_model_tokens > 0 for row in rows])
    return Rollout(
        batch,
        {name: values[episode] for name, values in components.items()},
        rows,
        [problems[each] for each in episode.tolist()],
        sum(each.num_started for each in conversations),
    )


def select_rows(rollout: Rollout, rows: np.ndarray) -> Rollout:
    """Return the given rows (int64 [n]) of a rollout in the given order; `group` is unchanged."""
    batch = rollout.batch.select_indices(rows)
    if EPISODE in batch:
        batch[EPISODE] = np.unique(batch[EPISODE], return_inverse=True)[1]
    return replace(
        rollout,
        conversations=[rollout.conversations[row] for row in rows.tolist()],
        reward_problems=[rollout.reward_problems[row] for row in rows.tolist()],
        batch=batch,
        components={name: values[rows] for name, values in rollout.components.items()},
    )


def concat_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate the rows of rollouts, whose values of `group` are different.

    A component of the reward that a part lacks is 0 in its rows. Raises ValueError for no parts.
    """
    if not parts:
        raise ValueError("concat_rollouts needs at least one rollout")
    conversations = []
    problems = []
    episodes = []
    num_episodes = 0
    for part in parts:
        conversations += part.conversations
        problems += part.reward_problems
        if EPISODE in part.batch:
            episodes.append(part.batch[EPISODE] + num_episodes)
            num_episodes += len(part.first_rows)
    batches = [part.batch for part in parts]
    if any(IMAGES in each for each in batches):
        batches = [BatchedDataDict({IMAGES: [()] * each.size, **each}) for each in batches]
    batch = BatchedDataDict.from_batches(batches)
    if episodes:
        batch[EPISODE] = np.concatenate(episodes)
    return replace(
        parts[0],
        conversations=conversations,
        reward_problems=problems,
        num_started=sum(part.num_started for part in parts),
        batch=batch,
        components=_concat_components(parts),
    )


def _concat_components(parts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return the components of the reward of all rows, float64 [B] each."""
    names = dict.fromkeys(name for part in parts for name in part.components)
    components = {}
    for name in names:
        columns = []
        for part in parts:
            missing = np.zeros(part.batch.size)
            columns.append(part.components.get(name, missing))
        components[name] = np.concatenate(columns)
    return components


def training_rows(conversations: Sequence[ConversationRow]) -> BatchedDataDict:
    """Concatenate the segments of each of B rows, int32 [L] each; they become views of the columns.

    They alternate between given tokens (the prompt, observations) and turns of the model. Only the
    model's tokens are trained and have the log-probs of the sampler. Token columns are [T] over the
    tokens of all rows, row columns [B].
    """
    segments = [segment for row in conversations for segment in row.segments]
    input_ids = Jagged.from_lengths(
        Jagged.from_rows(segments, np.int32).values,
        np.array([row.num_tokens for row in conversations], dtype=np.int64),
    )
    is_model = []
    for row in conversations:
        flags = np.arange(len(row.segments)) % 2
        if row.is_trained is not None:
            flags[1::2] = row.is_trained
        is_model.append(flags)
    sizes = np.array([len(segment) for segment in segments], dtype=np.int64)
    # Frees what the rows still refer to, segment by segment.
    del segments
    mask = np.repeat(np.concatenate([[], *is_model]).astype(np.uint8), sizes)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    stop = 0
    for row in conversations:
        for index, segment in enumerate(row.segments):
            start = stop
            stop = start + len(segment)
            row.segments[index] = input_ids.values[start:stop]
            if index % 2:
                logprobs[start:stop] = row.logprobs[index // 2]
                row.logprobs[index // 2] = logprobs[start:stop]
    batch = BatchedDataDict(
        input_ids=input_ids,
        token_mask=Jagged(mask, input_ids.offsets),
        generation_logprobs=Jagged(logprobs, input_ids.offsets),
        length=input_ids.lengths,
    )
    if any(row.prompt.images for row in conversations):
        batch[IMAGES] = [row.prompt.images for row in conversations]
    if all(row.routed_experts for row in conversations):
        batch[ROUTED_EXPERTS] = _routed_experts(conversations)
    return batch


def _routed_experts(conversations: Sequence[ConversationRow]) -> Jagged:
    """Move the experts of the rows, [n, layers, top-k] each, into a column [T, layers, top-k]."""
    rows = []
    for conversation in conversations:
        rows.append(join_experts(conversation.routed_experts, conversation.num_tokens))
        conversation.routed_experts = []
    return Jagged.from_rows(rows, rows[0].dtype)


def rollout_metrics(rollout: Rollout) -> Metrics:
    """Return metrics of rewards, lengths, and completions that reached the length limit."""
    lengths = rollout.episode_lengths
    if EPISODE in rollout.batch:
        # Metrics are those of episodes, whatever the number of their rows.
        rollout = select_rows(rollout, rollout.first_rows)
    is_stopped = rollout.finish_reasons == "stop"
    prompt_lengths = np.array([len(each.segments[0]) for each in rollout.conversations])
    mask = rollout.batch["reward_mask"]
    metrics = problem_metrics(rollout.reward_problems, mask)
    if mask.any():
        metrics |= reward_metrics(
            rollout.batch["reward"][mask],
            rollout.batch["group"][mask],
            {name: values[mask] for name, values in rollout.components.items()},
        )
    metrics |= {
        "generation/completion_length_mean": _mean(lengths),
        "generation/completion_length_max": Max(float(lengths.max())),
        "generation/completion_length_min": Min(float(lengths.min())),
        "generation/completion_length_p90": Max(float(np.quantile(lengths, 0.9))),
        # Without the completions that reached the limit, whose length is the limit.
        "generation/completion_length_stopped_mean": _mean(lengths[is_stopped]),
        "generation/truncated_share": _mean(~is_stopped),
        "generation/prompt_length_mean": _mean(prompt_lengths),
        "generation/num_tokens": Sum(float(lengths.sum())),
    }
    experts = rollout.batch.get(ROUTED_EXPERTS)
    if experts is not None:
        num_bytes = float(experts.values.nbytes)
        metrics["generation/routed_experts_bytes_per_token"] = Mean(num_bytes, len(experts.values))
    if any(each.messages and each.outcome is None for each in rollout.conversations):
        metrics |= conversation_metrics(rollout.conversations)
    return metrics


def reward_metrics(
    rewards: np.ndarray, groups: np.ndarray, components: dict[str, np.ndarray]
) -> Metrics:
    """Return the mean, spread and extremes of the reward, and shares of groups with equal rewards.

    `rewards` is float [B], `groups` int [B], each of the `components` float [B]. A group with equal
    rewards does not train the policy: its advantages are 0. `reward/frac_groups_zero_std` is the
    share of such groups; `reward/frac_groups_all_worst` and `reward/frac_groups_all_best` are the
    shares of groups whose rewards all equal the lowest or the highest reward of the batch, 0 for
    both if all rewards of the batch are equal. `reward/frac_groups_all_zero` is the share of groups
    whose rewards are all 0.
    """
    # Groups may have any numbers; `group_of_row` int64 [B] counts them from 0.
    _, group_of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    num_groups = len(sizes)
    group_sums = np.bincount(group_of_row, weights=rewards)
    means = group_sums / sizes
    deviations = np.abs(rewards - means[group_of_row])
    is_spread = has_spread(np.bincount(group_of_row, weights=deviations) / sizes, means)
    equal_rewards = means[~is_spread]
    best = rewards.max(initial=-np.inf)
    worst = rewards.min(initial=np.inf)
    # In a batch of equal rewards every group would be both best and worst.
    tolerance = _TOLERANCE * max(1.0, float(np.abs(rewards).max(initial=0.0)))
    has_range = bool(best - worst > tolerance)
    is_best = has_range & (equal_rewards >= best - tolerance)
    is_worst = has_range & (equal_rewards <= worst + tolerance)
    is_zero = np.abs(equal_rewards) <= _TOLERANCE
    metrics: Metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/max": Max(float(best)),
        "reward/min": Min(float(worst)),
        "reward/frac_groups_zero_std": _share(~is_spread, num_groups),
        "reward/frac_groups_all_best": _share(is_best, num_groups),
        "reward/frac_groups_all_worst": _share(is_worst, num_groups),
        "reward/frac_groups_all_zero": _share(is_zero, num_groups),
    }
    for name, column in components.items():
        values = column[~np.isnan(column)]
        metrics[f"reward/{name}_mean"] = _mean(values)
        metrics[f"reward/{name}_std"] = _std(values)
    return metrics


def has_spread(deviation: np.ndarray | float, mean: np.ndarray | float) -> np.ndarray:
    """Return True where values with this mean are not all equal, [...].

    `deviation` is their standard deviation or their mean absolute deviation. Values that differ by
    less than 1e-12 of their size, or of 1, count as equal.
    """
    return np.asarray(deviation > _TOLERANCE * np.maximum(1.0, np.abs(mean)))


def problem_metrics(problems: Sequence[RewardProblem | None], mask: np.ndarray) -> Metrics:
    """Return the numbers of failed completions, in all and by kind, and of the rows left out.

    `mask` bool [B] is False for rows that are left out.
    """
    kinds = Counter(problem.kind for problem in problems if problem is not None)
    metrics: Metrics = {
        "reward/num_errors": Sum(float(kinds.total())),
        "reward/num_dropped": Sum(float((~mask).sum())),
    }
    for kind in get_args(BadRewardKind):
        metrics[f"reward/num_errors_{kind}"] = Sum(float(kinds[kind]))
    return metrics


def conversation_metrics(conversations: Sequence[ConversationRow]) -> Metrics:
    """Return turns, observations, time and reasons of the ends of B conversations.

    Metrics of the environment are `environment/<name>`, averaged over the conversations.
    """
    turns = np.array([conversation.num_turns for conversation in conversations])
    # Segments alternate: prompt, turn, observation, turn, ...
    observed = np.array([sum(map(len, each.segments[2::2])) for each in conversations])
    seconds = np.array([conversation.step_s for conversation in conversations])
    reasons = np.array([str(conversation.ended_by) for conversation in conversations])
    metrics: Metrics = {
        "conversation/turns_mean": _mean(turns),
        "conversation/turns_max": Max(float(turns.max(initial=0))),
        "conversation/observation_tokens_mean": _mean(observed),
        "conversation/step_s_mean": _mean(seconds),
        "conversation/step_s_max": Max(float(seconds.max(initial=0.0))),
        "conversation/ended_by_environment_share": _mean(reasons == "done"),
        "conversation/ended_by_turns_share": _mean(reasons == "turns"),
        "conversation/ended_by_tokens_share": _mean(reasons == "tokens"),
        "conversation/ended_by_timeout_share": _mean(reasons == "timeout"),
        "conversation/ended_by_error_share": _mean(reasons == "error"),
    }
    names = {name for conversation in conversations for name in conversation.metrics}
    for name in sorted(names):
        total = sum(conversation.metrics.get(name, 0.0) for conversation in conversations)
        metrics[f"environment/{name}"] = Mean(total, len(conversations))
    return metrics


def _mean(values: np.ndarray) -> Mean:
    """Return the mean of `values` [B]."""
    return Mean(float(values.sum()), len(values))


def _std(values: np.ndarray) -> Mean:
    """Return the sample standard deviation of `values` [B], 0 for one value."""
    return Mean(float(values.std(ddof=1)) if len(values) > 1 else 0.0)


def _share(mask: np.ndarray, num_groups: int) -> Mean:
    """Return the share of groups that are True in `mask` bool [n]."""
    return Mean(float(mask.sum()), num_groups)
