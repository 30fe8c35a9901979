"""Start of a policy worker: the process group, the model, the reference and the teachers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers.utils import logging as transformers_logging

from nemo_like.config.parallel import build_layout
from nemo_like.config.paths import require_model_directory
from nemo_like.config.schema import (
    ActivationCheckpointing,
    OutputHead,
    ParallelConfig,
    PolicyConfig,
)
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.device import total_memory_bytes
from nemo_like.policy.engine import Engine
from nemo_like.policy.worker import PolicyWorker
from nemo_like.prediction.memory import fitting_checkpointing

BuildEngine = Callable[[PolicyConfig, bool], Engine]
"""Loads the model of a config on this rank, trainable or not; every rank calls."""


@dataclass(frozen=True, kw_only=True)
class PolicyStart:
    """What a policy worker loads beside the model of its configuration."""

    parallel: ParallelConfig = ParallelConfig()  # noqa: RUF009  (immutable)
    seed: int = 0
    """Seed of the initial adapters and the initial score head."""
    needs_reference: bool = False
    """Load a frozen copy of the model. With adapters there is none: the reference is the model
    without them.
    """
    teachers: Sequence[str] = ()
    """Directories of further frozen models."""
    head: OutputHead = "vocabulary"
    """With `scores` the model is a reward model."""
    checkpointing_peaks: Mapping[ActivationCheckpointing, float] = field(default_factory=dict)
    """Predicted bytes by mode, the fastest first, for `policy.activation_checkpointing=auto`."""
    trainable: bool = True
    """Without it the model has neither gradients nor an optimizer, and in bfloat16 no float32
    weights: it computes log-probs or scores only.
    """


class EngineWorker(PolicyWorker, ABC):
    """A policy worker that joins the process group and loads its models."""

    def __init__(
        self, context: WorkerContext, config: PolicyConfig, start: PolicyStart = PolicyStart()
    ) -> None:
        """Join the process group and load the models."""
        require_model_directory("policy.model_name", config.model_name)
        if config.tokenizer_name is not None:
            # For the export, at the end of the run.
            require_model_directory("policy.tokenizer_name", config.tokenizer_name, weights=False)
        torch.manual_seed(start.seed)
        transformers_logging.disable_progress_bar()
        if config.activation_checkpointing == "auto":
            device_bytes = total_memory_bytes(torch.device(context.device))
            mode = fitting_checkpointing(start.checkpointing_peaks, device_bytes)
            config = replace(config, activation_checkpointing=mode)
        layout = build_layout(start.parallel, context.world_size)
        build = self.engine_builder(context, config, layout, start)
        policy = build(config, start.trainable)
        reference = None
        if start.needs_reference:
            reference = build(config, False) if config.adapter is None else policy
        frozen = []
        for name in start.teachers:
            require_model_directory("distill.teachers", name)
            teacher = build(config.frozen(name), False)
            # Before the next one is loaded, so that one teacher at a time is on the device.
            teacher.offload()
            frozen.append(teacher)
        super().__init__(config, policy, reference, frozen)

    @staticmethod
    @abstractmethod
    def engine_builder(
        context: WorkerContext, config: PolicyConfig, layout: ParallelLayout, start: PolicyStart
    ) -> BuildEngine:
        """Join the process groups; return the function that loads models on them."""
        ...
