"""The number of this DataLoader worker, its share of the groups, and states that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import get_worker_info

from nemo_like.integer_math import ceil_div


def worker_number() -> tuple[int, int]:
    """Return (number of this DataLoader worker, number of workers), (0, 1) without workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def share_of_worker(num_groups: int, worker: int, num_workers: int) -> int:
    """Return how many of the first `num_groups` groups are those of `worker`.

    A DataLoader takes the groups of its workers in turns.
    """
    return ceil_div(max(num_groups - worker, 0), num_workers)


def worker_state() -> dict[str, Any]:
    """Return the part of a state that identifies this worker, JSON values."""
    worker, num_workers = worker_number()
    return {"worker": worker, "num_workers": num_workers}


def checked_state(state: Any, name: str) -> dict[str, Any]:
    """Return a copy of a state of `worker_state` with the further key `name`.

    Raises ValueError if it is something else.
    """
    expected = ("worker", "num_workers", name)
    if not isinstance(state, Mapping) or not all(key in state for key in expected):
        raise ValueError(
            f"the state must be a mapping with {', '.join(expected)}; give what `state_dict` of"
            " this dataset returned"
        )
    return dict(state)


def check_worker_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless `state` is that of this worker of as many workers."""
    worker, num_workers = worker_number()
    if (state["worker"], state["num_workers"]) != (worker, num_workers):
        raise ValueError(
            f"the state is that of DataLoader worker {state['worker']} of {state['num_workers']},"
            f" this is {worker} of {num_workers}; use the same num_workers, or resume with"
            " skip_batches, which accepts any"
        )


def unused_state(loaded: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state that was loaded and not used yet. Raises ValueError without one."""
    if loaded is None:
        raise ValueError(
            "the dataset was not iterated in this process, so it has no position: DataLoader"
            " workers have their own; use torchdata's StatefulDataLoader, or resume with"
            " skip_batches(number of optimizer steps)"
        )
    return dict(loaded)
