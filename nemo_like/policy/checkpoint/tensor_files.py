"""Reading of parts of tensors from safetensors files, with a bound on the memory that it maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.policy.optim import LARGEST, all_within

_MAX_MAPPED_BYTES = 2**25
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


class TensorFiles:
    """Open files. Pages that were read stay mapped, and count as memory of the process, until the
    files are closed; so they are closed, and opened again, before more than `max_mapped_bytes` are
    mapped.
    """

    def __init__(self, max_mapped_bytes: int = _MAX_MAPPED_BYTES) -> None:
        self._max_mapped_bytes = max_mapped_bytes
        self._num_mapped_bytes = 0
        self._files: dict[Path, Any] = {}

    def read_into(self, target: Tensor, path: Path, key: str, index: Sequence[slice]) -> None:
        """Copy the part `index` of the tensor `key` into `target` [*shape of the part].

        `index` has one slice with start and stop per dim. The values are converted to the precision
        and device of `target`.
        """
        stored = self._file(path).get_slice(key)
        row_bytes = _ITEM_BYTES.get(stored.get_dtype(), 8) * math.prod(stored.get_shape()[1:])
        del stored  # it would keep the file mapped
        if not index:
            target.copy_(self._file(path).get_tensor(key))
            return
        rows, *columns = index
        num_rows = max(1, self._max_mapped_bytes // max(1, row_bytes))
        for start in range(rows.start, rows.stop, num_rows):
            stop = min(start + num_rows, rows.stop)
            self._add_mapped((stop - start) * row_bytes)
            values = self._file(path).get_slice(key)[(slice(start, stop), *columns)]
            target[start - rows.start : stop - rows.start].copy_(values)
            del values  # a view of the mapped file

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        self._files = {}
        self._num_mapped_bytes = 0

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            # Memory-mapped: opening reads only the header.
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]

    def _add_mapped(self, num_bytes: int) -> None:
        """Close the files if `num_bytes` more would exceed the limit."""
        # Complete rows, because a column slice maps the pages between its parts as well.
        if self._num_mapped_bytes + num_bytes > self._max_mapped_bytes:
            self.close()
        self._num_mapped_bytes += num_bytes


def check_values(tensor: Tensor, path: Path, key: str) -> None:
    """Raise ConfigError for NaN, infinity and values above `LARGEST` in a part of a weight.

    A model with such a weight would fail later, with a message about something else.
    """
    if tensor.is_floating_point() and not all_within([tensor], LARGEST):
        raise ConfigError(
            f"{shown_path(path)}: {key} has values that are NaN, infinite or larger than"
            f" {LARGEST:.2g}; download or save the model again, or use another one"
        )
