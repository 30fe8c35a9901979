"""Loaders of several ranks: in threads, and in the processes of a gloo group (imported by them)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import Coordinator, ProcessGroupCoordinator
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.online import OnlineBatchLoader, OnlineStep
from tests.torch_data.row_datasets import FailingRows, Rows, Stream

Out = TypeVar("Out")


class ThreadCoordinator:
    """A rank in a thread; `gathered` and `barrier` are shared."""

    def __init__(self, rank: int, gathered: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.num_ranks = len(gathered)
        self._gathered = gathered
        self._barrier = barrier

    def all_gather(self, values: Sequence[int]) -> np.ndarray:
        self._gathered[self.rank] = list(values)
        self._barrier.wait(timeout=120)
        result = np.array(self._gathered, dtype=np.int64)
        self._barrier.wait(timeout=120)
        return result


def run_ranks(num_ranks: int, work: Callable[[Coordinator], Out]) -> list[Out]:
    """Run `work` for every rank in a thread of its own; return the results by rank."""
    gathered: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = []
        for rank in range(num_ranks):
            futures.append(pool.submit(work, ThreadCoordinator(rank, gathered, barrier)))
        return [future.result() for future in futures]


class Seen(NamedTuple):
    """What a test compares of a step."""

    step: int
    rows: tuple[tuple[int, ...], ...]
    is_dummy: tuple[bool, ...]
    num_rows: int
    num_trained: int
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each microbatch, one row after the other; of a dummy the empty tuple."""


def seen(step: OnlineStep[list[Any]]) -> Seen:
    tokens = []
    for batch, is_dummy in zip(step.microbatches, step.is_dummy, strict=True):
        rows = () if is_dummy else batch
        tokens.append(tuple(token for row in rows for token in row["input_ids"].tolist()))
    return Seen(step.step, step.rows, step.is_dummy, step.num_rows, step.num_trained, tuple(tokens))


GLOO_SPEC = StreamSpec(
    plan=PlanSpec(layout="padded", max_tokens=24), microbatches_per_step=2, window_rows=4
)


def run_gloo_rank(rank: int, num_ranks: int, meeting: Path) -> dict[str, Any]:
    """Return what this rank had in several cases."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        lengths = [5, 9, 3, 8, 2, 7, 4, 6, 1, 9, 9]
        streams = [Stream([]), Stream([6, 2, 9, 4, 4, 4])]
        return {
            "map": _outcome(Rows(lengths)),
            "workers": _outcome(Rows(lengths), num_workers=1, multiprocessing_context="fork"),
            "empty": _outcome(streams[rank], dummy=list),
            "empty without dummy": _outcome(streams[rank]),
            "empty without join": _outcome(streams[rank], join=False),
            "failing": _outcome(FailingRows(lengths, 4, KeyError), shuffle=False),
            "after a failure": _outcome(Rows(lengths)),
        }
    finally:
        dist.destroy_process_group()


def _outcome(dataset: Any, **options: Any) -> list[Seen] | str:
    """Return the steps, or the text of the error."""
    loader = OnlineBatchLoader(
        dataset, GLOO_SPEC, collate_fn=list, coordinator=ProcessGroupCoordinator(), **options
    )
    try:
        return [seen(step) for step in loader]
    except Exception as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"
