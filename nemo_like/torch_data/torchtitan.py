"""Microbatches by token budget with the dataloader interface of torchtitan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nemo_like.torch_data.drop_in import OnlineBatches
from nemo_like.torch_data.packed_batch import IGNORE_INDEX


class TitanBatches:
    """Pairs of inputs and labels, epoch after epoch, as `torchtitan`'s `BaseDataLoader` gives them.

    Return it from `build_dataloader_fn` of a `TrainSpec`, with as many `microbatches_per_step` as
    torchtitan has gradient accumulation steps. Its trainer divides the loss by the labels of the
    step over all ranks.
    """

    def __init__(self, batches: OnlineBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Iterate over (`{"input": ids, "positions": ...}`, shifted labels), all [B, S]."""
        while True:
            for batch in self.batches:
                inputs = {"input": batch["input_ids"]}
                if "position_ids" in batch:
                    # They separate the rows of a packed microbatch.
                    inputs["positions"] = batch["position_ids"]
                yield inputs, _shifted(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this data-parallel rank; the keys of all ranks differ."""
        coordinator = self.batches.loader.coordinator
        name = f"dp_rank_{coordinator.rank}"
        return {name: json.dumps(self.batches.state_dict()), "world_size": coordinator.num_ranks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after `state_dict`; without effect if it is empty, as before the first step.

        Raises ValueError for a state without this rank.
        """
        if not state_dict:
            return
        coordinator = self.batches.loader.coordinator
        name = f"dp_rank_{coordinator.rank}"
        if name not in state_dict or state_dict["world_size"] != coordinator.num_ranks:
            raise ValueError(
                f"the state has the positions of {state_dict.get('world_size')} data-parallel"
                f" ranks, and this is rank {coordinator.rank} of {coordinator.num_ranks}; resume on"
                " as many ranks"
            )
        self.batches.load_state_dict(json.loads(state_dict[name]))


def _shifted(batch: Mapping[str, Any]) -> Tensor:
    """Return the label of each position: the next token, or none at the end of a row."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORE_INDEX)
