from __future__ import annotations

import multiprocessing
import time

import pytest

from nemo_like.generation import vllm_engine
from nemo_like.generation.vllm_engine import ChildProcesses


@pytest.mark.parametrize("owns_process", [True, False])
def test_a_worker_ends_before_an_exception_because_of_a_lost_child(
    monkeypatch: pytest.MonkeyPatch, owns_process: bool
) -> None:
    """The driver restarts a worker whose process ended; an exception would end the run."""
    reasons = []

    def end_worker(reason: str) -> None:
        time.sleep(0.2)
        reasons.append(reason)

    monkeypatch.setattr(vllm_engine, "end_worker", end_worker)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    children = ChildProcesses([child], owns_process=owns_process)
    with pytest.raises(RuntimeError, match=r"of vLLM \(pid \d+\) ended"), children.explaining():
        child.kill()
        raise ConnectionError("closed by the other side")
    assert len(reasons) == owns_process


def test_other_exceptions_are_raised_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "CHILD_END_S", 0.01)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    children = ChildProcesses([child], owns_process=False)
    with pytest.raises(FloatingPointError), children.explaining():
        raise FloatingPointError("the logits are not finite")
    child.kill()
    child.join()
