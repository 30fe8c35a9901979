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
    return replace(
        rollout,
        batch=rollout.batch.select_indices(rows),
        samples=[rollout.samples[row] for row in rows.tolist()],
        components={name: values[rows] for name, values in rollout.components.items()},
        completions=rollout.completions.take(rows),
    )


def concat_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate the rows of rollouts; each prompt of the result has its own `group`.

    Raises ValueError for no parts.
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
    for part in parts:
        samples += part.samples
    components = {}
    for name in parts[0].components:
        components[name] = np.concatenate([part.components[name] for part in parts])
    return replace(
        parts[0],
        batch=BatchedDataDict.from_batches(batches),
        samples=samples,
        components=components,
        completions=Completions.concat([part.completions for part in parts]),
    )
