"""What remains of a Ray session when its driver is killed: nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from nemo_like.distributed.activity import process_state
from nemo_like.distributed.ray.session_guard import SessionDirectory, remove_session

ROOT = Path(__file__).parents[3]


def start_python(
    script: str, stderr: TextIO | None = None, **environment: str
) -> subprocess.Popen[str]:
    """A driver in a process group of its own, as a shell starts it."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=kept | environment,
        cwd=ROOT,
        process_group=0,
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")


CLUSTER = """
    import json, os, signal, sys
    from pathlib import Path
    import ray
    from nemo_like.config.schema import ClusterConfig
    from nemo_like.distributed.ray.session_guard import remove_all_sessions
    from nemo_like.parallel_layout import ParallelLayout
    from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
    from nemo_like.distributed.ray.worker_group import RayWorkerGroup
    from tests.distributed.plain_workers import PlainWorker

    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    cluster = RayVirtualCluster(ClusterConfig(workers_per_node=2, cpus_per_worker=0.1))
    layout = ParallelLayout(dp=2)
    group = RayWorkerGroup(cluster, PlainWorker, {}, name="policy", parallel_layout=layout)
    pids = [location.pid for location in group.locations]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.killpg(0, number)
    assert group.run_all_workers("multiply", 2) == [0, 2], "the workers survive these signals"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "Ray's alarm would abort this process"
    assert set(received) == {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}, received
    started = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    pids += [int(pid) for pid in started]
    print(json.dumps([str(cluster._session.path), pids]), flush=True)
"""


def test_a_killed_driver_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    """The workers survive signals to the process group; one is stopped when the driver is
    killed. Other users can read neither its folder nor its token.
    """
    driver = start_python(CLUSTER + "    signal.pause()\n", HOME=str(tmp_path))
    assert driver.stdout is not None
    folder, pids = json.loads(driver.stdout.readline())
    assert Path(folder).name.startswith("nemo_like_ray_")
    assert len(pids) >= 5, "two workers, the GCS, the raylet, the guard"
    token = tmp_path / ".ray" / "auth_token"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (Path(folder), token)]
    assert modes == [0o700, 0o600]
    assert not any(path.name.startswith("session_") for path in Path(folder).iterdir())
    assert all(map(is_running, pids))
    os.kill(pids[0], signal.SIGSTOP)
    driver.kill()
    driver.wait()
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not any(map(is_running, pids)))


SHUT_DOWN = """
        received = []
        signal.signal(signal.SIGTERM, lambda *_: received.append(1))
        RayVirtualCluster(ClusterConfig(cpus_per_worker=0.1)).shutdown()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received, "the handler is kept"
"""


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_a_driver_whose_raylet_dies_ends_with_one_message(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        import ray
        from nemo_like.config.schema import ClusterConfig
        from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
        from nemo_like.distributed.ray.worker_group import RayWorkerGroup
        from nemo_like.parallel_layout import ParallelLayout
        from tests.distributed.plain_workers import PlainWorker
        {SHUT_DOWN}
        with RayVirtualCluster(ClusterConfig(cpus_per_worker=0.1)) as cluster:
            layout = ParallelLayout()
            options = dict(name="policy", parallel_layout=layout)
            group = RayWorkerGroup(cluster, PlainWorker, {{}}, **options)
            children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
            commands = {{pid: Path("/proc", pid, "cmdline").read_bytes() for pid in children}}
            raylets = [pid for pid, each in commands.items() if b"/raylet\\0" in each]
            assert len(raylets) == 1
            os.kill(int(raylets[0]), signal.SIGKILL)
            while True:
                group.run_all_workers("multiply", 2)
        """
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        driver = start_python(script, stderr=file)
        assert driver.wait(90) == 1
    ends = [line for line in errors.read_text().splitlines() if "its node left the cluster" in line]
    assert len(ends) == 1 and "worker 0 of the policy group" in ends[0]
    # A cluster that is closed is not reported by its guard.
    assert "the driver ended without closing" not in errors.read_text()


def test_a_session_whose_guard_is_gone_too_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    driver = start_python(
        """
        import json, signal, subprocess, sys
        from nemo_like.distributed.ray.session_guard import SessionDirectory, remove_session
        session = SessionDirectory()
        log = (session.path / "worker.err").open("w")
        worker = subprocess.Popen(["sleep", "1000"], stdout=log, stderr=log)
        print(json.dumps([str(session.path), worker.pid, session._guard.pid]), flush=True)
        signal.pause()
        """
    )
    assert driver.stdout is not None
    folder, worker, guard = json.loads(driver.stdout.readline())
    other = SessionDirectory()
    assert Path(folder).is_dir(), "a session whose driver lives is left alone"
    for pid in (guard, driver.pid):
        os.kill(pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not is_running(guard))
    assert Path(folder).is_dir()
    assert is_running(worker)

    third = SessionDirectory()
    assert not Path(folder).exists()
    assert not is_running(worker)
    assert other.path.is_dir()
    logs = other.temp_dir / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("why")
    other.close(keep_logs=tmp_path / "kept")
    third.close()
    assert (tmp_path / "kept" / "raylet.err").read_text() == "why"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_ray_process_with_another_title_belongs_to_the_session_whose_log_it_has_open(
    tmp_path: Path,
):
    folder = tmp_path / "nemo_like_ray_test"
    folder.mkdir()
    with (folder / "agent.log").open("w") as log:
        sleep, descriptors = shutil.which("sleep"), (log.fileno(),)
        agent = subprocess.Popen(
            ["ray::DashboardAgent", "60"], executable=sleep, pass_fds=descriptors
        )
        reader = subprocess.Popen(["sleep", "60"], pass_fds=descriptors)
    try:
        # The kernel shows the command line a moment after the new program has begun.
        wait_until(lambda: b"ray::" in Path(f"/proc/{agent.pid}/cmdline").read_bytes())
        remove_session(folder)
        assert agent.wait(10) == -signal.SIGKILL
        assert reader.poll() is None, "only processes of Ray are killed"
        assert not folder.exists()
    finally:
        for process in (agent, reader):
            process.kill()
            process.wait()
