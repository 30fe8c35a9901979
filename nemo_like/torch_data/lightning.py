"""Microbatches by token budget in the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from lightning import Trainer
from torch.utils.data import DataLoader

from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.drop_in import (
    OnlineBatches,
    OnlineMicrobatch,
    online_batches,
    spec_of_trainer,
)


class LightningBatches:
    """Microbatches whose state is part of a checkpoint of Lightning, which one rank writes."""

    def __init__(self, batches: OnlineBatches, trainer: Trainer) -> None:
        self.batches = batches
        # Its attributes have incomplete types.
        self._trainer: Any = trainer
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[OnlineMicrobatch]:
        """Iterate over the microbatches of the epoch, or over the rest after a loaded state."""
        # Lightning may have left the last epoch early (limit_train_batches), have created this
        # object anew, or not have loaded its state, as from the end of an epoch. A state after the
        # last step of an epoch is ahead.
        if not self._trainer.overfit_batches:
            epoch = self._trainer.fit_loop.epoch_progress.current.processed
            self.batches.set_epoch(max(epoch, self.batches.epoch))
        batches = iter(self.batches)
        # Lightning fetches a microbatch in advance to know the last one, unless there is a limit.
        # When it writes a checkpoint, the step of that microbatch is not trained yet.
        self._state = self.batches.state_dict()
        for batch in batches:
            yield batch
            if batch.is_last:
                self._state = self.batches.state_dict()
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all ranks after the last trained step; every rank calls it."""
        own = self._state
        if own is None or isinstance(self._trainer.limit_train_batches, int):
            own = self.batches.state_dict()
        states = [own]
        if self.batches.loader.coordinator.num_ranks > 1:
            states *= self.batches.loader.coordinator.num_ranks
            dist.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`, on any number of ranks."""
        self.batches.load_states(state["ranks"])
        self._state = None


def train_batches(
    trainer: Trainer, dataloader: DataLoader[Any], spec: StreamSpec | int, **options: Any
) -> LightningBatches:
    """Return the microbatches of this rank, for the hook `train_dataloader` of a module.

    A step has `trainer.accumulate_grad_batches` microbatches, and `loss_scale` and `num_items`
    cancel Lightning's division by their number. Call it in the hook, when the ranks are connected.
    `spec` is a `StreamSpec` with as many microbatches, or the number of tokens of a microbatch;
    `options` are arguments of `online_batches`. Raises ValueError for another number of
    microbatches.
    """
    per_step = trainer.accumulate_grad_batches
    spec = spec_of_trainer(spec, "Trainer", "accumulate_grad_batches", per_step)
    for name in ("limit_train_batches", "val_check_interval"):
        number = getattr(trainer, name)
        if isinstance(number, int) and number % per_step:
            raise ValueError(
                f"{name}={number} is within a step, where its gradient and a checkpoint are"
                f" incomplete; make it a multiple of accumulate_grad_batches={per_step}"
            )
    batches = online_batches(dataloader, spec, accumulates_mean=True, **options)
    return LightningBatches(batches, trainer)
