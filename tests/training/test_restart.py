"""Which failures of a run are followed by a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.schema import ClusterConfig, RestartConfig
from nemo_like.distributed.errors import ClusterError, WorkerDied, WorkerError, WorkerHung
from nemo_like.training.restart import RestartPolicy, is_lost_worker, last_step


def died(message: str = "killed") -> WorkerDied:
    return WorkerDied(message, group="policy", rank=1, method="train")


def raised(cause: Exception) -> WorkerError:
    return WorkerError(group="policy", rank=0, method="train", cause=cause, traceback_text="")


def policy_of(now: list[float], **options: object) -> RestartPolicy:
    restart = RestartConfig(**options)  # type: ignore[arg-type]
    return RestartPolicy(ClusterConfig(num_nodes=4, restart=restart), clock=lambda: now[0])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (died(), True),
        (
            WorkerHung(
                group="policy",
                rank=0,
                method="train",
                pid=1,
                node="n",
                silent_s=1.0,
                activity="",
                state="",
            ),
            True,
        ),
        (raised(RuntimeError("[gloo/transport] Connection closed by peer")), True),
        (raised(RuntimeError("shapes differ")), False),
        (raised(MemoryError()), False),
        (ValueError("wrong"), False),
    ],
)
def test_only_lost_processes_and_connections_are_followed_by_a_restart(
    error: Exception, expected: bool
) -> None:
    assert is_lost_worker(error) is expected
    found = policy_of([0.0]).next_start(error, step=3, has_new_steps=True, num_nodes=4)
    assert (found is not None) is expected


def test_a_failure_that_repeats_is_final() -> None:
    policy = policy_of([0.0], backoff_s=2.0)
    assert policy.next_start(died(), step=0, has_new_steps=False, num_nodes=4) is None
    policy = policy_of([0.0], backoff_s=2.0)
    first = policy.next_start(died(), step=5, has_new_steps=True, num_nodes=4)
    assert first is not None and (first.delay_s, first.num_nodes, first.number) == (2.0, 4, 1)
    assert policy.next_start(died(), step=5, has_new_steps=True, num_nodes=4) is None


@given(
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=30),
    st.integers(0, 4),
    st.floats(1.0, 100.0),
)
def test_no_window_has_more_restarts_than_the_limit(
    gaps: list[float], limit: int, window_s: float
) -> None:
    now = [0.0]
    policy = policy_of(now, max_restarts=limit, window_s=window_s, backoff_s=1.0)
    restarts: list[float] = []
    for step, gap in enumerate(gaps):
        now[0] += gap
        found = policy.next_start(died(), step=step, has_new_steps=True, num_nodes=4)
        recent = [before for before in restarts if now[0] - before < window_s]
        assert (found is not None) == (len(recent) < limit)
        if found is not None:
            assert found.delay_s == 2.0 ** len(recent)
            restarts.append(now[0])


def test_a_restart_uses_fewer_nodes_only_down_to_the_minimum() -> None:
    missing = ClusterError("two nodes")
    missing.num_nodes = 2
    first_start = policy_of([0.0], min_nodes=2)
    assert first_start.next_start(missing, step=0, has_new_steps=False, num_nodes=4) is None
    for min_nodes, expected in ((1, 2), (2, 2), (3, None), (None, None)):
        policy = policy_of([0.0], min_nodes=min_nodes)
        assert policy.next_start(died(), step=3, has_new_steps=True, num_nodes=4) is not None
        policy.next_start(missing, step=3, has_new_steps=False, num_nodes=4)
        found = policy.next_start(missing, step=3, has_new_steps=False, num_nodes=4)
        assert (None if found is None else found.num_nodes) == expected


def test_the_last_complete_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == (0, 0.0)
    assert last_step(Path("/dev/zero")) == (0, 0.0), "only its end is read"
    path.write_text('{"step": 1, "unix_time_s": 5.5}\n{"step": 2, "unix_time_s": 6.0}\n{"ste')
    assert last_step(path) == (2, 6.0)
