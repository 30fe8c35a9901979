"""The sandbox of a user without privileges: a user namespace, or Landlock and seccomp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.environments.sandbox import linux
from tests.environments.sandbox.hostile import ISSUE, MORE

ROOT = Path(__file__).parents[3]
_PYTHON = "/usr/bin/python3"
_NOBODY = 65534
_NAMES = (
    "fork_bomb",
    "writes_home",
    "reads_environment",
    "opens_socket",
    "kills_parent",
    "starts_daemon",
    "symlink_escape",
    "forks_and_sleeps",
    "deep_directories",
    "stops_itself",
    "changes_modes",
)
_SCRIPT = """
import json, os, sys
from nemo_like.environments.sandbox.sandbox import SandboxLimits
from nemo_like.environments.sandbox.sandbox import Sandbox, SandboxError
limits = SandboxLimits(wall_s=2.0, cpu_s=1.0, memory_mb=256, max_processes=12, scratch_mb=8)
try:
    sandbox = Sandbox(limits, without=json.loads(sys.argv[1]))
except SandboxError as error:
    print(json.dumps({"refused": str(error)}))
    raise SystemExit
print(json.dumps({
    "user": os.geteuid(),
    "works": sandbox.run("print(sum(range(10)))").stdout,
    "reasons": {name: sandbox.run(source).reason for name, source in json.load(sys.stdin).items()},
}))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of the other user, in a place that the user can enter."""
    if os.geteuid() != 0:
        pytest.skip("the other tests of the sandbox run as this user")
    path = Path(tempfile.mkdtemp(prefix="nemo-like-test-"))
    os.chown(path, _NOBODY, _NOBODY)
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("without", [[], ["namespaces", "network"]])
def test_hostile_programs_of_a_user_without_privileges(without: list[str], directory: Path) -> None:
    check = (
        f"import sys; sys.path.append({str(ROOT)!r}); import nemo_like;"
        " assert sys.version_info >= (3, 11)"
    )
    as_nobody = {"user": _NOBODY, "group": _NOBODY, "extra_groups": [], "cwd": "/"}
    if subprocess.run([_PYTHON, "-c", check], capture_output=True, **as_nobody).returncode != 0:
        pytest.skip(f"another user cannot run {_PYTHON} 3.11 or import the package")
    constants = f"HOME = {str(directory)!r}\nMARKER = 'marker'\nPORT = 0\nSECRET_NAME = 'SECRET'\n"
    programs = {name: constants + (ISSUE | MORE)[name] for name in _NAMES}
    before = set(linux.descendants(os.getpid()))
    # Processes that are left behind become children of this one.
    linux.become_subreaper()
    scratch = directory / "scratch"
    scratch.mkdir()
    scratch.chmod(0o777)
    done = subprocess.run(
        [_PYTHON, "-c", _SCRIPT, json.dumps(without)],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "SECRET": "x"},
        **as_nobody,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if "refused" in result:
        pytest.skip(result["refused"])
    assert result["user"] == _NOBODY and result["works"] == "45\n"
    assert "ok" not in result["reasons"].values(), result
    assert result["reasons"]["starts_daemon"] == "left_processes"
    assert result["reasons"]["forks_and_sleeps"] == result["reasons"]["stops_itself"] == "timeout"
    assert set(linux.descendants(os.getpid())) == before
    assert directory.stat().st_mode & 0o777 == 0o755
    assert list(scratch.iterdir()) == [] and list(directory.iterdir()) == [scratch]
