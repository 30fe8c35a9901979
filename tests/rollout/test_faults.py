"""Rollouts of programs with faults of every kind: they end, count every episode once, and leave
nothing behind.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.agents.statuses import Status
from nemo_like.agents.worker import AgentWorker
from nemo_like.data.chat import ChatEncoder
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.errors import WorkerDied
from nemo_like.distributed.local_group import LocalGroup
from nemo_like.distributed.worker_group import Handle
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams
from nemo_like.metrics import metric_values
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.episodes import episode_metrics
from nemo_like.rollout.rows import Rollout
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec
from tests.agents.faulty_programs import FAILURES, FAULTS
from tests.agents.test_launcher import processes_with
from tests.policy.tiny import context
from tests.rollout.test_episodes import collector_of

PROGRAM = "tests.agents.faulty_programs.misbehaves"


class DyingReplica(LocalGroup):
    """The first replica dies while it decodes."""

    num_calls = 0

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        if method == "poll":
            DyingReplica.num_calls += 1
            if DyingReplica.num_calls == 3:
                self.shutdown()
                raise WorkerDied("it died", group="generation", rank=0, method=method)
        return super().submit_all(method, *args, **kwargs)


class CountingWorker(HFGenerationWorker):
    """Counts its requests."""

    num_requests = 0

    def submit(self, requests: GenerationRequests) -> None:
        self.num_requests += len(requests.request_ids)
        super().submit(requests)


class DyingAgents(LocalGroup):
    """The process of the programs dies once, at the first answer."""

    num_deaths = 0

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        if method == AgentWorker.advance.__name__ and args[1] and not DyingAgents.num_deaths:
            DyingAgents.num_deaths += 1
            self.shutdown()
            raise WorkerDied("it died", group="environment", rank=0, method=method)
        return super().submit_one(rank, method, *args, **kwargs)


def generator_of(folder: Path, group: type[LocalGroup] = LocalGroup) -> Generator:
    build_tokenizer().save_pretrained(folder)
    build_model(0).save_pretrained(folder)
    kwargs = {"start": GenerationStart(model_name=str(folder))}
    return Generator(lambda _: group(CountingWorker, kwargs, context()), max_restarts=2)


def rollout_of(
    collector: RolloutCollector,
    folder: Path,
    faults: tuple[str, ...],
    after: Callable[[int], None] = lambda num: None,
    rows: Sequence[dict[str, Any]] = (),
) -> Rollout:
    """`after` is called after each pass of the collector; `rows` are those of the data."""
    encoder = ChatEncoder(build_tokenizer())
    token_ids = encoder.encode_prompt([{"role": "user", "content": "2+3"}])
    given = [{"prompt": "2+3", "do": fault, "folder": str(folder)} for fault in faults]
    prompts = [
        Prompt(token_ids=token_ids, text="2+3", answer="5", row=row) for row in rows or given
    ]
    job = collector.start(
        prompts,
        group_size=1,
        sampling=SamplingParams(max_new_tokens=6),
        max_total_length=120,
        seeds=np.arange(len(faults), dtype=np.uint64),
    )
    num = 0
    while not job.is_done:
        collector.advance()
        after(num)
        num += 1
    return job.result()


def keys_of(folder: Path) -> list[str]:
    """The keys of all episodes so far."""
    return [line.split()[1] for line in (folder / "keys").read_text().splitlines()]


def counts_of(rollout: Rollout) -> dict[str, float]:
    """It raises unless every attempt is counted once."""
    values = metric_values(episode_metrics(rollout, rollout.batch["group"]))
    names = ("started", "trained", "dropped", "cancelled", "replaced")
    return {name: values[f"episodes/{name}"] for name in names}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder for the programs, and one for temporary files, in which each launcher has a folder.

    There is a proxy that reaches nothing.
    """
    own, temporary = tmp_path / "own", tmp_path / "temporary"
    own.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return own, temporary


def test_programs_with_faults_end_and_leave_nothing(
    tmp_path: Path,
    folders: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own, temporary = folders
    caplog.set_level(logging.DEBUG)
    # A lost zygote fails also those that start at the same time, which may have failed before.
    with collector_of(generator_of(tmp_path), PROGRAM, retries=3) as collector:
        first = rollout_of(collector, own, ("none",))
        (own / "ended").write_text((own / "keys").read_text())
        rollout = rollout_of(collector, own, FAULTS)
        outcomes = [row.outcome for row in rollout.conversations]
        statuses = {
            fault: each.status for fault, each in zip(FAULTS, outcomes, strict=True) if each
        }
        # Without its processes, before the worker ends.
        assert processes_with(str(own)) == []
        assert list(temporary.glob("*/*")) == []
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int((own / "port").read_text())), 1)
    assert set(statuses.values()) == {Status.DONE}
    assert (own / "repeated").exists()
    attempts = [each.num_attempts for each in outcomes if each is not None]
    is_tried_again = [fault in FAILURES for fault in FAULTS]
    assert all(number >= 2 for number, each in zip(attempts, is_tried_again, strict=True) if each)
    found = counts_of(rollout)
    assert found["trained"] == len(FAULTS) == found["started"] - found["replaced"]
    assert counts_of(first)["started"] == 1
    # Its call counts once.
    repeated = rollout.conversations[FAULTS.index("repeat")].outcome
    assert repeated is not None and repeated.num_calls == 1
    shown = capfd.readouterr()
    texts = [caplog.text, shown.out, shown.err, json.dumps(rollout.records())]
    for key in keys_of(own):
        assert not any(key in text for text in texts)
    assert "exit status" in caplog.text


def test_a_program_that_ignores_signals_ends_at_its_limit(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    own, temporary = folders
    with collector_of(generator_of(tmp_path), PROGRAM, timeout_s=0.5) as collector:
        rollout = rollout_of(collector, own, ("hang",))
        assert processes_with(str(own)) == [] and list(temporary.glob("*/*")) == []
    (row,) = rollout.conversations
    assert row.outcome is not None and row.outcome.status is Status.LIMIT_TIME


@pytest.mark.parametrize("retries", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_crashes_change_no_other_episode(tmp_path: Path, retries: int) -> None:
    """A fifth of the first attempts crashes; longer ones do."""
    path = "tests.agents.faulty_programs.counts_digits"
    num, rewards, counts = 20, [], {}
    crashes = np.arange(num) % 5 == 0
    for is_faulty in (False, True):
        rows = [
            {
                "number": number,
                "crashes": bool(each and is_faulty),
                "num_calls": 3 if each else 1,
                "prompt": "2+3",
                "folder": str(tmp_path),
            }
            for number, each in enumerate(crashes)
        ]
        with collector_of(generator_of(tmp_path), path, retries=retries) as collector:
            rollout = rollout_of(collector, tmp_path, ("",) * num, rows=rows)
        first = rollout.first_rows
        rewards.append(rollout.batch["reward"][first])
        mask = rollout.batch["reward_mask"][first]
        counts = counts_of(rollout)
        metrics = metric_values(episode_metrics(rollout, rollout.batch["group"]))
        assert metrics.get("episodes/failed_calls_mean") == (3.0 if is_faulty else None)
    assert np.array_equal(rewards[0][~crashes], rewards[1][~crashes])
    assert mask.tolist() == (~crashes | (retries == 1)).tolist()
    replaced, dropped = (4, 0) if retries else (0, 4)
    assert (counts["replaced"], counts["dropped"]) == (replaced, dropped)
    assert counts["started"] == num + replaced and counts["trained"] == num - dropped
    # The mean is that of the run without crashes, within two standard errors.
    error = rewards[0].std(ddof=1) / np.sqrt(num)
    assert abs(rewards[1][mask].mean() - rewards[0].mean()) < 2 * error


def test_a_failed_program_has_no_reward_and_no_key_in_its_record(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    own, _ = folders
    with collector_of(generator_of(tmp_path), PROGRAM, retries=0) as collector:
        rollout = rollout_of(collector, own, ("none", "crash", "supervisor"))
    assert rollout.batch["reward_mask"].tolist() == [True, False, False]
    assert counts_of(rollout)["dropped"] == 2
    text = json.dumps(rollout.records())
    assert "ValueError" in text and "<key>" in text
    assert not any(key in text for key in keys_of(own))


def test_lost_workers_and_new_weights_lose_no_episode(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    own, temporary = folders
    generator = generator_of(tmp_path, DyingReplica)
    DyingReplica.num_calls, DyingAgents.num_deaths = 0, 0
    versions = []

    def update(num: int) -> None:
        """New weights in the middle of calls, and the weights of a new replica."""
        if generator.replicas_without_weights:
            generator.set_version(generator.replicas, generator.version)
        if num in (4, 8):
            versions.append(len(versions) + 1)
            collector.drain()
            generator.set_version(generator.replicas, versions[-1])

    with collector_of(generator, PROGRAM, retries=1, group=DyingAgents) as collector:
        rollout = rollout_of(collector, own, ("none",) * 6, update)
    assert DyingReplica.num_calls > 3 and DyingAgents.num_deaths == 1
    found = counts_of(rollout)
    assert found["trained"] == 6 and found["replaced"] >= 1
    assert rollout.batch["reward"].tolist() == [1.0] * 6
    assert rollout.versions[1] <= max(versions, default=0)
    assert processes_with(str(own)) == [] and list(temporary.glob("*/*")) == []


def test_calls_around_a_weight_update_have_the_log_probs_of_their_weights(tmp_path: Path) -> None:
    generator = generator_of(tmp_path)
    models = {0: build_model(0), 1: build_model(0)}
    torch.manual_seed(1)
    for parameter in models[1].parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)

    def update(num: int) -> None:
        """After the second of three calls, or while the third is decoded."""
        del num
        group = generator.replicas[0].group
        assert isinstance(group, LocalGroup)
        worker = group.worker
        assert isinstance(worker, CountingWorker)
        if generator.version == 0 and worker.num_requests == 3:
            named = list(models[1].named_parameters())
            spec = ChannelSpec(transport="in_process", layouts=(), slot_bytes=0, timeout_s=1.0)
            assert worker.open_weight_channel(spec, (0,)) == ""
            worker.begin_update([name for name, _ in named])
            worker.load_bucket(BucketMessage(0, tuple((n, p.data) for n, p in named)))
            worker.finish_update(version=1)
            generator.set_version(generator.replicas, 1)

    with collector_of(generator, "tests.algorithms.agent_programs.does") as collector:
        rollout = rollout_of(collector, tmp_path, ("converse", "silent"), update)
    row = rollout.conversations[0]
    versions = np.concatenate(row.weight_versions)
    assert set(versions.tolist()) == {0, 1} and (np.diff(versions) >= 0).all()
    assert (row.weight_versions[0] == 0).all() and (row.weight_versions[1] == 0).all()
    ids = torch.from_numpy(np.concatenate(row.segments).astype(np.int64))
    mask = rollout.batch["token_mask"][0].astype(bool)
    found = rollout.batch["generation_logprobs"][0][mask]
    for version, model in models.items():
        with torch.no_grad():
            logits = model.double()(ids[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()[mask[1:]]
        own = versions == version
        np.testing.assert_allclose(found[own], expected[own], atol=1e-4)
        # Those of the other weights differ.
        assert own.any() and np.abs(found[~own] - expected[~own]).max() > 1e-3
    assert rollout.drop_stale(0, 1) == 0 and rollout.drop_stale(1, 2) == 1
