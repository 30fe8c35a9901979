"""Reward models on their workers: scores, limits, failures, and the files that are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import OnError, RewardConfig, RewardModelConfig
from nemo_like.config.schema import DataConfig
from nemo_like.distributed.errors import WorkerDied, WorkerFailure
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.environments.reward import RewardError, RewardSample
from nemo_like.generation.requests import SamplingParams
from nemo_like.metrics import metric_values
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.rollout.collector import RolloutJob
from nemo_like.rollout.conversations import Prompt, scored_conversation
from nemo_like.rollout.rewards import ModelRewards, RewardModel
from nemo_like.training.model_files import open_reward_model
from nemo_like.training.rollout_workers import serving_config
from tests.reward_models import ReferenceScores, save_reward_model

DATA = DataConfig(train_path="train.jsonl")
ANSWERS = ["4", "", "The answer is four. 1 + 2 = 3", "12 34 56 " * 9, "What is two plus two?"]


class DyingOnce(DTensorPolicyWorker):
    """A worker whose first calls of `compute_scores` fail as those of a process that ended."""

    num_failures = 0

    def compute_scores(self, shard: Any) -> Any:
        if DyingOnce.num_failures > 0:
            DyingOnce.num_failures -= 1
            raise WorkerDied(
                "it received SIGKILL", group="reward_model-quality", rank=0, method="compute_scores"
            )
        return super().compute_scores(shard)


class UnwrappedGroup(LocalGroup):
    """Raises the failures of `DyingOnce` as a group of processes does."""

    def _guard(self, method: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def reference(directory: Path) -> ReferenceScores:
    return ReferenceScores(directory)


def reward_model(
    directory: Path,
    worker_class: type[DTensorPolicyWorker] = DTensorPolicyWorker,
    report: Any = None,
    **keys: Any,
) -> RewardModel:
    config = RewardModelConfig(model_name=str(directory), **keys)
    files = open_reward_model("quality", config)
    serving = serving_config(config)
    kwargs = {"config": serving, "start": PolicyStart(head="scores", trainable=False)}
    group_class = LocalGroup if worker_class is DTensorPolicyWorker else UnwrappedGroup

    def start() -> Policy:
        group = group_class(worker_class, kwargs, local_context(num_threads=1))
        return Policy(group, serving, files.spec)

    return RewardModel(
        "quality",
        config,
        files.encoder,
        start,
        max_length=files.max_length,
        max_restarts=1,
        report=report or print,
    )


def score(model: RewardModel, answers: list[str], **keys: Any) -> RolloutJob:
    """Score one answer to each prompt; a function gave each a reward of 1."""
    prompt = Prompt(token_ids=np.array([1], dtype=np.int32), text="2+2=?", answer=None)
    job = RolloutJob([prompt] * len(answers), 1, SamplingParams(max_new_tokens=8))
    job.rewards += 1.0
    config = RewardConfig(models={"quality": model.config}, **keys)
    samples = [RewardSample(prompt="2+2=?", completion=answer) for answer in answers]
    ModelRewards([model], config, DATA).score(job, samples)
    return job


def test_scores_are_those_of_transformers_in_any_packing(
    directory: Path, reference: ReferenceScores
) -> None:
    expected = [reference.answer("2+2=?", answer) for answer in ANSWERS]
    assert np.ptp(expected) > 0.1
    # A longer conversation than the budget has a microbatch of its own.
    for mb_tokens in (40, 8192):
        model = reward_model(directory, mb_tokens=mb_tokens, weight=-0.5)
        job = score(model, ANSWERS)
        np.testing.assert_allclose(job.components["quality"], expected, atol=1e-5)
        np.testing.assert_allclose(job.rewards, 1 - 0.5 * np.array(expected), atol=1e-5)


def test_equal_completions_have_one_score(directory: Path, reference: ReferenceScores) -> None:
    """In microbatches of other sizes scores differ by rounding, as a sum of other order does."""
    model = reward_model(directory, mb_tokens=40)
    answers = ["4", ANSWERS[3], "4", "", "4", ANSWERS[3], "4"]
    scores = score(model, answers).components["quality"]
    expected = [reference.answer("2+2=?", answer) for answer in answers]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert len(set(scores.tolist())) == 3
    metrics = metric_values(model.pop_metrics())
    alone = reward_model(directory, mb_tokens=40)
    score(alone, ["4", ANSWERS[3], ""])
    num_tokens = metric_values(alone.pop_metrics())["reward_model/quality_num_tokens"]
    assert metrics["reward_model/quality_num_tokens"] == num_tokens


def test_a_model_of_another_tool_is_scored_at_the_end_of_the_template(
    directory: Path, reference: ReferenceScores
) -> None:
    tokenizer = reference.tokenizer
    expected = []
    for answer in ANSWERS:
        turns = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        assert text.endswith("<|im_end|>\n")
        expected.append(reference.score(tokenizer(text, add_special_tokens=False)["input_ids"]))
    job = score(reward_model(directory, conversation_end="template"), ANSWERS)
    np.testing.assert_allclose(job.components["quality"], expected, atol=1e-5)


def test_a_conversation_is_scored_with_all_its_turns_and_the_prompts_of_the_config(
    directory: Path, reference: ReferenceScores
) -> None:
    data = DataConfig(train_path="t", system_prompt="Add.", prompt_template="Solve: {prompt}")
    turns = [
        {"role": "user", "content": "2+2=?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]
    sample = RewardSample(
        prompt="2+2=?", completion="4", row={"prompt": "2+2=?"}, messages=tuple(turns)
    )
    model = reward_model(directory)
    values, _ = model.score([scored_conversation(sample, data)])
    ids = reference.token_ids(
        ("system", "Add."),
        ("user", "Solve: 2+2=?"),
        ("assistant", "3"),
        # An observation is no prompt, so the template does not apply to it.
        ("user", "no"),
        ("assistant", "4"),
    )
    assert model.encode(scored_conversation(sample, data)).tolist() == ids
    assert values[0] == pytest.approx(reference.score(ids), abs=1e-5)


def test_a_conversation_above_the_limit_is_a_failure_or_loses_its_beginning(
    directory: Path, reference: ReferenceScores
) -> None:
    model = reward_model(directory, max_length=24)
    with pytest.raises(RewardError) as caught:
        score(model, ANSWERS)
    text = str(caught.value)
    assert "reward.models.quality" in text and "above reward.models.quality.max_length, 24" in text
    assert "oversize_rows to truncate" in text and "is four. 1 + 2" in text
    errors: list[OnError] = ["zero", "drop"]
    for on_error in errors:
        job = score(model, ANSWERS, on_error=on_error, max_error_share=0.5)
        assert job.dropped_rows == ({2, 3} if on_error == "drop" else set())
        assert list(job.reward_problems) == [2, 3]
        assert job.components["quality"][3] == 0 and job.components["quality"][0] != 0
    with pytest.raises(RewardError, match=r"1 of 5 completions failed, above reward.max_error"):
        score(model, ANSWERS, on_error="zero")

    model = reward_model(directory, max_length=24, oversize_rows="truncate")
    job = score(model, ANSWERS)
    ids = reference.token_ids(("user", "2+2=?"), ("assistant", ANSWERS[3]))
    assert job.components["quality"][3] == pytest.approx(reference.score(ids[-24:]), abs=1e-5)
    metrics = metric_values(model.pop_metrics())
    assert metrics["reward_model/quality_truncated_share"] == pytest.approx(2 / 5)
    assert metrics["reward_model/quality_num_tokens"] > 48


def test_a_score_that_is_not_finite_is_an_error_with_its_row(tmp_path: Path) -> None:
    directory = save_reward_model(tmp_path / "broken")
    file = directory / "model.safetensors"
    weights = load_file(file)
    # Weights that are not finite are refused when they are read; here their product is not.
    weights["model.norm.weight"].fill_(1.7e19)
    weights["score.weight"].fill_(1.7e19)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"score (nan|-?inf), which is not a finite number"):
        score(reward_model(directory), ["4"])


def test_workers_that_died_are_started_again_a_limited_number_of_times(
    directory: Path, reference: ReferenceScores
) -> None:
    reports: list[str] = []
    model = reward_model(directory, DyingOnce, reports.append)
    DyingOnce.num_failures = 1
    job = score(model, ["4", "12"])
    expected = [reference.answer("2+2=?", answer) for answer in ("4", "12")]
    np.testing.assert_allclose(job.components["quality"], expected, atol=1e-5)
    assert len(reports) == 1 and "restart 1 of at most 1" in reports[0]
    DyingOnce.num_failures = 1
    with pytest.raises(WorkerFailure, match=r"limit of cluster\.max_restarts=1"):
        score(model, ["4"])


def test_files_that_are_no_reward_model_are_refused(demo: Path, tmp_path: Path) -> None:
    def problem(**keys: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            open_reward_model("quality", RewardModelConfig(**keys))
        return str(caught.value)

    causal = problem(model_name=str(demo / "model"))
    assert "a LlamaForCausalLM, which has no score head" in causal and "nemo-like rm" in causal
    missing = problem(model_name=str(tmp_path / "none"))
    assert re.match(r"reward\.models\.quality\.model_name is '.*none', but there is no", missing)
    classifier = save_reward_model(tmp_path / "classifier", num_labels=3)
    assert "a classifier of 3 labels" in problem(model_name=str(classifier))
    short = save_reward_model(tmp_path / "short", max_positions=64)
    text = problem(model_name=str(short), max_length=65)
    assert "max_length is 65, above the 64 positions" in text
