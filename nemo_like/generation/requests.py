"""Requests to a generation worker, sampling options, completions, and the methods of a worker.

A worker is one replica of the generator, on one or several devices. It implements
`GenerationWorkerProtocol`: the driver submits requests, then calls `poll` again and again, and
updates the weights between two polls. A worker may also decode between two calls. A method runs
between two decoding steps, so that weights, requests and completions change in the order of the
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from nemo_like.config.paths import require_model_directory
from nemo_like.config.rollout import GenerationConfig
from nemo_like.config.schema import AdapterConfig, Switch, VisionConfig
from nemo_like.data.images import RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.sampling_filter import SamplingFilter
from nemo_like.weight_sync.channel import WeightTarget

FinishReason = Literal["stop", "length"]
"""`stop`: an end token or a stop string. `length`: the token limit was reached."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options, with the names and meanings of `policy.generation`."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()

    @property
    def token_filter(self) -> SamplingFilter:
        """Filter of the tokens that may be sampled; not applied at temperature 0."""
        return SamplingFilter(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @classmethod
    def from_config(cls, config: GenerationConfig) -> SamplingParams:
        """Return the sampling keys of `config`."""
        return cls(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_strings=tuple(config.stop_strings),
        )


@dataclass(frozen=True, slots=True)
class GenerationRequests:
    """N requests for one completion each.

    Example: two completions of the prompt [5, 6] are `request_ids` [7, 8], `prompt_ids` rows
    [5, 6] and [5, 6], `seeds` [1, 2].
    """

    request_ids: np.ndarray
    """int64 [N], unique among the unfinished requests of a replica."""
    prompt_ids: Jagged
    """int32, N rows of at least one token."""
    seeds: np.ndarray
    """uint64 [N]: the random stream of each completion. With the `hf` backend, requests of equal
    prompt and seed have equal completions; with `vllm`, if they also run in equal batches."""
    sampling: SamplingParams
    max_total_length: int
    """Max tokens of prompt and completion together."""
    images: Sequence[Sequence[RowImage]] = ()
    """N entries, the images of each prompt, whose ids have all tokens of them; or none."""
    has_order: bool = False
    """Decode those in front first, as by predicted lengths; else in any order."""

    def __len__(self) -> int:
        """Number of requests, N."""
        return len(self.request_ids)

    def take(self, rows: np.ndarray | Sequence[int]) -> GenerationRequests:
        """Return the given rows (int [n]) in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        return GenerationRequests(
            self.request_ids[rows],
            self.prompt_ids.take(rows),
            self.seeds[rows],
            self.sampling,
            self.max_total_length,
            [self.images[row] for row in rows.tolist()] if self.images else (),
            self.has_order,
        )

    def joined(self, other: GenerationRequests) -> GenerationRequests | None:
        """Return the requests of both, in order; None if their options differ."""
        options = (self.sampling, self.max_total_length)
        if options != (other.sampling, other.max_total_length):
            return None
        return GenerationRequests(
            np.concatenate([self.request_ids, other.request_ids]),
            Jagged.concat([self.prompt_ids, other.prompt_ids]),
            np.concatenate([self.seeds, other.seeds]),
            self.sampling,
            self.max_total_length,
            [*self.images_of_rows, *other.images_of_rows] if self.images or other.images else (),
            self.has_order,
        )

    @property
    def images_of_rows(self) -> Sequence[Sequence[RowImage]]:
        """The images of each prompt, N entries."""
        return self.images or [()] * len(self)

    def max_new_tokens(self) -> np.ndarray:
        """Return the token limit of each completion, int64 [N]."""
        room = self.max_total_length - self.prompt_ids.lengths
        return np.minimum(self.sampling.max_new_tokens, room)


@dataclass(frozen=True, slots=True)
class Completions:
    """B completions.

    Example: "4" and an end token after one prompt, three tokens without an end after another, both
    with the weights of version 2: `token_ids` rows [20, 2] and [9, 9, 7], `weight_versions` rows
    [2, 2] and [2, 2, 2], `finish_reasons` ["stop", "length"].
    """

    token_ids: Jagged
    """int32: the tokens sampled after each prompt, the end token included."""
    logprobs: Jagged
    """float32: log-prob of each token under the distribution that it was drawn from."""
    weight_versions: Jagged
    """int32: version of the weights that sampled each token, as set by the last weight update; 0 is
    the model as loaded. A row has several if the weights changed while it was sampled."""
    finish_reasons: list[FinishReason]
    routed_experts: Jagged | None = None
    """[layers, top-k] for each token of prompt and completion but the last, which the model never
    sees; see `data.routed_experts`. None where the worker records none."""

    def __len__(self) -> int:
        """Number of completions, B."""
        return len(self.finish_reasons)

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and the highest weight version of all tokens; (0, 0) without tokens."""
        values = self.weight_versions.values
        if len(values) == 0:
            return 0, 0
        return int(values.min()), int(values.max())

    def take(self, rows: np.ndarray) -> Completions:
        """Return the given rows (int64 [n]) in the given order."""
        reasons = [self.finish_reasons[row] for row in rows]
        return Completions(
            self.token_ids.take(rows),
            self.logprobs.take(rows),
            self.weight_versions.take(rows),
            reasons,
            None if self.routed_experts is None else self.routed_experts.take(rows),
        )

    @classmethod
    def from_rows(
        cls,
        token_ids: Sequence[Sequence[int] | np.ndarray],
        logprobs: Sequence[Sequence[float] | np.ndarray],
        weight_versions: Sequence[Sequence[int] | np.ndarray],
        finish_reasons: Sequence[FinishReason],
        routed_experts: Sequence[np.ndarray] = (),
    ) -> Completions:
        """Build from one sequence per row; the sequences of a row have equal lengths.

        `routed_experts` are [tokens, layers, top-k] for each row, or none.
        """
        experts = None
        if routed_experts:
            experts = Jagged.from_rows(routed_experts, routed_experts[0].dtype)
        return cls(
            Jagged.from_rows(token_ids, np.int32),
            Jagged.from_rows(logprobs, np.float32),
            Jagged.from_rows(weight_versions, np.int32),
            list(finish_reasons),
            experts,
        )

    @staticmethod
    def concat(parts: Sequence[Completions]) -> Completions:
        """Concatenate the rows of all parts."""
        finish_reasons: list[FinishReason] = []
        for part in parts:
            finish_reasons.extend(part.finish_reasons)
        # Parts without rows have no experts.
        experts = [part.routed_experts for part in parts if part.routed_experts is not None]
        return Completions(
            Jagged.concat([part.token_ids for part in parts]),
            Jagged.concat([part.logprobs for part in parts]),
            Jagged.concat([part.weight_versions for part in parts]),
            finish_reasons,
            Jagged.concat(experts) if experts else None,
        )


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """The result of one `poll`: the completions that ended in it."""

    request_ids: np.ndarray
    """int64 [F]: the finished requests, in the order in which they ended."""
    completions: Completions
    """F rows, in the order of `request_ids`."""
    num_unfinished: int
    """Requests of the replica that still run or wait."""
    num_tokens: int
    """Tokens sampled since the last poll, also of unfinished completions."""
    busy_s: float
    """Seconds of decoding since the last poll."""
    num_cancelled_tokens: int = 0
    """Tokens that were sampled for the requests cancelled since the last poll."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the finished requests; 0 where the worker caches no prefixes."""
    num_cached_tokens: int = 0
    """Those of them whose keys and values were read from the prefix cache."""


def check_room(requests: GenerationRequests) -> None:
    """Raise ValueError for the first prompt that is empty or leaves no room for a token."""
    lengths = requests.prompt_ids.lengths
    limit = requests.max_total_length
    invalid = np.flatnonzero((lengths == 0) | (lengths >= limit))
    if len(invalid) == 0:
        return
    row = invalid[0]
    if lengths[row] == 0:
        raise ValueError(
            f"prompt {row} has no tokens; a completion needs at least one to start from"
        )
    raise ValueError(
        f"prompt {row} has {lengths[row]} tokens and policy.max_total_sequence_length is"
        f" {limit}, which leaves no room for a completion; raise it to at least"
        f" {lengths[row] + 1} or drop the prompt"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationStart:
    """What every generation worker is started with."""

    model_name: str
    tokenizer_name: str | None = None
    """None is the directory of the model."""
    precision: str = "float32"
    end_token_ids: Sequence[int] = ()
    """End a completion in addition to those that model and tokenizer declare. The chat template may
    end a turn with a token that neither declares, such as `<|im_end|>` of Qwen2.5 base models.
    """
    adapter: AdapterConfig | None = None
    """With it a weight update has either all weights or the adapters alone, which are 0 until the
    first.
    """
    vision: VisionConfig = field(default_factory=VisionConfig)
    """Limits on the size of images, as in the configuration."""
    router_replay: Switch = False
    """As in the configuration: the completions have the experts that the model chose."""
    seed: int = 0
    can_sleep: bool = False
    """Allows `offload` on a GPU that is shared with the policy."""
    shares_process: bool = False
    """The policy is in the process of the worker."""

    def checked_tokenizer(self) -> str:
        """Return the directory of the tokenizer; ConfigError if it or the model's is missing."""
        require_model_directory("policy.model_name", self.model_name)
        tokenizer_name = self.tokenizer_name or self.model_name
        require_model_directory("policy.tokenizer_name", tokenizer_name, weights=False)
        return tokenizer_name


class GenerationWorkerProtocol(WeightTarget, Protocol):
    """One replica of the generator.

    A weight update (`WeightTarget`) may come while requests are unfinished. They then continue with
    the new weights: the replica recomputes their KV cache, and no cached prefix of the old weights
    is read again.
    """

    def submit(self, requests: GenerationRequests) -> None:
        """Add requests to the queue; they are decoded by later calls of `poll`.

        Raises ValueError for a prompt that is empty or leaves no room for a token; no request of
        the call is added then.
        """
        ...

    def poll(self, max_seconds: float, min_seconds: float | None = None) -> GenerationProgress:
        """Decode for about `max_seconds`, or until every request is finished.

        With `min_seconds` it ends after that time if a request has finished. Also returns what
        finished since the last poll. At least one decoding step is done if a request is unfinished.
        Raises FloatingPointError if the model's logits are not finite, RuntimeError inside a weight
        update.
        """
        ...

    def partial_tokens(self) -> dict[int, list[int]]:
        """Return the tokens sampled so far for each running request, by its id.

        For output while a completion is decoded; `poll` returns the complete ones.
        """
        ...

    def abort(self) -> int:
        """Discard all unfinished requests; return the number of tokens sampled for them.

        Also of cancelled requests that no poll has reported.
        """
        ...

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Discard these requests and free their KV cache; no later `poll` returns them.

        Ids of requests that a poll has returned are ignored. The next poll reports the number of
        tokens that were sampled for the others.
        """
        ...

    def start_rollout(self) -> None:
        """Forget cached prefixes if no request is unfinished.

        Results of a rollout then do not depend on what the replica computed before, which a
        bit-exact resume needs.
        """
        ...

    def score(self, rows: Jagged) -> Jagged:
        """Return the log-prob of each token given those before it in its row, float32.

        `rows` has int32 token ids, at most `max_total_length` per row. The log-probs refer to
        the model at temperature 1 without filters; the first of each row is 0. The result has the
        lengths of `rows`. For the comparison with the policy after a weight update: raises
        RuntimeError if cached prefixes of older weights would be read.
        """
        ...

    def offload(self, discards_weights: bool = False) -> None:
        """Release the memory of the device: weights go to host memory, the KV cache is dropped.

        With `discards_weights` a complete weight update follows before `onload`, and the worker
        need not keep the weights.
        """
        ...

    def onload(self) -> None:
        """Move the weights back to the device."""
        ...
