"""Keys of `reward`: functions and models that score completions, and what a failure does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from nemo_like.config.constraints import IMPORT_PATH, NOT_EMPTY

OnError = Literal["stop", "zero", "drop"]


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function."""

    path: Annotated[str, IMPORT_PATH]
    """Import path of a function `(RewardSample) -> float`, e.g. `my_package.rewards.brevity`."""
    weight: float = 1.0
    """Weight of the function in the sum; may be negative."""
    batched: bool = False
    """The function takes a list of samples and returns a list, array or tensor of one number each.
    A function with the attribute `batched = True` is one as well."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, e.g. `{time_limit_s: 5}`."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """One reward model: sequence classification with one output, as `nemo-like rm` exports it."""

    model_name: Annotated[str, NOT_EMPTY]
    """Directory of the model, or the name of one on the Hugging Face hub, which is downloaded."""
    tokenizer_name: str | None = None
    """Directory or hub name of the tokenizer; null uses the model's."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    conversation_end: Literal["turn", "template"] = "turn"
    """Last token of a conversation, where the score is read: `turn` is the end token of its last
    turn, as `nemo-like rm` trains; `template` is the last token that the chat template writes, e.g.
    a line break after that token, for models that other tools trained."""
    weight: float = 1.0
    """Weight of the score in the sum; may be negative, and 0 logs the score only."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights and of the forward pass."""
    max_length: Annotated[int | None, Ge(1)] = None
    """Max tokens of a conversation in the reward model's own tokenizer; null is the number of
    positions of the model."""
    oversize_rows: Literal["error", "truncate"] = "error"
    """Conversations above `max_length`: `error` is a failed reward, for which `reward.on_error`
    decides; `truncate` removes the beginning, because the score is read at the last token."""
    mb_tokens: Annotated[int, Ge(1)] = 8192
    """Max tokens per packed microbatch; a longer conversation has a separate microbatch."""
    num_workers: Annotated[int, Ge(0)] = 0
    """Separate workers over which the model is sharded; 0 runs it on the policy's workers and keeps
    it in host memory while it does not score."""
    max_restarts: Annotated[int, Ge(0)] = 1
    """Number of times in a run that the workers are started again after one died or hung. The next
    failure stops the run."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards of completions: the weighted sum of functions and of scores of reward models."""

    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    models: dict[str, RewardModelConfig] = field(default_factory=dict)
    num_workers: Annotated[int, Ge(1)] = 1
    """Processes that compute rewards."""
    timeout_s: Annotated[float | None, Gt(0)] = None
    """Max seconds of one call of a reward function, which then failed: an async call is cancelled,
    and the process of another one is ended and replaced. null sets no limit, and functions run in
    the reward worker itself, where `cluster.progress_timeout_s` ends the run if one hangs."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """A reward function that fails: it raises, exceeds `timeout_s`, ends its process, or returns
    something else than one finite number. `stop` ends the run with the sample, `zero` takes 0 as
    its value, `drop` leaves the completion out of training and of the statistics of its group."""
    max_error_share: Annotated[float, Ge(0), Le(1)] = 0.1
    """Max share of the completions of a rollout with a failed function, for `on_error` `zero` and
    `drop`; above it the run stops. The refills of dynamic sampling count with the rollout of their
    step."""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of all functions and models, by name."""
        weights = {name: function.weight for name, function in self.functions.items()}
        for name, model in self.models.items():
            weights[name] = model.weight
        return weights
