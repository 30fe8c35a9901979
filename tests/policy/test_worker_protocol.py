"""The workers have the methods that drivers call through a Protocol, with the same parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import WorkerContext, call_all, call_sharded, submit_all
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationWorkerProtocol
from nemo_like.policy.worker import PolicyWorker
from nemo_like.weight_sync.channel import WeightSource


def public_methods(protocol: type) -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    ]


@pytest.mark.parametrize(
    ("protocol", "worker"),
    [(WeightSource, PolicyWorker), (GenerationWorkerProtocol, HFGenerationWorker)],
)
def test_a_worker_has_the_methods_of_its_protocol(protocol: type, worker: type) -> None:
    names = public_methods(protocol)
    assert len(names) >= 3
    for name in names:
        expected = inspect.signature(getattr(protocol, name))
        assert inspect.signature(getattr(worker, name)) == expected, name


class Doubler:
    """A worker with one method."""

    def __init__(self, context: WorkerContext) -> None:
        pass

    def double(self, value: int, *, plus: int = 0) -> int:
        return 2 * value + plus


def test_typed_calls_are_calls_by_name() -> None:
    group: Any = LocalGroup(Doubler, {}, local_context())
    assert call_all(group, Doubler.double, 3, plus=1) == [7]
    assert call_sharded(group, Doubler.double, [3], plus=1) == [7]
    assert group.get(submit_all(group, Doubler.double, 3)) == [6]
    group.shutdown()
