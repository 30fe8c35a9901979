"""The scripts for a cluster: wrong use is an error before anything is submitted or started."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nemo_like.algorithms.registry import ALGORITHMS, load_config
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.load import to_yaml
from tests.algorithms.test_ray_runs import wait_for_step
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "ray_jobs").glob("*.sh"))


def test_one_script_submits_every_algorithm() -> None:
    assert [path.stem for path in SCRIPTS] == ["retry", "start_head", "stop_head", "submit"]
    text = (ROOT / "ray_jobs" / "submit.sh").read_text(encoding="utf-8")
    assert f"[--env NAME ...] {'|'.join(ALGORITHMS)} CONFIG" in text
    assert f"  {' | '.join(ALGORITHMS)}) ;;" in text


@pytest.mark.parametrize(
    "script", [*SCRIPTS, ROOT / "ray_jobs" / "slurm.sbatch"], ids=lambda path: path.name
)
def test_each_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: ray_jobs/submit.sh"),
        (["--upload", "grpo"], "usage: ray_jobs/submit.sh"),
        (["dance", "x.yaml"], "unknown command 'dance'"),
        (["sft", "examples/configs/missing.yaml"], "no config file examples/configs/missing.yaml"),
        (["--retries", "many", "sft", "x.yaml"], "--retries takes a number"),
        (["--package", "missing", "sft", "x.yaml"], "--package missing is not a directory"),
        (
            ["--env", "NOT_SET_ANYWHERE", "sft", "x.yaml"],
            "--env NOT_SET_ANYWHERE: the variable is not set here",
        ),
        (["--env", "TOKEN=secret", "sft", "x.yaml"], "--env takes the name of a variable"),
    ],
)
def test_wrong_use_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [ROOT / "ray_jobs" / "submit.sh", *arguments], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_clusters_are_closed_and_dashboards_stay_on_loopback() -> None:
    start = (ROOT / "ray_jobs" / "start_head.sh").read_text(encoding="utf-8")
    assert "export RAY_AUTH_MODE=token" in start
    assert "--dashboard-host 127.0.0.1" in start
    assert not any("0.0.0.0" in script.read_text(encoding="utf-8") for script in SCRIPTS)


def test_the_manifest_runs_a_command_that_fits_its_pods() -> None:
    spec = yaml.safe_load((ROOT / "ray_jobs" / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]
    words = spec["entrypoint"].split()
    assert words[2] == "ray_jobs/retry.sh" and spec["backoffLimit"] > 0
    kind, option, path = words[words.index("nemo-like") + 1 :][:3]
    assert option == "--config"
    config = load_config(kind, ROOT / path, words[words.index(path) + 1 :])
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (pod,) = group["template"]["spec"]["containers"]
    assert config.resume
    assert config.cluster.num_nodes == group["replicas"]
    assert config.cluster.gpus_per_node == int(pod["resources"]["limits"]["nvidia.com/gpu"])
    mounts = [mount["mountPath"] for mount in pod["volumeMounts"]]
    assert config.output_dir in mounts


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The scripts and a config in another directory, where `ray` is a program of the test."""
    shutil.copytree(ROOT / "ray_jobs", tmp_path / "ray_jobs")
    (tmp_path / "run.yaml").write_text("run_name: x\n")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    return tmp_path


def write_ray(root: Path, body: str) -> None:
    ray = root / ".venv" / "bin" / "ray"
    ray.write_text(f"#!/usr/bin/env bash\n{body}\n")
    ray.chmod(0o755)


class JobApi(http.server.BaseHTTPRequestHandler):
    """Answers like the list of jobs of Ray's dashboard, to those with the token `right`."""

    def do_GET(self) -> None:
        status = 404 if self.path != "/api/jobs/" else 200
        if self.headers.get("Authorization") != "Bearer right":
            status = 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"[]" if status == 200 else b"no")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def job_api() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), JobApi) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_job_api_that_does_not_answer_is_one_message(
    copied: Path, job_api: str, tmp_path: Path
) -> None:
    write_ray(copied, f"touch {copied}/was_called")
    (tmp_path / "token").write_text("wrong\n")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        closed_port = closed.getsockname()[1]
    cases = [
        (
            {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{closed_port}"},
            "there is no Ray job API at .*refused",
        ),
        (
            {"RAY_API_SERVER_ADDRESS": "http://no-such-host.invalid:8265"},
            "there is no Ray job API at http://no-such-host",
        ),
        ({"RAY_API_SERVER_ADDRESS": "head:8265"}, "must begin with http:// or https://"),
        (
            {"RAY_API_SERVER_ADDRESS": job_api, "RAY_AUTH_TOKEN": "wrong"},
            r"refuses the token \(HTTP 401\)",
        ),
        (
            {"RAY_API_SERVER_ADDRESS": job_api, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")},
            "refuses the token",
        ),
        (
            {"RAY_API_SERVER_ADDRESS": f"{job_api}/other", "RAY_AUTH_TOKEN": "right"},
            "answers HTTP 404",
        ),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for variables, message in cases:
        done = subprocess.run(
            [copied / "ray_jobs" / "submit.sh", "sft", "run.yaml"],
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert re.search(f"^error: .*{message}", done.stderr), done.stderr
        assert done.stderr.count("\n") == 1
    assert not (copied / "was_called").exists()


def test_a_run_gets_the_environment_it_needs_and_no_value_is_printed(
    copied: Path, job_api: str
) -> None:
    write_ray(
        copied,
        f"""
        printf '%s\\n' "$@" > {copied}/arguments
        while [ "$1" != --runtime-env ]; do shift; done
        stat -c %a "$2" > {copied}/mode
        cp "$2" {copied}/runtime_env.json
        exit 1""",
    )
    package = copied / "elsewhere" / "my_rewards"
    package.mkdir(parents=True)
    access = {"RAY_API_SERVER_ADDRESS": job_api, "RAY_AUTH_TOKEN": "right"}
    given = {
        "HF_TOKEN": "secret-1",
        "WANDB_API_KEY": 'secret-"2"',
        "PYTHONPATH": "lib:/abs",
        "MINE": "secret-3",
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "WANDB_"))
    }
    script = copied / "ray_jobs" / "submit.sh"
    done = subprocess.run(
        [script, "--package", "my_rewards", "--env", "MINE", "grpo", "run.yaml", "seed=1"],
        cwd=package.parent,
        env=environment | access | given | {"OTHER": "secret-4"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, "the exit code is that of ray job submit"
    runtime_env = json.loads((copied / "runtime_env.json").read_text())
    variables = runtime_env["env_vars"]
    assert runtime_env["py_modules"] == [str(package)]
    assert variables.pop("PYTHONPATH") == f"{package.parent}/lib:/abs"
    assert variables.pop("RAY_JOB_STOP_WAIT_TIME_S") == "1800"
    variables.pop("NEMO_LIKE_DATA", None)
    assert variables == {name: given[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "MINE")}
    assert (copied / "mode").read_text() == "600\n"
    arguments = (copied / "arguments").read_text().splitlines()
    assert arguments[-5:] == ["nemo_like", "grpo", "--config", "run.yaml", "seed=1"]
    assert not Path(arguments[arguments.index("--runtime-env") + 1]).exists()
    assert "secret" not in done.stdout + done.stderr + "".join(arguments)


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_head_is_not_started_on_an_occupied_port(copied: Path, listener: int) -> None:
    write_ray(copied, f"touch {copied}/was_called")
    script = copied / "ray_jobs" / "start_head.sh"
    for option in ("--port", "--dashboard-port"):
        other = "--dashboard-port" if option == "--port" else "--port"
        done = subprocess.run(
            [script, f"{other}=0", option, str(listener)], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert f"port {listener} is in use by another program" in done.stderr
    assert not (copied / "was_called").exists()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def start_named(port: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process that looks like a head: it has its name and its port argument."""
    command = f"exec -a 'gcs_server --gcs_server_port={port}' sleep 1000"
    process = subprocess.Popen(
        ["bash", "-c", command], env=os.environ | environment, start_new_session=True
    )
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"gcs_server"):
        time.sleep(0.01)
    return process


def test_an_existing_head_is_named_and_only_a_head_of_the_script_is_stopped(copied: Path) -> None:
    write_ray(copied, f"touch {copied}/was_called")
    start, stop = copied / "ray_jobs" / "start_head.sh", copied / "ray_jobs" / "stop_head.sh"
    foreign_port, own_port = map(str, free_ports(2))
    foreign = start_named(foreign_port)
    own = start_named(own_port, NEMO_LIKE_HEAD=own_port)
    try:
        done = subprocess.run([start, "--port", foreign_port], capture_output=True, text=True)
        assert done.returncode == 1
        assert (
            f"a Ray head with port {foreign_port} already runs on this machine (pid {foreign.pid})"
            in done.stderr
        )
        done = subprocess.run([stop, foreign_port], capture_output=True, text=True)
        assert done.returncode == 1
        assert (
            f"no head with port {foreign_port} that ray_jobs/start_head.sh started" in done.stderr
        )
        assert foreign.poll() is None
        own_stop = subprocess.Popen([stop, own_port])
        assert own.wait(timeout=60) == -signal.SIGTERM
        assert own_stop.wait(timeout=60) == 0
    finally:
        foreign.kill()
        own.kill()
        foreign.wait()
    assert not (copied / "was_called").exists()


def test_a_head_that_fails_to_start_leaves_no_process(copied: Path) -> None:
    """Beside the Ray of a run, whose head has the port argument 0."""
    write_ray(
        copied,
        f"""
        [ "$1" = start ] || exit 0
        sleep 1000 > /dev/null 2>&1 &
        echo $! > {copied}/child
        echo "the reason" >&2
        exit 3""",
    )
    script = copied / "ray_jobs" / "start_head.sh"
    ray_of_a_run = start_named("0")
    try:
        done = subprocess.run(
            [script, "--port=0", "--dashboard-port=0"],
            env=os.environ | {"RAY_TMPDIR": str(copied)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        ray_of_a_run.kill()
        ray_of_a_run.wait()
    assert done.returncode == 1
    assert "the reason" in done.stderr
    assert "the processes it had started were stopped" in done.stderr
    child = int((copied / "child").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{child}").exists()


RETRY = ROOT / "ray_jobs" / "retry.sh"


@pytest.mark.parametrize(
    ("body", "expected", "code"),
    [
        ('echo "$@"; kill -KILL $$', ["a", "a resume=true", "a resume=true"], 137),
        ('echo "$@"; kill -TERM $$', ["a"], 143),
        *((f'echo "$@"; exit {code}', ["a"], code) for code in (0, 1, 2, 3, 75, 130)),
    ],
)
def test_only_a_command_that_a_signal_killed_runs_again(
    body: str, expected: list[str], code: int
) -> None:
    command = [RETRY, "2", "bash", "-c", body, "bash", "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (code, expected)
    assert done.stderr.count("starts again with resume=true (retry") == len(expected) - 1


def test_a_signal_reaches_the_command_and_ends_the_retries() -> None:
    body = "trap 'sleep 0.1; exit 137' TERM; echo ready; while :; do sleep 0.01; done"
    process = subprocess.Popen([RETRY, "2", "bash", "-c", body], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=60) == 137
    assert process.stdout.read() == "", "it did not run again"


@pytest.mark.exhaustive
def test_a_job_whose_driver_was_killed_continues(recipe: Recipe) -> None:
    options = (
        "sft.max_num_steps=100",
        "sft.val_period=0",
        "sft.val_at_start=false",
        "checkpointing.save_period=3",
        "checkpointing.export_hf=false",
    )
    config = recipe.folder / "job.yaml"
    config.write_text(to_yaml(recipe.sft(*options, "cluster.backend=ray")))
    port, dashboard_port = map(str, free_ports(2))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="nl_") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder, "PATH": programs}
        environment |= {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard_port}"}
        start = [ROOT / "ray_jobs" / "start_head.sh", "--num-cpus=1"]
        start += [f"--port={port}", f"--dashboard-port={dashboard_port}"]
        subprocess.run(start, env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            submit = [ROOT / "ray_jobs" / "submit.sh", "--retries", "1", "sft", config]
            job = subprocess.Popen(submit, env=environment, stdout=subprocess.PIPE, text=True)
            wait_for_step(recipe.folder / "sft", 5)
            lock = json.loads((recipe.folder / "sft" / "run.lock").read_text())
            os.kill(lock["pid"], signal.SIGKILL)
            output, _ = job.communicate()
        finally:
            subprocess.run([ROOT / "ray_jobs" / "stop_head.sh", port], check=True)
    assert job.returncode == 0, output
    assert "killed by signal 9; it starts again with resume=true (retry 1 of at most 1)" in output
    assert "resumed from" in output
    straight = run_sft(recipe.sft(*options, "run_name=straight"))
    expected = read_metrics(straight.directory.path)
    found = read_metrics(recipe.folder / "sft")
    assert [record["step"] for record in found] == list(range(1, 101))
    assert [record["policy/loss"] for record in found] == pytest.approx(
        [record["policy/loss"] for record in expected], rel=1e-6
    )


@pytest.fixture
def heads() -> Iterator[list[tuple[str, str]]]:
    """Two heads that run at the same time: (what `start_head.sh` printed, address) of each."""
    ports = free_ports(4)
    scripts = []
    with tempfile.TemporaryDirectory(prefix="nl_") as folder:  # short, for the paths of sockets
        try:
            for port, dashboard_port in (ports[:2], ports[2:]):
                options = [f"--port={port}", f"--dashboard-port={dashboard_port}", "--num-cpus=1"]
                command = [ROOT / "ray_jobs" / "start_head.sh", *options]
                environment = os.environ | {"RAY_TMPDIR": folder}
                scripts.append(
                    subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
                )
            started = []
            for port, script in zip(ports[::2], scripts, strict=True):
                printed, _ = script.communicate()
                assert script.returncode == 0
                match = re.search(rf"head runs at (\S+:{port}),", printed)
                assert match is not None
                started.append((printed, match.group(1)))
            for each in Path(folder).iterdir():
                assert stat.S_IMODE(each.stat().st_mode) == 0o700, "Ray's own directory is 0777"
            yield started
        finally:
            stop = ROOT / "ray_jobs" / "stop_head.sh"
            stops = [subprocess.Popen([stop, str(port)]) for port in ports[::2]]
            assert [each.wait() for each in stops] == [0, 0]


def call_api(address: str, path: str, body: object = None) -> dict[str, str]:
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api/jobs/{path}", data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.exhaustive
def test_of_two_heads_each_gives_its_jobs_its_own_address(heads: list[tuple[str, str]]) -> None:
    """`start_head.sh` prints what a job and `ray status` need, without the advice of Ray."""
    jobs = []
    for printed, _ in heads:
        assert "ray stop" not in printed
        match = re.search(r"RAY_API_SERVER_ADDRESS=(\S+) \S+/submit.sh", printed)
        assert match is not None
        job = call_api(match.group(1), "", {"entrypoint": "printenv RAY_ADDRESS"})
        jobs.append((match.group(1), job["submission_id"]))
    for (_, address), (api, job_id) in zip(heads, jobs, strict=True):
        while call_api(api, job_id)["status"] in ("PENDING", "RUNNING"):
            time.sleep(0.2)
        assert address in call_api(api, f"{job_id}/logs")["logs"].splitlines()
    status = re.search("RAY_AUTH_MODE=token .* status .*", heads[0][0])
    assert status is not None
    subprocess.run(status.group(), shell=True, check=True)
    # Ray would choose one of all clusters of the machine.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from nemo_like.distributed.ray import connection as c; c.connect(None)",
        ],
        env=os.environ | {"RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
    )
    error = done.stderr.splitlines()[-1]
    assert "ClusterError" in error and all(address in error for _, address in heads)
