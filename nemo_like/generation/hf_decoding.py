"""Decoding with a Hugging Face model: sampling of the next token, end tokens, batches of requests.

A draw inverts the CDF of the filtered distribution at a uniform number, which is a function of the
row's seed and the token index alone. A row's tokens therefore do not depend on the other rows, the
batch size or the number of workers. The rows of a batch start together, finished rows leave it, and
no new rows join.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from nemo_like.data.images import RowImage
from nemo_like.data.routed_experts import pack_experts
from nemo_like.generation.hf_images import ImageTower, PlacedImages
from nemo_like.generation.requests import FinishReason, GenerationRequests, SamplingParams
from nemo_like.models.routers import RouteRecorder
from nemo_like.sampling_filter import filter_logits

_COMPACT_BELOW = 0.75
"""Finished rows are removed once less than this share of the batch is unfinished: each removal
copies the KV cache of the remaining rows.
"""


def row_uniforms(seeds: np.ndarray, num_tokens: int) -> np.ndarray:
    """Draw float64 [B, num_tokens] in [0, 1), row i from the Philox4x64 stream of `seeds[i]`.

    `seeds` is uint64 [B]. Every stream is read from its start, so a longer request has the shorter
    one as prefix.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    raw = np.empty((len(seeds), num_tokens), dtype=np.uint64)
    for row, seed in enumerate(seeds):
        generator = np.random.Philox(key=int(seed))
        raw[row] = generator.random_raw(num_tokens)
    # The upper 53 bits, the precision of float64.
    upper_bits = raw >> np.uint64(11)
    return upper_bits * 2.0**-53


def sample_tokens(
    logits: Tensor, uniforms: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row, int64 [B], and its log-prob, float32 [B].

    `logits` is [B, V] of any float type, `uniforms` float64 [B]. The log-prob refers to the
    distribution sampled from, after temperature and filters. Temperature 0 takes the most likely
    token; its log-prob refers to the model at temperature 1 without filters.
    """
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(dim=-1)
        return token_ids, _log_probs_of(logits, token_ids)
    logits = filter_logits(logits / params.temperature, params.token_filter)
    # float64, so that rounding of a long cumulative sum does not move mass between tokens and does
    # not depend on the batch.
    probabilities = logits.double().softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    # Relative to the computed total, which rounding moves away from 1.
    total = cumulative[:, -1:]
    target = uniforms[:, None] * total
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # The search passes the end only for non-finite logits. The log-prob is not finite then, which
    # the caller checks.
    last_token_id = logits.shape[-1] - 1
    token_ids = token_ids.clamp_(max=last_token_id)
    return token_ids, _log_probs_of(logits, token_ids)


def _log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probs [B] of `token_ids` [B] under softmax of `logits` [B, V]."""
    index = token_ids[:, None]
    picked = logits.gather(-1, index).squeeze(-1)
    return picked - logits.logsumexp(dim=-1)


def declared_end_token_ids(
    generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the end tokens that the generation config (one or several) and tokenizer declare."""
    declared = None
    if generation_config is not None:
        declared = generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    candidates = [*ids, tokenizer.eos_token_id]
    # Either may be None.
    return frozenset(token_id for token_id in candidates if isinstance(token_id, int))


@dataclass(slots=True, kw_only=True)
class DecodedRow:
    """One completion during decoding."""

    request_id: int
    prompt: np.ndarray
    """int32 [L]"""
    max_new_tokens: int
    images: Sequence[RowImage] = ()
    """Of the prompt."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    routed_experts: list[np.ndarray] = field(default_factory=list)
    """[n, layers, top-k] each, of consecutive tokens from the first of the prompt."""
    finish_reason: FinishReason = "length"
    is_finished: bool = False

    def finish(self, reason: FinishReason) -> None:
        """Mark the completion as finished."""
        self.finish_reason = reason
        self.is_finished = True


class DecodingBatch:
    """Rows that are decoded together."""

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        requests: GenerationRequests,
        end_ids: frozenset[int],
        device: torch.device,
        recorder: RouteRecorder | None = None,
        tower: ImageTower | None = None,
    ) -> None:
        """Compute the logits after the prompts of `requests`, which all start together.

        `recorder` records the experts that the model chooses; `tower` computes images.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = requests.sampling
        self._max_total_length = requests.max_total_length
        self._end_ids = end_ids
        self._device = device
        self._recorder = recorder
        self._tower = tower
        self._slots: list[DecodedRow] = []
        limits = requests.max_new_tokens().tolist()
        images = requests.images_of_rows
        for row, request_id in enumerate(requests.request_ids.tolist()):
            self._slots.append(
                DecodedRow(
                    request_id=request_id,
                    prompt=requests.prompt_ids[row],
                    max_new_tokens=limits[row],
                    images=images[row],
                )
            )
        self._num_steps = 0
        # float64 [b, steps]: the random numbers of each row.
        self._uniforms = torch.from_numpy(row_uniforms(requests.seeds, max(limits))).to(device)
        self._forward = self._computed([row.prompt for row in self._slots])
        self._last_token_ids: Tensor | None = None
        """int64 [b]: sampled, but not yet passed to the model."""

    @property
    def unfinished(self) -> list[DecodedRow]:
        """Rows that are still decoded."""
        return [row for row in self._slots if not row.is_finished]

    @torch.inference_mode()
    def step(self, weight_version: int) -> list[DecodedRow]:
        """Sample one token for every unfinished row; return the rows that it finishes.

        Raises FloatingPointError if the logits of a row are not finite.
        """
        if self._last_token_ids is not None:
            self._forward.advance(self._last_token_ids)
            self._add_experts()
        uniforms = self._uniforms[:, self._num_steps]
        token_ids, logprobs = sample_tokens(self._forward.logits, uniforms, self._sampling)
        self._num_steps += 1
        finished = self._extend(token_ids.tolist(), logprobs.tolist(), weight_version)
        unfinished = [slot for slot, row in enumerate(self._slots) if not row.is_finished]
        if unfinished and len(unfinished) < _COMPACT_BELOW * len(self._slots):
            kept = torch.tensor(unfinished, device=self._device)
            self._forward.keep(kept)
            self._uniforms = self._uniforms[kept]
            token_ids = token_ids[kept]
            self._slots = [self._slots[slot] for slot in unfinished]
        self._last_token_ids = token_ids
        return finished

    def cancel(self, request_ids: Collection[int]) -> int:
        """Finish rows without a result; return the number of tokens sampled for them.

        They leave the batch as other finished rows do.
        """
        cancelled = [row for row in self.unfinished if row.request_id in request_ids]
        for row in cancelled:
            row.is_finished = True
        return sum(len(row.token_ids) for row in cancelled)

    def free_cache(self) -> None:
        """Free the KV cache. Call `recompute` before the next `step`."""
        self._forward.free()

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute the KV cache of the unfinished rows again, after the weights changed or
        `free_cache`.
        """
        unfinished = [slot for slot, row in enumerate(self._slots) if not row.is_finished]
        self._uniforms = self._uniforms[torch.tensor(unfinished, device=self._device)]
        self._slots = [self._slots[slot] for slot in unfinished]
        texts = []
        for row in self._slots:
            texts.append(np.concatenate([row.prompt, np.array(row.token_ids, dtype=np.int32)]))
        self._forward = self._computed(texts)
        # The new logits are those after the last token.
        self._last_token_ids = None

    def _computed(self, texts: Sequence[np.ndarray]) -> _CachedForward:
        """Compute the KV cache of `texts`, int32 [length] each, one per row."""
        forward = _CachedForward(
            self._model,
            texts,
            self._max_total_length,
            self._device,
            self._recorder,
            self._tower,
            [row.images for row in self._slots],
        )
        if forward.experts is not None:
            for row, text, experts in zip(self._slots, texts, forward.experts, strict=True):
                # Tokens that were sampled before keep the experts of then. The text is at the end.
                num_known = sum(map(len, row.routed_experts))
                row.routed_experts.append(experts[len(experts) - len(text) + num_known :])
        return forward

    def _add_experts(self) -> None:
        """Add the experts of the last token to every unfinished row."""
        if self._forward.experts is None:
            return
        for row, experts in zip(self._slots, self._forward.experts, strict=True):
            if not row.is_finished:
                row.routed_experts.append(experts)

    def _extend(
        self, token_ids: list[int], logprobs: list[float], weight_version: int
    ) -> list[DecodedRow]:
        """Append one token to every unfinished row; mark and return the rows that it finishes."""
        extended = []
        for row, token_id, logprob in zip(self._slots, token_ids, logprobs, strict=True):
            if row.is_finished:
                continue
            check_finite(logprob, len(row.token_ids), weight_version)
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
            row.weight_versions.append(weight_version)
            extended.append(row)
        stopped = self._has_stop_string(extended)
        for row, is_stopped in zip(extended, stopped, strict=True):
            if is_stopped or row.token_ids[-1] in self._end_ids:
                row.finish("stop")
            elif len(row.token_ids) == row.max_new_tokens:
                row.finish("length")
        return [row for row in extended if row.is_finished]

    def _has_stop_string(self, rows: list[DecodedRow]) -> list[bool]:
        """Return for each completion whether its last tokens contain a stop string."""
        stop_strings = self._sampling.stop_strings
        if not stop_strings:
            return [False] * len(rows)
        # Only a tail is decoded. A token has at least one byte, so the longest string in bytes is
        # a limit for its tokens. One more, because tokenizers may treat the first token of a text
        # differently.
        longest = max(len(string.encode()) for string in stop_strings)
        num_tail_tokens = longest + 1
        tail_ids = [row.token_ids[-num_tail_tokens:] for row in rows]
        # Clean-up would change the text around the string.
        tails = self._tokenizer.batch_decode(tail_ids, clean_up_tokenization_spaces=False)
        return [any(string in tail for string in stop_strings) for tail in tails]


def check_finite(logprob: float, token_index: int, weight_version: int) -> None:
    """Raise FloatingPointError if the log-prob of a sampled token is not finite."""
    if not math.isfinite(logprob):
        raise FloatingPointError(
            f"the model's logits are not finite at token {token_index} of a"
            f" completion (weights of version {weight_version}); the training has"
            " probably diverged, try a lower policy.optimizer.lr"
        )


class _CachedForward:
    """Model and KV cache of a left-padded batch; `logits` [b, V] are of the next token."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[np.ndarray],
        max_total_length: int,
        device: torch.device,
        recorder: RouteRecorder | None,
        tower: ImageTower | None,
        images: Sequence[Sequence[RowImage]],
    ) -> None:
        """Left-pad b `prompts`, int32 [length] each, and compute the logits after them.

        `images` are those of each prompt; `tower` is None for a model without. Positions of later
        tokens are limited to `max_total_length` - 1.
        """
        longest = max(len(prompt) for prompt in prompts)
        shape = (len(prompts), longest)
        input_ids = np.zeros(shape, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        # Left-padded, so that the last column is every row's last token.
        for slot, prompt in enumerate(prompts):
            start = longest - len(prompt)
            input_ids[slot, start:] = prompt
            attention_mask[slot, start:] = 1
        self._model = model
        self._recorder = recorder
        self._tower = tower
        self.experts: np.ndarray | None = None
        """[b, n, layers, top-k] of the n new tokens of the last forward; None without recorder."""
        self._last_position = max_total_length - 1
        self._cache = DynamicCache(config=model.config)
        self._attention_mask = torch.from_numpy(attention_mask).to(device)
        num_tokens_before = self._attention_mask.cumsum(dim=-1) - 1
        # Padding has -1, for which a model may have no position.
        positions = num_tokens_before.clamp_(min=0)
        placed = None
        if tower is not None:
            placed = tower.place(prompts, images, longest)
            positions = placed.positions
        # int64 [b, 1]: position of each row's last token. A text has equal ones in all dimensions.
        self._positions = positions[..., -1:].reshape(-1, len(prompts), 1).amax(dim=0)
        self.logits = self._forward(torch.from_numpy(input_ids).to(device), positions, placed)

    def advance(self, token_ids: Tensor) -> None:
        """Append `token_ids` int64 [b] and compute the next logits."""
        self._attention_mask = torch.nn.functional.pad(self._attention_mask, (0, 1), value=1)
        # Only finished rows that are not yet removed reach the limit; a model may have no position
        # beyond it.
        next_positions = self._positions + 1
        self._positions = next_positions.clamp_(max=self._last_position)
        self.logits = self._forward(token_ids[:, None], self._positions)

    def free(self) -> None:
        """Free the KV cache and the logits."""
        self._cache = DynamicCache()
        self.logits = self.logits.new_empty(0)

    def keep(self, slots: Tensor) -> None:
        """Remove all rows except `slots` int64 [k]; `logits` are stale until the next `advance`."""
        self._cache.batch_select_indices(slots)
        self._attention_mask = self._attention_mask[slots]
        self._positions = self._positions[slots]

    def _forward(
        self, input_ids: Tensor, position_ids: Tensor, placed: PlacedImages | None = None
    ) -> Tensor:
        """Return the logits [b, V] after the last of the new tokens int64 [b, n].

        `position_ids` are int64 [b, n], or [3, b, n] with `placed` images.
        """
        options: dict[str, Any] = {
            "attention_mask": self._attention_mask,
            "position_ids": position_ids,
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if self._tower is not None:
            return self._tower.logits(input_ids, placed, **options)
        with self._recorder or nullcontext():
            output = self._model(input_ids=input_ids, logits_to_keep=1, **options)
        if self._recorder is not None:
            experts = pack_experts(self._recorder.take(), self._recorder.num_experts)
            self.experts = experts.reshape(*input_ids.shape, *experts.shape[1:])
        return output.logits[:, -1]
