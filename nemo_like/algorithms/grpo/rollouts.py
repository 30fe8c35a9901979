"""The rollouts of coming steps, started at most `grpo.max_staleness` steps ahead of training.

With dynamic sampling (DAPO, arXiv 2503.14476) groups with equal rewards are replaced by further
prompts. With `grpo.oversampling_factor` above 1 (after the tail batching of RollPacker, arXiv
2509.21009) the groups that end last are cancelled, and their prompts wait for another step. With
prompt selection (`selection`) the outcomes of the groups decide which prompts of later steps are
sampled.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.selection import WEIGHT, Outcome, PromptSelector
from nemo_like.config.errors import ConfigError
from nemo_like.data.loader import Position, RowLoader
from nemo_like.data.oversampling import OversamplingLoader
from nemo_like.generation.requests import SamplingParams
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.rollout.collector import RolloutJob
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.episodes import episode_metrics
from nemo_like.rollout.rows import (
    EPISODE,
    Rollout,
    concat_rollouts,
    has_spread,
    rollout_metrics,
    row_seeds,
    select_rows,
)
from nemo_like.training.run import TrainingRun
from nemo_like.training.run_data import loader_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Started:
    step: int
    job: RolloutJob
    locations: list[str]
    position: Position
    """Position of the loader after the prompts of this step."""
    epoch: int
    """Epoch of the prompts."""
    metrics: Metrics
    """Metrics of the loader."""
    sources: np.ndarray | None
    """Index of the training set of each prompt, int64 [P]; None with one set."""
    choice: Choice | None
    """None without prompt selection."""


@dataclass(frozen=True)
class Choice:
    """The last batch of a loader with a selector."""

    rows: list[int]
    """Rows of the data set, [P]."""
    weights: np.ndarray
    """float32 [P]: 1 / probability with which each row was chosen."""
    num_skipped: int
    """Rows that were skipped."""


class RolloutPipeline:
    """The rollouts of a run in the order of its steps.

    The rollout of step s starts as soon as the generator has the weights of step s -
    `max_staleness`, so no token is older than that. With 0 each rollout starts when its step does.
    """

    def __init__(
        self, run: TrainingRun, config: GrpoRunConfig, loader: RowLoader[Prompt], step: int
    ) -> None:
        """`step` is the first step that is trained, counted from 0."""
        self._run = run
        self._config = config
        self._loader = loader
        self._started: deque[_Started] = deque()
        self._next_step = step
        self._fetched: list[Prompt] | None = None
        """Prompts of `_next_step`, if they were fetched already."""
        self._sampling = SamplingParams.from_config(config.policy.generation)
        self._selector = loader.selector if isinstance(loader.selector, PromptSelector) else None
        self.position = loader.position
        """Position of the loader after the prompts of the last step that was taken."""

    def fetch(self, step: int) -> None:
        """Fetch the prompts of `step`, if its rollout has not started.

        Raises ConfigError for a bad row, after a checkpoint. Call while no generator is on a device
        that it shares with the policy.
        """
        if self._next_step == step and self._fetched is None:
            self._begin_choice(step)
            with self._run.log.timers("data_wait"):
                self._fetched = next(self._loader)

    def start(self, step: int) -> None:
        """Start the rollouts that may run while `step` trains, including its own.

        Stops before a bad row, which `fetch` reports when its step comes.
        """
        last_step = min(step + self._config.grpo.max_staleness, self._config.grpo.max_num_steps - 1)
        while self._next_step <= last_step:
            prompts = self._fetched
            self._fetched = None
            if prompts is None:
                self._begin_choice(self._next_step)
                prompts = self._next_prompts()
            if prompts is None:
                return
            self._start_next(prompts)

    def _begin_choice(self, step: int) -> None:
        """Let the loader choose the prompts of `step`."""
        if self._selector is not None:
            self._selector.begin(step)
            grpo = self._config.grpo
            if grpo.dynamic_sampling.enabled:
                num_wanted = grpo.num_prompts_per_step
                limit = grpo.max_prompts_per_step
                self._loader.next_size = self._selector.num_prompts(num_wanted, limit)

    def _choice(self) -> Choice | None:
        """Return the choice of the last batch; None without prompt selection."""
        if self._selector is None:
            return None
        weights = (1 / np.array(self._loader.batch_probabilities)).astype(np.float32)
        return Choice(list(self._loader.batch_rows), weights, self._loader.num_skipped)

    def take(self, step: int) -> StepRollout:
        """Wait for the rollout of `step`. Call `fetch` and `start` before.

        Rows with a token of weights older than allowed are left out of training. Raises
        RuntimeError if no row is left.
        """
        started = self._started.popleft()
        assert started.step == step, "rollouts are taken in the order of the steps"
        rollout = self._finish_rollout(started.job, step)
        if isinstance(self._loader, OversamplingLoader):
            started = self._with_kept(started, self._loader)
        self._count_rewards(rollout, started.sources)
        self.position = started.position
        if self._config.grpo.max_staleness > 0:
            rollout.batch["version_gap"] = rollout.version_gaps(step)
        observed = _Observed()
        self._observe(rollout, started.choice, observed)
        taken = StepRollout(rollout, started.locations)
        if self._config.grpo.dynamic_sampling.enabled:
            taken = self._with_refills(started, rollout, observed)
        else:
            self._run.log.add(started.metrics)
        if self._selector is not None:
            metrics = self._selector.record(step, observed.outcomes, observed.num_skipped)
            self._run.log.add(metrics)
        return taken

    def _with_kept(self, started: _Started, loader: OversamplingLoader[Prompt]) -> _Started:
        """Return what is known of the prompts that were kept, and defer the others."""
        num_sampled = len(started.locations)
        kept = started.job.kept
        loader.keep(range(num_sampled) if kept is None else kept)
        started = self._described(started.job, started.step)
        num_deferred = float(num_sampled - len(started.locations))
        num_waiting = float(len(loader.deferred.rows))
        metrics: Metrics = {
            "generation/num_deferred_prompts": Sum(num_deferred),
            "generation/num_waiting_prompts": Mean(num_waiting),
        }
        return replace(started, metrics=started.metrics | metrics)

    def _observe(self, rollout: Rollout, choice: Choice | None, observed: _Observed) -> None:
        """Add the outcomes of a rollout of chosen prompts, and the weights of its rows."""
        if choice is None:
            return
        groups = rollout.batch["group"]
        is_informative = informative_rows(self._config, rollout)
        first_rows = rollout.first_rows
        has_reward = rollout.batch["reward_mask"][first_rows]
        num_rewards = np.bincount(groups[first_rows], weights=has_reward)
        # A group whose rewards failed or whose rows are stale tells nothing about its prompt.
        for group in np.flatnonzero(num_rewards > 1).tolist():
            is_unequal = bool(is_informative[groups == group].any())
            length = round(rollout.episode_lengths[groups[first_rows] == group].mean())
            observed.outcomes.append((choice.rows[group], is_unequal, length))
        observed.num_skipped += choice.num_skipped
        if self._config.grpo.prompt_selection.importance_weights:
            rollout.batch[WEIGHT] = choice.weights[groups]

    def _with_refills(
        self, started: _Started, rollout: Rollout, observed: _Observed
    ) -> StepRollout:
        """Return the groups with unequal rewards, of the rollout and of further prompts.

        No rollout of a later step has started, so the loader is at the prompts after those of this
        step. Refills end with the epoch, so that no step has a prompt twice, and before a bad row,
        which `fetch` reports when its step comes.
        """
        config = self._config.grpo
        kept = KeptGroups(self._config)
        kept.add(rollout, started.locations)
        num_dropped = self._loader.num_dropped
        jobs = [started.job]
        for refill in range(1, config.dynamic_sampling.max_refills + 1):
            num_prompts = kept.num_missing
            if self._selector is not None:
                limit = config.max_prompts_per_step - kept.num_sampled
                num_prompts = self._selector.num_prompts(num_prompts, limit)
            if num_prompts <= 0 or self._loader.epoch != started.epoch:
                break
            prompts = self._next_prompts(num_prompts)
            if prompts is None:
                break
            num_dropped += self._loader.num_dropped
            if not prompts:
                break
            locations = self._loader.batch_locations()
            sources = self._loader.batch_sources()
            choice = self._choice()
            job = self._start_rollout(prompts, started.step, refill, jobs)
            jobs.append(job)
            refilled = self._finish_rollout(job, started.step)
            self._count_rewards(refilled, sources)
            self._observe(refilled, choice, observed)
            kept.add(refilled, locations)
        self.position = self._loader.position
        data = {"data/epoch": Mean(self._loader.epoch), "data/num_dropped": Sum(num_dropped)}
        self._run.log.add(started.metrics | data)
        if kept.num_missing > 0:
            logger.info(
                "step %d lacks %d of %d groups with unequal rewards",
                started.step + 1,
                kept.num_missing,
                config.num_prompts_per_step,
            )
        return kept.result()

    def _count_rewards(self, rollout: Rollout, sources: np.ndarray | None) -> None:
        """Add the rewards of each training set to the metrics of the step; see `source_rewards`."""
        mixture = self._loader.mixture
        if sources is not None and mixture is not None:
            self._run.log.add(source_rewards(rollout, sources, mixture.names))

    def prepare_update(self) -> None:
        """Finish or discard completions that may not continue with other weights."""
        generator = self._run.rollouts.generator
        if self._config.grpo.weight_update == "drain":
            with self._run.log.timers("drain"):
                # Requests that wait for a restarted replica may start with the new weights.
                self._run.rollouts.collector.drain()
        elif self._config.grpo.weight_update == "restart":
            generator.restart_unfinished()

    def _next_prompts(self, num_prompts: int | None = None) -> list[Prompt] | None:
        """Return the next prompts, by default for a step, or None if one of them is a bad row.

        A number of prompts is for a refill, which may have fewer at the end of the epoch.
        """
        try:
            with self._run.log.timers("data_wait"):
                if num_prompts is None:
                    return next(self._loader)
                return self._loader.take(num_prompts, in_epoch=True)
        except ConfigError:
            # The loader keeps its position before the bad row.
            return None

    def _start_next(self, prompts: list[Prompt]) -> None:
        job = self._start_rollout(prompts, self._next_step)
        self._started.append(self._described(job, self._next_step))
        self._next_step += 1

    def _described(self, job: RolloutJob, step: int) -> _Started:
        """Return the rollout of a step, with what the loader knows of its last batch."""
        return _Started(
            step,
            job,
            self._loader.batch_locations(),
            self._loader.position,
            self._loader.batch_epoch,
            loader_metrics(self._loader),
            self._loader.batch_sources(),
            self._choice(),
        )

    def _start_rollout(
        self, prompts: list[Prompt], step: int, refill: int = 0, earlier: Sequence[RolloutJob] = ()
    ) -> RolloutJob:
        group_size = self._config.grpo.num_generations_per_prompt
        lengths = None
        if self._selector is not None:
            lengths = self._selector.lengths(self._loader.batch_rows)
        num_wanted = None
        if isinstance(self._loader, OversamplingLoader):
            num_wanted = self._loader.num_wanted
        return self._run.rollouts.collector.start(
            prompts,
            group_size=group_size,
            sampling=self._sampling,
            max_total_length=self._config.policy.max_total_sequence_length,
            seeds=row_seeds(self._config.seed, step, len(prompts) * group_size, refill),
            earlier=tuple(earlier),
            lengths=lengths,
            num_wanted=num_wanted,
        )

    def _finish_rollout(self, job: RolloutJob, step: int) -> Rollout:
        """Wait for a rollout; rows with tokens of older weights than allowed are not trained."""
        with self._run.log.timers("rollout_wait"):
            rollout = self._run.rollouts.finish(job)
        num_stale = rollout.drop_stale(step - self._config.grpo.max_staleness, step)
        if self._config.grpo.max_staleness > 0:
            self._run.log.add({"staleness/num_dropped": Sum(float(num_stale))})
        self._run.log.timers.add("generation", job.generation_s)
        self._run.log.timers.add("reward", job.reward_s)
        return rollout


@dataclass
class _Observed:
    """What a step adds to the history of prompt selection."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_skipped: int = 0


def prompt_selector(config: GrpoRunConfig) -> PromptSelector:
    """Return the selector of `grpo.prompt_selection`, without history."""
    selection = config.grpo.prompt_selection
    return PromptSelector(
        decay=selection.decay,
        exploration=selection.exploration,
        seed=config.seed,
        lag=config.grpo.max_staleness,
    )


@dataclass(frozen=True)
class StepRollout:
    """The rollout of one step, with what its training needs to know of its rows."""

    rollout: Rollout
    """The completions that are trained on."""
    locations: list[str]
    """File and line of each prompt."""
    sampled: Rollout | None = None
    """With dynamic sampling all completions of the step, including dropped groups."""
    sampled_locations: list[str] = field(default_factory=list)
    """File and line of each prompt of `sampled`."""
    sampling_metrics: Metrics = field(default_factory=dict)
    """Of dynamic sampling."""

    def metrics(self) -> Metrics:
        """Return the metrics of all completions of the step, whether they are trained on or not."""
        sampled = self.rollout if self.sampled is None else self.sampled
        metrics = rollout_metrics(sampled) | self.sampling_metrics
        if EPISODE in sampled.batch:
            metrics |= episode_metrics(sampled, self.rollout.batch["group"])
        return metrics


def rows_with_spread(
    rewards: np.ndarray, groups: np.ndarray, reward_mask: np.ndarray
) -> np.ndarray:
    """Return True for rows whose group has unequal rewards, bool [B].

    `rewards` is float [B], `groups` int [B]; `reward_mask` bool [B] is False for rows without a
    reward, which do not count.
    """
    rewards = rewards.astype(np.float64)
    _, group_of_row = np.unique(groups, return_inverse=True)
    sizes = np.maximum(np.bincount(group_of_row, weights=reward_mask), 1.0)
    means = np.bincount(group_of_row, weights=rewards * reward_mask) / sizes
    deviations = (rewards - means[group_of_row]) * reward_mask
    squares = np.bincount(group_of_row, weights=deviations**2)
    return has_spread(np.sqrt(squares / sizes), means)[group_of_row]


def source_rewards(rollout: Rollout, sources: np.ndarray, names: Sequence[str]) -> Metrics:
    """Return the mean reward of each training set with a reward, `data/source_<name>/reward_mean`.

    `sources` int64 [P] has the index in `names` of the set of each prompt. Rows without a reward do
    not count.
    """
    metrics: Metrics = {}
    first_rows = rollout.first_rows
    source_of_row = sources[rollout.batch["group"][first_rows]]
    mask = rollout.batch["reward_mask"][first_rows]
    for index, name in enumerate(names):
        rewards = rollout.batch["reward"][first_rows][mask & (source_of_row == index)]
        if len(rewards):
            mean = Mean(float(rewards.sum()), len(rewards))
            metrics[f"data/source_{name}/reward_mean"] = mean
    return metrics


def informative_rows(config: GrpoRunConfig, rollout: Rollout) -> np.ndarray:
    """Return True for rows of groups with unequal rewards, bool [B].

    The rewards are those of reward functions and models, without penalties. With separate
    components a group counts if one of them is unequal, also where their sum is equal.
    """
    groups = rollout.batch["group"]
    # The rewards that have an advantage of their own, float [B] each.
    compared = [rollout.batch["reward"]]
    if config.grpo.advantage.components == "separate":
        weights = config.reward.weights
        for name, values in rollout.components.items():
            if weights.get(name, 1.0) != 0:
                compared.append(values)
    is_informative = np.zeros(len(groups), dtype=bool)
    for values in compared:
        mask = rollout.batch["reward_mask"] & ~np.isnan(values)
        is_informative |= rows_with_spread(np.nan_to_num(values), groups, mask)
    return is_informative


class KeptGroups:
    """The groups of one step that have unequal rewards, from one rollout and its refills."""

    def __init__(self, config: GrpoRunConfig) -> None:
        self._config = config
        self._num_groups = config.grpo.num_prompts_per_step
        self._sampled: list[Rollout] = []
        self._kept: list[Rollout] = []
        self._kept_groups: list[int] = []
        self._sampled_locations: list[str] = []

    @property
    def num_missing(self) -> int:
        """Groups that the step still lacks."""
        return max(self._num_groups - len(self._kept_groups), 0)

    @property
    def num_sampled(self) -> int:
        """Groups that were sampled."""
        return len(self._sampled_locations)

    def add(self, rollout: Rollout, locations: list[str]) -> None:
        """Add a rollout of the prompts at `locations`, without its groups with equal rewards."""
        # The index of a prompt among all prompts of the step.
        groups = rollout.batch["group"] + self.num_sampled
        rollout.batch["group"] = groups
        is_kept = informative_rows(self._config, rollout)
        self._sampled.append(rollout)
        self._kept.append(select_rows(rollout, np.flatnonzero(is_kept)))
        self._sampled_locations += locations
        self._kept_groups += np.unique(groups[is_kept]).tolist()

    def result(self) -> StepRollout:
        """Return the kept groups as the rollout of the step; it may have none.

        They are the first in the order of the prompts: which of them end first, and their rewards,
        have no influence.
        """
        trained = self._kept_groups[: self._num_groups]
        rollout = concat_rollouts(self._kept)
        if len(trained) < len(self._kept_groups):
            is_trained = np.isin(rollout.batch["group"], trained)
            rollout = select_rows(rollout, np.flatnonzero(is_trained))
        num_kept = len(self._kept_groups)
        metrics: Metrics = {
            "dynamic_sampling/num_refills": Sum(float(len(self._sampled) - 1)),
            "dynamic_sampling/num_sampled_groups": Sum(float(self.num_sampled)),
            "dynamic_sampling/kept_share": Mean(float(num_kept), float(self.num_sampled)),
            "dynamic_sampling/num_missing_groups": Sum(float(self.num_missing)),
        }
        if self._config.grpo.prompt_selection.enabled:
            metrics["selection/num_surplus_groups"] = Sum(float(num_kept - len(trained)))
        return StepRollout(
            rollout,
            [self._sampled_locations[group] for group in trained],
            sampled=concat_rollouts(self._sampled),
            sampled_locations=self._sampled_locations,
            sampling_metrics=metrics,
        )
