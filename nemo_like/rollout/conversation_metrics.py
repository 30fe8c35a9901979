"""Metrics of the conversations of one rollout."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.metrics import Max, Mean, Metrics
from nemo_like.rollout.conversations import ConversationRow, EndReason


def conversation_metrics(conversations: Sequence[ConversationRow]) -> Metrics:
    """Return turns, observations, time and reasons of the ends of B conversations.

    Metrics of the environment are `environment/<name>`, averaged over the conversations.
    """
    num_rows = len(conversations)
    turns = [conversation.num_turns for conversation in conversations]
    num_observed = 0
    for conversation in conversations:
        # Segments alternate: prompt, turn, observation, turn, ...
        num_observed += sum(len(segment) for segment in conversation.segments[2::2])
    seconds = [conversation.step_s for conversation in conversations]
    metrics: Metrics = {
        "conversation/turns_mean": Mean(float(sum(turns)), num_rows),
        "conversation/turns_max": Max(float(max(turns, default=0))),
        "conversation/observation_tokens_mean": Mean(float(num_observed), num_rows),
        "conversation/step_s_mean": Mean(sum(seconds), num_rows),
        "conversation/step_s_max": Max(max(seconds, default=0.0)),
        "conversation/ended_by_environment_share": _share(conversations, "done"),
        "conversation/ended_by_turns_share": _share(conversations, "turns"),
        "conversation/ended_by_tokens_share": _share(conversations, "tokens"),
        "conversation/ended_by_timeout_share": _share(conversations, "timeout"),
    }
    names = {name for conversation in conversations for name in conversation.metrics}
    for name in sorted(names):
        total = sum(conversation.metrics.get(name, 0.0) for conversation in conversations)
        metrics[f"environment/{name}"] = Mean(total, num_rows)
    return metrics


def _share(conversations: Sequence[ConversationRow], reason: EndReason) -> Mean:
    """Return the share of conversations that ended for `reason`."""
    num_ended = sum(conversation.ended_by == reason for conversation in conversations)
    return Mean(float(num_ended), len(conversations))
