"""What a policy worker asks of a training engine. The worker knows losses and metrics, the engine
knows parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nemo_like.distributed.parallel_layout import Topology
from nemo_like.files import FileRecord
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.sampling_filter import SamplingFilter

ResultT = TypeVar("ResultT")
Sync = Literal["microbatch", "step"]


class TokenLogprobs(NamedTuple):
    """Of the T predicting positions of a microbatch; 0 where `inputs.label_mask` is False."""

    logprobs: Tensor
    """float32 [T]: log-prob of `inputs.labels`, of the filtered distribution where sampling is
    filtered.
    """
    entropy: Tensor | None
    """float32 [T] with `with_entropy`: of the whole distribution, filtered or not."""
    unfiltered_logprobs: Tensor | None = None
    """float32 [T] with a token filter: log-prob of `inputs.labels` in the whole distribution."""


StepFunction = Callable[[ModelInputs, TokenLogprobs], tuple[Tensor | None, ResultT]]
"""What is done with a microbatch's outputs: (loss to differentiate, None without backward; what
`run` returns).
"""


class Engine(Protocol):
    """One model, sharded over the ranks of the process group. Every method is called by every
    rank.
    """

    device: torch.device
    topology: Topology
    rank: int
    """Global rank; its place on the axes is `topology.coordinates(rank)`."""
    num_optimizer_steps: int
    """Optimizer steps applied so far, skipped ones not counted; part of the checkpoint."""
    clock: ComputeClock
    """Runs while `run` computes on this rank, and not while it waits for other ranks."""

    @property
    def sync(self) -> Sync:
        """Where ranks wait for each other: at every microbatch, or once per optimizer step."""
        ...

    @property
    def model_config(self) -> Any:
        """The Hugging Face configuration."""
        ...

    def run(
        self,
        microbatches: Iterable[ModelInputs],
        step_fn: StepFunction[ResultT],
        *,
        backward: bool,
        temperature: float = 1.0,
        with_entropy: bool = False,
        token_filter: SamplingFilter | None = None,
    ) -> list[ResultT]:
        """Forward (and backward) of each microbatch, in an order the engine chooses; results in the
        given order.

        Every rank passes the same number of microbatches; the ranks of one dp rank pass the same
        ones, each with its own context-parallel share. `step_fn` runs, and results come, only on
        the last pipeline stage: elsewhere the list is empty. All tp ranks see the same outputs.
        Gradients are *summed* over microbatches and over dp and cp ranks and kept until
        `optimizer_step`; the loss carries its own division.
        """
        ...

    def optimizer_step(self, lr: float, *, is_loss_finite: bool = True) -> float:
        """Clip, update, clear gradients; returns the gradients' global norm before clipping.

        The step is skipped where `clip_factor` gives None, and when any rank passes
        `is_loss_finite=False` (the norm is then NaN). A skipped step clears the gradients and
        changes neither weights nor moments nor `num_optimizer_steps`, so the learning rate does not
        advance either. All ranks decide the same.
        """
        ...

    def is_finite(self, *, with_moments: bool = False) -> bool:
        """Whether no weight of any rank is larger than `optim.LARGEST`, and with `with_moments` all
        moments of the optimizer are finite. The same result on every rank.
        """
        ...

    def sum_over_dp(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the dp ranks, in float64."""
        ...

    def gather_over_dp_cp(self, value: Any) -> list[Any]:
        """The values (any small Python object) of the ranks that hold different tokens: those that
        differ from this one along dp and cp only, in rank order."""
        ...

    def gather_over_world(self, value: Any) -> list[Any]:
        """The values (any small Python object) of all ranks, in rank order."""
        ...

    def gather_over_cp(self, values: Tensor) -> Tensor:
        """[cp x T] from this rank's `values` [T]: the shares of cp rank 0, 1, ... end to end. No
        gradient.
        """
        ...

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> full shape of each distinct weight (a tied one appears once), in a
        fixed order.
        """
        ...

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named weights in compute precision, one at a time: whole on rank 0, elsewhere perhaps
        an empty tensor.
        """
        ...

    def save(self, directory: Path) -> dict[str, FileRecord]:
        """Write this rank's part of weights and optimizer state; returns size and checksum of each
        file, by name.
        """
        ...

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, in whatever layout and by whichever engine."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Rank 0 writes a model that transformers loads."""
        ...

    def offload(self) -> None:
        """Leave the accelerator's memory to somebody else."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...
