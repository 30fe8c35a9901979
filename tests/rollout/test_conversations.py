"""Rollouts of several turns with a real generator and environment: ids, masks, limits, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.agents.environment_worker import EnvironmentWorker
from nemo_like.agents.statuses import turn_seed
from nemo_like.agents.workers import AgentWorkers
from nemo_like.algorithms.grpo.advantages import without_truncated
from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import EnvironmentConfig, RewardConfig, RewardFunctionConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.errors import WorkerDied
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import Handle
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationStart, SamplingParams
from nemo_like.metrics import metric_values
from nemo_like.rollout.answers import answer_metrics
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.episodes import EpisodeDriver
from nemo_like.rollout.rows import Rollout, build_rollout, rollout_metrics, row_seeds

CONTEXT = local_context(num_threads=1)
SAMPLING = SamplingParams(max_new_tokens=6)
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    build_model(seed=0).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def generator(model_directory: Path) -> Generator:
    kwargs = {"start": GenerationStart(model_name=str(model_directory)), "batch_size": 8}
    return Generator(lambda index: LocalGroup(HFGenerationWorker, kwargs, CONTEXT))


def _environment(
    name: str, *, group: type[LocalGroup] = LocalGroup, max_turns: int = 9, **settings: Any
) -> AgentWorkers:
    path = f"tests.environments.user_environments.{name}"
    config = EnvironmentConfig(path=path, max_turns=max_turns, **settings)
    kwargs = {"config": config}
    return AgentWorkers(lambda index: group(EnvironmentWorker, kwargs, CONTEXT), 1, max_restarts=1)


def _collector(
    generator: Generator, workers: AgentWorkers, rewards: RewardEnvironment | None = None
) -> RolloutCollector:
    encoder = ChatEncoder(build_tokenizer())
    workers.set_encoder(encoder)
    driver = EpisodeDriver(workers, generator, EnvironmentConfig(), RewardConfig())
    return RolloutCollector(generator, rewards, encoder.tokenizer, driver)


def _prompts(rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    encoder = ChatEncoder(build_tokenizer())
    prompts = []
    for row in rows:
        token_ids = encoder.encode_prompt([{"role": "user", "content": row["prompt"]}])
        prompts.append(Prompt(token_ids=token_ids, text=row["prompt"], answer=None, row=row))
    return prompts


def _rollout(
    collector: RolloutCollector,
    prompts: list[Prompt],
    group_size: int = 1,
    sampling: SamplingParams = SAMPLING,
    max_tokens: int = MAX_TOKENS,
) -> Rollout:
    seeds = row_seeds(3, 0, len(prompts) * group_size)
    job = collector.start(
        prompts, group_size=group_size, sampling=sampling, max_total_length=max_tokens, seeds=seeds
    )
    while not job.is_done:
        collector.advance()
    return job.result()


def _scripted(turns: Sequence[int]) -> list[dict[str, Any]]:
    return [{"prompt": f"{index}+{count}", "num_turns": count} for index, count in enumerate(turns)]


def test_rows_are_the_sampled_ids_and_the_ids_of_the_observations(generator: Generator) -> None:
    turns = [5, 1, 3, 2]
    workers = _environment("Scripted")
    rollout = _rollout(_collector(generator, workers), _prompts(_scripted(turns)), group_size=2)
    workers.shutdown()
    conversations = rollout.conversations
    assert [each.num_turns for each in conversations] == np.repeat(turns, 2).tolist()
    tokenizer = build_tokenizer()
    eos = tokenizer.eos_token_id
    seeds = row_seeds(3, 0, len(conversations))
    for row, conversation in enumerate(conversations):
        ids: list[int] = conversation.prompt.token_ids.tolist()
        mask = [0] * len(ids)
        logprobs = [0.0] * len(ids)
        for turn in range(conversation.num_turns):
            # The turn sampled again by itself, from all ids before it.
            again = generator.generate(
                Jagged.from_rows([ids], np.int32),
                np.array([turn_seed(int(seeds[row]), turn)], dtype=np.uint64),
                SAMPLING,
                max_total_length=MAX_TOKENS,
            )
            ids += again.token_ids[0].tolist()
            mask += [1] * len(again.token_ids[0])
            logprobs += again.logprobs[0].tolist()
            if turn + 1 < conversation.num_turns:
                text = tokenizer.decode(again.token_ids[0], skip_special_tokens=True)
                end = "" if ids[-1] == eos else "<eos>"
                observation = f"{end}<user>{turn + 1}+{len(text)}<assistant>"
                observed = tokenizer(observation, add_special_tokens=False)["input_ids"]
                ids += observed
                mask += [0] * len(observed)
                logprobs += [0.0] * len(observed)
        assert rollout.batch["input_ids"][row].tolist() == ids
        assert rollout.batch["token_mask"][row].tolist() == mask
        found = rollout.batch["generation_logprobs"][row]
        np.testing.assert_allclose(found, logprobs, atol=1e-5)
        assert rollout.batch["length"][row] == len(ids)


def test_rewards_of_turns_and_of_functions_add_up(generator: Generator) -> None:
    functions = {
        "digits": RewardFunctionConfig(path="tests.algorithms.rewards.digit_share", weight=10.0)
    }
    rewards = RewardEnvironment(
        LocalGroup(RewardWorker, {"functions": functions}, CONTEXT),
        RewardConfig(functions=functions),
    )
    workers = _environment("Scripted")
    collector = _collector(generator, workers, rewards)
    rollout = _rollout(collector, _prompts(_scripted([2, 4])))
    workers.shutdown()
    components = rollout.components
    assert components["environment_turns"].tolist() == [2, 4]
    lengths = []
    for conversation in rollout.conversations:
        turns = [each for each in conversation.messages if each["role"] == "assistant"]
        lengths.append(sum(len(each["content"]) for each in turns))
    assert components["environment_characters"].tolist() == lengths
    expected = (
        components["environment_turns"]
        + components["environment_characters"]
        + 10 * components["digits"]
    )
    np.testing.assert_allclose(rollout.batch["reward"], expected, rtol=1e-6)
    for conversation in rollout.conversations:
        sample = conversation.sample()
        assert sample.completion == conversation.messages[-1]["content"]
        assert list(sample.messages) == conversation.messages
    values = metric_values(rollout_metrics(rollout))
    assert values["conversation/turns_mean"] == 3 and values["conversation/turns_max"] == 4
    assert values["environment/tool_calls"] == 3
    assert values["conversation/ended_by_environment_share"] == 1
    assert values["generation/prompt_length_mean"] == len(rollout.conversations[0].segments[0])
    record = rollout.records()[1]
    assert record["num_turns"] == 4 and record["ended_by"] == "done"
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * 4


@pytest.mark.parametrize(
    ("max_turns", "max_tokens", "reason"), [(2, MAX_TOKENS, "turns"), (9, 22, "tokens")]
)
def test_limits_end_a_conversation(
    generator: Generator, max_turns: int, max_tokens: int, reason: str
) -> None:
    workers = _environment("Scripted", max_turns=max_turns)
    collector = _collector(generator, workers)
    rollout = _rollout(collector, _prompts(_scripted([9, 9, 1])), max_tokens=max_tokens)
    workers.shutdown()
    assert [each.ended_by for each in rollout.conversations] == [reason, reason, "done"]
    assert max(rollout.batch["length"]) <= max_tokens
    for conversation in rollout.conversations:
        assert conversation.num_turns <= max_turns
        # Every turn has its reward, and a row ends with a turn of the model.
        assert conversation.rewards["environment_turns"] == conversation.num_turns
        assert len(conversation.segments) == 2 * conversation.num_turns
    values = metric_values(rollout_metrics(rollout))
    assert values[f"conversation/ended_by_{reason}_share"] == pytest.approx(2 / 3)


def test_conversations_that_a_token_limit_ends_are_truncated(generator: Generator) -> None:
    """The limit of the conversation ends the first one after a complete turn."""
    workers = _environment("Scripted", max_turns=4)
    prompts = _prompts(_scripted([9, 9, 1, 9, 1, 2]))
    # A turn that reaches no limit ends with its first digit.
    sampling = SamplingParams(max_new_tokens=3, stop_strings=tuple("0123456789"))
    collector = _collector(generator, workers)
    rollout = _rollout(collector, prompts, sampling=sampling, max_tokens=22)
    workers.shutdown()
    conversations = rollout.conversations
    last_turns = [str(each.messages[-1]["content"]) for each in conversations]
    is_complete = [text[-1:].isdigit() for text in last_turns]
    assert conversations[0].ended_by == "tokens" and is_complete[0]
    is_truncated = [
        each.ended_by == "tokens" or not complete
        for each, complete in zip(conversations, is_complete, strict=True)
    ]
    assert 0 < sum(is_truncated) < len(is_truncated)
    assert without_truncated(rollout).batch["row_mask"].tolist() == np.invert(is_truncated).tolist()
    share = pytest.approx(np.mean(is_truncated))
    assert metric_values(rollout_metrics(rollout))["generation/truncated_share"] == share
    rows = np.arange(len(is_truncated))
    values = metric_values(answer_metrics(rollout, rows, num_samples=1, pass_reward=1.0))
    assert values["generation_truncated_share"] == share
    reasons = [record["finish_reason"] == "length" for record in rollout.records()]
    assert reasons == is_truncated


def test_a_tool_that_hangs_ends_its_own_conversation(generator: Generator) -> None:
    workers = _environment("Hanging", options={"kind": "async"}, timeout_s=0.1)
    rows = [{"prompt": "1+1", "do": "hang"}, {"prompt": "2+2", "do": "answer"}]
    rollout = _rollout(_collector(generator, workers), _prompts(rows))
    workers.shutdown()
    assert [each.ended_by for each in rollout.conversations] == ["timeout", "done"]
    assert rollout.batch["reward"].tolist() == [0.0, 1.0]
    assert metric_values(rollout_metrics(rollout))["conversation/ended_by_timeout_share"] == 0.5


def test_drained_conversations_go_on_later(generator: Generator) -> None:
    workers = _environment("Scripted")
    collector = _collector(generator, workers)
    prompts = _prompts(_scripted([3, 3]))
    seeds = row_seeds(3, 0, 2)
    job = collector.start(
        prompts, group_size=1, sampling=SAMPLING, max_total_length=MAX_TOKENS, seeds=seeds
    )
    collector.drain()
    assert generator.num_unfinished == 0 and not job.is_done
    with collector.background():
        while not job.is_done:
            pass
    drained = job.result().batch["input_ids"]
    straight = _rollout(collector, prompts).batch["input_ids"]
    workers.shutdown()
    assert [row.tolist() for row in drained] == [row.tolist() for row in straight]


class _DyingGroup(LocalGroup):
    """Its process dies at the third call of `poll`, as far as the driver can see."""

    num_polls = 0

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        if handles[0].method == "poll":
            self.num_polls += 1
            if self.num_polls == 3:
                raise WorkerDied("it died", group=self.name, rank=0, method="poll")
        return super().get(handles)


def test_a_lost_replica_changes_no_conversation(
    generator: Generator, model_directory: Path
) -> None:
    kwargs = {"start": GenerationStart(model_name=str(model_directory)), "batch_size": 8}
    groups = [_DyingGroup, LocalGroup]

    def start(index: int) -> LocalGroup:
        return groups.pop(0)(HFGenerationWorker, kwargs, CONTEXT)

    reports: list[str] = []
    losing = Generator(start, max_restarts=1, report=reports.append)
    workers = _environment("Scripted")
    collector = _collector(losing, workers)
    prompts = _prompts(_scripted([4, 3]))
    seeds = row_seeds(3, 0, 2)
    job = collector.start(
        prompts, group_size=1, sampling=SAMPLING, max_total_length=MAX_TOKENS, seeds=seeds
    )
    while not job.is_done:
        # The restarted replica has loaded the same weights.
        losing.set_version(losing.replicas_without_weights, losing.version)
        collector.advance()
    assert len(reports) == 1 and groups == []
    expected = _rollout(_collector(generator, workers), prompts)
    workers.shutdown()
    found = job.result()
    for name in ("input_ids", "token_mask"):
        assert [row.tolist() for row in found.batch[name]] == [
            row.tolist() for row in expected.batch[name]
        ]


class _DyingEnvironment(LocalGroup):
    """Its process dies once, when it is given the answers to the second turns."""

    num_answers: ClassVar[list[int]] = []

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        if method == "advance" and any(each.number == 1 for each in args[1]):
            self.num_answers.append(len(args[1]))
            if len(self.num_answers) == 1:
                self.shutdown()
                raise WorkerDied("it died", group="environment", rank=0, method=method)
        return super().submit_one(rank, method, *args, **kwargs)


def test_a_lost_process_of_the_environment_changes_no_conversation(generator: Generator) -> None:
    _DyingEnvironment.num_answers = []
    prompts = _prompts(_scripted([4, 3, 1]))
    found = []
    for group in (_DyingEnvironment, LocalGroup):
        workers = _environment("Scripted", group=group)
        found.append(_rollout(_collector(generator, workers), prompts, group_size=2))
        workers.shutdown()
    assert len(_DyingEnvironment.num_answers) > 1
    lost, expected = found
    for name in ("input_ids", "token_mask", "reward", "group"):
        assert [row.tolist() for row in lost.batch[name]] == [
            row.tolist() for row in expected.batch[name]
        ]
    assert generator.num_unfinished == 0


def test_a_prompt_without_room_for_a_turn_is_refused(generator: Generator) -> None:
    workers = _environment("Scripted")
    collector = _collector(generator, workers)
    with pytest.raises(ConfigError, match=r"'0\+1' has 6 tokens.*max_total_sequence_length"):
        _rollout(collector, _prompts(_scripted([1])), max_tokens=6)
    workers.shutdown()


def test_the_first_turn_has_the_seed_of_the_row() -> None:
    seed = int(row_seeds(1, 2, 1)[0])
    seeds = [turn_seed(seed, turn) for turn in range(5)]
    assert seeds[0] == seed and len(set(seeds)) == 5
    assert seeds == [turn_seed(seed, turn) for turn in range(5)]


_IDS = st.lists(st.integers(0, 99), min_size=1, max_size=5)


_PAIRS = st.lists(st.tuples(_IDS, _IDS), min_size=1, max_size=4)
"""Prompt and turn, then observation and turn for each further pair."""


@given(st.lists(_PAIRS, min_size=1, max_size=5))
def test_a_row_is_its_segments_with_every_second_one_trained(
    pairs: list[list[tuple[list[int], list[int]]]],
) -> None:
    rows = [[part for pair in each for part in pair] for each in pairs]
    prompt = Prompt(token_ids=np.array([1], np.int32), text="", answer=None)
    conversations = []
    for parts in rows:
        conversation = ConversationRow.start(prompt, 0)
        conversation.segments = [np.array(part, np.int32) for part in parts]
        for part in parts[1::2]:
            conversation.logprobs.append(-np.array(part, np.float32))
            conversation.weight_versions.append(np.array(part, np.int32))
        conversations.append(conversation)
    rollout = build_rollout(conversations, 1, np.zeros(len(rows), np.float32), {})
    for row, parts in enumerate(rows):
        ids = [token for part in parts for token in part]
        trained = [index % 2 for index, part in enumerate(parts) for _ in part]
        assert rollout.batch["input_ids"][row].tolist() == ids
        assert rollout.batch["token_mask"][row].tolist() == trained
        expected = [-token * is_trained for token, is_trained in zip(ids, trained, strict=True)]
        assert rollout.batch["generation_logprobs"][row].tolist() == expected
        gaps = [(100 - token) * is_trained for token, is_trained in zip(ids, trained, strict=True)]
        assert rollout.version_gaps(100)[row].tolist() == gaps
