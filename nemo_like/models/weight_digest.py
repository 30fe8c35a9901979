"""Identity of the weights of a model directory, from samples of its files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_NUM_SAMPLES = 32
"""Samples of each file; values of a model that was trained differ in all of them."""
_SAMPLE_BYTES = 4096


def weights_digest(directory: Path) -> str:
    """Return a hash of the sizes and of evenly spaced samples of the *.safetensors files.

    It does not depend on names and dates, so a copy of the directory has the same one. Raises
    OSError for a file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
