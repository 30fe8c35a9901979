"""Prompts, and the conversations that begin with them: token ids, texts, rewards and their ends.

The token ids of a conversation only grow: a turn of the model adds exactly the ids that were
sampled, and an observation adds the ids of its text, tokenized once. The prompt of every turn is
all ids so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from nemo_like.agents.history import Reason
from nemo_like.agents.statuses import Status
from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.config.schema import DataConfig
from nemo_like.data.chat import prepare_messages
from nemo_like.data.formats import question
from nemo_like.data.images import RowImage
from nemo_like.data.messages import Message, Tool
from nemo_like.environments.reward import RewardSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_like.generation.requests import Completions, FinishReason

T = TypeVar("T")
EndReason = Literal["done", "turns", "tokens", "timeout", "error"]
"""`done`: the environment ended the conversation. `turns`, `tokens` and `timeout` are its limits:
`environment.max_turns`, `policy.max_total_sequence_length` and `environment.timeout_s`. `error`:
the environment failed, and `environment.on_error` is not `stop`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome:
    """How the episode of a program ended; its rows have it in common."""

    status: Status
    is_dropped: bool
    """Left out of training."""
    num_attempts: int = 1
    num_calls: int = 0
    """Answered calls of the last attempt."""
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    """Number of calls that continue no other, by reason."""
    seconds: float = 0.0
    problem: str = ""


_NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The encoded prompt of one row: the input of the policy in a rollout."""

    token_ids: np.ndarray
    """int32 [L], with the chat template's opening of the assistant turn."""
    text: str
    answer: str | None
    row: dict[str, Any] = field(default_factory=dict)
    """The row of the data file, for reward functions that use other columns than the answer."""
    images: tuple[RowImage, ...] = ()
    """In the order of their tokens."""


@dataclass(eq=False)
class ConversationRow:
    """A row of a rollout: a prompt and one completion, or a conversation with an environment."""

    prompt: Prompt
    seed: int
    """Seed of the row; see `row_seeds`."""
    segments: list[np.ndarray]
    """int32 [L] each: prompt, turn of the model, observation, turn of the model, ..."""
    messages: list[Message] = field(default_factory=list)
    """Texts of all turns so far, the prompt first; empty without an environment."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer of the texts; None for a row whose text nothing reads."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32 [L] for each turn of the model."""
    weight_versions: list[np.ndarray] = field(default_factory=list)
    """int32 [L] for each turn of the model."""
    routed_experts: list[np.ndarray] = field(default_factory=list)
    """[n, layers, top-k] each, of consecutive tokens from the first of the prompt; see
    `data.routed_experts`. Empty where the generator records none."""
    finish_reason: FinishReason = "stop"
    """How the last turn of the model ended; `length` also for a conversation without room for the
    next turn."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Components of the environment's reward, summed over turns."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the environment, summed over turns."""
    step_s: float = 0.0
    """Seconds of the environment's steps."""
    group: int = 0
    """Equal for the completions of one prompt in a rollout, and for no others of the run."""
    episode: int = 0
    """Number of the row among all rows of the run."""
    ended_by: EndReason | None = None
    """None while the conversation goes on, and without an environment."""
    is_trained: Sequence[bool] | None = None
    """Of a row of a program: whether it trains each turn of the model, which is context otherwise.
    None trains all."""
    rows: Sequence[ConversationRow] = ()
    """All rows of the episode of a program, of which this is one; empty for another row."""
    num_started: int = 0
    """Attempts of an episode."""
    failed_calls: Sequence[int] = ()
    """Answered calls of each attempt that failed."""
    outcome: EpisodeOutcome | None = None
    """Of the episode of a program, once it has ended."""
    calls: Sequence[int] | None = None
    """Of a row of a program: number of each of its turns among the calls of the episode, in the
    order of their answers. None: its turns are all turns of the episode."""
    turn_rewards: Sequence[float] = ()
    """What each turn of the episode was given while it ran; the last turns may be left out."""

    @classmethod
    def start(
        cls, prompt: Prompt, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> ConversationRow:
        """Return a row that consists of its prompt."""
        return cls(prompt, seed, [prompt.token_ids], tokenizer=tokenizer)

    @property
    def text(self) -> str:
        """Text of the last turn of the model, without special tokens.

        It is decoded at every access: a driver that decoded all completions would spend most of
        its time with it.
        """
        if self.tokenizer is None:
            return ""
        token_ids = self.last_turn.tolist()
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), "of one row"
        return text

    @property
    def segment_texts(self) -> list[str]:
        """Texts of prompt, turn of the model, observation, ..., with special tokens."""
        if self.tokenizer is None:
            return []
        return [str(self.tokenizer.decode(segment.tolist())) for segment in self.segments]

    @property
    def last_turn(self) -> np.ndarray:
        """Token ids of the last turn of the model, int32 [L]."""
        return self.segments[2 * self.num_turns - 1] if self.num_turns else _NO_IDS

    @property
    def num_turns(self) -> int:
        """Turns of the model so far."""
        return len(self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, with the prompt."""
        return sum(len(segment) for segment in self.segments)

    @property
    def model_token_ids(self) -> np.ndarray:
        """Token ids of all turns of the model, int32 [L]."""
        return np.concatenate([_NO_IDS, *self.segments[1::2]])

    @property
    def num_model_tokens(self) -> int:
        """Tokens of all turns of the model that the row trains."""
        return sum(map(len, self.trained(self.segments[1::2])))

    def trained(self, turns: Sequence[T]) -> list[T]:
        """Return those of the row's turns of the model that are trained."""
        if self.is_trained is None:
            return list(turns)
        return [turn for turn, is_trained in zip(turns, self.is_trained, strict=True) if is_trained]

    def add_turn(self, completions: Completions, position: int) -> None:
        """Append the turn of the model in row `position` of `completions`."""
        self.segments.append(completions.token_ids[position])
        self.logprobs.append(completions.logprobs[position])
        versions = completions.weight_versions[position]
        if (versions == versions[:1]).all():
            # One number in memory, in the shape of the turn.
            versions = np.broadcast_to(versions[:1].copy(), versions.shape)
        self.weight_versions.append(versions)
        if completions.routed_experts is not None:
            # Tokens of earlier turns keep the experts with which they were sampled.
            num_known = sum(map(len, self.routed_experts))
            self.routed_experts.append(completions.routed_experts[position][num_known:])
        self.finish_reason = completions.finish_reasons[position]

    def cancel(self) -> None:
        """Mark the episode of a program as cancelled."""
        if self.outcome is not None:
            self.outcome = replace(self.outcome, status=Status.CANCELLED)

    def sample(self, *, has_text: bool = True) -> RewardSample:
        """Return the input of reward functions; without `has_text` no completion is in it."""
        return RewardSample(
            prompt=self.prompt.text,
            completion=self.text if has_text else "",
            answer=self.prompt.answer,
            row=self.prompt.row,
            completion_ids=self.last_turn if has_text else _NO_IDS,
            finish_reason=self.finish_reason,
            group=self.group,
            messages=tuple(self.messages),
        )


def prompt_messages(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt, without those that the config adds."""
    if not prompt.row:
        return [{"role": "user", "content": prompt.text}]
    return list(question(prompt.row).messages)


def check_prompt_lengths(prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Raise ConfigError for a prompt that leaves no room for a turn of the model."""
    for prompt in prompts:
        if len(prompt.token_ids) >= max_tokens:
            raise ConfigError(
                f"the prompt {shown_value(prompt.text)} has {len(prompt.token_ids)} tokens, and"
                f" a conversation at most {max_tokens}, so there is no room for a turn of"
                " the model; raise policy.max_total_sequence_length"
            )


@dataclass(frozen=True)
class ScoredConversation:
    """What a reward model scores for one completion."""

    messages: list[Message]
    """All turns, with the prompts that the config adds; the last is a turn of the model."""
    tools: list[Tool] | None = None


def scored_conversation(sample: RewardSample, data: DataConfig) -> ScoredConversation:
    """Return the conversation of a sample as the policy saw it, with the prompts of `data`.

    Those are added to the messages of the data row only, not to observations of an environment.
    """
    prompt: list[Message] = [{"role": "user", "content": sample.prompt}]
    tools = None
    if sample.row:
        prompt_of_row = question(dict(sample.row))
        prompt = list(prompt_of_row.messages)
        tools = prompt_of_row.tools
    turns = list(sample.messages[len(prompt) :])
    if not sample.messages:
        turns = [{"role": "assistant", "content": sample.completion}]
    prepared = prepare_messages(
        prompt, system_prompt=data.system_prompt, prompt_template=data.prompt_template
    )
    return ScoredConversation([*prepared, *turns], tools)
