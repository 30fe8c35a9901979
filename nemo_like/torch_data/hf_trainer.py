"""Microbatches by token budget in the Trainer of transformers and its subclasses, such as TRL's.

`class MyTrainer(OnlineBatchesMixin, Trainer): ...` takes the arguments of the Trainer, and
`max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from nemo_like.torch_data.drop_in import (
    Kind,
    Microbatch,
    OnlineBatches,
    online_batches,
    stream_spec,
)
from nemo_like.torch_data.packed_collate import PackingCollator

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    _Base = Trainer
else:
    _Base = object


class OnlineBatchesMixin(_Base):
    """Replaces the training batches of a Trainer: `class MyTrainer(OnlineBatchesMixin, Trainer)`.

    An optimizer step has `gradient_accumulation_steps` microbatches of at most `max_tokens` tokens
    on each rank; `per_device_train_batch_size` is only the number of rows that a DataLoader worker
    fetches at a time. The Trainer divides the loss by the labels of the step, as always.
    Evaluation, callbacks, checkpoints and logs stay as they are. A checkpoint has the position of
    each rank, so a resume continues exactly, without a repetition of the rows before it.
    """

    def __init__(
        self,
        *args: Any,
        max_tokens: int,
        kind: Kind = "online",
        lengths: Sequence[int] | None = None,
        stream_settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the Trainer with `args` and `kwargs`.

        `max_tokens`, `kind` and `stream_settings` are arguments of `stream_spec`. `lengths` of all
        rows are needed for `num_train_epochs`; with `max_steps` they are not, and a `datasets`
        dataset with `input_ids` has them. Rows are packed if the data collator is a
        `PackingCollator`.
        """
        self._max_tokens = max_tokens
        self._kind: Kind = kind
        self._lengths = lengths
        self._stream_settings = stream_settings or {}
        self._batches: _TrainerBatches | None = None
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the microbatches of this rank.

        Raises ValueError for a model whose loss cannot be divided by the tokens of the step.
        """
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
            raise ValueError(
                f"{type(self.model).__name__} does not take num_items_in_batch, so the Trainer"
                " would average the means of microbatches of different sizes; pass a"
                " compute_loss_func that divides the sum of the losses by num_items_in_batch"
            )
        loader = super().get_train_dataloader()
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise ValueError(
                "accelerate reads the rows of an iterable dataset on one rank and sends them to the"
                ' others; set accelerator_config={"dispatch_batches": False} in the arguments, so'
                " that each rank reads its rows"
            )
        lengths = self._lengths
        if lengths is None:
            lengths = _column_lengths(loader.dataset)
        spec = stream_spec(
            self._max_tokens,
            kind=self._kind,
            packed=isinstance(self.data_collator, PackingCollator),
            microbatches_per_step=self.args.gradient_accumulation_steps,
            **self._stream_settings,
        )
        batches = online_batches(
            loader,
            spec,
            collate_fn=self.data_collator,
            lengths=lengths,
            seed=self.args.data_seed or self.args.seed,
            # The Trainer counts the labels of a step over all ranks itself.
            loss_scaling="none",
        )
        self._batches = _TrainerBatches(batches, self.args)
        return self._batches

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        epochs, steps = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or self.args.ignore_data_skip:
            return epochs, steps
        assert self._batches is not None, "the dataloader is created first"
        self._batches.batches.load(resume_from_checkpoint)
        # The rows before the position are not read again, so the Trainer has none to skip.
        return self._batches.begin(), 0

    def _save_rng_state(self, output_dir: str) -> None:
        # Every rank calls it, once the directory of the checkpoint exists.
        super()._save_rng_state(output_dir)
        assert self._batches is not None, "a checkpoint is written during training"
        self._batches.batches.save(output_dir)


class _TrainerBatches:
    """The microbatches, with the length that a Trainer needs: of the longest epoch.

    Epochs differ a little in their number of steps, and the Trainer takes equally many from each.
    It goes on with the next epoch when one ends earlier.
    """

    def __init__(self, batches: OnlineBatches, args: TrainingArguments) -> None:
        self.batches = batches
        self.dataset = batches.dataset
        self._args = args
        self._num_batches: int | None = None
        self._begun: Iterator[Microbatch] | None = None

    def begin(self) -> int:
        """Return the epoch of the next microbatch, which is formed for it.

        After the last step of an epoch that is the next epoch, which only all ranks together know.
        """
        iterator = iter(self.batches)
        first = next(iterator, None)
        self._begun = None if first is None else chain([first], iterator)
        return self.batches.epoch

    def __iter__(self) -> Iterator[Microbatch]:
        iterator = self._begun or iter(self.batches)
        self._begun = None
        return iterator

    def __len__(self) -> int:
        if self._args.max_steps > 0:
            raise TypeError("max_steps limits the run, so the length of epochs is not needed")
        if self._num_batches is None:
            epochs = range(max(math.ceil(self._args.num_train_epochs), 1))
            num_steps = max(self.batches.num_steps(epoch) for epoch in epochs)
            self._num_batches = num_steps * self.batches.microbatches_per_step
        return self._num_batches

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)


def _column_lengths(dataset: Any) -> Sequence[int] | None:
    """Return the lengths of `input_ids` of a dataset of the library `datasets`; else None."""
    if "input_ids" not in (getattr(dataset, "column_names", None) or ()):
        return None
    if not hasattr(dataset, "__len__"):
        return None
    from pyarrow import compute

    table = dataset.select_columns(["input_ids"]).with_format("arrow")[:]
    return compute.call_function("list_value_length", [table["input_ids"]]).to_numpy()
