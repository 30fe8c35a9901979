"""Drives generation and rewards: completions are scored while others are still decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_like.data.jagged import Jagged
from nemo_like.environments.reward import RewardEnvironment, RewardSample
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import Completions
from nemo_like.generation.sampling_params import SamplingParams
from nemo_like.rollout.prompt import Prompt
from nemo_like.rollout.rollout import Rollout, build_rollout

_WAIT_S = 0.05
"""Max wait for completions or rewards in one call of `advance`."""


@dataclass(eq=False)
class RolloutJob:
    """The prompts of one rollout, and what is known of their completions."""

    prompts: list[Prompt]
    """B prompts, one per completion; those of a group are consecutive."""
    group_size: int
    parts: list[Completions] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Row of each completion in `parts`."""
    samples: dict[int, RewardSample] = field(default_factory=dict)
    """By row."""
    rewards: np.ndarray = field(init=False)
    """float32 [B]; valid for the rows that are scored."""
    components: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [B] each: unweighted values of the reward functions."""
    num_scored: int = 0
    started_s: float = field(default_factory=time.monotonic)
    generation_s: float = 0.0
    """Seconds from the start to the last completion."""
    reward_s: float = 0.0
    """Seconds from the last completion to the last reward."""

    def __post_init__(self) -> None:
        self.rewards = np.zeros(len(self.prompts), dtype=np.float32)

    @property
    def is_done(self) -> bool:
        """True if every completion has its reward."""
        return self.num_scored == len(self.prompts)

    def result(self) -> Rollout:
        """Return the rollout, in the order of the prompts."""
        completions = Completions.concat(self.parts).take(np.argsort(self.rows))
        samples = [self.samples[row] for row in range(len(self.prompts))]
        return build_rollout(
            self.prompts,
            self.group_size,
            completions,
            samples,
            self.rewards,
            self.components,
        )


class RolloutCollector:
    """Runs any number of jobs at a time on one generator and one group of reward workers.

    Not thread-safe: `background` is the only way to run it in another thread.
    """

    def __init__(
        self,
        generator: Generator,
        rewards: RewardEnvironment,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.generator = generator
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._jobs: dict[int, tuple[RolloutJob, int]] = {}
        """By request id: the job and the row of requests without a reward."""

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        max_total_length: int,
        seeds: np.ndarray,
    ) -> RolloutJob:
        """Request `group_size` completions per prompt; `seeds` is uint64 [P x G]."""
        # Prompt-major: the completions of a prompt are consecutive rows.
        repeated: list[Prompt] = []
        for prompt in prompts:
            repeated += [prompt] * group_size
        if self.generator.num_unfinished == 0:
            self.generator.start_rollout()
        request_ids = self.generator.submit(
            Jagged.from_rows([prompt.token_ids for prompt in repeated], np.int32),
            seeds,
            sampling,
            max_total_length=max_total_length,
        )
        job = RolloutJob(repeated, group_size)
        for row, request_id in enumerate(request_ids):
            self._jobs[request_id] = (job, row)
        return job

    def advance(self) -> None:
        """Collect finished completions, start their rewards, and collect rewards.

        Raises WorkerFailure if a worker fails that cannot be replaced.
        """
        if self.generator.num_unfinished:
            request_ids, completions = self.generator.collect(_WAIT_S)
            if request_ids:
                self._add_completions(request_ids, completions)
            self._collect_rewards(0.0)
        else:
            self._collect_rewards(_WAIT_S)

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
        """Add finished completions to their jobs and submit them for rewards."""
        token_ids = [ids.tolist() for ids in completions.token_ids]
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        samples = []
        rows_of_job: dict[int, tuple[RolloutJob, list[int], list[int]]] = {}
        for position, (request_id, text) in enumerate(zip(request_ids, texts, strict=True)):
            job, row = self._jobs[request_id]
            prompt = job.prompts[row]
            sample = RewardSample(
                prompt=prompt.text,
                completion=text,
                answer=prompt.answer,
                row=prompt.row,
            )
            job.samples[row] = sample
            samples.append(sample)
            _, rows, positions = rows_of_job.setdefault(id(job), (job, [], []))
            rows.append(row)
            positions.append(position)
        for job, rows, positions in rows_of_job.values():
            job.rows += rows
            job.parts.append(completions.take(np.array(positions)))
            if len(job.rows) == len(job.prompts):
                job.generation_s = time.monotonic() - job.started_s
        self._rewards.submit(request_ids, samples)

    def _collect_rewards(self, timeout_s: float) -> None:
        for scored in self._rewards.collect(timeout_s):
            for position, request_id in enumerate(scored.keys):
                job, row = self._jobs.pop(request_id)
                job.rewards[row] = scored.rewards[position]
                for name, values in scored.components.items():
                    column = job.components.setdefault(name, np.zeros(len(job.prompts), np.float32))
                    column[row] = values[position]
                job.num_scored += 1
                if job.is_done:
                    job.reward_s = time.monotonic() - job.started_s - job.generation_s
