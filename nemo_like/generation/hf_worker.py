"""Built-in generation worker: batched decoding with a KV cache on any Hugging Face causal LM.

It needs only transformers, on CPU or GPU. It is not a serving engine: the rows of a batch start
together, finished rows leave it, and no new rows join (no continuous batching).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from nemo_like.config.paths import is_local, require_model_directory
from nemo_like.data.jagged import Jagged
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.generation.sampling import row_uniforms, sample_tokens
from nemo_like.generation.worker_protocol import Completions, FinishReason, SamplingParams
from nemo_like.weight_sync.stream import Bucket

_COMPACT_BELOW = 0.75
"""Finished rows are removed once less than this share of the batch is unfinished: each removal
copies the KV cache of the remaining rows.
"""


class HFGenerationWorker:
    """Implements `GenerationWorkerProtocol` in one process with one replica of the model."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_name: str,
        tokenizer_name: str | None = None,
        precision: str = "float32",
        batch_size: int = 64,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Load model and tokenizer.

        `end_token_ids` end a completion in addition to those that model and tokenizer declare. The
        chat template may end a turn with a token that neither declares, such as `<|im_end|>` of
        Qwen2.5 base models.
        """
        transformers_logging.disable_progress_bar()
        self._device = torch.device(context.device)
        self._batch_size = batch_size
        require_model_directory("policy.model_name", model_name)
        tokenizer_name = tokenizer_name or model_name
        self._tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_name, trust_remote_code=False, local_files_only=is_local(tokenizer_name)
        )
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_name,
            dtype=getattr(torch, precision),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=is_local(model_name),
        )
        self._model.eval().requires_grad_(False)
        self._move(self._device)
        declared = declared_end_token_ids(self._model, self._tokenizer)
        self._end_ids = declared | frozenset(end_token_ids)
        self._weight_version = 0
        self._missing: set[str] | None = None
        """Parameters not yet loaded by the update in progress; None between updates."""

    def generate(
        self,
        prompt_ids: Jagged,
        seeds: np.ndarray,
        sampling: SamplingParams,
        max_total_length: int,
    ) -> Completions:
        """See `Generator.generate`; raises RuntimeError during a weight update.

        `prompt_ids` has B rows of int32 [L], `seeds` is uint64 [B].
        """
        if self._missing is not None:
            raise RuntimeError(
                "generate was called inside a weight update; the model is partly of the old weights"
            )
        # Prompts of similar length are decoded together, which needs little padding.
        order = np.argsort(prompt_ids.lengths, kind="stable")
        rows: list[_Row] = []
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            prompts = [prompt_ids[row] for row in batch]
            rows += self._decode_batch(prompts, seeds[batch], sampling, max_total_length)
        # Back to the order of the prompts.
        rows = [rows[position] for position in np.argsort(order)]
        token_ids = [row.token_ids for row in rows]
        logprobs = [row.logprobs for row in rows]
        return Completions(
            Jagged.from_rows(token_ids, np.int32),
            Jagged.from_rows(logprobs, np.float32),
            [row.finish_reason for row in rows],
            self._weight_version,
        )

    def offload(self) -> None:
        """Move the weights to host memory; does nothing on CPU."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the weights back to the device."""
        self._move(self._device)

    def begin_update(self) -> None:
        """See `WeightTarget.begin_update`."""
        self._missing = {name for name, _ in self._model.named_parameters()}

    def load_bucket(self, bucket: Bucket) -> None:
        """See `WeightTarget.load_bucket`; the model may be offloaded or onloaded."""
        if self._missing is None:
            raise RuntimeError("load_bucket was called outside begin_update ... finish_update")
        targets = self._model.state_dict(keep_vars=True)
        parameter_names = {
            id(parameter): name for name, parameter in self._model.named_parameters()
        }
        for name, tensor in bucket.decode():
            target = targets.get(name)
            if target is None:
                model = type(self._model).__name__
                raise ValueError(f"weight {name!r} is not part of {model}")
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the model's is"
                    f" {tuple(target.shape)}"
                )
            target.copy_(tensor)
            # Tied weights (embedding and output) are one parameter under two names; a bucket has
            # one of them.
            self._missing.discard(parameter_names.get(id(target), name))

    def finish_update(self, version: int) -> None:
        """See `WeightTarget.finish_update`."""
        if self._missing is None:
            raise RuntimeError("finish_update was called without begin_update")
        if self._missing:
            raise ValueError(
                f"the weight update left out {len(self._missing)} parameters:"
                f" {sorted(self._missing)[:5]} ..."
            )
        self._missing = None
        self._weight_version = version

    def _move(self, device: torch.device) -> None:
        # Not the model's own `to`, which only adds checks for quantised models and has a signature
        # that type checkers reject.
        torch.nn.Module.to(self._model, device)

    @torch.inference_mode()
    def _decode_batch(
        self,
        prompts: list[np.ndarray],
        seeds: np.ndarray,
        sampling: SamplingParams,
        max_total_length: int,
    ) -> list[_Row]:
        """Decode the prompts together until all are finished; one row per prompt, in order.

        `prompts` are int32 [length] each, `seeds` uint64 [P].
        """
        rows = []
        for prompt in prompts:
            max_length = max_total_length - len(prompt)
            max_new_tokens = min(sampling.max_new_tokens, max_length)
            rows.append(_Row(max_new_tokens=max_new_tokens))
        max_steps = max(row.max_new_tokens for row in rows)
        uniforms = torch.from_numpy(row_uniforms(seeds, max_steps)).to(self._device)
        forward = _CachedForward(self._model, prompts, max_total_length, self._device)
        # The rows that are still in the batch; finished ones stay until the next removal.
        slots = rows
        for index in range(max_steps):
            activity.note(f"decoding step {index + 1} of {max_steps}, {len(slots)} rows")
            token_ids, logprobs = sample_tokens(forward.logits, uniforms[:, index], sampling)
            self._extend(
                slots,
                token_ids.tolist(),
                logprobs.tolist(),
                sampling.stop_strings,
            )
            unfinished = [slot for slot, row in enumerate(slots) if not row.is_finished]
            if not unfinished:
                break
            if len(unfinished) < _COMPACT_BELOW * len(slots):
                kept = torch.tensor(unfinished, device=self._device)
                forward.keep(kept)
                uniforms = uniforms[kept]
                token_ids = token_ids[kept]
                slots = [slots[slot] for slot in unfinished]
            forward.advance(token_ids)
        return rows

    def _extend(
        self,
        slots: list[_Row],
        token_ids: list[int],
        logprobs: list[float],
        stop_strings: tuple[str, ...],
    ) -> None:
        """Append one token to every unfinished row, and mark the rows that it finishes."""
        unfinished = [row for row in slots if not row.is_finished]
        for row, token_id, logprob in zip(slots, token_ids, logprobs, strict=True):
            if row.is_finished:
                continue
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"the model's logits are not finite at token {len(row.token_ids)} of a"
                    f" completion (weights of version {self._weight_version}); the training has"
                    " probably diverged, try a lower policy.optimizer.lr"
                )
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
        stopped = self._has_stop_string(unfinished, stop_strings)
        for row, is_stopped in zip(unfinished, stopped, strict=True):
            if is_stopped or row.token_ids[-1] in self._end_ids:
                row.finish("stop")
            elif len(row.token_ids) == row.max_new_tokens:
                row.finish("length")

    def _has_stop_string(self, rows: list[_Row], stop_strings: tuple[str, ...]) -> list[bool]:
        """Return for each completion whether its last tokens contain one of the strings."""
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


def declared_end_token_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> frozenset[int]:
    """Return the end tokens that the generation config (one or several) and tokenizer declare."""
    declared = None
    if model.generation_config is not None:
        declared = model.generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    candidates = [*ids, tokenizer.eos_token_id]
    # Either may be None.
    return frozenset(token_id for token_id in candidates if isinstance(token_id, int))


@dataclass(slots=True, kw_only=True)
class _Row:
    """One completion during decoding."""

    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    is_finished: bool = False

    def finish(self, reason: FinishReason) -> None:
        """Mark the completion as finished."""
        self.finish_reason = reason
        self.is_finished = True


class _CachedForward:
    """Model and KV cache of a left-padded batch; `logits` [b, V] are those of the next token."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[np.ndarray],
        max_total_length: int,
        device: torch.device,
    ) -> None:
        """Left-pad b `prompts`, int32 [length] each, and compute the logits after them.

        Positions of later tokens are limited to `max_total_length` - 1.
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
        self._last_position = max_total_length - 1
        self._cache = DynamicCache(config=model.config)
        self._attention_mask = torch.from_numpy(attention_mask).to(device)
        num_tokens_before = self._attention_mask.cumsum(dim=-1) - 1
        # Padding has -1, for which a model may have no position.
        positions = num_tokens_before.clamp_(min=0)
        # int64 [b, 1]: position of each row's last token.
        self._positions = positions[:, -1:]
        self.logits = self._forward(torch.from_numpy(input_ids).to(device), positions)

    def advance(self, token_ids: Tensor) -> None:
        """Append `token_ids` int64 [b] and compute the next logits."""
        self._attention_mask = torch.nn.functional.pad(self._attention_mask, (0, 1), value=1)
        # Only finished rows that are not yet removed reach the limit; a model may have no position
        # beyond it.
        next_positions = self._positions + 1
        self._positions = next_positions.clamp_(max=self._last_position)
        self.logits = self._forward(token_ids[:, None], self._positions)

    def keep(self, slots: Tensor) -> None:
        """Remove all rows except `slots` int64 [k]; `logits` are stale until the next `advance`."""
        self._cache.batch_select_indices(slots)
        self._attention_mask = self._attention_mask[slots]
        self._positions = self._positions[slots]

    def _forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the logits [b, V] after the last of the new tokens int64 [b, n]."""
        output = self._model(
            input_ids=input_ids,
            attention_mask=self._attention_mask,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
