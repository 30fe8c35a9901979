"""Ranks as threads of this process with gloo between them: for functions of a process group that
need no process each.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

ResultT = TypeVar("ResultT")


def run_thread_ranks(size: int, function: Callable[[dist.ProcessGroup], ResultT]) -> list[ResultT]:
    """`function(group)` of every rank of a group of `size`, in rank order."""
    store = HashStore()

    def run(rank: int) -> ResultT:
        group = dist.ProcessGroup(PrefixStore("group", store), rank, size)
        backend = dist.ProcessGroupGloo(
            PrefixStore("gloo", store), rank, size, timedelta(seconds=120)
        )
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return function(group)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        return [future.result(timeout=180) for future in futures]
