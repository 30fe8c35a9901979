"""Freed memory of a process that trains on CPU is used again without page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import sys
import threading

import torch

from nemo_like.policy.host_allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
elif sys.argv[1] == "configured":
    assert not keep_freed_memory()


def allocate() -> None:
    for _ in range(10):
        torch.ones(2**24)  # 64 MiB


def in_both_threads() -> None:
    # The backward pass runs in a thread of its own.
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    allocate()


for _ in range(3):
    in_both_threads()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_both_threads()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_page_faults(mode: str, **variables: str) -> int:
    """Page faults of 20 allocations of 64 MiB, after they were made and freed three times."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    environment.pop("GLIBC_TUNABLES", None)
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, mode],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of glibc")
def test_kept_memory_is_used_again() -> None:
    # Not 0: small allocations between the blocks may use parts of them.
    assert num_page_faults("keep") < num_page_faults("default") / 4


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of glibc")
def test_settings_of_the_user_are_kept() -> None:
    assert num_page_faults("configured", MALLOC_ARENA_MAX="4") >= 0
