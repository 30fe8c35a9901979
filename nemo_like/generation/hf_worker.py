"""The embedded generator: batched decoding with a KV cache over any Hugging Face causal language
model.

It needs nothing but transformers, on CPU or GPU. It is not a serving engine: a batch starts
together, finished rows leave it, and no new ones join before it is done.
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
from nemo_like.generation.generator import Completions, FinishReason, SamplingParams
from nemo_like.generation.sampling import row_uniforms, sample_tokens
from nemo_like.weight_sync.stream import Bucket

_COMPACT_BELOW = 0.75
"""Finished rows are cut out once less than this share of the batch is alive: each cut copies the
whole KV cache.
"""


class HFGenerationWorker:
    """One process that holds one whole copy of the model."""

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
        """`end_token_ids` end a completion in addition to those that model and tokenizer declare.

        The chat template ends a turn with a token that neither may declare, such as `<|im_end|>` of
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
        self._end_ids = declared_end_token_ids(self._model, self._tokenizer) | frozenset(
            end_token_ids
        )
        self._weight_version = 0
        self._missing: set[str] | None = None
        """Parameters an update in progress has not delivered yet; None between updates."""

    def generate(
        self, prompt_ids: Jagged, seeds: np.ndarray, sampling: SamplingParams, max_total_length: int
    ) -> Completions:
        """As `Generator.generate`. Prompts of like length decode together; the result is in the
        order given.
        """
        if self._missing is not None:
            raise RuntimeError(
                "generate was called inside a weight update; the model is partly of the old weights"
            )
        order = np.argsort(prompt_ids.lengths, kind="stable")
        rows: list[_Row] = []
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            rows += self._decode_batch(
                [prompt_ids[row] for row in chosen], seeds[chosen], sampling, max_total_length
            )
        rows = [rows[position] for position in np.argsort(order)]
        return Completions(
            Jagged.from_rows([row.token_ids for row in rows], np.int32),
            Jagged.from_rows([row.logprobs for row in rows], np.float32),
            [row.finish_reason for row in rows],
            self._weight_version,
        )

    def offload(self) -> None:
        """Move the weights to host memory; nothing to do on CPU."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the weights back to the device."""
        self._move(self._device)

    def begin_update(self) -> None:
        """Start a weight update; `generate` is refused until `finish_update`."""
        self._missing = {name for name, _ in self._model.named_parameters()}

    def load_bucket(self, bucket: Bucket) -> None:
        """Copy the tensors of `bucket` over the model's of the same names, asleep or awake.

        Raises ValueError for a name the model does not have, or another shape.
        """
        if self._missing is None:
            raise RuntimeError("load_bucket was called outside begin_update ... finish_update")
        targets = self._model.state_dict(keep_vars=True)
        parameter_names = {
            id(parameter): name for name, parameter in self._model.named_parameters()
        }
        for name, tensor in bucket.decode():
            target = targets.get(name)
            if target is None:
                raise ValueError(f"weight {name!r} is not part of {type(self._model).__name__}")
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the model's is"
                    f" {tuple(target.shape)}"
                )
            target.copy_(tensor)
            # Tied weights (embedding and output) are one parameter under two names; either name
            # delivers it.
            self._missing.discard(parameter_names.get(id(target), name))

    def finish_update(self, version: int) -> None:
        """End the update; completions carry `version` from here on. Raises ValueError if a
        parameter never came.
        """
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
        # Not the model's own `to`: that one only adds checks for quantised models, and a signature
        # no checker accepts.
        torch.nn.Module.to(self._model, device)

    @torch.inference_mode()
    def _decode_batch(
        self,
        prompts: list[np.ndarray],
        seeds: np.ndarray,
        sampling: SamplingParams,
        max_total_length: int,
    ) -> list[_Row]:
        """Decode the prompts together to their ends; one row per prompt, in order."""
        rows = [
            _Row(limit=min(sampling.max_new_tokens, max_total_length - len(prompt)))
            for prompt in prompts
        ]
        uniforms = torch.from_numpy(row_uniforms(seeds, max(row.limit for row in rows))).to(
            self._device
        )
        forward = _CachedForward(self._model, prompts, max_total_length, self._device)
        slots = rows
        for index in range(uniforms.shape[1]):
            activity.note(f"decoding step {index + 1} of {uniforms.shape[1]}, {len(slots)} rows")
            token_ids, logprobs = sample_tokens(forward.logits, uniforms[:, index], sampling)
            self._extend(slots, token_ids.tolist(), logprobs.tolist(), sampling.stop_strings)
            alive = [slot for slot, row in enumerate(slots) if not row.is_finished]
            if not alive:
                break
            if len(alive) < _COMPACT_BELOW * len(slots):
                kept = torch.tensor(alive, device=self._device)
                forward.keep(kept)
                uniforms, token_ids, slots = (
                    uniforms[kept],
                    token_ids[kept],
                    [slots[slot] for slot in alive],
                )
            forward.advance(token_ids)
        return rows

    def _extend(
        self,
        slots: list[_Row],
        token_ids: list[int],
        logprobs: list[float],
        stop_strings: tuple[str, ...],
    ) -> None:
        """Add one token to every row that is not finished, and finish those it ends."""
        growing = [row for row in slots if not row.is_finished]
        for row, token_id, logprob in zip(slots, token_ids, logprobs, strict=True):
            if not row.is_finished:
                if not math.isfinite(logprob):
                    raise FloatingPointError(
                        f"the model's logits are not finite at token {len(row.token_ids)} of a"
                        f" completion (weights of"
                        f" version {self._weight_version}); the training has probably diverged, try"
                        f" a lower"
                        " policy.optimizer.lr"
                    )
                row.token_ids.append(token_id)
                row.logprobs.append(logprob)
        stopped = self._completes_stop_string(growing, stop_strings)
        for row, is_stopped in zip(growing, stopped, strict=True):
            if is_stopped or row.token_ids[-1] in self._end_ids:
                row.finish_reason, row.is_finished = "stop", True
            elif len(row.token_ids) == row.limit:
                row.finish_reason, row.is_finished = "length", True

    def _completes_stop_string(self, rows: list[_Row], stop_strings: tuple[str, ...]) -> list[bool]:
        """Whether each completion now contains one of the strings.

        Only a tail is decoded. A token is at least one byte, so as many tokens as the longest
        string has bytes hold it; one more, because tokenizers may treat the first token of a text
        differently.
        """
        if not stop_strings:
            return [False] * len(rows)
        num_tail_tokens = max(len(string.encode()) for string in stop_strings) + 1
        tails = self._tokenizer.batch_decode(
            [row.token_ids[-num_tail_tokens:] for row in rows], clean_up_tokenization_spaces=False
        )
        return [any(string in tail for string in stop_strings) for tail in tails]


def declared_end_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The tokens that end a completion as declared: the generation config's (one or several) and
    the tokenizer's.
    """
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(
        token_id for token_id in (*ids, tokenizer.eos_token_id) if isinstance(token_id, int)
    )


@dataclass(slots=True, kw_only=True)
class _Row:
    """One completion while it grows."""

    limit: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    is_finished: bool = False


class _CachedForward:
    """The model over a left-padded batch: `logits` [b, V] of the next token, kept current by
    `advance` and `keep`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[np.ndarray],
        max_total_length: int,
        device: torch.device,
    ) -> None:
        longest = max(len(prompt) for prompt in prompts)
        input_ids = np.zeros((len(prompts), longest), dtype=np.int64)
        attention_mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for slot, prompt in enumerate(prompts):
            input_ids[slot, longest - len(prompt) :] = prompt
            attention_mask[slot, longest - len(prompt) :] = 1
        self._model = model
        self._last_position = max_total_length - 1
        self._cache = DynamicCache(config=model.config)
        self._attention_mask = torch.from_numpy(attention_mask).to(device)
        positions = (self._attention_mask.cumsum(dim=-1) - 1).clamp_(min=0)
        self._positions = positions[:, -1:]  # [b, 1], of the last token seen
        self.logits = self._forward(torch.from_numpy(input_ids).to(device), positions)

    def advance(self, token_ids: Tensor) -> None:
        """Append `token_ids` [b]."""
        self._attention_mask = torch.nn.functional.pad(self._attention_mask, (0, 1), value=1)
        # Only finished rows reach the bound, those that wait to be cut out; a model may have no
        # position beyond it.
        self._positions = (self._positions + 1).clamp_(max=self._last_position)
        self.logits = self._forward(token_ids[:, None], self._positions)

    def keep(self, slots: Tensor) -> None:
        """Drop every row but those in `slots` [k]; the caller advances before it reads `logits`
        again.
        """
        self._cache.batch_select_indices(slots)
        self._attention_mask = self._attention_mask[slots]
        self._positions = self._positions[slots]

    def _forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        output = self._model(
            input_ids=input_ids,
            attention_mask=self._attention_mask,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
