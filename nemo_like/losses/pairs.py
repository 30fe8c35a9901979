"""Pairs of rows in a microbatch: which rows belong together, and means over pairs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from nemo_like.device_transfer import to_device
from nemo_like.losses.reduce import LossInputs
from nemo_like.losses.tensor_metrics import LossMetrics, TensorMean


def pair_rows(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the rows of the chosen and of the rejected completions, int64 [P] each.

    Row columns: `pair` (equal for the two rows of a pair) and `is_chosen`. A dummy microbatch has
    no pairs. Raises ValueError for an incomplete pair.
    """
    # On the host: the number of pairs is a shape, and reading it would wait for the device.
    host = inputs.rows_on_host("pair", "is_chosen")
    # A dummy has one row without tokens.
    rows = np.flatnonzero(host.num_tokens)
    pair = host.columns["pair"][rows]
    is_chosen = host.columns["is_chosen"][rows].astype(bool)
    # Both sorted by pair, so that position i of the two belongs to the same pair.
    chosen = rows[is_chosen][pair[is_chosen].argsort()]
    rejected = rows[~is_chosen][pair[~is_chosen].argsort()]
    pairs = host.columns["pair"]
    if not np.array_equal(pairs[chosen], pairs[rejected]):
        raise ValueError(
            "a microbatch has one row of a preference pair without the other; plan the batch with"
            " groups=batch['pair']"
        )
    rows_of_pairs = {"chosen": chosen, "rejected": rejected}
    tensors = to_device(rows_of_pairs, inputs.row_num_tokens.device)
    return tensors["chosen"], tensors["rejected"]


def pair_means(values: Mapping[str, Tensor]) -> LossMetrics:
    """Return the means over pairs of [P] tensors."""
    metrics = {}
    for name, value in values.items():
        metrics[name] = TensorMean(value.detach().float().sum(), float(len(value)))
    return metrics
