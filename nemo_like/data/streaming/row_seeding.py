"""Random state per row, so that a row that is fetched again has the same augmentation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


@contextmanager
def seeded_row(seed: int, epoch: int, row: int) -> Iterator[None]:
    """Seed the global generators of `random`, NumPy and torch (CPU) from (seed, epoch, row).

    In the training process their states are restored at the end, so that fetching rows has no
    effect on dropout or on other random numbers; it takes about 0.2 ms. A DataLoader worker has no
    other random numbers. Generators that a dataset creates from the entropy of the system are not
    affected.
    """
    if get_worker_info() is not None:
        _seed(seed, epoch, row)
        yield
        return
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    try:
        _seed(seed, epoch, row)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)


def _seed(seed: int, epoch: int, row: int) -> None:
    # A sequence gives independent streams for neighboring epochs and rows.
    words = np.random.SeedSequence([seed, epoch, row]).generate_state(8)
    random.seed(int.from_bytes(words[:2].tobytes(), "little"))
    # Augmentations use the global generator, so it is the one to seed.
    np.random.seed(words[2:6])  # noqa: NPY002
    # torch.manual_seed would also seed the devices, whose states are not restored.
    torch.default_generator.manual_seed(int.from_bytes(words[6:].tobytes(), "little") >> 1)
