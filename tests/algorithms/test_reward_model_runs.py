"""GRPO runs with a reward model in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.registry import load_config
from nemo_like.config.errors import ConfigError
from tests.recipe import Recipe
from tests.reward_models import ReferenceScores, save_reward_model


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


def test_the_scores_of_a_model_are_a_component_of_the_reward(
    recipe: Recipe, reward_model: Path
) -> None:
    config = recipe.grpo(
        f"reward.models.quality.model_name={reward_model}",
        "reward.models.quality.weight=0.5",
        "reward.models.quality.mb_tokens=256",
        "grpo.advantage.components=separate",
        "grpo.max_num_steps=2",
        "data.system_prompt=Add.",
        "checkpointing.enabled=false",
    )
    result = run_grpo(config)
    reference = ReferenceScores(reward_model)
    for step in (1, 2):
        lines = result.directory.rollouts(step).read_bytes().splitlines()
        records = [json.loads(line) for line in lines]
        assert len(records) == 32
        for record in records:
            ids = reference.token_ids(
                ("system", "Add."), ("user", record["prompt"]), ("assistant", record["completion"])
            )
            assert record["reward_quality"] == pytest.approx(reference.score(ids), abs=1e-4)
            expected = record["reward_digits"] + 0.5 * record["reward_quality"]
            assert record["reward"] == pytest.approx(expected, abs=1e-5)
    scores = [record["reward_quality"] for record in records]
    assert result.last["reward/quality_mean"] == pytest.approx(sum(scores) / 32, abs=1e-5)
    assert result.last["reward/quality_std"] > 0
    assert result.last["timing/reward_model_s"] > 0
    assert result.last["reward_model/quality_num_tokens"] > 32
    assert "validation/quality_mean" in result.first and "validation/quality_mean" in result.last


def test_a_model_may_be_the_only_reward_also_in_bfloat16(
    recipe: Recipe, reward_model: Path
) -> None:
    """The run does not resume with other weights in the directory of the model."""
    reward_model = shutil.copytree(reward_model, recipe.folder / "reward_model")
    path = recipe.folder / "grpo.yaml"
    recipe.grpo()
    text = path.read_text()
    start = text.index("reward:")
    path.write_text(
        text[:start]
        + f"reward: {{models: {{quality: {{model_name: {reward_model}, precision: bfloat16}}}}}}\n"
    )
    overrides = [
        "policy.precision=bfloat16",
        "grpo.max_num_steps=1",
        "grpo.val_at_start=false",
        "checkpointing.export_hf=false",
    ]
    result = run_grpo(load_config(GrpoRunConfig, path, overrides))
    assert result.last["reward/mean"] == pytest.approx(result.last["reward/quality_mean"])
    assert result.last["reward/std"] > 0
    weights = reward_model / "model.safetensors"
    values = load_file(weights)
    save_file({name: each * 1.01 for name, each in values.items()}, weights)
    with pytest.raises(
        ConfigError, match=r"reward\.models\.quality\.model_name is .* whose weights"
    ):
        run_grpo(load_config(GrpoRunConfig, path, [*overrides, "resume=true"]))
