"""Start of a policy worker: the process group, the model, the reference and the teachers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from transformers.utils import logging as transformers_logging

from nemo_like.config.parallel import build_layout
from nemo_like.config.paths import require_model_directory
from nemo_like.config.schema import OutputHead, ParallelConfig, PolicyConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.engine import Engine
from nemo_like.policy.worker import PolicyWorker

BuildEngine = Callable[[PolicyConfig, bool], Engine]
"""Loads the model of a config on this rank, trainable or not; every rank calls."""


class EngineWorker(PolicyWorker, ABC):
    """A policy worker that joins the process group and loads its models."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: PolicyConfig,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (immutable)
        seed: int = 0,
        needs_reference: bool = False,
        teachers: Sequence[str] = (),
        head: OutputHead = "vocabulary",
        trainable: bool = True,
    ) -> None:
        """Join the process group and load the model, and its frozen copy if `needs_reference`.

        With adapters no copy is loaded, see `SharedReference`. `teachers` are the directories of
        further frozen models. With `head` `scores` the model is a reward model. Without `trainable`
        it has neither gradients nor an optimizer, and in bfloat16 no float32 weights: it computes
        log-probs or scores only.
        """
        require_model_directory("policy.model_name", config.model_name)
        if config.tokenizer_name is not None:
            # For the export, at the end of the run.
            require_model_directory("policy.tokenizer_name", config.tokenizer_name, weights=False)
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        parallel_layout = build_layout(parallel, context.world_size)
        build = self.engine_builder(context, config, parallel_layout, seed, head)
        policy = build(config, trainable)
        reference = None
        if needs_reference:
            reference = build(config, False) if config.adapter is None else policy
        frozen = []
        for name in teachers:
            require_model_directory("distill.teachers", name)
            teacher = build(config.frozen(name), False)
            # Before the next one is loaded, so that one teacher at a time is on the device.
            teacher.offload()
            frozen.append(teacher)
        super().__init__(config, policy, reference, frozen)

    @staticmethod
    @abstractmethod
    def engine_builder(
        context: WorkerContext,
        config: PolicyConfig,
        parallel_layout: ParallelLayout,
        seed: int,
        head: OutputHead,
    ) -> BuildEngine:
        """Join the process groups; return the function that loads models on them."""
        ...
