"""Rows of rollouts: selecting some, and concatenating several rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.generation.requests import Completions
from nemo_like.rollout.rollout import Rollout


def select_rows(rollout: Rollout, rows: np.ndarray) -> Rollout:
    """Return the given rows (int64 [n]) of a rollout in the given order; `group` is unchanged."""
    conversations = None
    if rollout.conversations is not None:
        conversations = [rollout.conversations[row] for row in rows.tolist()]
    problems = rollout.reward_problems
    if problems:
        problems = [problems[row] for row in rows.tolist()]
    return replace(
        rollout,
        conversations=conversations,
        reward_problems=problems,
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
        problems += part.reward_problems or [None] * part.batch.size
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
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(part.components)
    components = {}
    for name in names:
        columns = []
        for part in parts:
            missing = np.zeros(part.batch.size, dtype=np.float32)
            columns.append(part.components.get(name, missing))
        components[name] = np.concatenate(columns)
    return components
