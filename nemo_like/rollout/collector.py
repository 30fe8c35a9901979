"""Drives generation and rewards: completions are scored while others are still decoded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_like.config.rollout import OnError, RewardConfig
from nemo_like.data.jagged import Jagged
from nemo_like.environments.reward import RewardError, RewardProblem
from nemo_like.environments.reward_worker import RewardEnvironment
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import Completions, SamplingParams
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.episodes import EpisodeDriver
from nemo_like.rollout.rows import Rollout, build_rollout

_WAIT_S = 0.05
"""Max wait for completions or rewards in one call of `advance`."""
_NUM_SHOWN = 3
"""Different problems that an error shows."""


@dataclass(eq=False)
class RolloutJob:
    """The prompts of one rollout, and what is known of their completions."""

    prompts: list[Prompt]
    """B prompts, one per completion; the prompts of a group are consecutive."""
    group_size: int
    sampling: SamplingParams
    max_total_length: int = 0
    """Max tokens of prompt and completion, or of a conversation."""
    rows: list[ConversationRow] = field(default_factory=list)
    """B rows."""
    num_ended: int = 0
    """Rows whose completion or conversation has ended."""
    rewards: np.ndarray = field(init=False)
    """float64 [B]; valid for the rows that are scored."""
    components: dict[str, np.ndarray] = field(default_factory=dict)
    """float64 [B] each: unweighted values of reward functions and models; NaN in rows to which a
    function does not apply."""
    reward_problems: dict[int, RewardProblem] = field(default_factory=dict)
    """By row: why a reward function, a reward model or the environment failed."""
    dropped_rows: set[int] = field(default_factory=set)
    """Those of these rows that are left out of training."""
    earlier: Sequence[RolloutJob] = ()
    """Jobs of the same step, which count for the share of rows with a problem."""
    lengths: np.ndarray | None = None
    """Predicted tokens of the completion of each row, float [B]; None without a prediction."""
    num_wanted: int | None = None
    """The job ends with the first so many groups whose completions have all ended, and the others
    are cancelled; None: with all groups."""
    kept: list[int] | None = None
    """Indices of the prompts of these groups, increasing; None before, and without `num_wanted`."""
    scored_rows: list[int] = field(default_factory=list)
    """Rows that are complete with their reward, in the order in which they got it."""
    started_s: float = field(default_factory=time.monotonic)
    generation_s: float = 0.0
    """Seconds from the start to the last completion."""
    reward_s: float = 0.0
    """Seconds from the last completion to the last reward of a function."""

    def __post_init__(self) -> None:
        self.rewards = np.zeros(len(self.prompts))
        self._num_ended_of_group: Counter[int] = Counter()

    def add_ended(self, row: int) -> list[int]:
        """Count a row whose last turn has ended; return the rows that are not needed any more.

        When `num_wanted` groups have ended, these are the rows of all other groups.
        """
        self.num_ended += 1
        group_size = self.group_size
        sizes = self._num_ended_of_group
        sizes[row // group_size] += 1
        if self.num_ended == len(self.prompts):
            self.generation_s = time.monotonic() - self.started_s
        if self.num_wanted is None or sizes[row // group_size] < group_size:
            return []
        complete = sorted(group for group, size in sizes.items() if size == group_size)
        if len(complete) < self.num_wanted:
            return []
        self.kept = complete
        self.generation_s = time.monotonic() - self.started_s
        kept = set(complete)
        self.scored_rows = [each for each in self.scored_rows if each // group_size in kept]
        return [each for each in range(len(self.prompts)) if each // group_size not in kept]

    def add_component(self, name: str, row: int, value: float) -> None:
        """Set a component of the reward of a row; it is 0 in rows without it."""
        column = self.components.setdefault(name, np.zeros(len(self.prompts)))
        column[row] = value

    def add_scored(self, row: int) -> None:
        """Mark a row as complete."""
        self.scored_rows.append(row)
        if self.is_done:
            self.reward_s = time.monotonic() - self.started_s - self.generation_s
            if self.kept is not None:
                self._leave_out_cancelled(self.kept)

    def _leave_out_cancelled(self, kept: Sequence[int]) -> None:
        """Keep the rows of the groups `kept` only, which have all their rewards."""
        starts = np.array(kept, dtype=np.int64)[:, None] * self.group_size
        rows = (starts + np.arange(self.group_size)).reshape(-1)
        place = {row: index for index, row in enumerate(rows.tolist())}
        self.prompts = [self.prompts[row] for row in place]
        self.rows = [self.rows[row] for row in place]
        self.rewards = self.rewards[rows]
        self.components = {name: values[rows] for name, values in self.components.items()}
        problems = self.reward_problems.items()
        self.reward_problems = {place[row]: each for row, each in problems if row in place}
        self.dropped_rows = {place[row] for row in self.dropped_rows if row in place}
        self.scored_rows = [place[row] for row in self.scored_rows]

    def add_problem(
        self,
        row: int,
        problem: RewardProblem,
        config: RewardConfig,
        on_error: OnError | None = None,
    ) -> None:
        """Add a failure; the first of a row is kept. Raises RewardError if too many have failed.

        `on_error` is the one of `config` if it is None. A few rows that were sampled in addition
        are not a separate rollout: one of four is not a quarter of the step.
        """
        self.reward_problems.setdefault(row, problem)
        if (on_error or config.on_error) == "drop":
            self.dropped_rows.add(row)
        problems: list[RewardProblem] = []
        num_rows = 0
        for job in (*self.earlier, self):
            problems += job.reward_problems.values()
            num_rows += len(job.prompts)
        check_error_share(problems, num_rows, config)

    @property
    def is_done(self) -> bool:
        """True if every completion has the rewards of functions and environment.

        With `num_wanted` every completion of the groups that are kept.
        """
        if self.num_wanted is None:
            return len(self.scored_rows) == len(self.prompts)
        num_rows = self.num_wanted * self.group_size
        return self.kept is not None and len(self.scored_rows) == num_rows

    def result(self) -> Rollout:
        """Return the rollout, in the order of the prompts."""
        return build_rollout(
            self.rows,
            self.group_size,
            self.rewards,
            self.components,
            [self.reward_problems.get(row) for row in range(len(self.prompts))],
            self.dropped_rows,
        )


class RolloutCollector:
    """Runs any number of jobs at a time on one generator and one group of reward workers.

    With an environment every row is a conversation of several turns, with a program an episode.
    Not thread-safe: `background` is the only way to run it in another thread.
    """

    def __init__(
        self,
        generator: Generator,
        rewards: RewardEnvironment | None,
        tokenizer: PreTrainedTokenizerBase,
        episodes: EpisodeDriver | None = None,
    ) -> None:
        """`rewards` is None without reward functions: an environment or models may give rewards.

        Without all of them the reward of every completion is 0.
        """
        self.generator = generator
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._episodes = episodes
        if rewards is not None:
            # The workers get token ids.
            rewards.set_tokenizer(tokenizer)
        self._num_groups = 0
        """Groups that were started."""
        self._num_rows = 0
        """Rows that were started."""
        self._incomplete: dict[int, list[int]] = {}
        """By group: requests that ended, while others of the group have not."""
        self._jobs: dict[int, tuple[RolloutJob, int]] = {}
        """By request id, or by number of an episode: the job and the row of those without a reward.
        """
        self._is_draining = False

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        max_total_length: int,
        seeds: np.ndarray,
        earlier: Sequence[RolloutJob] = (),
        lengths: np.ndarray | None = None,
        num_wanted: int | None = None,
    ) -> RolloutJob:
        """Request `group_size` completions per prompt; `seeds` is uint64 [P x G].

        `earlier` are other jobs of the same step; see `RolloutJob.earlier`. `lengths` float [P] are
        the predicted tokens of a completion of each prompt, by which the replicas are assigned.
        With `num_wanted` only the groups of so many prompts are kept, those that end first, and the
        others are cancelled; not with an environment.
        Raises ConfigError for a prompt that leaves no room in a conversation of at most
        `max_total_length` tokens.
        """
        assert num_wanted is None or self._episodes is None, "an episode cannot be cancelled"
        # Prompt-major: the completions of a prompt are consecutive rows.
        repeated: list[Prompt] = []
        for prompt in prompts:
            repeated += [prompt] * group_size
        job = RolloutJob(
            repeated,
            group_size,
            sampling,
            max_total_length=max_total_length,
            earlier=earlier,
            num_wanted=None if num_wanted == len(prompts) else num_wanted,
        )
        if lengths is not None:
            job.lengths = np.repeat(lengths, group_size)
        for index, (prompt, seed) in enumerate(zip(repeated, seeds, strict=True)):
            row = ConversationRow.start(prompt, int(seed), self._tokenizer)
            row.group = self._num_groups + index // group_size
            row.episode = self._num_rows + index
            job.rows.append(row)
        self._num_groups += len(prompts)
        self._num_rows += len(repeated)
        if self.generator.num_unfinished == 0:
            self.generator.start_rollout()
        if self._episodes is None:
            self._request(job)
            return job
        for index, row in enumerate(job.rows):
            self._jobs[row.episode] = (job, index)
        self._episodes.start(job.rows, sampling, max_total_length, job.lengths)
        return job

    def advance(self) -> None:
        """Collect finished completions, steps and rewards, and start what follows them.

        Raises WorkerFailure if a worker fails that cannot be replaced, and RewardError if reward
        functions or the environment failed in more rows than `reward.max_error_share` allows.
        """
        calls = [] if self._rewards is None else self._rewards.running_calls
        if self._episodes is not None:
            calls += self._episodes.workers.start_calls(is_idle=not self.generator.num_running)
        if self.generator.num_unfinished or calls:
            request_ids, completions = self.generator.collect(_WAIT_S, calls)
            if request_ids:
                self._add_completions(request_ids, completions)
        self._collect_episodes()
        self._collect_rewards()

    def drain(self) -> None:
        """Finish the completions that are being decoded.

        Conversations request their next turn after this. Requests that wait for a restarted replica
        are not waited for.
        """
        self._is_draining = True
        try:
            while self.generator.num_running:
                self.advance()
        finally:
            self._is_draining = False

    @contextmanager
    def background(self) -> Iterator[None]:
        """Advance in another thread while the block runs.

        An exception in the thread is raised at the end of the block. In the block, no other method
        of the collector or of its generator may be called.
        """
        if not self._jobs:
            yield
            return
        stopped = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while not stopped.is_set() and self._jobs:
                    self.advance()
            except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
                errors.append(error)

        thread = threading.Thread(target=run, name="rollout", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            stopped.set()
            thread.join()
            if errors:
                error.add_note(f"The rollout beside it failed as well: {errors[0]}")
            raise
        stopped.set()
        thread.join()
        if errors:
            raise errors[0]

    def _add_completions(self, request_ids: Sequence[int], completions: Completions) -> None:
        """Add finished completions to their rows; submit them for rewards."""
        if self._episodes is not None:
            self._episodes.add_completions(request_ids, completions)
            return
        for position, request_id in enumerate(request_ids):
            job, row = self._jobs[request_id]
            job.rows[row].add_turn(completions, position)
        self._end_rows(request_ids)

    def _collect_episodes(self) -> None:
        """Continue the episodes, and add those that have ended to their jobs."""
        if self._episodes is None:
            return
        keys = []
        for row, problem in self._episodes.advance(submits=not self._is_draining):
            job, index = self._jobs[row.episode]
            if row.outcome is not None and row.outcome.is_dropped:
                job.dropped_rows.add(index)
            if problem is not None:
                limits, on_error = self._episodes.rewards, self._episodes.config.on_error
                job.add_problem(index, problem, limits, on_error)
            keys.append(row.episode)
        self._end_rows(keys)

    def _request(self, job: RolloutJob) -> None:
        """Request the completions of a job without episodes."""
        request_ids = self.generator.submit(
            Jagged.from_rows([row.prompt.token_ids for row in job.rows], np.int32),
            np.array([row.seed for row in job.rows], dtype=np.uint64),
            job.sampling,
            lengths=job.lengths,
            max_total_length=job.max_total_length,
            images=[row.prompt.images for row in job.rows],
        )
        for index, request_id in enumerate(request_ids):
            self._jobs[request_id] = (job, index)

    def _end_rows(self, request_ids: Sequence[int]) -> None:
        """Submit rows that ended for rewards of functions, if there are any."""
        for request_id in request_ids:
            if request_id not in self._jobs:
                # Its group was cancelled in this loop.
                continue
            job, row = self._jobs[request_id]
            conversation = job.rows[row]
            self._cancel(job, job.add_ended(row))
            job.rewards[row] = sum(conversation.rewards.values())
            for name, value in conversation.rewards.items():
                job.add_component(name, row, value)
            if self._rewards is None:
                del self._jobs[request_id]
                job.add_scored(row)
        request_ids = [each for each in request_ids if each in self._jobs]
        if self._rewards is not None and self._rewards.is_grouped:
            request_ids = self._complete_groups(request_ids)
        if self._rewards is None or not request_ids:
            return
        ended = []
        for request_id in request_ids:
            job, row = self._jobs[request_id]
            ended.append(job.rows[row])
        # The workers decode.
        samples = [row.sample(has_text=False) for row in ended]
        self._rewards.submit(request_ids, samples, [row.last_turn for row in ended])

    def _cancel(self, job: RolloutJob, rows: Sequence[int]) -> None:
        """Discard rows of a job, whose completions and rewards are not needed."""
        if not rows:
            return
        cancelled = set(rows)
        jobs = self._jobs.items()
        ids = [each for each, (owner, row) in jobs if owner is job and row in cancelled]
        for request_id in ids:
            del self._jobs[request_id]
        self.generator.cancel(ids)
        # Those that have ended; the replicas count the others.
        self.generator.add_discarded(sum(job.rows[row].num_model_tokens for row in rows))
        for row in rows:
            self._incomplete.pop(job.rows[row].group, None)

    def _complete_groups(self, request_ids: Sequence[int]) -> list[int]:
        """Return the requests of the groups whose last rows are `request_ids`, in row order."""
        complete: list[int] = []
        for request_id in request_ids:
            job, row = self._jobs[request_id]
            ended = self._incomplete.setdefault(job.rows[row].group, [])
            ended.append(request_id)
            if len(ended) == job.group_size:
                del self._incomplete[job.rows[row].group]
                complete += sorted(ended, key=lambda each: self._jobs[each][1])
        return complete

    def _collect_rewards(self) -> None:
        if self._rewards is None:
            return
        for scored in self._rewards.collect(0.0):
            for position, request_id in enumerate(scored.keys):
                if request_id not in self._jobs:
                    # It was cancelled while its reward was computed.
                    continue
                job, row = self._jobs.pop(request_id)
                # On top of the reward of the environment, if there is one.
                job.rewards[row] += scored.rewards[position]
                for name, values in scored.components.items():
                    job.add_component(name, row, float(values[position]))
                problem = scored.problems[position]
                if problem is not None:
                    job.add_problem(row, problem, self._rewards.config)
                job.add_scored(row)


def check_error_share(
    problems: Collection[RewardProblem], num_rows: int, config: RewardConfig
) -> None:
    """Raise RewardError if more completions of a rollout failed than `max_error_share` allows.

    `problems` has one entry per completion that failed so far, of `num_rows` in all.
    """
    # Not the product with the share, which may be rounded below a number of rows.
    if len(problems) / num_rows <= config.max_error_share:
        return
    counts = Counter(str(problem) for problem in problems)
    frequent_first = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"  {count} x {text}" for text, count in frequent_first[:_NUM_SHOWN]]
    if len(counts) > _NUM_SHOWN:
        lines.append(f"  and {len(counts) - _NUM_SHOWN} other problems")
    raise RewardError(
        f"the rewards of {len(problems)} of {num_rows} completions failed, above"
        f" reward.max_error_share {config.max_error_share:g}: correct the functions, or raise the"
        " limit. Problems:\n" + "\n".join(lines)
    )
