"""Names and shapes of the tensors in safetensors files, read without torch and without values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

Shape = tuple[int, ...]


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shape of each tensor of a safetensors file by name.

    Raises ValueError with the problem of a file that cannot be read or is damaged; see
    `read_header`.
    """
    return {name: tuple(entry["shape"]) for name, entry in read_header(path).items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of the header by name of the tensor: `dtype`, `shape`, `data_offsets`.

    The header is a JSON object after its length in 8 bytes; the tensors follow without a gap
    (https://github.com/huggingface/safetensors, "Format"). Raises ValueError, with a text that
    continues the name of the file, unless the header and the size of the file agree.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            # Checked before the read: a damaged length could exceed the memory.
            if header_size > min(size, MAX_HEADER_BYTES):
                raise ValueError("the length of the header exceeds the file")
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected_size = 8 + header_size + max(ends, default=0)
        for entry in header.values():
            tuple(entry["shape"])
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            "is damaged: it does not begin with the header of a safetensors file"
        ) from error
    if size != expected_size:
        raise ValueError(f"is damaged: it has {size:,} bytes and should have {expected_size:,}")
    return header
