"""`grpo.oversampling_factor` in complete runs: what is kept, deferred, counted and resumed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.config.errors import ConfigError
from nemo_like.data.oversampling import OversamplingLoader
from tests.algorithms.test_asynchronous import ON_RAY
from tests.algorithms.test_grpo_options import rollout_of
from tests.algorithms.test_prompt_selection import make_loader, make_selector
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

RUN = (
    "grpo.num_prompts_per_step=4",
    "grpo.oversampling_factor=1.25",
    "grpo.max_num_steps=7",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
    "data.max_train_rows=11",
    "checkpointing.keep_latest=9",
    "checkpointing.export_hf=false",
    "loss_fn.reference_policy_kl_penalty=0",
)
DEPENDS_ON_TIME = ("generation/num_discarded_tokens", "generation/num_cancelled")
"""How far a request was when it was cancelled."""


def without_times(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in line.items() if name not in DEPENDS_ON_TIME}
        for line in metrics
    ]


@pytest.mark.parametrize("selects", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_each_prompt_is_trained_once_an_epoch_and_a_resumed_run_is_equal(
    recipe: Recipe, selects: bool
) -> None:
    """Two epochs of 11 prompts: steps of 4, 4 and 3; without history nothing is skipped in one."""
    options = [*RUN, f"grpo.prompt_selection.enabled={str(selects).lower()}"]
    options.append("grpo.prompt_selection.decay=1")
    run = run_grpo(recipe.grpo(*options)).directory.path
    metrics, rows = read_metrics(run), [rollout_of(run, step) for step in range(1, 8)]
    folder = run / "checkpoints/step_7"
    state = (folder / "training_state.json").read_bytes()
    weights = (folder / "policy/rank_00000_000.safetensors").read_bytes()
    waiting = 0
    for epoch in range(2):
        sources: Counter[str] = Counter()
        for step in range(3 * epoch, 3 * epoch + 3):
            sources.update(row["source"] for row in rows[step])
            waiting += metrics[step]["generation/num_deferred_prompts"]
            is_rest = step % 3 == 2
            waiting -= waiting if is_rest else 0
            assert metrics[step]["generation/num_waiting_prompts"] == waiting
            assert len(rows[step]) == (12 if is_rest else 16)
        assert set(sources.values()) == {4} and len(sources) == 11
    deferred = [line["generation/num_deferred_prompts"] for line in metrics]
    assert deferred == [1, 1, 0, 1, 1, 0, 1]
    assert metrics[0]["generation/num_discarded_tokens"] > 0
    # Two prompts wait.
    interrupt_at(run, 5)
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert without_times(read_metrics(run)) == without_times(metrics)
    assert [rollout_of(run, step) for step in range(1, 8)] == rows
    assert (folder / "training_state.json").read_bytes() == state
    assert (folder / "policy/rank_00000_000.safetensors").read_bytes() == weights


def test_the_kept_groups_are_those_that_end_first(recipe: Recipe) -> None:
    """Against a run that trains on all five groups: the rows of a batch are decoded in lockstep."""
    short = ["grpo.max_num_steps=1", "run_name=oversampled"]
    run = run_grpo(recipe.grpo(*RUN, *short)).directory.path
    kept = rollout_of(run, 1)
    everything = ["grpo.num_prompts_per_step=5", "grpo.oversampling_factor=1", "run_name=all"]
    options = [*RUN, *short, *everything, "policy.train_global_batch_size=20"]
    sampled = rollout_of(run_grpo(recipe.grpo(*options)).directory.path, 1)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sampled:
        groups.setdefault(row["source"], []).append(row)
    sources = {row["source"] for row in kept}
    assert len(groups) == 5 and len(sources) == 4
    expected = [row["completion"] for row in sampled if row["source"] in sources]
    assert [row["completion"] for row in kept] == expected
    ends = {
        source: max(row["completion_tokens"] for row in rows) for source, rows in groups.items()
    }
    (deferred,) = set(groups) - sources
    assert ends[deferred] == max(ends.values())


def test_a_selector_chooses_each_deferred_prompt_once() -> None:
    """Its draws are those of a loader that defers nothing, and the probabilities stay."""

    def run(num_sampled: int, stop: int | None = None) -> list[list[tuple[int, float]]]:
        selector = make_selector()
        selector.record(0, [(row, row % 3 == 0, 1) for row in range(23)], 0)
        selector.begin(1)
        loader = make_loader(selector, 23, batch_size=4, seed=1)
        if num_sampled > 4:
            loader = OversamplingLoader.of(loader, num_sampled=num_sampled)
            loader.selector = selector
        epochs: list[list[tuple[int, float]]] = [[] for _ in range(9)]
        while True:
            if stop is not None and sum(map(len, epochs)) >= stop:
                state = json.loads(json.dumps(loader.state_dict()))
                selector.load_state_dict(make_selector().state_dict())
                loader.order.start_epoch(0)
                assert loader.load_state_dict(state)
                selector.begin(1)
                stop = None
            next(loader)
            if isinstance(loader, OversamplingLoader):
                size = len(loader.batch_rows)
                loader.keep(range(size - loader.num_wanted, size))
            if loader.batch_epoch == 9:
                return epochs
            pairs = zip(loader.batch_rows, loader.batch_probabilities, strict=True)
            epochs[loader.batch_epoch] += pairs

    plain = [sorted(epoch) for epoch in run(4)]
    assert any(probability < 1 for epoch in plain for _, probability in epoch)
    for num_sampled in (5, 7, 11):
        assert [sorted(epoch) for epoch in run(num_sampled)] == plain
        assert [sorted(epoch) for epoch in run(num_sampled, 10)] == plain


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        (["grpo.dynamic_sampling.enabled=true"], "grpo.dynamic_sampling.enabled"),
        (["environment.path=tests.environments.fakes.Fake"], "environment.path"),
        ([*ON_RAY, "cluster.generation_workers=1", "grpo.max_staleness=1"], "grpo.max_staleness"),
    ],
)
def test_what_it_cannot_be_combined_with_is_an_error(
    recipe: Recipe, changes: list[str], other: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        recipe.grpo("grpo.oversampling_factor=1.5", *changes)
    assert str(raised.value).count("grpo.oversampling_factor is 1.5") == 1
    assert f"Set grpo.oversampling_factor to 1, or remove {other}" in str(raised.value)


@pytest.mark.parametrize(("num", "factor", "expected"), [(10, 1.1, 11), (4, 1.25, 5), (2, 1.2, 3)])
def test_the_number_of_sampled_prompts_is_rounded_up(
    recipe: Recipe, num: int, factor: float, expected: int
) -> None:
    options = [f"grpo.num_prompts_per_step={num}", f"grpo.oversampling_factor={factor}"]
    options.append("policy.train_global_batch_size=4")
    config = recipe.grpo(*options)
    assert config.grpo.num_sampled_prompts == expected
    line = f"oversampling: {expected} prompts per step, the first {num} to end are trained"
    assert line in config.needs.batch.lines
