"""Episodes of programs on the embedded generator: their rows, rewards and outcomes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from nemo_like.agents.statuses import Status, attempt_seed
from nemo_like.agents.worker import AgentWorker
from nemo_like.agents.workers import AgentWorkers
from nemo_like.config.rollout import EnvironmentConfig, RewardConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.errors import WorkerDied
from nemo_like.distributed.local_group import LocalGroup
from nemo_like.distributed.worker_group import Handle
from nemo_like.environments.reward import RewardError
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import (
    GenerationProgress,
    GenerationRequests,
    GenerationStart,
    SamplingParams,
)
from nemo_like.metrics import metric_values
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.episodes import EpisodeDriver, episode_metrics
from nemo_like.rollout.rows import EPISODE, Rollout, rollout_metrics
from tests.policy.tiny import context

MAX_TOKENS = 120


class LoggingWorker(HFGenerationWorker):
    """Keeps prompt and answer of every request."""

    prompts: ClassVar[dict[int, np.ndarray]] = {}
    log: ClassVar[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []

    def submit(self, requests: GenerationRequests) -> None:
        for row, request_id in enumerate(requests.request_ids.tolist()):
            self.prompts[request_id] = requests.prompt_ids[row].copy()
        super().submit(requests)

    def poll(self, max_seconds: float, min_seconds: float | None = None) -> GenerationProgress:
        found = super().poll(max_seconds, min_seconds)
        for row, request_id in enumerate(found.request_ids.tolist()):
            completions = found.completions
            sampled = completions.token_ids[row].copy(), completions.logprobs[row].copy()
            self.log.append((self.prompts[request_id], *sampled))
        return found


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    build_model(0).save_pretrained(folder)
    kwargs = {"start": GenerationStart(model_name=str(folder))}
    return Generator(lambda _: LocalGroup(LoggingWorker, kwargs, context()))


@contextlib.contextmanager
def collector_of(
    generator: Generator, path: str, group: type[LocalGroup] = LocalGroup, **options: Any
) -> Iterator[RolloutCollector]:
    config = EnvironmentConfig(kind="program", path=path, max_turns=6, **options)
    encoder = ChatEncoder(build_tokenizer())
    workers = AgentWorkers(
        lambda _: group(AgentWorker, {"config": config}, context()), 1, max_restarts=2
    )
    workers.set_encoder(encoder)
    rewards = RewardConfig(max_error_share=0.9)
    episodes = EpisodeDriver(workers, generator, config, rewards)
    try:
        yield RolloutCollector(generator, None, encoder.tokenizer, episodes)
    finally:
        workers.shutdown()


@pytest.fixture(scope="module")
def collector(generator: Generator) -> Iterator[RolloutCollector]:
    with collector_of(generator, "tests.algorithms.agent_programs.does", retries=1) as opened:
        yield opened


def rollout_of(
    collector: RolloutCollector, *does: str, group_size: int = 1, lengths: np.ndarray | None = None
) -> Rollout:
    encoder = ChatEncoder(build_tokenizer())
    prompts = []
    for do in does:
        token_ids = encoder.encode_prompt([{"role": "user", "content": "2+3"}])
        row = {"prompt": "2+3", "do": do}
        prompts.append(Prompt(token_ids=token_ids, text="2+3", answer="5", row=row))
    LoggingWorker.log = []
    job = collector.start(
        prompts,
        group_size=group_size,
        sampling=SamplingParams(max_new_tokens=6),
        max_total_length=MAX_TOKENS,
        seeds=np.arange(len(does) * group_size, dtype=np.uint64),
        lengths=lengths,
    )
    while not job.is_done:
        collector.advance()
    return job.result()


class StartLog(LocalGroup):
    """Keeps the seeds of the episodes in the order in which they are started."""

    seeds: ClassVar[list[int]] = []

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        if method == AgentWorker.advance.__name__:
            self.seeds.extend(start.seed for start in args[0])
        return super().submit_one(rank, method, *args, **kwargs)


def test_replicas_are_assigned_by_the_predicted_tokens_that_an_episode_has_left(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three episodes of three turns each; the second is predicted to be the longest."""
    submit = generator.submit
    found: dict[int, list[float]] = {}

    def logged(*args: Any, **kwargs: Any) -> list[int]:
        for episode, length in zip(kwargs["affinity"], kwargs["lengths"], strict=True):
            found.setdefault(episode, []).append(length)
        return submit(*args, **kwargs)

    monkeypatch.setattr(generator, "submit", logged)
    predicted = [10.0, 500.0, 40.0]
    with collector_of(generator, "tests.algorithms.agent_programs.does", StartLog) as collector:
        rollout = rollout_of(collector, *["converse"] * 3, lengths=np.array(predicted))
    seeds = [attempt_seed(row.seed, 0) for row in rollout.conversations]
    assert StartLog.seeds == [seeds[1], seeds[2], seeds[0]]
    for row, length in zip(rollout.conversations, predicted, strict=True):
        sizes = [len(turn) for turn in row.segments[1::2]]
        assert len(sizes) == 3
        left = [length, length - sizes[0], length - sizes[0] - sizes[1]]
        assert found[row.episode] == [max(each, 1.0) for each in left]


def test_rows_are_what_the_generator_has_sampled(collector: RolloutCollector) -> None:
    rollout = rollout_of(collector, "converse", "branch", "request", "silent", group_size=2)
    batch = rollout.batch
    # A conversation is one row; two prompts, of which one was sent again with n=2, are four.
    sizes = [1, 1, 4, 4, 1, 1, 1, 1]
    assert np.bincount(batch[EPISODE]).tolist() == sizes
    assert batch["group"].tolist() == np.repeat([0, 0, 1, 1, 2, 2, 3, 3], sizes).tolist()
    rewards = batch["reward"][rollout.first_rows]
    assert rewards[2:].tolist() == [0.5, 0.5, 0.75, 0.75, 1.0, 1.0]
    assert rollout.components["environment_length"][:2].tolist() == rewards[:2].tolist()
    # Byte for byte: every prompt and answer of the generator begins a row, with its log-probs.
    assert len(LoggingWorker.log) == 2 * (3 + 4 + 1)
    ids, logprobs, mask = (
        batch[name] for name in ("input_ids", "generation_logprobs", "token_mask")
    )
    rows = range(batch.size)
    for prompt, sampled, sampled_logprobs in LoggingWorker.log:
        both = np.concatenate([prompt, sampled])
        span = slice(len(prompt), len(both))
        found = [row for row in rows if np.array_equal(ids[row][: len(both)], both)]
        assert found
        assert any(np.array_equal(logprobs[row][span], sampled_logprobs) for row in found)
    num_sampled = sum(len(sampled) for _, sampled, _ in LoggingWorker.log)
    assert int(mask.values.sum()) == num_sampled == int(rollout.episode_lengths.sum())
    # An episode without a call has a reward, and nothing that is trained.
    assert batch["row_mask"].tolist() == [True] * 12 + [False] * 2
    assert batch["reward_mask"].all()
    values = metric_values(rollout_metrics(rollout) | episode_metrics(rollout, batch["group"]))
    assert values["reward/mean"] == pytest.approx(rewards.mean())
    assert values["generation/num_tokens"] == num_sampled
    assert values["episodes/rows_mean"] == 14 / 8 and values["episodes/calls_mean"] == 2.0


def test_failures_and_limits_end_no_rollout(collector: RolloutCollector) -> None:
    rollout = rollout_of(collector, "crash", "none", "loop", "converse", "leave")
    outcomes = [row.outcome for row in rollout.conversations]
    statuses = [outcome.status for outcome in outcomes if outcome is not None]
    first = rollout.first_rows
    assert [statuses[row] for row in first] == [
        Status.FAILED_PROGRAM,
        Status.FAILED_PROGRAM,
        Status.LIMIT_TURNS,
        Status.DONE,
        Status.DONE,
    ]
    assert rollout.batch["reward_mask"][first].tolist() == [False, False, True, True, True]
    problems = [str(rollout.reward_problems[row]) for row in first]
    assert "ValueError: it crashes" in problems[0] and "it has no reward" in problems[1]
    values = metric_values(episode_metrics(rollout, rollout.batch["group"]))
    counts = {"trained": 3, "dropped": 2, "cancelled": 0, "replaced": 2, "started": 7}
    assert {name: values[f"episodes/{name}"] for name in counts} == counts
    broken = copy.copy(rollout)
    object.__setattr__(broken, "num_started", 8)
    with pytest.raises(RuntimeError, match="8 episodes were started"):
        episode_metrics(broken, rollout.batch["group"])


def test_tokens_of_too_old_weights_cancel_their_episode(collector: RolloutCollector) -> None:
    rollout = rollout_of(collector, "branch", "silent")
    assert rollout.drop_stale(0, 1) == 0
    assert rollout.drop_stale(1, 2) == 1
    # An episode without tokens has none that are too old.
    assert rollout.batch["reward_mask"].tolist() == [False] * 4 + [True]
    values = metric_values(episode_metrics(rollout, rollout.batch["group"]))
    assert values["episodes/cancelled"] == values["episodes/trained"] == 1
    assert rollout_of(collector, "silent").drop_stale(3, 3) == 0


class DyingGroup(LocalGroup):
    """Its process dies at the first call with an answer, and the next one as it starts."""

    num_deaths = 0

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        if DyingGroup.num_deaths == 1 and method == AgentWorker.set_encoder.__name__:
            self._die(method)
        return super().submit_all(method, *args, **kwargs)

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        if DyingGroup.num_deaths == 0 and args[1]:
            self._die(method)
        return super().submit_one(rank, method, *args, **kwargs)

    def _die(self, method: str) -> None:
        DyingGroup.num_deaths += 1
        self.shutdown()
        raise WorkerDied("it died", group="environment", rank=0, method=method)


def test_episodes_of_a_lost_worker_are_tried_again(generator: Generator) -> None:
    path = "tests.agents.programs.answers_anything"
    with collector_of(generator, path, retries=1, group=DyingGroup) as collector:
        rollout = rollout_of(collector, "a", "b")
    assert DyingGroup.num_deaths == 2
    values = metric_values(episode_metrics(rollout, rollout.batch["group"]))
    assert values["episodes/trained"] == values["episodes/replaced"] == 2
    assert rollout.batch["reward"].tolist() == [1.0, 1.0]


def test_a_program_that_hangs_ends_at_its_time_limit(generator: Generator) -> None:
    with collector_of(generator, "tests.agents.programs.hangs", timeout_s=0.5) as collector:
        rollout = rollout_of(collector, "anything")
    (row,) = rollout.conversations
    assert row.outcome is not None and row.outcome.status is Status.LIMIT_TIME
    assert rollout.batch["reward"].tolist() == [0.0] and rollout.batch["reward_mask"].all()


def test_a_failure_stops_the_run_where_it_should(generator: Generator) -> None:
    path = "tests.agents.programs.kills_itself"
    with (
        collector_of(generator, path, retries=0, on_error="stop") as collector,
        pytest.raises(RewardError, match=r"exit status -11.*environment\.on_error=drop"),
    ):
        rollout_of(collector, "anything")
