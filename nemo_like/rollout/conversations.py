"""One conversation of a rollout: its token ids, texts, rewards, and the reason of its end.

The token ids of a conversation only grow: a turn of the model adds exactly the ids that were
sampled, and an observation adds the ids of its text, tokenized once. The prompt of every turn is
all ids so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from nemo_like.config.environment import EnvironmentConfig
from nemo_like.config.errors import ConfigError
from nemo_like.data.datasets import question
from nemo_like.data.messages import Message
from nemo_like.environments.environment import Conversation, State
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.steps import StepOutcome, StepTask
from nemo_like.generation.requests import Completions, FinishReason
from nemo_like.rollout.prompt import Prompt

EndReason = Literal["done", "turns", "tokens", "timeout"]
"""`done`: the environment ended the conversation. The others are its limits: `environment.
max_turns`, `environment.max_tokens` and `environment.timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class ConversationLimits:
    """Limits on one conversation."""

    max_turns: int
    max_tokens: int
    """Prompt and observations included."""
    timeout_s: float | None
    """Of the steps of the environment together; None sets no limit."""

    @classmethod
    def from_config(cls, config: EnvironmentConfig, max_total_length: int) -> ConversationLimits:
        """Return the limits of `config`, with at most `max_total_length` tokens."""
        return cls(
            max_turns=config.max_turns,
            max_tokens=config.conversation_limit(max_total_length),
            timeout_s=config.timeout_s,
        )


@dataclass(eq=False)
class ConversationRow:
    """A conversation that becomes one row of the rollout."""

    prompt: Prompt
    seed: int
    """Seed of the row; see `turn_seed`."""
    messages: list[Message]
    """Texts of all turns so far, those of the prompt first."""
    segments: list[np.ndarray]
    """int32 [L] each: prompt, turn of the model, observation, turn of the model, ..."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32 [L] for each turn of the model."""
    weight_versions: list[np.ndarray] = field(default_factory=list)
    """int32 [L] for each turn of the model."""
    finish_reason: FinishReason = "stop"
    """Of the last turn of the model; `length` also for a conversation without room for the next
    turn."""
    state: State = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    """Components of the environment's reward, summed over turns."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the environment, summed over turns."""
    step_s: float = 0.0
    """Seconds of the environment's steps."""
    ended_by: EndReason | None = None
    """None while the conversation goes on."""

    @classmethod
    def start(cls, prompt: Prompt, seed: int) -> ConversationRow:
        """Return a conversation that consists of its prompt."""
        return cls(prompt, seed, prompt_messages(prompt), [prompt.token_ids])

    @property
    def num_turns(self) -> int:
        """Turns of the model so far."""
        return len(self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those of the prompt included."""
        return sum(len(segment) for segment in self.segments)

    @property
    def reward(self) -> float:
        """Reward of the environment so far."""
        return sum(self.rewards.values())

    @property
    def token_ids(self) -> np.ndarray:
        """All token ids so far, int32 [L]: the prompt of the next turn."""
        return np.concatenate(self.segments)

    def add_turn(self, completions: Completions, position: int, text: str) -> None:
        """Append the turn of the model in row `position` of `completions`; `text` is its text."""
        self.segments.append(completions.token_ids[position])
        self.logprobs.append(completions.logprobs[position])
        self.weight_versions.append(completions.weight_versions[position])
        self.finish_reason = completions.finish_reasons[position]
        self.messages.append({"role": "assistant", "content": text})

    def task(self, key: int, limits: ConversationLimits) -> StepTask:
        """Return the step of the environment that answers the last turn."""
        timeout_s = None
        if limits.timeout_s is not None:
            timeout_s = max(limits.timeout_s - self.step_s, 0.0)
        conversation = Conversation(
            messages=tuple(self.messages),
            row=self.prompt.row,
            state=self.state,
            turn=self.num_turns,
            is_truncated=self.finish_reason == "length",
        )
        return StepTask(key=key, conversation=conversation, timeout_s=timeout_s)

    def add_outcome(self, outcome: StepOutcome, limits: ConversationLimits) -> None:
        """Add reward, state and metrics of a step; ends the conversation if it is over.

        The observation is not appended: `add_observation` does so where the conversation goes on.
        """
        self.state = outcome.state
        self.step_s += outcome.seconds
        for name, value in outcome.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value
        for name, value in outcome.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if outcome.is_timeout:
            self.ended_by = "timeout"
        elif outcome.done:
            self.ended_by = "done"
        elif self.num_turns >= limits.max_turns:
            self.ended_by = "turns"

    def add_observation(
        self, messages: Sequence[Message], token_ids: np.ndarray, limits: ConversationLimits
    ) -> None:
        """Append an observation, `token_ids` int32 [L], or end without room for another turn."""
        if self.num_tokens + len(token_ids) >= limits.max_tokens:
            self.ended_by = "tokens"
            self.finish_reason = "length"
            return
        self.segments.append(token_ids)
        self.messages += messages

    def completions(self) -> Completions:
        """Return the tokens of the model's turns as one row."""
        return Completions.from_rows(
            [np.concatenate(self.segments[1::2])],
            [np.concatenate(self.logprobs)],
            [np.concatenate(self.weight_versions)],
            [self.finish_reason],
        )

    def sample(self) -> RewardSample:
        """Return the input of reward functions."""
        return RewardSample(
            prompt=self.prompt.text,
            completion=str(self.messages[-1]["content"]),
            answer=self.prompt.answer,
            row=self.prompt.row,
            messages=tuple(self.messages),
        )


def prompt_messages(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt, without those that the config adds."""
    if not prompt.row:
        return [{"role": "user", "content": prompt.text}]
    return list(question(prompt.row).messages)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn's sampling stream; that of turn 0 is the seed of the row.

    It depends on the row's seed and the turn only, so a turn that is sampled again after the loss
    of a replica has the same stream.
    """
    if turn == 0:
        return seed
    sequence = np.random.SeedSequence((seed, turn))
    return int(sequence.generate_state(1, np.uint64)[0])


def check_prompt_lengths(prompts: Sequence[Prompt], limits: ConversationLimits) -> None:
    """Raise ConfigError for a prompt that leaves no room for a turn of the model."""
    for prompt in prompts:
        if len(prompt.token_ids) >= limits.max_tokens:
            raise ConfigError(
                f"the prompt {_shortened(prompt.text)} has {len(prompt.token_ids)} tokens, and"
                f" a conversation at most {limits.max_tokens}, so there is no room for a turn of"
                " the model; raise environment.max_tokens or policy.max_total_sequence_length"
            )


def row_segments(conversations: Sequence[ConversationRow]) -> list[list[np.ndarray]]:
    """Return the segments of each conversation, int32 [L] each; see `ConversationRow.segments`."""
    return [conversation.segments for conversation in conversations]


def conversation_record(conversation: ConversationRow) -> dict[str, Any]:
    """Return what a record of the rollout has of a conversation, as JSON values."""
    return {
        "messages": conversation.messages,
        "num_turns": conversation.num_turns,
        "ended_by": conversation.ended_by,
        "environment_metrics": conversation.metrics,
    }


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
