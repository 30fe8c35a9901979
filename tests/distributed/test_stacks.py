"""Stacks of processes: their innermost call in three formats, and the last collective."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_like.distributed.stacks import innermost, is_in_collective, last_collective, stack_of

PY_SPY = """Process 7: ray::WorkerActor.call
Thread 9 (idle): "Thread-1"
    wait (threading.py:327)
Thread 7 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3077)
    Worker.sum_along (workers.py:29)
"""
FAULTHANDLER = """Thread 0x00007f (most recent call first):
  File "/lib/threading.py", line 327 in wait

Current thread 0x00007e (most recent call first):
  File "/torch/distributed/distributed_c10d.py", line 3077 in all_reduce
  File "/workers.py", line 29 in sum_along
"""


def test_the_innermost_call_of_the_main_thread_is_found_in_each_format() -> None:
    for text in (PY_SPY, FAULTHANDLER):
        assert innermost(text) == "all_reduce (distributed_c10d.py:3077)"
        assert is_in_collective(text)
    own = "".join(traceback.format_stack(sys._getframe()))
    assert innermost(own).startswith("test_the_innermost_call_of_the_main_thread_is_found")
    assert "(test_stacks.py:" in innermost(own) and not is_in_collective(own)
    assert innermost("no answer in 10 s") == ""


def test_a_process_that_is_gone_has_no_stack(tmp_path: Path) -> None:
    assert stack_of(2**22 + 1, str(tmp_path / "worker.err")) == ""


def test_the_last_collective_has_its_name_shape_and_number(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2, 5), 0)
        text = last_collective()
    finally:
        dist.destroy_process_group()
    assert text.startswith("gloo:broadcast of [[2, 5]] (collective 2 of the group ")
