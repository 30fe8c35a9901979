"""The part of a run that samples completions: the generator, its weights, and the rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_like.data.chat import ChatEncoder
from nemo_like.rollout.collector import RolloutJob
from nemo_like.rollout.rows import Rollout
from nemo_like.training.groups import WorkersStart
from nemo_like.training.rollout_workers import open_collector
from nemo_like.training.step_log import StepLog
from nemo_like.training.weights import GeneratorWeights
from nemo_like.training.workers import RunWorkers


class RolloutRun:
    """Samples and scores completions with the workers of a run."""

    def __init__(
        self, settings: WorkersStart, workers: RunWorkers, encoder: ChatEncoder, log: StepLog
    ) -> None:
        """Open what drives the workers; `log` gets the metrics of generation and weights."""
        assert settings.needs.rollouts is not None, "the run samples completions"
        self.workers = workers
        self.log = log
        self.generator = workers.rollout.generator
        self.collector = open_collector(settings.needs.rollouts, workers.rollout, encoder)
        """Drives generation, the environment and rewards."""
        self.weights = GeneratorWeights(
            settings.policy,
            settings.cluster,
            workers.policy,
            self.generator,
            log.timers,
            log.progress.print_line,
        )
        """Keeps the generator's weights equal to the policy's."""
        self._last_logged_s = time.monotonic()

    def start(self, settings: WorkersStart) -> None:
        """Give the generator the weights of a new run, which has loaded the model on both sides."""
        with self.workers.policy_onloaded():
            adapter = settings.policy.adapter
            if adapter is not None and (adapter.adapter_path or adapter.is_quantized):
                # The generator has loaded the model without the adapter, and not in 4 bits.
                self.sync_weights(0)
            else:
                # Both sides have loaded the same model; a resume checks the first update.
                self.weights.start_check()

    def sync_weights(self, version: int) -> None:
        """Copy the policy's weights to the generator, whose completions then carry `version`.

        The version is the number of steps done. Call inside `workers.policy_onloaded()`.
        """
        self.log.add(self.weights.update(version))

    @contextmanager
    def generating(self, *, updates_next: bool = False) -> Iterator[None]:
        """Keep the generator on its devices inside the block, with verified weights.

        `updates_next` tells that `sync_weights` is called before the generator is used again.
        """
        with self.workers.generator_onloaded(discards_weights=updates_next):
            self.log.add(self.weights.verify())
            yield

    def add_generator_metrics(self) -> None:
        """Add the counters of the generator since the last call; not while it runs in a thread."""
        now = time.monotonic()
        generator = self.generator
        self.log.add(generator.pop_metrics(now - self._last_logged_s))
        self._last_logged_s = now

    def finish(self, job: RolloutJob) -> Rollout:
        """Generate and score until `job` is done. Restarted replicas get the current weights."""
        generator = self.generator
        while not job.is_done:
            if generator.replicas_without_weights:
                # The policy must not be loaded beside a generator on the same devices.
                with self.workers.generator_offloaded(), self.workers.policy_onloaded():
                    replicas = generator.replicas_without_weights
                    self.weights.update(generator.version, replicas)
                self.log.add(self.weights.verify())
            self.collector.advance()
        reward_models = self.workers.rollout.reward_models
        if reward_models is not None:
            with self.log.timers("reward_model"), self.workers.reward_models_alone():
                reward_models.score(job, [row.sample() for row in job.rows])
            self.log.add(reward_models.pop_metrics())
        return job.result()
