"""A set of row ids in a few kilobytes of JSON, from which small differences to another set can be
read.

An invertible Bloom lookup table (Eppstein et al., "What's the Difference? Efficient Set
Reconciliation without Prior Context", 2011): every id is added to one cell of each of four tables.
The difference of two sketches holds only ids that one set has and the other has not, and a cell
with exactly one of them gives it away. The size does not depend on the number of ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_TABLES = 4
CELLS_PER_TABLE = 64
MAX_DIFFERENCE = 100
"""Differences of up to this many ids are found with probability above 0.999."""
_CHECK_SALT = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class RowSketch:
    """Example: `RowSketch.of(a).difference(RowSketch.of(b))` is `(ids only in a, ids only in
    b)`.
    """

    counts: np.ndarray
    """int64 [tables x cells]: ids in each cell."""
    ids: np.ndarray
    """uint64 [tables x cells]: exclusive or of the ids in each cell."""
    checks: np.ndarray
    """uint64 [tables x cells]: exclusive or of a hash of each id, which tells a cell of one id from
    a cell of several.
    """

    @classmethod
    def of(cls, ids: np.ndarray) -> RowSketch:
        """The sketch of distinct `ids`, uint64 [N]."""
        size = NUM_TABLES * CELLS_PER_TABLE
        sketch = cls(np.zeros(size, np.int64), np.zeros(size, np.uint64), np.zeros(size, np.uint64))
        checks = mix(ids ^ np.uint64(_CHECK_SALT))
        for cells in _cells(ids):
            sketch.counts[:] += np.bincount(cells, minlength=size)
            np.bitwise_xor.at(sketch.ids, cells, ids)
            np.bitwise_xor.at(sketch.checks, cells, checks)
        return sketch

    def difference(self, other: RowSketch) -> tuple[np.ndarray, np.ndarray] | None:
        """(ids only in this set, ids only in `other`), uint64 each; None where there are too many
        to tell.
        """
        counts, ids, checks = (
            self.counts - other.counts,
            self.ids ^ other.ids,
            self.checks ^ other.checks,
        )
        only: dict[int, list[int]] = {1: [], -1: []}
        pending = list(range(len(counts)))
        while pending:
            cell = pending.pop()
            sign, value = int(counts[cell]), ids[cell : cell + 1].copy()
            check = mix(value ^ np.uint64(_CHECK_SALT))
            if (
                abs(sign) != 1
                or check[0] != checks[cell]
                or not any(cells[0] == cell for cells in _cells(value))
            ):
                continue
            only[sign].append(int(value[0]))
            if len(only[1]) + len(only[-1]) > len(counts):
                return None
            for cells in _cells(value):
                counts[cells] -= sign
                ids[cells] ^= value
                checks[cells] ^= check
                pending.append(int(cells[0]))
        if counts.any() or ids.any() or checks.any():
            return None
        return np.array(only[1], np.uint64), np.array(only[-1], np.uint64)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "counts": self.counts.tolist(),
            "ids": self.ids.tolist(),
            "checks": self.checks.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RowSketch:
        """What `to_dict` wrote. Raises KeyError, ValueError or OverflowError for anything else."""
        counts = np.array(values["counts"], np.int64)
        ids, checks = (np.array(values[name], np.uint64) for name in ("ids", "checks"))
        if any(part.shape != (NUM_TABLES * CELLS_PER_TABLE,) for part in (counts, ids, checks)):
            raise ValueError(
                f"a sketch has {NUM_TABLES * CELLS_PER_TABLE} cells, this one has {len(counts)}"
            )
        return cls(counts, ids, checks)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijective hash of uint64 [N]: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def unmix(values: np.ndarray) -> np.ndarray:
    """The inverse of `mix`."""
    mixed = values ^ (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    mixed = mixed * np.uint64(0x319642B2D24D8EC3)
    mixed = mixed ^ (mixed >> np.uint64(27)) ^ (mixed >> np.uint64(54))
    mixed = mixed * np.uint64(0x96DE1B173F119089)
    mixed = mixed ^ (mixed >> np.uint64(30)) ^ (mixed >> np.uint64(60))
    return mixed - np.uint64(0x9E3779B97F4A7C15)


def _cells(ids: np.ndarray) -> list[np.ndarray]:
    """The cell of each id in each table, int64 [N] each."""
    hashed = mix(mix(ids))
    shifts = range(0, 16 * NUM_TABLES, 16)
    return [
        ((hashed >> np.uint64(shift)) % np.uint64(CELLS_PER_TABLE)).astype(np.int64)
        + table * CELLS_PER_TABLE
        for table, shift in enumerate(shifts)
    ]
