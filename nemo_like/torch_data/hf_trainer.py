"""Microbatches by token budget in the Trainer of transformers and its subclasses, such as TRL's.

`class MyTrainer(OnlineBatchesMixin, Trainer): ...` takes the arguments of the Trainer, and
`max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_like.torch_data.drop_in import (
    Kind,
    OnlineBatches,
    OnlineMicrobatch,
    online_batches,
    stream_spec,
)
from nemo_like.torch_data.packed_batch import FLASH_ARGUMENTS, forward_arguments
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
        self._is_divisor_checked = False
        self._resumed: tuple[int, float, int] | None = None
        """The resumed epoch, the fraction of an epoch at step 0, and the steps of an epoch."""
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the microbatches of this rank.

        Raises ValueError for a model whose loss cannot be divided by the tokens of the step, and
        for arguments with which it would not be, or with which rows would be lost.
        """
        self._check_arguments()
        loader = super().get_train_dataloader()
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise ValueError(
                "accelerate reads the rows of an iterable dataset on one rank and sends them to the"
                ' others; set accelerator_config={"dispatch_batches": False} in the arguments, so'
                " that each rank reads its rows"
            )
        is_packed = isinstance(self.data_collator, PackingCollator)
        lengths = self._lengths
        if lengths is None:
            lengths = _column_lengths(loader.dataset, is_packed)
        spec = stream_spec(
            self._max_tokens,
            kind=self._kind,
            packed=is_packed,
            microbatches_per_step=self.args.gradient_accumulation_steps,
            **self._stream_settings,
        )
        batches = online_batches(
            loader,
            spec,
            # The Trainer's own one removes columns that the model does not take.
            collate_fn=self.data_collator if is_packed else None,
            lengths=lengths,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            # The Trainer counts the labels of a step over all ranks itself.
            loss_scaling="none",
        )
        self._batches = _TrainerBatches(batches, self.args)
        return self._batches

    def _check_arguments(self) -> None:
        """Raise ValueError for arguments that do not suit microbatches by tokens."""
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
            self._raise_without_divisor()
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices is False, so each rank would divide by its own"
                " tokens, and a rank with dummies by 0; set it to True"
            )
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                "train_sampling_strategy is batch_rebalance, which divides the rows over ranks"
                " itself; use random, sequential or group_by_length"
            )
        if self.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size reduces the number of rows, which does not limit a microbatch"
                " here; set it to False and reduce max_tokens if the memory does not suffice"
            )
        if self.label_smoother and getattr(self.data_collator, "shift_labels", False):
            raise ValueError(
                "label_smoothing_factor shifts the labels, which shift_labels of the data collator"
                " does too; set shift_labels=False"
            )

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        self._resumed = None
        epochs, steps = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or self.args.ignore_data_skip:
            return epochs, steps
        assert self._batches is not None, "the dataloader is created first"
        self._batches.batches.load(resume_from_checkpoint)
        # After the last step of an epoch, which only all ranks together know, the next one follows.
        self._batches.batches.loader.peek()
        epoch = self._batches.batches.epoch
        saved = self.state.epoch
        if saved is not None and int(saved) == epoch:
            origin = saved - self.state.global_step / num_update_steps_per_epoch
            self._resumed = epoch, origin, num_update_steps_per_epoch
        # The rows before the position are not read again, so the Trainer has none to skip.
        return epoch, 0

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer computes the fraction of the epoch from the microbatches since the resume.
        if self._resumed is not None:
            epoch, origin, steps_per_epoch = self._resumed
            if self.state.epoch is not None and self.state.epoch <= epoch + 1:
                self.state.epoch = origin + self.state.global_step / steps_per_epoch
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradient of a microbatch; see the Trainer.

        Raises ValueError in the first one if the loss of the model ignores `num_items_in_batch`.
        """
        if not self._is_divisor_checked:
            self._is_divisor_checked = True
            self._check_divisor(model, inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the arguments of the model for `inputs`, also of an evaluation. Those of packed
        rows keep them apart, see `forward_arguments`. Raises ValueError for an implementation of
        attention that packing does not know.
        """
        config = getattr(self.model, "config", None)
        if isinstance(self.data_collator, PackingCollator) and config is not None:
            others = inputs.keys() - {"attention_mask", *FLASH_ARGUMENTS}
            arguments = forward_arguments(inputs, config._attn_implementation)
            inputs = {name: inputs[name] for name in others} | arguments
        return super()._prepare_inputs(inputs)

    def _check_divisor(self, model: Any, inputs: Any) -> None:
        """Raise ValueError if the loss of `model` is the same for any `num_items_in_batch`.

        Many models take it as one of any keywords, and compute a mean. The causal loss of
        transformers divides, and a loss of the user is not computed twice.
        """
        from transformers import Trainer

        is_own = type(self).compute_loss is not Trainer.compute_loss
        if is_own or self.compute_loss_func or self.label_smoother or self._loss_shifts_labels:
            return
        model.eval()
        with torch.no_grad():
            prepared = self._prepare_inputs(inputs)
            one, two = (model(**prepared, num_items_in_batch=n)["loss"] for n in (1, 2))
        if one == two != 0:
            self._raise_without_divisor()

    def _raise_without_divisor(self) -> None:
        raise ValueError(
            f"the loss of {type(self.model).__name__} does not use num_items_in_batch, so the"
            " Trainer would add the means of microbatches of different sizes; pass a"
            " compute_loss_func that divides the sum of the losses by num_items_in_batch"
        )

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

    def __iter__(self) -> Iterator[OnlineMicrobatch]:
        return iter(self.batches)

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


def _column_lengths(dataset: Any, is_packed: bool) -> Sequence[int] | None:
    """Return the lengths of `input_ids` of a dataset of the library `datasets`; else None.

    If rows `is_packed`, of what the attention mask keeps.
    """
    columns = getattr(dataset, "column_names", None) or ()
    if "input_ids" not in columns or not hasattr(dataset, "__len__"):
        return None
    from pyarrow import compute

    is_masked = is_packed and "attention_mask" in columns
    name = "attention_mask" if is_masked else "input_ids"
    lengths = [np.zeros(0, dtype=np.int64)]
    for rows in dataset.select_columns([name]).with_format("arrow")[:][name].chunks:
        values = rows.flatten().to_numpy(zero_copy_only=False)
        if values.dtype == object:
            # Rows of shape [1, L]; only the collator knows what they are.
            return None
        counted = values != 0 if is_masked else np.ones(len(values), dtype=bool)
        ends = np.cumsum(compute.call_function("list_value_length", [rows]).to_numpy())
        lengths.append(np.diff(np.append(0, np.cumsum(counted))[np.append(0, ends)]))
    return np.concatenate(lengths)  # pyright: ignore[reportReturnType]
