"""Microbatches by token budget in a training loop with accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch.utils.data import DataLoader

from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.drop_in import OnlineBatches, online_batches, spec_of_trainer

_NUM_PREPARED: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()


def prepare(
    accelerator: Accelerator, dataloader: DataLoader[Any], spec: StreamSpec | int, **options: Any
) -> OnlineBatches:
    """Return the microbatches of this rank, on its device; in place of `accelerator.prepare`.

    A step has `accelerator.gradient_accumulation_steps` microbatches, so
    `accelerator.accumulate(model)` synchronizes gradients in the last one, and `loss_scale` and
    `num_items` cancel the division in `accelerator.backward`. `save_state` and `load_state`
    include the position. `dataloader` may be prepared or not. `spec` is a `StreamSpec` with as many
    microbatches, or the number of tokens of a microbatch; `options` are arguments of
    `online_batches`. Raises ValueError for another number of microbatches.
    """
    per_step = accelerator.gradient_accumulation_steps
    spec = spec_of_trainer(spec, "Accelerator", "gradient_accumulation_steps", per_step)
    batches = online_batches(
        dataloader, spec, **{"device": accelerator.device, "accumulates_mean": True, **options}
    )
    number = _NUM_PREPARED.get(accelerator, 0)
    _NUM_PREPARED[accelerator] = number + 1
    # The batches of several DataLoaders have positions of their own.
    place = f"online_batches_of_dataloader_{number}"
    accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: batches.save(Path(directory) / place)
    )
    accelerator.register_load_state_pre_hook(
        lambda models, directory: batches.load(Path(directory) / place)
    )
    return batches
