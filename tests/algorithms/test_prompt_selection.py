"""Prompt selection: the selector alone, and in complete runs that are resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_like.algorithms.grpo.advantages import rollout_advantages
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.grpo.rollouts import RolloutPipeline, prompt_selector
from nemo_like.algorithms.grpo.selection import WEIGHT, PromptSelector, step_weights
from nemo_like.data.jagged import Jagged
from nemo_like.data.loader import LastBatch, RowLoader
from nemo_like.data.row_order import RowOrder
from nemo_like.generation.requests import Completions
from nemo_like.metrics import Metrics, Timers, metric_values
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import Rollout, build_rollout
from tests.algorithms.test_asynchronous import ON_RAY
from tests.algorithms.test_grpo_options import rollout_of
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe


class Numbers:
    """The rows 0 to n - 1, encoded as themselves; rows of `dropped` are dropped."""

    def __init__(self, num_rows: int, dropped: frozenset[int] = frozenset()) -> None:
        self._num_rows = num_rows
        self._dropped = dropped
        self.digests = (f"{num_rows} numbers",)
        self.num_skipped = 0

    def __len__(self) -> int:
        return self._num_rows

    def fetch(self, rows: list[int]) -> list[int | None]:
        return [None if row in self._dropped else row for row in rows]

    def location(self, row: int) -> str:
        return str(row)


def make_selector(**changes: float) -> PromptSelector:
    settings = {"decay": 0.5, "exploration": 0.1, "seed": 3, "lag": 0, **changes}
    return PromptSelector(**settings)  # type: ignore[arg-type]


def make_rollout(rewards: list[float], version: int = 0) -> Rollout:
    """Groups of two rows, each of a prompt token and two completion tokens."""
    prompt = Prompt(token_ids=np.array([5], dtype=np.int32), text="", answer=None)
    rows = []
    for _ in rewards:
        row = ConversationRow.start(prompt, 0)
        row.add_turn(Completions.from_rows([[5, 5]], [[-1.0, -1.0]], [[version] * 2], ["stop"]), 0)
        rows.append(row)
    return build_rollout(rows, 2, np.array(rewards, dtype=np.float64), {})


def make_loader(selector: PromptSelector, num_rows: int, **options: Any) -> RowLoader[int]:
    loader = plain_loader(num_rows, **options)
    loader.selector = selector
    return loader


def plain_loader(
    num_rows: int, *, seed: int = 0, batch_size: int, last_batch: LastBatch = "keep"
) -> RowLoader[int]:
    rows: Any = Numbers(num_rows)
    order = RowOrder(num_rows, rows.digests, seed=seed)
    return RowLoader(rows, order, batch_size=batch_size, last_batch=last_batch)


def run_steps(
    loader: RowLoader[int],
    selector: PromptSelector,
    is_informative: Callable[[int, int], bool],
    steps: range,
    lag: int = 0,
) -> tuple[dict[int, list[int]], dict[int, dict]]:
    """Rows and positions of `steps`, whose batches are chosen up to `lag` steps ahead."""
    rows: dict[int, list[int]] = {}
    orders = {}
    positions = {}
    for step in steps:
        for ahead in range(step, min(step + lag + 1, steps.stop)):
            if ahead not in rows:
                selector.begin(ahead)
                rows[ahead] = next(loader)
                orders[ahead] = loader.position
        outcomes = [(row, is_informative(row, step), row) for row in rows[step]]
        selector.record(step, outcomes, 0)
        positions[step] = json.loads(json.dumps(orders[step].state_dict()))
    return rows, positions


def test_the_probability_of_a_prompt_falls_with_its_uninformative_visits() -> None:
    selector = make_selector()
    seen = [selector.probability(7)]
    for step, is_informative in enumerate([False, False, False, False, True, False]):
        selector.record(step, [(7, is_informative, 5), (8, True, 5)], 0)
        selector.begin(step + 1)
        seen.append(selector.probability(7))
        assert selector.probability(8) == 1
    assert seen == [1, 0.5, 0.25, 0.125, 0.1, 1, 0.5]


def test_the_weighted_sum_over_sampled_visits_is_unbiased() -> None:
    """By the probabilities that are returned, and by the frequency of the draws."""
    selector = make_selector()
    rng = np.random.default_rng(0)
    rows = np.arange(40)
    for step in range(4):
        is_informative = rng.random(40) < rows / 40
        selector.record(step, [(row, bool(is_informative[row]), 1) for row in range(40)], 0)
    selector.begin(4)
    values = rng.normal(size=40)
    num_sampled = np.zeros(40)
    estimates = []
    expected = [max(0.1, 0.5 ** selector.streak(row)) for row in range(40)]
    for epoch in range(800):
        is_sampled, probabilities = selector.choose(rows.tolist(), epoch, 0)
        assert probabilities.tolist() == expected
        num_sampled += is_sampled
        estimates.append(values[is_sampled] @ (1 / probabilities[is_sampled]))
    errors = num_sampled / 800 - np.array(expected)
    assert np.abs(errors).max() < 4 * np.sqrt(0.25 / 800)
    assert (num_sampled[np.array(expected) == 1] == 800).all()
    spread = np.std(estimates) / np.sqrt(len(estimates))
    assert spread > 0
    assert abs(np.mean(estimates) - values.sum()) < 4 * spread


def test_draws_do_not_depend_on_how_the_visits_are_divided() -> None:
    selector = make_selector()
    selector.record(0, [(row, False, 1) for row in range(64)], 0)
    selector.begin(1)
    rows = list(range(64))
    together, _ = selector.choose(rows, 2, 5)
    parts = [selector.choose(rows[i : i + 7], 2, 5 + i)[0] for i in range(0, 64, 7)]
    assert together.tolist() == np.concatenate(parts).tolist()
    assert together.tolist() != selector.choose(rows, 3, 5)[0].tolist()
    other = make_selector(seed=4)
    other.load_state_dict(selector.state_dict())
    assert together.tolist() != other.choose(rows, 2, 5)[0].tolist()


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_resumed_selection_equals_a_straight_one(lag: int, stop: int) -> None:
    """Also where batches are chosen ahead of the outcomes of earlier ones."""

    def is_informative(row: int, step: int) -> bool:
        return (row + step // 5) % 3 == 0

    def start() -> tuple[RowLoader[int], PromptSelector]:
        selector = make_selector(lag=lag)
        return make_loader(selector, 23, batch_size=4, seed=1), selector

    straight, positions = run_steps(*start(), is_informative, range(20), lag)
    loader, selector = start()
    assert loader.load_state_dict(positions[stop])
    resumed, later = run_steps(loader, selector, is_informative, range(stop + 1, 20), lag)
    assert resumed == {step: straight[step] for step in range(stop + 1, 20)}
    assert later[19] == positions[19]


def test_an_epoch_visits_each_prompt_at_most_once_and_none_is_lost() -> None:
    """Random outcomes and sizes: over many epochs every prompt is sampled."""
    rng = np.random.default_rng(5)
    for trial in range(10):
        num_rows, batch_size = int(rng.integers(1, 30)), int(rng.integers(1, 9))
        if trial % 2 and batch_size > num_rows:
            batch_size = num_rows
        selector = make_selector(seed=trial)
        last_batch = "drop" if trial % 2 else "keep"
        loader = make_loader(selector, num_rows, batch_size=batch_size, last_batch=last_batch)
        informative = set(np.flatnonzero(rng.random(num_rows) < 0.3).tolist())
        by_epoch: dict[int, Counter[int]] = {}
        for step in range(120):
            selector.begin(step)
            rows = next(loader)
            assert len(loader.batch_rows) == len(loader.batch_probabilities) == len(rows) > 0
            if last_batch == "drop":
                assert len(rows) == batch_size
            by_epoch.setdefault(loader.batch_epoch, Counter()).update(rows)
            selector.record(
                step, [(row, row in informative, 1) for row in rows], loader.num_skipped
            )
        assert max(max(count.values()) for count in by_epoch.values()) == 1
        assert set().union(*by_epoch.values()) == set(range(num_rows))
        # Those that always are informative are never skipped.
        last = max(by_epoch) - 1
        if last_batch == "keep" and last > 0:
            assert informative <= set(by_epoch.get(last, ()))


def test_the_number_of_prompts_follows_the_measured_yield() -> None:
    selector = make_selector()
    assert selector.num_prompts(8, 32) == 8, "without history as many as are needed"
    metrics: Metrics = {}
    for step in range(60):
        metrics = selector.record(step, [(row, row < 2, 1) for row in range(8)], 24)
    assert selector.expected_yield == pytest.approx(0.25, abs=0.01)
    values = metric_values(metrics)
    assert values["selection/skipped_share"] == 0.75
    assert values["selection/uninformative_share"] == 0.75
    assert selector.num_prompts(2, 32) in (8, 9)
    assert selector.num_prompts(8, 20) == 20
    for step in range(60, 200):
        selector.record(step, [(row, False, 1) for row in range(8)], 0)
    assert selector.num_prompts(1, 10**6) <= 8 * 10 + 1, "no yield is 0"


def test_lengths_are_predicted_from_the_last_visit() -> None:
    selector = make_selector()
    assert selector.lengths([1, 2]) is None
    selector.record(0, [(1, True, 30), (2, False, 10)], 0)
    selector.record(1, [(2, False, 20)], 0)
    predicted = selector.lengths([2, 1, 7])
    assert predicted is not None and predicted.tolist() == [20, 30, 25]


def test_an_asynchronous_step_predicts_from_the_steps_that_its_start_could_wait_for() -> None:
    selector = make_selector(lag=1)
    found = []
    for step in range(4):
        selector.begin(step)
        lengths = selector.lengths([7])
        found.append(None if lengths is None else lengths.item())
        selector.record(step, [(7, True, 10 * (step + 1))], 0)
    assert found == [None, None, 10, 20]


def test_a_loader_with_changed_rows_begins_without_history(
    caplog: pytest.LogCaptureFixture,
) -> None:
    selector = make_selector()
    loader = make_loader(selector, 8, batch_size=8)
    next(loader)
    selector.record(0, [(0, False, 1)], 0)
    state = loader.state_dict()
    other = make_selector()
    changed = make_loader(other, 9, batch_size=8)
    assert not changed.load_state_dict(state, allow_changed_rows=True)
    assert other.probability(0) == 1
    assert "begins without history" in caplog.text
    # A run that did not select has no history, and one that selects no more does not read it.
    selector = make_selector()
    plain = plain_loader(8, batch_size=8)
    assert plain.load_state_dict(state)
    assert make_loader(selector, 8, batch_size=8).load_state_dict(plain.state_dict())
    assert selector.probability(0) == 1


def test_weights_have_a_mean_of_one_over_trained_rows() -> None:
    weights = np.array([1, 4, 10, 1], dtype=np.float32)
    mask = np.array([True, True, False, True])
    assert step_weights(weights, mask).tolist() == [0.5, 2, 5, 0.5]
    assert step_weights(weights, np.zeros(4, dtype=bool)).tolist() == weights.tolist()


RUN = (
    "grpo.prompt_selection.enabled=true",
    "grpo.num_prompts_per_step=4",
    "grpo.max_num_steps=10",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
    "data.max_train_rows=12",
    "checkpointing.keep_latest=9",
    "checkpointing.export_hf=false",
    "loss_fn.reference_policy_kl_penalty=0",
    "policy.generation.max_new_tokens=4",
    "reward.functions.digits.path=tests.algorithms.test_grpo_options.rarely_unequal",
)


def prompts_of(run: Path, num_steps: int) -> list[list[dict]]:
    return [rollout_of(run, step) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("samples_dynamically", [False, True])
def test_a_run_that_was_killed_and_resumed_equals_a_straight_one(
    recipe: Recipe, samples_dynamically: bool
) -> None:
    options = (*RUN, f"grpo.dynamic_sampling.enabled={str(samples_dynamically).lower()}")
    run = run_grpo(recipe.grpo(*options)).directory.path
    metrics, rows = read_metrics(run), prompts_of(run, 10)
    state = (run / "checkpoints/step_10/training_state.json").read_bytes()
    weights = (run / "checkpoints/step_10/policy/rank_00000_000.safetensors").read_bytes()
    interrupt_at(run, 4)
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert read_metrics(run) == metrics
    assert prompts_of(run, 10) == rows
    assert (run / "checkpoints/step_10/training_state.json").read_bytes() == state
    resumed = run / "checkpoints/step_10/policy/rank_00000_000.safetensors"
    assert resumed.read_bytes() == weights

    assert sum(line["selection/skipped_share"] for line in metrics) > 0
    streaks: dict[str, int] = {}
    groups: dict[int, list[dict]] = {}
    for line, step in zip(metrics, rows, strict=True):
        groups = {}
        for row in step:
            groups.setdefault(row["group"], []).append(row)
        equal = [len({row["reward"] for row in group}) == 1 for group in groups.values()]
        assert line["selection/uninformative_share"] == pytest.approx(np.mean(equal))
        for group, is_equal in zip(groups.values(), equal, strict=True):
            source = group[0]["source"]
            streaks[source] = streaks.get(source, 0) + 1 if is_equal else 0
    history = json.loads(state)["loader"]["selection"]
    by_source = {
        f"{recipe.demo}/grpo_train.jsonl:{row + 1}": streak
        for row, streak in zip(history["rows"], history["streaks"], strict=True)
    }
    assert by_source == streaks
    lengths = dict(zip(history["rows"], history["lengths"], strict=True))
    last = groups[max(groups)]
    row = int(last[0]["source"].rpartition(":")[2]) - 1
    assert lengths[row] == round(np.mean([each["completion_tokens"] for each in last]))
    if samples_dynamically:
        assert all(line["policy/num_rows"] <= 16 for line in metrics if "policy/num_rows" in line)
        surplus = sum(line["selection/num_surplus_groups"] for line in metrics)
        kept = [row for step in rows for row in step if row.get("kept", True)]
        spread = [
            line["dynamic_sampling/kept_share"] * line["dynamic_sampling/num_sampled_groups"]
            for line in metrics
        ]
        assert surplus == pytest.approx(sum(spread) - len(kept) / 4)


@pytest.mark.parametrize("reward_kl", [False, True])
def test_advantages_are_divided_by_the_probabilities(recipe: Recipe, reward_kl: bool) -> None:
    """Of two groups of two; the first was sampled with probability 1/4."""
    changes = ["loss_fn.reference_policy_kl_in=reward"] if reward_kl else []
    config = recipe.grpo("grpo.advantage.normalize=none", *changes)
    rollout = make_rollout([1, 0, 3, 0])
    tokens = rollout.batch["input_ids"]
    zeros = Jagged(np.zeros(len(tokens.values), dtype=np.float32), tokens.offsets)
    logprobs = {"prev_logprobs": zeros, "reference_logprobs": zeros}
    plain = rollout_advantages(config, rollout, logprobs)
    assert plain.rows.tolist() == [0.5, -0.5, 1.5, -1.5]
    rollout.batch[WEIGHT] = np.array([4, 4, 1, 1], dtype=np.float32)
    weighted = rollout_advantages(config, rollout, logprobs)
    # Divided by the mean weight 2.5.
    np.testing.assert_allclose(weighted.rows, [0.8, -0.8, 0.6, -0.6], rtol=1e-6)
    if reward_kl:
        assert isinstance(weighted.column, Jagged)
        for row, tokens_of_row in enumerate(np.split(weighted.column.values, 4)):
            assert tokens_of_row[1:] == pytest.approx(weighted.rows[row])
    assert (rollout.batch["reward"] == [1, 0, 3, 0]).all(), "rewards are not changed"


@pytest.mark.parametrize("weighted", [True, False])
def test_a_run_trains_with_the_weights(recipe: Recipe, weighted: bool) -> None:
    options = [*RUN, "grpo.advantage.normalize=none", "policy.train_global_batch_size=16"]
    options.append(f"grpo.prompt_selection.importance_weights={str(weighted).lower()}")
    run = run_grpo(recipe.grpo(*options, "grpo.max_num_steps=8")).directory.path
    streaks: dict[str, int] = {}
    has_differed = False
    for step in prompts_of(run, 8):
        groups = [step[start : start + 4] for start in range(0, len(step), 4)]
        # By default a prompt is sampled with 0.5 per uninformative visit, and at least 0.1.
        weights = [1 / max(0.1, 0.5 ** streaks.get(each[0]["source"], 0)) for each in groups]
        if not weighted:
            weights = [1.0] * len(groups)
        for group, weight in zip(groups, weights, strict=True):
            rewards = np.array([row["reward"] for row in group])
            expected = (rewards - rewards.mean()) * weight / np.mean(weights)
            np.testing.assert_allclose([row["advantage"] for row in group], expected, atol=1e-6)
            source = group[0]["source"]
            streaks[source] = streaks.get(source, 0) + 1 if np.ptp(rewards) == 0 else 0
            has_differed |= np.ptp(rewards) > 0 and weight != np.mean(weights)
    assert has_differed == weighted


def test_an_asynchronous_pipeline_resumes_with_the_same_prompts(recipe: Recipe) -> None:
    """Rollouts start one step ahead of training, those after a resume again."""
    config = recipe.grpo(
        *(*ON_RAY, "cluster.generation_workers=1", "grpo.max_staleness=1"),
        *("grpo.prompt_selection.enabled=true", "grpo.num_prompts_per_step=4"),
        *("grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=8"),
        "grpo.max_num_steps=16",
    )

    def run_from(first: int, position: dict | None) -> tuple[dict, dict, dict]:
        loader = make_loader(prompt_selector(config), 11, batch_size=4, seed=1)
        if position is not None:
            assert loader.load_state_dict(position)
        rows: dict[int, list[int]] = {}
        predicted: dict[int, list[float] | None] = {}

        def start(prompts: list[int], lengths: np.ndarray | None, **_: object) -> SimpleNamespace:
            step = first + len(rows)
            rows[step] = prompts
            predicted[step] = None if lengths is None else lengths.tolist()
            return SimpleNamespace(step=step, generation_s=0.0, reward_s=0.0)

        def finish(job: SimpleNamespace) -> Rollout:
            rewards = []
            for row in rows[job.step]:
                rewards += [1.0, 0.0] if (row + job.step // 4) % 4 == 0 else [1.0, 1.0]
            return make_rollout(rewards, job.step)

        pending: dict[str, Any] = {}
        log = SimpleNamespace(timers=Timers(), pending=pending, add=pending.update)
        rollouts = SimpleNamespace(collector=SimpleNamespace(start=start), finish=finish)
        run: Any = SimpleNamespace(log=log, rollouts=rollouts)
        pipeline = RolloutPipeline(run, config, loader, first)  # type: ignore[arg-type]
        positions = {}
        for step in range(first, 16):
            pipeline.start(step)
            taken = pipeline.take(step)
            assert WEIGHT in taken.rollout.batch
            positions[step] = json.loads(json.dumps(pipeline.position.state_dict()))
        return rows, predicted, positions

    straight, predicted, positions = run_from(0, None)
    # Step 2 is the first that is chosen after the end of one.
    assert [each is None for each in predicted.values()] == [True] * 2 + [False] * 14
    assert sum(map(len, straight.values())) < 16 * 4, "short batches at the end of epochs"
    assert any(position["epoch"] > 6 for position in positions.values()), "rows were skipped"
    for stop in (2, 7, 12):
        resumed, again, later = run_from(stop + 1, positions[stop])
        assert resumed == {step: straight[step] for step in range(stop + 1, 16)}
        assert again == {step: predicted[step] for step in range(stop + 1, 16)}
        assert later[15] == positions[15]


def test_a_run_of_one_epoch_is_warned_about(recipe: Recipe) -> None:
    config = recipe.grpo("grpo.prompt_selection.enabled=true")
    (warning,) = config.grpo.prompt_selection.warnings(32, 32)
    assert "at most 32 prompts of 32, and prompts are skipped from their second" in warning
    assert config.grpo.prompt_selection.warnings(33, 32) == []
    assert recipe.grpo().grpo.prompt_selection.warnings(32, 32) == []
