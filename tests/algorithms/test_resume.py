"""What a resume changes in a run's directory, and that a refused one changes nothing. Failing
writers of a run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nemo_like import cli
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.config.load import to_yaml
from nemo_like.run import checkpoint as checkpoint_module
from nemo_like.run.checkpoint import CheckpointError
from nemo_like.run.directory import LOCK_NAME, answer, check_shared, locked
from tests.algorithms import rewards
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

OPTIONS = (
    "checkpointing.keep_latest=5",
    "checkpointing.export_hf=false",
    "sft.val_period=0",
    "sft.val_at_start=false",
    "data.max_train_rows=200",
)
SMALL_GRPO = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "policy.generation.max_new_tokens=4",
    "data.max_train_rows=64",
    "data.validation_path=null",
)


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but its log."""
    paths = (path for path in run.rglob("*") if path.is_file() and path.name != "driver.log")
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def test_a_refused_resume_changes_nothing_and_a_damaged_checkpoint_is_passed_over(
    recipe: Recipe, capsys
) -> None:
    run = run_sft(recipe.sft(*OPTIONS)).directory
    expected, lengths = read_metrics(run.path), run.lengths.read_bytes()
    before = contents(run.path)
    with pytest.raises(ConfigError, match="written with seed=42, this run has seed=7"):
        run_sft(recipe.sft(*OPTIONS, "resume=true", "seed=7", "policy.optimizer.lr=1e-4"))
    with pytest.raises(ConfigError, match="in use by process"), locked(run.path):
        run_sft(recipe.sft(*OPTIONS, "resume=true", "policy.optimizer.lr=1e-4"))
    assert contents(run.path) == before

    weights = [
        run.path / f"checkpoints/step_{step}/policy/rank_00000_000.safetensors" for step in (2, 4)
    ]
    flip_a_byte(weights[1])
    # As a kill in step 4 leaves them: a line that is cut, and records of a step that will be
    # repeated.
    for path in (run.metrics, run.lengths):
        path.write_bytes(path.read_bytes()[:-7])
    resumed = run_sft(recipe.sft(*OPTIONS, "resume=true"))
    assert read_metrics(resumed.directory.path) == expected
    assert run.lengths.read_bytes() == lengths, "each step stands once"
    reason = "step_4: policy/rank_00000_000.safetensors does not have the content that was written"
    log = (run.logs / "driver.log").read_text()
    assert (
        reason in log
        and "falling back to" in log
        and "changed since this run was started: policy.optimizer.lr" in log
    )
    assert f"resumed from {run.path}/checkpoints/step_2" in capsys.readouterr().out

    flip_a_byte(weights[0])
    flip_a_byte(weights[1])
    before = contents(run.path)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used") as caught:
        run_sft(recipe.sft(*OPTIONS, "resume=true", "policy.optimizer.lr=1e-4"))
    assert "step_2: " in str(caught.value) and "step_4: " in str(caught.value)
    assert contents(run.path) == before, "neither config.yaml nor metrics"


def test_rollouts_after_the_checkpoint_are_removed(recipe: Recipe) -> None:
    options = (*SMALL_GRPO, "checkpointing.export_hf=false")
    run = run_grpo(recipe.grpo(*options)).directory
    later = run.rollouts(7)
    shutil.copy(run.rollouts(2), later)
    shutil.copy(run.rollout_tokens(2), run.rollout_tokens(7))
    with run.metrics.open("a") as metrics:
        metrics.write('{"step": 3, "policy/loss": 1.0}\n{"step": 4, "pol')
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert sorted(path.name for path in later.parent.iterdir()) == [
        "step_1.jsonl",
        "step_1.safetensors",
        "step_2.jsonl",
        "step_2.safetensors",
    ]
    assert [line["step"] for line in read_metrics(run.path)] == [1, 2]


def test_every_file_of_a_run_has_the_permissions_of_the_umask(recipe: Recipe) -> None:
    options = ("sft.max_num_steps=1", "sft.val_period=0", "sft.val_at_start=false")
    run = run_sft(recipe.sft(*options, "data.max_train_rows=64")).directory
    umask = os.umask(0)
    os.umask(umask)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".yaml", ".jsonl", ".log"}
    assert {
        str(path): path.stat().st_mode & 0o777
        for path in files
        if path.stat().st_mode & 0o777 != 0o666 & ~umask
    } == {}


def replaced_by_a_file(name: str) -> Callable[[Path], None]:
    def replace(run: Path) -> None:
        path = run / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file")

    return replace


def always_full(name: str) -> Callable[[Path], None]:
    def link(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to("/dev/full")

    return link


def a_directory(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).mkdir(parents=True)


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: shutil.rmtree(run / name)


BEFORE, RUNNING = "before the run", "after the first step"
FAULTS = [
    (BEFORE, always_full("plan/lengths.jsonl"), "lengths.jsonl: No space left on device"),
    (BEFORE, always_full("metrics.jsonl"), "metrics.jsonl: No space left on device"),
    (
        BEFORE,
        always_full("logs/driver.log"),
        "driver.log cannot be written: No space left on device",
    ),
    (BEFORE, a_directory("config.yaml"), "config.yaml cannot be written: Is a directory"),
    (BEFORE, a_directory("plan/step_0.json"), "step_0.json cannot be written: Is a directory"),
    (BEFORE, replaced_by_a_file("tb"), "tb cannot be written"),
    (RUNNING, removed("rollouts"), "rollouts was removed or replaced"),
    (RUNNING, removed("plan"), "plan was removed or replaced"),
    (RUNNING, removed("tb"), "tb was removed or replaced"),
    (RUNNING, removed("logs"), "logs was removed or replaced"),
    (RUNNING, removed("."), "was removed or replaced"),
    (RUNNING, replaced_by_a_file("checkpoints"), "the checkpoint of step 2 was not written"),
    (RUNNING, replaced_by_a_file("hf.unfinished"), "hf.unfinished cannot be written"),
    (RUNNING, a_directory("latest"), "latest cannot be written: Is a directory"),
]


@pytest.mark.parametrize(
    ("when", "fault", "message"), FAULTS, ids=[message for _, _, message in FAULTS]
)
def test_a_writer_that_fails_ends_the_run_with_one_message(
    recipe: Recipe, capsys, when: str, fault: Callable[[Path], None], message: str
) -> None:
    path = recipe.folder / "faults.yaml"
    reward = "reward.functions.digits.path=tests.algorithms.rewards.acting_digit_share"
    path.write_text(to_yaml(recipe.grpo(*SMALL_GRPO, reward)))
    run = recipe.folder / "grpo"
    if when == BEFORE:
        run.mkdir()
        fault(run)
    else:
        rewards.after_first_step(run, partial(fault, run))
    assert cli.main(["grpo", "--config", str(path)]) == 1
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0], errors
    assert "Traceback" not in errors
    assert not (run / LOCK_NAME).exists()


def test_a_disk_that_fills_is_one_message_and_keeps_the_checkpoint(recipe: Recipe) -> None:
    """A real file system of 12 MB, which has room for the first checkpoints only."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0
    ):
        pytest.skip("needs unshare and the permission to mount")
    config = recipe.folder / "small.yaml"
    small = recipe.folder / "small"
    small.mkdir()
    options = (
        "sft.max_num_steps=8",
        "sft.val_period=0",
        "sft.val_at_start=false",
        "data.max_train_rows=200",
        "checkpointing.keep_latest=9",
    )
    config.write_text(to_yaml(recipe.sft(f"output_dir={small}", *options)))
    script = f"mount -t tmpfs -o size=12m tmpfs {small}"
    script += f" && {sys.executable} -m nemo_like sft --config {config}; code=$?;"
    script += f" cat {small}/sft/latest; ls -a {small}/sft/checkpoints; exit $code"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "is intact; resume=true continues there" in lines[0]
    assert "checkpoints/step_" in done.stdout and ".writing_" not in done.stdout


def test_workers_that_see_another_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "VISIBLE_WITHIN_S", 0.2)
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "logs").mkdir(parents=True)

    def ask(*is_shared: bool) -> None:
        def answers(folder: str, token: str) -> list[str]:
            local = other / Path(folder).name
            local.mkdir(parents=True, exist_ok=True)
            return [
                answer(folder if shared else str(local), token, rank)
                for rank, shared in enumerate(is_shared)
            ]

        check_shared(run, answers, ["10.0.0.1", "10.0.0.2", "10.0.0.3"][: len(is_shared)])

    ask(True, True, True)
    assert list((run / "logs").iterdir()) == []
    match = r"output_dir: policy worker 1 on node 10\.0\.0\.2 .* do not share .*/run: .*1 of the 3"
    with pytest.raises(ConfigError, match=match):
        ask(True, False, False)

    def on_a_copy(folder: str, token: str) -> list[str]:
        """A directory that was copied at the start looks the same to the worker, but the driver
        does not get its file.
        """
        copied = other / "copy"
        shutil.copytree(folder, copied)
        return [answer(str(copied), token, 0)]

    with pytest.raises(
        ConfigError, match=r"the driver does not see the file .*rank_0 that the worker wrote"
    ):
        check_shared(run, on_a_copy, [])
    assert json.dumps(os.listdir(run / "logs")) == "[]"
