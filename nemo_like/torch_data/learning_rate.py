"""Learning rate scaled by the batch size of each step, around any scheduler of torch.

The base scheduler computes its learning rates as without this module. Each step multiplies them by
the scale of its batch size; see `nemo_like.learning_rate`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nemo_like.integer_math import check_integer
from nemo_like.learning_rate import Method, batch_size_scale

logger = logging.getLogger(__name__)

Unit = Literal["rows", "tokens"]


def scale_lr(
    base_batch_size: float, batch_size: float, base_lr: float = 1.0, method: Method = "linear"
) -> float:
    """Return the learning rate for a batch size, from that for the base batch size (DeepSpeed).

    See `batch_size_scale`, which raises ValueError.
    """
    return base_lr * batch_size_scale(batch_size, base_batch_size, method)


class VariableBatchSizeLR(LRScheduler):
    """Multiplies the learning rates of a base scheduler by the scale of each step's batch size.

    Step t, counted from 0 at construction, has `batch_sizes[t % len(batch_sizes)]`. Without
    `batch_sizes`, for streams, `set_next_batch_size` is called before every optimizer step:

        scheduler = VariableBatchSizeLR(lr_scheduler, base_batch_size=32)
        for batch in stream:
            scheduler.set_next_batch_size(len(batch))
            ...
            optimizer.step()
            scheduler.step()

    Before the base scheduler takes a step, its unscaled learning rates are put back into the
    parameter groups. Schedulers that compute the next learning rate from the current one, and
    `ReduceLROnPlateau`, therefore do the same as without this class. A new epoch changes nothing
    for the base scheduler: `start_epoch` restarts the sequence of batch sizes only.

    `unit` is what the batch sizes count, rows or tokens. It does not change the scale; it is part
    of the state, so that a run is not resumed with batch sizes of the other unit.
    """

    def __init__(
        self,
        lr_scheduler: LRScheduler,
        base_batch_size: float,
        batch_sizes: Sequence[int] | None = None,
        dataloader: object = None,
        lr_scaling_method: Method = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
        *,
        unit: Unit = "rows",
    ) -> None:
        """Wrap a scheduler; the arguments are as in DeepSpeed, in its order.

        `dataloader` is not used: the batch sizes are `batch_sizes`. `last_epoch` must be -1, as
        `load_state_dict` restores a position. `verbose` logs the learning rates of each step.
        Raises ValueError.
        """
        del dataloader
        if last_epoch != -1:
            raise ValueError(
                f"last_epoch is {last_epoch}: leave it out, load_state_dict restores a position"
            )
        # Not `super().__init__`: it replaces the current learning rates, which are those that the
        # base scheduler set for its present step.
        if isinstance(lr_scheduler, VariableBatchSizeLR):
            raise ValueError("lr_scheduler is a VariableBatchSizeLR: give the scheduler inside it")
        if not isinstance(lr_scheduler, LRScheduler):
            raise ValueError(
                f"lr_scheduler is a {type(lr_scheduler).__name__}: give a scheduler of"
                " torch.optim.lr_scheduler, such as LambdaLR"
            )
        if unit not in get_args(Unit):
            raise ValueError(f"unit is {unit!r}: give rows or tokens")
        batch_size_scale(1, base_batch_size, lr_scaling_method)
        self.optimizer = lr_scheduler.optimizer
        self.base_scheduler = lr_scheduler
        self.base_batch_size = base_batch_size
        self.method: Method = lr_scaling_method
        self.verbose = verbose
        self.unit: Unit = unit
        self.last_epoch = 0
        self._batch_sizes = _checked_batch_sizes(batch_sizes)
        self._first_step = 0
        self.batch_size: int | None = None
        """Batch size of the next optimizer step; None before `set_next_batch_size`."""
        self.unscaled_lrs = self._current_lrs()
        """Learning rate of the base scheduler for each parameter group."""
        self.base_lrs = list(self.unscaled_lrs)
        self._choose_batch_size()

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the scaled learning rate of each parameter group for the next optimizer step.

        Until the batch size of the step is known, it is the unscaled one.
        """
        scale = 1.0
        if self.batch_size is not None:
            scale = batch_size_scale(self.batch_size, self.base_batch_size, self.method)
        return [lr * scale for lr in self.unscaled_lrs]

    def set_next_batch_size(self, batch_size: int) -> None:
        """Set the batch size of the next optimizer step, and the learning rates with it.

        Called after the last `step` and before the optimizer step. Raises ValueError for a batch
        size of 0 or less, and if `batch_sizes` were given.
        """
        if self._batch_sizes is not None:
            raise ValueError("batch_sizes were given: set_next_batch_size is for streams without")
        self.batch_size = check_integer("the next batch size", batch_size, 1)
        self._set_lrs(self.get_lr())

    def start_epoch(self, batch_sizes: Sequence[int]) -> None:
        """Use `batch_sizes` from the next optimizer step on, which has the first of them.

        Called before the first optimizer step of an epoch whose batches differ from the batches of
        the last one. The base scheduler continues. Raises ValueError for streams.
        """
        if self._batch_sizes is None:
            raise ValueError("no batch_sizes were given: streams call set_next_batch_size instead")
        self._batch_sizes = _checked_batch_sizes(batch_sizes)
        self._first_step = self.last_epoch
        self._choose_batch_size()

    def step(self, metrics: float | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """Set the learning rates of the next optimizer step. Called after an optimizer step.

        `metrics` is for `ReduceLROnPlateau`, which requires it. For other schedulers the argument
        is `epoch`, the number of the next optimizer step, as in DeepSpeed: the present one changes
        nothing. Raises ValueError if `metrics` are missing, or for another value or step than the
        next, and RuntimeError for a stream in which `set_next_batch_size` was not called for this
        step.
        """
        if not isinstance(self.base_scheduler, ReduceLROnPlateau) and epoch is None:
            metrics, epoch = None, self._checked_step(metrics)
        if epoch == self.last_epoch:
            return
        if epoch not in (None, self.last_epoch + 1):
            raise ValueError(
                f"step was called for step {epoch} after step {self.last_epoch}: give"
                f" {self.last_epoch + 1}, or restore a position with load_state_dict"
            )
        if self.batch_size is None:
            raise RuntimeError(
                f"the batch size of step {self.last_epoch} is unknown: call set_next_batch_size "
                "before optimizer.step()"
            )
        base = self.base_scheduler
        needs_metrics = isinstance(base, ReduceLROnPlateau)
        if needs_metrics and metrics is None:
            raise ValueError("ReduceLROnPlateau was called without metrics: give the metric")
        self._set_lrs(self.unscaled_lrs)
        base.step(*([metrics] if needs_metrics else []))  # pyright: ignore[reportArgumentType]
        self.unscaled_lrs = self._current_lrs()
        self.last_epoch += 1
        self._choose_batch_size()

    def _checked_step(self, value: float | None) -> int | None:
        """Return `value` as the number of a step. Raises ValueError for another value."""
        if value is not None and value != int(value):
            raise ValueError(
                f"{type(self.base_scheduler).__name__} was called with metrics={value}: leave it"
                " out"
            )
        return None if value is None else int(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, a copy, with the state of the base scheduler."""
        sizes = None if self._batch_sizes is None else list(self._batch_sizes)
        return {
            "base_scheduler": copy.deepcopy(self.base_scheduler.state_dict()),
            "base_batch_size": self.base_batch_size,
            "method": self.method,
            "unit": self.unit,
            "last_epoch": self.last_epoch,
            "first_step": self._first_step,
            "batch_sizes": sizes,
            "batch_size": self.batch_size,
            "unscaled_lrs": list(self.unscaled_lrs),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, with its batch sizes, and set the learning rates of the optimizer.

        The state of the optimizer may be loaded before or after. Raises ValueError if the state has
        another unit, method, base batch size or number of parameter groups, or is for a stream and
        this scheduler is not.
        """
        expected = {
            "unit": self.unit,
            "method": self.method,
            "base_batch_size": self.base_batch_size,
        }
        for name, value in expected.items():
            if name not in state_dict:
                raise ValueError(
                    f"the state has no {name}, so it is not one of a VariableBatchSizeLR: give what"
                    " its state_dict returned"
                )
            if state_dict[name] != value:
                raise ValueError(
                    f"the state has {name}={state_dict[name]!r}, this scheduler {value!r}: "
                    "construct it with the value of the state"
                )
        if len(state_dict["unscaled_lrs"]) != len(self.unscaled_lrs):
            raise ValueError(
                f"the state has {len(state_dict['unscaled_lrs'])} parameter groups, the optimizer "
                f"{len(self.unscaled_lrs)}: construct the optimizer with the same groups"
            )
        if (state_dict["batch_sizes"] is None) != (self._batch_sizes is None):
            raise ValueError(
                "batch_sizes are given in only one of the state and this scheduler: give them in "
                "both, or in neither for a stream"
            )
        self.base_scheduler.load_state_dict(copy.deepcopy(state_dict["base_scheduler"]))
        self._batch_sizes = _checked_batch_sizes(state_dict["batch_sizes"])
        self._first_step = state_dict["first_step"]
        self.batch_size = state_dict["batch_size"]
        self.last_epoch = state_dict["last_epoch"]
        self.unscaled_lrs = list(state_dict["unscaled_lrs"])
        self._set_lrs(self.get_lr())

    def _choose_batch_size(self) -> None:
        """Take the batch size of the present step from the sequence, and set the learning rates."""
        if self._batch_sizes is None:
            self.batch_size = None
        else:
            position = (self.last_epoch - self._first_step) % len(self._batch_sizes)
            self.batch_size = self._batch_sizes[position]
        self._set_lrs(self.get_lr())
        if self.verbose:
            logger.info("step %d: learning rates %s", self.last_epoch, self._current_lrs())

    def _current_lrs(self) -> list[float]:
        """Read the learning rates of the parameter groups; a tensor is converted without loss."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _set_lrs(self, lrs: Sequence[float | torch.Tensor]) -> None:
        """Write one learning rate per parameter group; a tensor is changed in place."""
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = list(lrs)


def _checked_batch_sizes(batch_sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the batch sizes as a tuple; raises ValueError without sizes, or for one below 1."""
    if batch_sizes is None:
        return None
    sizes = []
    for step, size in enumerate(batch_sizes):
        sizes.append(check_integer(f"batch size {step}", size, 1))
    if not sizes:
        raise ValueError("batch_sizes is empty: give at least one, or None for a stream")
    return tuple(sizes)
