"""Conversion between requests, completions and log-probs of this package and those of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.generation.hf_decoding import check_finite
from nemo_like.generation.requests import Completions, FinishReason
from nemo_like.generation.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams

_SEED_BITS = 63
"""vLLM passes seeds to torch as signed 64-bit integers."""


def vllm_prompt(token_ids: np.ndarray) -> Any:
    """Return vLLM's form of a prompt of `token_ids` int32 [L]."""
    return {"prompt_token_ids": token_ids.tolist()}


def sampling_request(
    sampling: SamplingParams, *, max_tokens: int, seed: int, stop_token_ids: Sequence[int]
) -> VLLMSamplingParams:
    """Return vLLM's options of one completion."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop_strings = list(sampling.stop_strings)
    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k or 0, 0),
        min_p=sampling.min_p,
        max_tokens=max_tokens,
        seed=seed % 2**_SEED_BITS,
        stop_token_ids=list(stop_token_ids),
        stop=stop_strings or None,
        # Stop strings are found in the text; nothing else needs it.
        detokenize=bool(stop_strings),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        # The log-prob of the sampled token only.
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_request(*, reads_cache: bool) -> VLLMSamplingParams:
    """Return vLLM's options of a request for the log-probs of its prompt.

    With `reads_cache` the request has no log-probs, and tells by its number of cached tokens
    whether cached prefixes would be read: vLLM never reads them for log-probs of a prompt.
    """
    from vllm import SamplingParams as VLLMSamplingParams

    return VLLMSamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=None if reads_cache else 0, detokenize=False
    )


def to_completions(outputs: Sequence[Any], version: int) -> Completions:
    """Convert vLLM's completions, in order; `version` is that of the current weights.

    Raises FloatingPointError for a log-prob that is not finite: vLLM samples token 0 with log-prob
    NaN from weights that are not finite.
    """
    reasons: list[FinishReason] = []
    logprobs = []
    versions = []
    for output in outputs:
        reasons.append(_finish_reason(output.finish_reason))
        # One entry per token: only the log-prob of the sampled token was requested.
        row = np.array(output.logprobs.logprobs, dtype=np.float32)
        not_finite = np.flatnonzero(~np.isfinite(row))
        if len(not_finite):
            index = int(not_finite[0])
            check_finite(float(row[index]), index, version)
        logprobs.append(row)
        versions.append(_versions(output))
    token_ids = [np.array(output.token_ids, dtype=np.int32) for output in outputs]
    return Completions.from_rows(token_ids, logprobs, versions, reasons)


def prompt_logprobs(output: RequestOutput) -> np.ndarray:
    """Return the log-prob of each token of the prompt, float32 [L]; that of the first is 0."""
    token_ids = output.prompt_token_ids
    entries = output.prompt_logprobs
    assert token_ids is not None
    assert entries is not None
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for position in range(1, len(token_ids)):
        entry = entries[position]
        assert entry is not None, "only the first token has no log-prob"
        logprobs[position] = entry[token_ids[position]].logprob
    return logprobs


def _finish_reason(reason: str | None) -> FinishReason:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise RuntimeError(f"vLLM ended a request with the reason {reason!r}")


def _versions(output: Any) -> np.ndarray:
    """Return the weight version of each token of a completion, int32 [T]."""
    versions = np.zeros(len(output.token_ids), dtype=np.int32)
    for span in output.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return versions
