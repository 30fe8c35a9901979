"""The worker groups of a run, and when policy and generator are on their devices."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.environments.reward_worker import RewardEnvironment
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.training.rollout_workers import RolloutWorkers
from nemo_like.training.workers import GpuSharing, RunWorkers

NO_POLICY = cast(Policy, None)
NO_REWARDS = cast(RewardEnvironment, None)


class ResidentWorker:
    """Records the calls that move it."""

    def __init__(self, context: Any) -> None:
        self.calls: list[str] = []

    def onload(self) -> None:
        self.calls.append("onload")

    def offload(self, discards_weights: bool = False) -> None:
        self.calls.append("offload")

    def recorded(self) -> list[str]:
        return self.calls


@pytest.mark.parametrize(("offloads", "expected"), [(True, ["onload", "offload"]), (False, [])])
def test_a_generator_is_moved_only_if_the_run_offloads(offloads: bool, expected: list[str]) -> None:
    group = LocalGroup(ResidentWorker, {}, local_context())
    workers = RunWorkers(
        policy=NO_POLICY,
        rollout_workers=RolloutWorkers(Generator(lambda index: group), NO_REWARDS),
        sharing=GpuSharing(offloads),
    )
    with workers.generator_onloaded():
        (calls,) = group.run_all_workers("recorded")
        assert calls == expected[:1]
    assert group.run_all_workers("recorded") == [expected]
    # For the update of a restarted replica during a rollout.
    with workers.generator_offloaded():
        assert group.run_all_workers("recorded") == [[*expected, *expected[1:]]]
    assert group.run_all_workers("recorded") == [[*expected, *reversed(expected)]]


def test_a_run_without_generation_has_no_rollout_workers() -> None:
    workers = RunWorkers(policy=NO_POLICY, rollout_workers=None)
    with pytest.raises(RuntimeError, match="without a generator and reward workers"):
        _ = workers.rollout


@pytest.mark.parametrize("worker_class", [PolicyWorker, HFGenerationWorker])
def test_colocated_workers_can_be_moved(worker_class: type) -> None:
    """`start_workers` calls these by name, and only on GPUs."""
    for method in (PolicyWorker.offload, PolicyWorker.onload):
        assert callable(getattr(worker_class, method.__name__))
