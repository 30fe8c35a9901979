"""Interface of a training engine. The worker knows losses and metrics, the engine parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.checkpoint.sharded import PendingSave
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.sampling_filter import SamplingFilter

ResultT = TypeVar("ResultT")


class TokenLogprobs(NamedTuple):
    """Outputs at the T predicting positions of a microbatch; 0 where `label_mask` is False."""

    logprobs: Tensor
    """float32 [T]: log-prob of `inputs.labels`, under the filtered distribution where sampling is
    filtered.
    """
    entropy: Tensor | None
    """float32 [T], with `with_entropy`: entropy of the unfiltered distribution."""
    unfiltered_logprobs: Tensor | None = None
    """float32 [T], with a token filter: log-prob of `inputs.labels` under the unfiltered
    distribution.
    """
    is_argmax: Tensor | None = None
    """bool [T]: True where no token is more probable than the label; ties count as True."""
    columns: Mapping[str, Tensor] | None = None
    """float32 [T] each, of a microbatch with a `head` of its own: they join its columns for the
    loss.
    """
    scores: Tensor | None = None
    """float32 [R], of an engine with a score head: the score of each row whose last token is on
    this context-parallel rank, else 0. `logprobs` are 0 then.
    """


StepFunction = Callable[[ModelInputs, TokenLogprobs], tuple[Tensor | None, ResultT]]
"""Maps a microbatch's outputs to (loss or None without backward, one result of `run`)."""


class Engine(Protocol):
    """One model, sharded over the ranks of the process group. All ranks call every method."""

    device: torch.device
    parallel_layout: ParallelLayout
    rank: int
    """Global rank; its coordinates along the axes are `parallel_layout.coordinates(rank)`."""
    num_optimizer_steps: int
    """Optimizer steps applied so far, without skipped ones; part of the checkpoint."""
    clock: ComputeClock
    """Runs while `run` computes on this rank, and not while it waits for other ranks."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes and properties of the model."""
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
        """Run forward (and backward) of each microbatch; results in the given order.

        The engine chooses the order of execution. Every rank passes the same number of
        microbatches; the ranks of one dp rank pass the same ones, each with its own
        context-parallel share. `step_fn` runs only on the last pipeline stage: elsewhere the result
        is an empty list. All tp ranks see the same outputs. Gradients are *summed* over
        microbatches and over dp and cp ranks and kept until `optimizer_step`; the loss is already
        divided.
        """
        ...

    def base_model(self) -> AbstractContextManager[None]:
        """Return a context in which `run` computes the model without its LoRA adapters.

        Only for forward passes. Raises RuntimeError for a model without adapters.
        """
        ...

    def ema_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are their moving averages.

        Every rank enters it. Only for forward passes, exports and transfers of weights. Raises
        RuntimeError for a model without averages.
        """
        ...

    def optimizer_step(self, lr: float, *, is_loss_finite: bool = True) -> float:
        """Clip, update, clear gradients; returns the gradients' global norm before clipping.

        The step is skipped where `clip_factor` returns None, and when any rank passes
        `is_loss_finite=False` (the norm is then NaN). A skipped step clears the gradients and
        changes neither weights nor moments nor `num_optimizer_steps`, so the learning rate does not
        advance either. All ranks decide the same.
        """
        ...

    def gradient_norm(self, *, is_loss_finite: bool = True) -> float:
        """Clear the gradients without an update; returns their global norm.

        NaN when any rank passes `is_loss_finite=False`.
        """
        ...

    def is_finite(self, *, with_moments: bool = False) -> bool:
        """Return True if no weight of any rank is larger than `optim.LARGEST`.

        With `with_moments` all moments of the optimizer must be finite as well. The result is the
        same on every rank.
        """
        ...

    def sum_over_dp(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the dp ranks, in float64."""
        ...

    def gather_over_dp_cp(self, value: Any) -> list[Any]:
        """Gather small Python objects of the ranks that differ along dp and cp, in rank order.

        These ranks have different tokens.
        """
        ...

    def gather_over_world(self, value: Any) -> list[Any]:
        """Gather small Python objects of all ranks, in rank order."""
        ...

    def gather_over_cp(self, values: Tensor) -> Tensor:
        """All-gather [cp x T] from this rank's `values` [T], in cp-rank order; no gradient."""
        ...

    def sum_over_cp(self, values: Tensor) -> Tensor:
        """All-reduce `values` over the context-parallel ranks; the backward is the identity.

        The ranks' `values` and the result have the same shape.
        """
        ...

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> full shape of each distinct weight, in a fixed order.

        A tied weight appears once. LoRA adapters are part of the weights that they change.
        """
        ...

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> full shape of both matrices of each LoRA adapter, in a fixed order.

        The names are those of `adapter_names`. Empty for a model without adapters.
        """
        ...

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named weights in compute precision, one at a time.

        `names` are of `weight_shapes`, whose weights have their adapters merged, or all of
        `adapter_shapes`. On rank 0 the tensors are [*shape]; elsewhere a tensor may be smaller or
        empty.
        """
        ...

    def gather_weights(
        self, names: Sequence[str], dtype: torch.dtype, targets: Sequence[Tensor] | None
    ) -> None:
        """Gather the named weights, in compute precision, into `targets` of rank 0.

        The names are those of `full_weights`. `targets` are [*shape] each, of `dtype`; None on all
        other ranks. Every rank calls.
        """
        ...

    def local_weights(self) -> Iterable[Tensor]:
        """Return this rank's shard of each weight in a fixed order, with the shape of the shard."""
        ...

    def copy_weights(self, source: Engine) -> None:
        """Copy the weights of an engine of the same class, model and layout, without moments."""
        ...

    def save(self, directory: Path, *, in_background: bool) -> PendingSave:
        """Write this rank's shard of weights and optimizer state, of a frozen engine the weights.

        Of a model with LoRA adapters these are written, and not its frozen weights.

        With `in_background` a thread writes copies of them, and training may continue. The
        checkpoint is complete after `PendingSave.finish`, which every rank calls.
        """
        ...

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, in any layout and by either engine."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Write a transformers model directory on rank 0; LoRA adapters also in `adapter`."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer state to host memory."""
        ...

    def onload(self) -> None:
        """Move weights and optimizer state back to the device."""
        ...
