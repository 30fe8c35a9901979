"""Random state per row, so that a row that is fetched again has the same augmentation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded_row(seed: int, epoch: int, row: int) -> Iterator[None]:
    """Seed the global generators of `random`, NumPy and torch (CPU) from (seed, epoch, row).

    Their states are restored at the end, so that fetching rows has no effect on dropout or on other
    random numbers of the process. It takes about 0.1 ms. Generators that a dataset creates from the
    entropy of the system are not affected.
    """
    # A sequence gives independent streams for neighboring epochs and rows.
    words = np.random.SeedSequence([seed, epoch, row]).generate_state(8)
    python_state = random.getstate()
    # Augmentations use the global generator, so it is the one to seed.
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    try:
        random.seed(int.from_bytes(words[:2].tobytes(), "little"))
        np.random.seed(words[2:6])  # noqa: NPY002
        # torch.manual_seed would also seed the devices, whose states are not restored.
        torch.default_generator.manual_seed(int.from_bytes(words[6:].tobytes(), "little") >> 1)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
