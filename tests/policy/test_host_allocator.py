"""Freed memory of a process that trains on CPU is used again without page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os
import resource
import sys
import threading

import torch

from nemo_like.policy.device import keep_freed_memory

def allocate() -> None:
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB


def in_both_threads() -> None:
    # The backward pass runs in a thread of its own.
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    allocate()


def measure(mode: str) -> None:
    if mode == "keep":
        assert keep_freed_memory()
    elif mode == "configured":
        os.environ["MALLOC_ARENA_MAX"] = "4"
        assert not keep_freed_memory()
    # Small allocations between the blocks take parts of free blocks, and the heap grows for some
    # rounds. Kept memory gives rounds without new pages; returned memory gives none.
    rounds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        in_both_threads()
        rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(mode, min(rounds), flush=True)


# The settings cannot be undone. Before the first operation there are no threads of OpenMP.
for mode in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            measure(mode)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, mode
"""


def num_page_faults(*modes: str) -> dict[str, int]:
    """Page faults of 8 allocations of 64 MiB in the round that has the fewest."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    environment.pop("GLIBC_TUNABLES", None)
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *modes],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = map(str.split, result.stdout.splitlines())
    return {mode: int(count) for mode, count in lines}


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of glibc")
def test_kept_memory_is_used_again_and_settings_of_the_user_are_kept() -> None:
    found = num_page_faults("keep", "default", "configured")
    assert found["keep"] < found["default"] / 4
    assert found["keep"] < found["configured"] / 4
