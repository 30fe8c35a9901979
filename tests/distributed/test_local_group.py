from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest

from nemo_like.distributed import process_groups
from nemo_like.distributed.errors import WorkerError, WorkerFailure
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import WorkerContext, WorkerGroup
from nemo_like.parallel_layout import ParallelLayout


class Worker:
    def __init__(self, context: WorkerContext, *, joins: bool = False, fails: bool = False) -> None:
        self.context = context
        if fails:
            raise KeyError("no such weight")
        if joins:
            process_groups.init_process_group(context)

    def add(self, array: np.ndarray, offset: int) -> np.ndarray:
        return array + offset

    def same(self, value: object) -> object:
        return value

    def fail(self) -> None:
        raise MemoryError("too big")


def open_group(**kwargs: bool) -> WorkerGroup:
    return LocalGroup(Worker, kwargs, local_context(num_threads=1), name="policy")


def test_it_has_the_calls_of_a_group_with_one_dp_rank() -> None:
    group = open_group()
    assert (group.world_size, group.parallel_layout) == (1, ParallelLayout())
    assert group.run_all_workers("add", np.array([1, 2]), offset=3)[0].tolist() == [4, 5]
    assert group.run_all_workers_sharded_data("add", [np.array([1])], offset=1)[0].tolist() == [2]
    with pytest.raises(
        ValueError, match="argument 0 of add has 2 items; the policy group has dp 1"
    ):
        group.run_all_workers_sharded_data("add", [1, 2], offset=1)


def test_handles_hold_the_values_themselves() -> None:
    group, value = open_group(), np.arange(3)
    handle = group.put(value)
    [passed_on] = group.submit_all("same", handle)
    group.wait([passed_on])
    assert group.get([handle, passed_on]) == [value, value]
    assert group.run_all_workers_sharded_data("same", [passed_on])[0] is value


def test_exceptions_come_as_those_of_a_worker() -> None:
    with pytest.raises(
        WorkerFailure, match="worker 0 of the policy group failed in `__init__`: KeyError"
    ):
        open_group(fails=True)
    with pytest.raises(
        WorkerError, match=r"`fail`: MemoryError: too big\n.*policy.train_micro_batch_size"
    ) as caught:
        open_group().run_all_workers("fail")
    assert isinstance(caught.value.cause, MemoryError)
    assert "in fail" in caught.value.traceback_text


def test_shutdown_leaves_the_process_group_that_its_own_worker_joined() -> None:
    policy, generation = open_group(joins=True), open_group()
    generation.shutdown()
    assert process_groups.is_joined()
    policy.shutdown()
    policy.shutdown()
    assert not process_groups.is_joined()
    with pytest.raises(RuntimeError, match="the policy group was shut down"):
        policy.run_all_workers("fail")


class Cyclic:
    """Refers to itself, as a model whose forward was replaced."""

    def __init__(self, context: WorkerContext) -> None:
        self.forward = self.reference

    def reference(self) -> weakref.ref[Cyclic]:
        return weakref.ref(self)

    def close(self) -> None:
        """Nothing to release before the memory."""


def test_a_worker_with_a_gpu_is_freed_at_once() -> None:
    group = LocalGroup(Cyclic, {}, local_context(device="cuda:0"))
    (reference,) = group.run_all_workers("forward")
    assert reference() is not None
    group.shutdown()
    assert reference() is None


def test_the_context_names_this_process_alone() -> None:
    context = local_context(device="cuda:0", collective_timeout_s=5)
    assert (context.rank, context.world_size, context.device) == (0, 1, "cuda:0")
    assert context.init_method == "memory://"
    assert context.num_threads == len(os.sched_getaffinity(0))


def test_a_call_that_hangs_ends_the_process_with_a_message() -> None:
    script = """
        import time
        from nemo_like.distributed import activity
        from nemo_like.distributed.local_group import LocalGroup, local_context

        class Worker:
            def __init__(self, context): pass
            def work(self):
                for index in range(20):
                    activity.note(f"sample {index}")
                    time.sleep(0.2)
            def hang(self):
                time.sleep(1000)

        group = LocalGroup(Worker, {}, local_context(), name="reward", progress_timeout_s=3.0)
        group.run_all_workers("work")
        time.sleep(3.5)
        print("slow work and no work are no hang", flush=True)
        group.run_all_workers("hang")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (1, "slow work and no work are no hang\n")
    assert "worker 0 of the reward group" in done.stderr
    assert "hangs in `hang`: no progress for " in done.stderr
    assert "last activity: hang" in done.stderr
    assert "in hang" in done.stderr
