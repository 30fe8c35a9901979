"""SFT with `sft.val_generate`: answers are sampled with the weights of the step that is validated,
also after a resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.rollout.rows import Rollout
from nemo_like.training import validation_answers as validation
from nemo_like.training.rollout_run import RolloutRun
from nemo_like.weight_sync.channel import WeightSyncError
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

STEPS, PERIOD = 24, 8


def config_of(recipe: Recipe, *overrides: str) -> Any:
    """Eight rows of one answer, which a tiny model learns in 24 steps, and the same rows to
    validate.
    """
    path = recipe.folder / "constant.jsonl"
    rows = [{"prompt": f"{i}+{i}", "completion": "#### 7", "answer": "7"} for i in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe.sft(
        f"data.train_path={path}",
        f"data.validation_path={path}",
        "sft.val_generate=true",
        f"sft.max_num_steps={STEPS}",
        "sft.max_num_epochs=1000",
        f"sft.val_period={PERIOD}",
        "policy.train_global_batch_size=8",
        "policy.optimizer.lr=3e-3",
        "policy.scheduler.kind=constant",
        "policy.generation.max_new_tokens=8",
        f"checkpointing.save_period={PERIOD}",
        "checkpointing.keep_latest=5",
        "reward.functions.answer.path=nemo_like.environments.math.answer_reward",
        *overrides,
    )


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The weight version of each validation, in order; the generator's weights are compared with
    the policy's each time.
    """
    found: list[int] = []

    def checked_scores(run: Any, prompts: Any, step: int, *rest: Any) -> Any:
        (replica,) = run.workers.rollout.generator.replicas
        policy, generator = run.policy.group.worker, replica.group.worker
        sampled_with = dict(generator.model.named_parameters(remove_duplicate=False))
        for name, weight in policy.engine.full_weights(list(policy.engine.weight_shapes())):
            assert torch.equal(sampled_with[name], weight), (
                f"{name} of the generator is not the policy's at step {step}"
            )
        return score_answers(run, prompts, step, *rest)

    finish_rollout = RolloutRun.finish

    def recorded(run: RolloutRun, job: Any) -> Rollout:
        rollout = finish_rollout(run, job)
        low, high = rollout.versions
        assert low == high
        found.append(low)
        return rollout

    score_answers = validation.score_answers
    monkeypatch.setattr("nemo_like.algorithms.sft.validation.score_answers", checked_scores)
    monkeypatch.setattr(RolloutRun, "finish", recorded)
    return found


def test_answers_are_sampled_with_the_trained_weights(recipe: Recipe, versions: list[int]) -> None:
    result = run_sft(config_of(recipe))
    rewards = {
        line["step"]: line.get("validation/reward_mean")
        for line in read_metrics(result.directory.path)
    }
    assert versions == [0, 8, 16, 24]
    assert rewards[0] == 0.0
    assert rewards[STEPS] == 1.0, "the model has learned the answer, so validation must see that"
    expected = read_metrics(result.directory.path)
    versions.clear()
    interrupt_at(result.directory.path, 8)
    resumed = run_sft(config_of(recipe, "resume=true"))
    assert versions == [16, 24]
    assert read_metrics(resumed.directory.path) == expected


def test_completions_of_other_weights_are_refused(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nemo_like.training.rollout_run.RolloutRun.sync_weights", lambda run, version: None
    )
    with pytest.raises(
        RuntimeError, match="weights of versions 0 to 0, but step 8 needs version 8"
    ):
        run_sft(config_of(recipe, f"sft.max_num_steps={PERIOD}"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no effect", "replica 0 does not compute with the weights of version 8.*had no effect"),
        ("one tensor kept", "replica 0 does not compute with the weights of version 8"),
        ("not finite", "log-probs are not finite"),
    ],
)
def test_a_generator_with_other_weights_is_not_sampled_from(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    """Faults that a loader may have without an error."""

    def load(worker: HFGenerationWorker, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = worker.model.state_dict(keep_vars=True)
        for name, tensor in named:
            assert worker.coverage is not None
            worker.coverage.add(name, tuple(tensor.shape))
            is_kept = fault == "no effect" or (fault == "one tensor kept" and "down_proj" in name)
            if not is_kept:
                targets[name].copy_(tensor if fault != "not finite" else tensor * torch.nan)

    monkeypatch.setattr(HFGenerationWorker, "_load_weights", load)
    scored: list[int] = []
    score_answers = validation.score_answers
    monkeypatch.setattr(
        "nemo_like.algorithms.sft.validation.score_answers",
        lambda run, prompts, step, *rest: scored.append(step) or score_answers(run, prompts, step),
    )
    with pytest.raises(WeightSyncError, match=message):
        run_sft(config_of(recipe, f"sft.max_num_steps={PERIOD}"))
    # The first update sends the weights that the generator has already, unless it damages them.
    assert scored == ([] if fault == "not finite" else [0])
