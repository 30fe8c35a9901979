"""Built-in generation worker: batched decoding with a KV cache on any Hugging Face causal LM.

It needs only transformers, on CPU or GPU. It is not a serving engine: the rows of a batch start
together, finished rows leave it, and no new rows join (no continuous batching).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import Jagged
from nemo_like.distributed import activity
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.generation.adapters import Shapes, add_adapters
from nemo_like.generation.hf_decoding import DecodedRow, DecodingBatch, declared_end_token_ids
from nemo_like.generation.hf_images import ImageTower
from nemo_like.generation.requests import (
    Completions,
    GenerationProgress,
    GenerationRequests,
    GenerationStart,
    check_room,
)
from nemo_like.models.pretrained import load_model_config, load_tokenizer
from nemo_like.models.routers import RouteRecorder, router_modules
from nemo_like.models.vision import VISION_TYPES
from nemo_like.weight_sync.channel import (
    BucketMessage,
    Buckets,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    UpdateCoverage,
    aligned,
    plan_buckets,
)
from nemo_like.weight_sync.transfer import NamedTensors, WeightReceiver, load_all

_BLOCK_BYTES = 2**30


class HFGenerationWorker:
    """Implements `GenerationWorkerProtocol` in one process with one replica of the model."""

    def __init__(
        self, context: WorkerContext, start: GenerationStart, *, batch_size: int = 64
    ) -> None:
        """Load model and tokenizer.

        Raises ConfigError where `router_replay` is `true` and no experts can be recorded.
        """
        transformers_logging.disable_progress_bar()
        self._device = torch.device(context.device)
        self.batch_size = batch_size
        self.tokenizer = load_tokenizer(start.checked_tokenizer())
        auto_class: Any = AutoModelForCausalLM
        if load_model_config(start.model_name).model_type in VISION_TYPES:
            auto_class = AutoModelForImageTextToText
        self.model: PreTrainedModel = auto_class.from_pretrained(
            start.model_name,
            dtype=getattr(torch, start.precision),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
        self.model.eval().requires_grad_(False)
        # Not the model's own `to`, which only adds checks for quantised models and has a signature
        # that type checkers reject.
        nn.Module.to(self.model, self._device)
        self._tower_changes = start.vision.train != "frozen"
        self._tower = ImageTower.open(
            self.model,
            start.model_name,
            self._device,
            min_pixels=start.vision.min_pixels,
            max_pixels=start.vision.max_pixels,
        )
        self._adapter_shapes: Shapes = {}
        """Shapes of the adapters by name; empty without adapters."""
        if start.adapter is not None:
            self._adapter_shapes = add_adapters(self.model, start.adapter)
        self._host_weights = HostWeights(
            self.model, self._device, pinned=self._device.type == "cuda"
        )
        self._recorder = None
        if start.router_replay is not False and router_modules(self.model):
            self._recorder = RouteRecorder(self.model)
        elif start.router_replay is True:
            raise ConfigError(
                f"policy.router_replay is true, but {type(self.model).__name__} has no routers"
                " whose choices can be recorded: set it to auto or false"
            )
        declared = declared_end_token_ids(self.model.generation_config, self.tokenizer)
        self.end_ids = declared | frozenset(start.end_token_ids)
        self._weight_version = 0
        self._rank = context.rank
        self._receiver = WeightReceiver(self._device)
        self.coverage: UpdateCoverage | None = None
        """The weights set by the update in progress; None between updates."""
        self.queue: list[GenerationRequests] = []
        """Batches that wait, each of at most `batch_size` requests."""
        self.batch: DecodingBatch | None = None
        """The batch that is decoded."""
        self._num_cancelled_tokens = 0
        """Tokens of cancelled requests that `poll` has not reported."""

    def submit(self, requests: GenerationRequests) -> None:
        """See `GenerationWorkerProtocol.submit`."""
        check_room(requests)
        order = np.arange(len(requests))
        if not requests.has_order:
            # Prompts of similar length are decoded together, which needs little padding.
            order = np.argsort(requests.prompt_ids.lengths, kind="stable")
        for start in range(0, len(order), self.batch_size):
            self.queue.append(requests.take(order[start : start + self.batch_size]))

    def poll(self, max_seconds: float, min_seconds: float | None = None) -> GenerationProgress:
        """See `GenerationWorkerProtocol.poll`."""
        if self.coverage is not None:
            raise RuntimeError(
                "poll was called inside a weight update; the model is partly of the old weights"
            )
        start = time.monotonic()
        finished: list[DecodedRow] = []
        num_tokens = 0
        while self.batch is not None or self.queue:
            if self.batch is None:
                self.batch = DecodingBatch(
                    self.model,
                    self.tokenizer,
                    self._next_requests(),
                    self.end_ids,
                    self._device,
                    self._recorder,
                    self._tower,
                )
            num_rows = len(self.batch.unfinished)
            activity.note(f"decoding {num_rows} rows")
            finished += self.batch.step(self._weight_version)
            num_tokens += num_rows
            if not self.batch.unfinished:
                self.batch = None
            seconds = time.monotonic() - start
            if seconds >= max_seconds:
                break
            if finished and min_seconds is not None and seconds >= min_seconds:
                break
        num_cancelled_tokens, self._num_cancelled_tokens = self._num_cancelled_tokens, 0
        experts = []
        if self._recorder is not None:
            experts = [np.concatenate(row.routed_experts) for row in finished]
        return GenerationProgress(
            np.array([row.request_id for row in finished], dtype=np.int64),
            Completions.from_rows(
                [row.token_ids for row in finished],
                [row.logprobs for row in finished],
                [row.weight_versions for row in finished],
                [row.finish_reason for row in finished],
                experts,
            ),
            num_unfinished=self._num_unfinished(),
            num_tokens=num_tokens,
            busy_s=time.monotonic() - start,
            num_cancelled_tokens=num_cancelled_tokens,
        )

    def partial_tokens(self) -> dict[int, list[int]]:
        """See `GenerationWorkerProtocol.partial_tokens`."""
        running = [] if self.batch is None else self.batch.unfinished
        return {row.request_id: list(row.token_ids) for row in running}

    def abort(self) -> int:
        """See `GenerationWorkerProtocol.abort`."""
        running = [] if self.batch is None else self.batch.unfinished
        self.batch = None
        self.queue = []
        num_cancelled_tokens, self._num_cancelled_tokens = self._num_cancelled_tokens, 0
        return num_cancelled_tokens + sum(len(row.token_ids) for row in running)

    def cancel(self, request_ids: Sequence[int]) -> None:
        """See `GenerationWorkerProtocol.cancel`."""
        waiting = self.queue
        self.queue = []
        for requests in waiting:
            rows = np.flatnonzero(~np.isin(requests.request_ids, request_ids))
            if len(rows):
                self.queue.append(requests.take(rows))
        if self.batch is not None:
            self._num_cancelled_tokens += self.batch.cancel(request_ids)
            if not self.batch.unfinished:
                self.batch = None

    def start_rollout(self) -> None:
        """Do nothing: no prefix is cached, and rows do not depend on each other."""

    @torch.inference_mode()
    def score(self, rows: Jagged) -> Jagged:
        """See `GenerationWorkerProtocol.score`; `rows` is int32."""
        scored = []
        for row in rows:
            input_ids = torch.from_numpy(row.astype(np.int64)).to(self._device)
            logits = self.model(input_ids=input_ids[None], use_cache=False).logits[0]
            logprobs = logits[:-1].float().log_softmax(dim=-1)
            picked = logprobs.gather(-1, input_ids[1:, None]).squeeze(-1)
            scored.append(np.concatenate([np.zeros(1, np.float32), picked.cpu().numpy()]))
        return Jagged.from_rows(scored, np.float32)

    def offload(self, discards_weights: bool = False) -> None:
        """Move the weights to host memory and free the KV cache; does nothing on CPU.

        Weights are always kept, because new ones are written over them.
        """
        if self._device.type == "cuda":
            if self.batch is not None:
                self.batch.free_cache()
            if self._tower is not None:
                self._tower.forget()
            self._host_weights.offload()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the weights back to the device; an unfinished batch computes its KV cache again."""
        was_offloaded = self._host_weights.is_offloaded
        self._host_weights.onload()
        if was_offloaded and self.batch is not None:
            self.batch.recompute()

    def weight_endpoints(self) -> tuple[Endpoint, ...]:
        """See `WeightTarget.weight_endpoints`."""
        return (self._receiver.endpoint(),)

    def open_weight_channel(self, spec: ChannelSpec, first_index: tuple[int, ...]) -> str:
        """See `WeightTarget.open_weight_channel`."""
        return self._receiver.open(spec, first_index[self._rank])

    def load_weights(
        self, version: int, buckets: Buckets | None, is_first: bool
    ) -> list[LoadedBucket]:
        """See `WeightTarget.load_weights`; the model may be offloaded or onloaded."""
        return load_all(self, self._receiver.spec, version, buckets, is_first)

    def begin_update(self, names: Sequence[str]) -> None:
        """See `BucketLoader.begin_update`."""
        self._host_weights.note_change()
        if self._tower is not None and self._tower_changes:
            self._tower.forget()
        adapters = self._adapter_shapes
        if any(name in adapters for name in names):
            self.coverage = UpdateCoverage(adapters, names)
            return
        spec = self._receiver.spec
        kept = frozenset(() if spec is None else spec.names) - set(names)
        weights = {
            name: weight
            for name, weight in self.model.named_parameters()
            if name not in adapters and name not in kept
        }
        # Tied weights (embedding and output) are one parameter under two names; the policy sends
        # one of them.
        first_names = {id(weight): name for name, weight in weights.items()}
        tied = {}
        for name, weight in self.model.state_dict(keep_vars=True).items():
            if name in adapters:
                continue
            first_name = first_names.get(id(weight), name)
            if first_name != name:
                tied[name] = first_name
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.coverage = UpdateCoverage(shapes, names, tied=tied)

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """See `BucketLoader.load_bucket`."""
        if self.coverage is None:
            raise RuntimeError("load_bucket was called outside begin_update ... finish_update")
        return self._receiver.load(message, self._load_weights)

    def finish_update(self, version: int) -> None:
        """See `BucketLoader.finish_update`."""
        if self.coverage is None:
            raise RuntimeError("finish_update was called without begin_update")
        self.coverage.check_complete()
        self.coverage = None
        self._weight_version = version
        # Offloaded weights cannot be used; `onload` computes the cache then.
        if self.batch is not None and not self._host_weights.is_offloaded:
            self.batch.recompute()

    def close_weight_channel(self) -> None:
        """See `WeightTarget.close_weight_channel`."""
        self._receiver.close()

    def _load_weights(self, named: NamedTensors) -> None:
        """Copy the tensors, [*shape] each, over the model's weights of the same names."""
        assert self.coverage is not None
        targets = self.model.state_dict(keep_vars=True)
        for name, tensor in named:
            self.coverage.add(name, tuple(tensor.shape))
            targets[name].copy_(tensor)

    def _next_requests(self) -> GenerationRequests:
        """Take the first waiting batch, with those behind it that fit into one batch with it.

        The turns of conversations arrive one by one, and a batch of one row takes as long as a
        larger one.
        """
        requests = self.queue.pop(0)
        while self.queue and len(requests) + len(self.queue[0]) <= self.batch_size:
            joined = requests.joined(self.queue[0])
            if joined is None:
                break
            requests = joined
            self.queue.pop(0)
        return requests

    def _num_unfinished(self) -> int:
        num_running = 0 if self.batch is None else len(self.batch.unfinished)
        return num_running + sum(len(requests) for requests in self.queue)


class HostWeights:
    """The weights of a frozen model in host memory, in buffers that are allocated once.

    A parameter has either its memory on the device or its host buffer. New weights that arrive
    while the model is offloaded are written to the host buffers and copied to the device by
    `onload`; those on the device are equal to the buffers then, and offloading drops them.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, pinned: bool) -> None:
        self._model = model
        self._device = device
        self._pinned = pinned
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._is_current = False
        """The buffers have the values of the weights."""
        self.is_offloaded = False

    def note_change(self) -> None:
        """Note that the weights are about to change, on the device or in host memory."""
        # In host memory the buffers are the weights.
        if not self.is_offloaded:
            self._is_current = False

    @torch.no_grad()
    def offload(self) -> None:
        """Free the weights on the device; copies them first if they changed there."""
        if self.is_offloaded:
            return
        if not self._buffers:
            self._allocate()
        for parameter, buffer in self._buffers.items():
            if not self._is_current:
                buffer.copy_(parameter, non_blocking=True)
        self._wait()
        for parameter, buffer in self._buffers.items():
            parameter.data = buffer
        self._is_current = True
        self.is_offloaded = True

    @torch.no_grad()
    def onload(self) -> None:
        """Copy the weights to new memory on the device; the buffers keep their values."""
        if not self.is_offloaded:
            return
        for parameter, buffer in self._buffers.items():
            memory = torch.empty_like(buffer, device=self._device)
            parameter.data = memory.copy_(buffer, non_blocking=True)
        self._wait()
        self.is_offloaded = False

    def _allocate(self) -> None:
        """Allocate the host buffers of all parameters."""
        parameters = list(self._model.parameters())
        # In blocks of up to 1 GiB: torch rounds page-locked memory up to a power of two, and one
        # allocation per parameter could take twice the memory.
        for group in plan_buckets([each.nbytes for each in parameters], _BLOCK_BYTES):
            members = [parameters[index] for index in group]
            size = sum(aligned(parameter.nbytes) for parameter in members)
            block = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            start = 0
            for parameter in members:
                content = block[start : start + parameter.nbytes]
                self._buffers[parameter] = content.view(parameter.dtype).view(parameter.shape)
                start += aligned(parameter.nbytes)

    def _wait(self) -> None:
        if self._pinned:
            torch.cuda.current_stream().synchronize()
