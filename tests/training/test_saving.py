"""Checkpoints that are written while training continues: bits, kills and failed writes."""

from __future__ import annotations

import dataclasses
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_like.config.schema import (
    CheckpointingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import NllLoss
from nemo_like.metrics import Timers
from nemo_like.models.spec import load_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy
from nemo_like.run.checkpoint import Checkpointer, CheckpointError, TrainingState, incomplete_reason
from nemo_like.run.files import WriteError
from nemo_like.training.saving import CheckpointSaver, policy_directory
from nemo_like.training.workers import RunWorkers
from tests.forked import Forked
from tests.policy.tiny import random_batch, save_tiny_model, saved_tensors

KINDS = ("weight", "exp_avg", "exp_avg_sq")
CONFIG = PolicyConfig(
    model_name="",
    train_global_batch_size=4,
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=32),
    optimizer=OptimizerConfig(lr=1e-2),
)


def open_policy(model: str) -> Policy:
    config = dataclasses.replace(CONFIG, model_name=model)
    group = LocalGroup(DTensorPolicyWorker, {"config": config}, local_context(num_threads=1))
    return Policy(group, config, load_spec(model))


def train_step(policy: Policy, seed: int) -> None:
    batch = random_batch([7, 12, 3, 9], seed=seed)
    plan = policy.plan(np.asarray(batch["length"]))
    policy.train(policy.shard(batch, plan), None, NllLoss())


def open_saver(policy: Policy, run: Path, keep_latest: int = 2) -> CheckpointSaver:
    workers = RunWorkers(policy=policy, rollout_workers=None)
    config = CheckpointingConfig(save_period=1, keep_latest=keep_latest)
    return CheckpointSaver(Checkpointer(run, config), workers, Timers())


def save(saver: CheckpointSaver, step: int, *, in_background: bool = True) -> None:
    saver.save(TrainingState(step=step), prunes=True, in_background=in_background)


def latest(run: Path) -> str:
    return (run / "latest").read_text().strip().removeprefix("checkpoints/")


def assert_same_policy(found: Path, expected: Path) -> None:
    for kind in KINDS:
        tensors = saved_tensors(policy_directory(found), kind)
        wanted = saved_tensors(policy_directory(expected), kind)
        assert tensors.keys() == wanted.keys() and len(wanted) > 0
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted), kind


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))


@pytest.fixture
def policy(model: str) -> Policy:
    return open_policy(model)


def test_training_during_the_write_does_not_change_the_checkpoint(policy, tmp_path):
    train_step(policy, 0)
    reference = open_saver(policy, tmp_path / "reference")
    save(reference, 1, in_background=False)
    saver = open_saver(policy, tmp_path / "run")
    save(saver, 1)
    train_step(policy, 1)
    saver.finish()
    directory = tmp_path / "run" / "checkpoints" / "step_1"
    assert incomplete_reason(directory, 1) is None
    assert_same_policy(directory, tmp_path / "reference/checkpoints/step_1")
    # A run that resumes there takes the same next step.
    save(saver, 2, in_background=False)
    policy.load(policy_directory(directory))
    train_step(policy, 1)
    save(reference, 2, in_background=False)
    assert_same_policy(
        tmp_path / "reference/checkpoints/step_2", tmp_path / "run/checkpoints/step_2"
    )


def test_a_checkpoint_is_latest_only_after_it_was_published(policy, tmp_path):
    train_step(policy, 0)
    saver = open_saver(policy, tmp_path, keep_latest=1)
    save(saver, 1, in_background=False)
    save(saver, 2)
    assert latest(tmp_path) == "step_1"
    assert (tmp_path / "checkpoints/.writing_step_2").is_dir()
    while latest(tmp_path) == "step_1":
        saver.publish_if_written()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    saver.finish()  # nothing is pending
    assert latest(tmp_path) == "step_2"


def test_the_next_save_waits_for_the_pending_one(policy, tmp_path):
    train_step(policy, 0)
    saver = open_saver(policy, tmp_path)
    for step in (1, 2, 3):
        save(saver, step)
    assert latest(tmp_path) == "step_2"
    saver.finish()
    assert latest(tmp_path) == "step_3"
    for step in (2, 3):
        assert incomplete_reason(tmp_path / f"checkpoints/step_{step}", step) is None


def test_a_failed_write_is_one_message_and_keeps_the_earlier_checkpoint(policy, tmp_path):
    train_step(policy, 0)
    saver = open_saver(policy, tmp_path)
    save(saver, 1, in_background=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
    try:
        save(saver, 2)
        while not policy.is_save_written():
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(CheckpointError) as caught:
        # The checkpoint is the cause if another write of the run failed first.
        saver.finish_after_error(WriteError("metrics.jsonl cannot be written"))
    message = str(caught.value)
    for part in ("checkpoint of step 2", "rank_00000_000.safetensors", "ulimit -f", "step_1 is"):
        assert part in message
    assert "\n" not in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    # The run may also save again.
    save(saver, 3)
    saver.finish()
    assert latest(tmp_path) == "step_3"


def test_after_an_error_of_the_run_the_pending_checkpoint_is_published(policy, tmp_path, caplog):
    train_step(policy, 0)
    saver = open_saver(policy, tmp_path)
    save(saver, 1)
    saver.finish_after_error(ValueError("a bad row"))
    assert latest(tmp_path) == "step_1"
    save(saver, 2)
    policy.finish_save()  # so that it cannot be finished again, as after the loss of a worker
    saver.finish_after_error(ValueError("a bad row"))
    assert "the checkpoint of step 2 was being written and is lost" in caplog.text
    assert latest(tmp_path) == "step_1"
    assert not (tmp_path / "checkpoints/.writing_step_2").exists()


def save_and_wait(model: str, run: Path) -> None:
    """The process that is killed: a complete checkpoint, and one that is never published."""
    policy = open_policy(model)
    saver = open_saver(policy, run)
    for step in (1, 2):
        train_step(policy, step)
        save(saver, step, in_background=step == 2)
    time.sleep(600)


def test_a_kill_during_the_write_keeps_the_previous_checkpoint(model, tmp_path):
    run = tmp_path / "run"
    process = Forked(save_and_wait, model, run, folder=tmp_path).process
    try:
        deadline = time.monotonic() + 300
        while not list(run.glob("checkpoints/.writing_step_2/policy/rank_*")):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.join()
    found = Checkpointer(run, CheckpointingConfig()).find_latest()
    assert found is not None and found.step == 1
    # The next save removes what the killed process left.
    policy = open_policy(model)
    policy.load(policy_directory(found.path))
    saver = open_saver(policy, run)
    save(saver, 2)
    saver.finish()
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step_1", "step_2"}
