"""Relations between `reward.models` and other keys, and paths and foreign keys of reward models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.registry import job_schema
from nemo_like.config.check_sections import MAX_SHARED_MODELS
from nemo_like.config.foreign import find_foreign
from nemo_like.config.keys import tools
from nemo_like.config.paths import resolve_paths
from nemo_like.config.rollout import RewardConfig, RewardModelConfig
from nemo_like.distributed.ray.virtual_cluster import COLOCATED_GROUPS
from tests.config.test_check import GRPO, REWARD, problems

MODEL = RewardModelConfig(model_name="models/reward")


def test_a_model_alone_is_enough_and_weights_are_those_of_both_sections() -> None:
    assert problems(GRPO, reward=RewardConfig(models={"quality": MODEL})) == []
    (text,) = problems(GRPO, reward=RewardConfig())
    assert text.startswith("reward.functions and reward.models are empty")
    zero = replace(MODEL, weight=0.0)
    (text,) = problems(GRPO, reward=RewardConfig(models={"quality": zero}))
    assert text.startswith("every weight in reward.functions and reward.models is 0")
    both = replace(REWARD, models={"quality": zero})
    assert both.weights == {"answer": 1.0, "quality": 0.0} and problems(GRPO, reward=both) == []


def test_a_name_is_used_once() -> None:
    (text,) = problems(GRPO, reward=replace(REWARD, models={"answer": MODEL}))
    assert "both have the name answer" in text


def test_workers_that_the_cluster_cannot_have() -> None:
    own = replace(MODEL, num_workers=2)
    reward = replace(REWARD, models={"quality": own})
    (text,) = problems(GRPO, reward=reward, cluster__backend="local")
    assert text.startswith("reward.models.quality.num_workers is 2")
    assert problems(GRPO, reward=reward) == []
    # Policy and generator are the other two groups of a bundle.
    assert MAX_SHARED_MODELS == COLOCATED_GROUPS - 2
    reward = replace(REWARD, models={"a": MODEL, "b": MODEL, "c": MODEL, "d": own})
    (text,) = problems(GRPO, reward=reward)
    assert "3 reward models (a, b, c)" in text and "reward.models.c.num_workers" in text


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "reward").mkdir(parents=True)
    for name in ("tokens", GRPO.policy.model_name):
        (tmp_path / name).mkdir()
    models = {"quality": replace(MODEL, chat_template="chat.jinja", tokenizer_name="tokens")}
    resolved = resolve_paths(replace(GRPO, reward=RewardConfig(models=models)))
    model = resolved.reward.models["quality"]
    assert model.model_name == str(tmp_path / "models" / "reward")
    assert model.chat_template == str(tmp_path / "chat.jinja")
    assert model.tokenizer_name == str(tmp_path / "tokens")


@pytest.mark.parametrize(
    ("tool", "tree", "targets"),
    [
        (
            "NeMo RL",
            {
                "env": {
                    "reward_model": {
                        "enabled": True,
                        "model_name": "org/reward",
                        "precision": "bf16",
                        "batch_size": 4,
                        "max_model_len": 2048,
                    }
                }
            },
            {"model_name", "precision", "max_length"},
        ),
        (
            "verl",
            {
                "reward_model": {
                    "enable": True,
                    "model": {"path": "org/reward", "input_tokenizer": "org/policy"},
                    "max_length": 2048,
                    "forward_max_token_len_per_gpu": 32768,
                }
            },
            {"model_name", "max_length", "mb_tokens"},
        ),
        ("TRL", {"reward_model_name_or_path": "org/reward"}, {"model_name"}),
    ],
)
def test_reward_models_of_other_tools_are_translated(
    tool: str, tree: dict, targets: set[str]
) -> None:
    (table,) = [each for each in tools() if each.name == tool]
    found = find_foreign(job_schema("grpo"), tree, table)
    renamed = {target for finding in found for target in finding.targets}
    assert renamed == {f"reward.models.model.{name}" for name in targets}
    assert not any(finding.group == "unknown" for finding in found)
