"""The conversation of a completion that a reward model scores. Without torch, for `validate`."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.config.schema import DataConfig
from nemo_like.data.chat import prepare_messages
from nemo_like.data.datasets import question
from nemo_like.data.messages import Message, Tool
from nemo_like.environments.reward import RewardSample


@dataclass(frozen=True)
class ScoredConversation:
    """What a reward model scores for one completion."""

    messages: list[Message]
    """All turns, with the prompts that the config adds; the last is that of the model."""
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
