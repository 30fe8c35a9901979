"""Updates of the generator's weights, and the metrics of a step that has several."""

from __future__ import annotations

from nemo_like.algorithms.run import workers_start
from nemo_like.metrics import Sum, Timers
from nemo_like.run.progress import Progress
from nemo_like.training.weights import NUM_CHECKED, GeneratorWeights
from nemo_like.training.workers import start_workers
from tests.recipe import Recipe


def test_updates_of_restarted_replicas_add_to_the_metrics_of_the_step(recipe: Recipe) -> None:
    config = recipe.grpo()
    with start_workers(workers_start(config), Progress()) as workers:
        generator = workers.rollout.generator
        lines: list[str] = []
        weights = GeneratorWeights(
            config.policy, config.cluster, workers.policy, generator, Timers(), lines.append
        )
        alone = weights.update(1)
        assert weights.update(1, generator.live_replicas) == {}
        assert weights.update(1, generator.live_replicas) == {}
        together = weights.update(2)
        again = weights.update(3)
    num_bytes = alone["weight_sync/bytes"].value
    assert num_bytes > 0
    assert together["weight_sync/bytes"] == Sum(3 * num_bytes)
    assert again["weight_sync/bytes"] == Sum(num_bytes)
    assert together["weight_sync/seconds"].value > 0
    assert "weight_sync/check_max_error" in together
    assert len(lines) == 1 and "over in_process" in lines[0]


def test_the_first_updates_are_checked_and_every_tenth_later_one(recipe: Recipe) -> None:
    config = recipe.grpo()
    with start_workers(workers_start(config), Progress()) as workers:
        generator = workers.rollout.generator
        weights = GeneratorWeights(
            config.policy, config.cluster, workers.policy, generator, Timers(), lambda line: None
        )
        checked = [
            version
            for version in range(1, 3 * NUM_CHECKED + 1)
            if "weight_sync/check_max_error" in weights.update(version)
        ]
    assert checked == [*range(1, 11), 20, 30]
