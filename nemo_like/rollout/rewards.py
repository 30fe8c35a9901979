"""Rewards by reward models: conversations are encoded here and scored in packed batches by workers.

The score of a completion is the score of the conversation that it ends, in the reward model's own
tokenizer and chat template, as in the training of the model: up to the end of the last assistant
turn, or of what the template writes after it, and read at the last token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import RewardConfig, RewardModelConfig
from nemo_like.config.schema import DataConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.errors import Restarts, WorkerDied, WorkerHung
from nemo_like.environments.reward import BadRewardKind, RewardError, RewardProblem, RewardSample
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.policy.policy import Policy
from nemo_like.rollout.collector import RolloutJob
from nemo_like.rollout.conversations import ScoredConversation, scored_conversation

logger = logging.getLogger(__name__)


class RewardModel:
    """One reward model on its workers, which are started again after one died or hung."""

    def __init__(
        self,
        name: str,
        config: RewardModelConfig,
        encoder: ChatEncoder,
        start: Callable[[], Policy],
        *,
        max_length: int | None,
        offloads: bool = False,
        max_restarts: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Start the workers with `start`.

        `encoder` has the reward model's tokenizer and adds no prompts. `max_length` is the limit
        on the tokens of a conversation. With `offloads` the model is in host memory while it does
        not score. `report` gets a line about each restart.
        """
        self.name = name
        self.config = config
        self._encoder = encoder
        self._start = start
        self._max_length = max_length
        self._offloads = offloads
        self._restarts = Restarts(max_restarts, report)
        self._num_rows = 0
        self._num_tokens = 0
        self._num_truncated = 0
        self._policy = start()

    def encode(self, conversation: ScoredConversation) -> np.ndarray:
        """Encode up to the end that `conversation_end` selects, int32 [L].

        Raises ConfigError if the chat template refuses or drops messages, and for a conversation
        above the limit where `oversize_rows` is `error`.
        """
        messages = conversation.messages
        if self.config.conversation_end == "template":
            token_ids = self._encoder.encode_conversation(messages, conversation.tools)
        else:
            token_ids = self._encoder.encode_sft(messages, conversation.tools).input_ids
        limit = self._max_length
        if limit is None or len(token_ids) <= limit:
            return token_ids
        if self.config.oversize_rows == "truncate":
            self._num_truncated += 1
            # The score is read at the last token, so the end is kept.
            return token_ids[-limit:]
        key = f"reward.models.{self.name}"
        source = "the number of positions of the model"
        if self.config.max_length is not None:
            source = f"{key}.max_length"
        raise ConfigError(
            f"the conversation has {len(token_ids)} tokens, above {source}, {limit}; lower"
            f" policy.generation.max_new_tokens, or set {key}.oversize_rows to truncate, which"
            " removes the beginning"
        )

    def score(
        self, conversations: Sequence[ScoredConversation]
    ) -> tuple[np.ndarray, list[RewardProblem | None]]:
        """Return the scores of B conversations, float32 [B], and their problems; 0 without a score.

        Raises WorkerFailure if a worker fails and `max_restarts` is reached.
        """
        problems: list[RewardProblem | None] = [None] * len(conversations)
        rows = []
        positions = []
        for position, conversation in enumerate(conversations):
            try:
                rows.append(self.encode(conversation))
                positions.append(position)
            except ConfigError as error:
                problems[position] = self._problem("raised", f"cannot score it: {error}")
        values = np.zeros(len(conversations), dtype=np.float32)
        self._num_rows += len(rows)
        if rows:
            # Equal conversations get one score: in microbatches of other sizes it differs by
            # rounding, and a group of equal completions would have advantages.
            distinct = {row.tobytes(): row for row in rows}
            scores = dict(zip(distinct, self._scores([*distinct.values()]), strict=True))
            values[positions] = [scores[row.tobytes()] for row in rows]
        for position in np.flatnonzero(~np.isfinite(values)).tolist():
            text = f"gave the score {values[position]}, which is not a finite number"
            problems[position] = self._problem("value", text)
            values[position] = 0.0
        return values, problems

    def pop_metrics(self) -> Metrics:
        """Return the metrics of the conversations that were scored since the last call."""
        num_tokens = float(self._num_tokens)
        num_truncated = float(self._num_truncated)
        metrics: Metrics = {
            f"reward_model/{self.name}_num_tokens": Sum(num_tokens),
            f"reward_model/{self.name}_truncated_share": Mean(num_truncated, self._num_rows),
        }
        self._num_rows = 0
        self._num_tokens = 0
        self._num_truncated = 0
        return metrics

    def _scores(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the scores of encoded conversations, int32 [L] each: float32 [B]."""
        input_ids = Jagged.from_rows(rows, np.int32)
        num_tokens = len(input_ids.values)
        self._num_tokens += num_tokens
        batch = BatchedDataDict(
            input_ids=input_ids,
            # Nothing is trained.
            token_mask=Jagged(np.zeros(num_tokens, dtype=np.uint8), input_ids.offsets),
            length=input_ids.lengths,
            # Conversations of a prompt, and all behind one system prompt, begin with equal tokens.
            group=np.zeros(len(rows), dtype=np.int64),
        )
        while True:
            try:
                return self._compute(batch)
            except (WorkerDied, WorkerHung) as failure:
                # The model has no state, so the batch is scored again.
                worker = f"a worker of the reward model {self.name}"
                self._restarts.add(worker, failure, group=failure.group, rank=failure.rank)
                self._policy = self._start()

    def _compute(self, batch: BatchedDataDict) -> np.ndarray:
        """Return the scores of the rows of `batch`, float32 [B]."""
        with self._policy.onloaded() if self._offloads else nullcontext():
            # A conversation above `mb_tokens` runs alone; a warning would name keys of the policy.
            plan = self._policy.plan_rows(batch, purpose="evaluate", warn=False)
            return self._policy.compute_scores(self._policy.shard(batch, plan))

    def _problem(self, kind: BadRewardKind, text: str) -> RewardProblem:
        return RewardProblem(self.name, self.config.model_name, kind, text, section="models")


class ModelRewards:
    """Adds the scores of all reward models of a run to rollouts that are complete otherwise."""

    def __init__(
        self, models: Sequence[RewardModel], config: RewardConfig, data: DataConfig
    ) -> None:
        """`data` has the prompts that are added to the messages of a row, as for the policy."""
        self._models = models
        self._config = config
        self._data = data

    def score(self, job: RolloutJob, samples: Sequence[RewardSample]) -> None:
        """Score the completions of a job, one of `samples` each; adds the weighted scores to it.

        Raises RewardError if a completion cannot be scored and `reward.on_error` is `stop`, or if
        more failed than `reward.max_error_share` allows.
        """
        conversations = [scored_conversation(sample, self._data) for sample in samples]
        for model in self._models:
            values, problems = model.score(conversations)
            self._add_problems(job, samples, model, problems)
            job.components[model.name] = values
            job.rewards += model.config.weight * values

    def pop_metrics(self) -> Metrics:
        """Return the metrics of all reward models since the last call."""
        metrics: Metrics = {}
        for model in self._models:
            metrics |= model.pop_metrics()
        return metrics

    def _add_problems(
        self,
        job: RolloutJob,
        samples: Sequence[RewardSample],
        model: RewardModel,
        problems: Sequence[RewardProblem | None],
    ) -> None:
        """Add the first problem of each row to the job, or raise it."""
        for row, problem in enumerate(problems):
            if problem is None:
                continue
            if self._config.on_error == "stop":
                raise RewardError.from_problem(problem, samples[row])
            job.add_problem(row, problem, self._config)
