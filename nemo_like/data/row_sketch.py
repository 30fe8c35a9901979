"""Sketch of a set of row ids in a few kilobytes, from which small set differences can be decoded.

It is an invertible Bloom lookup table (Eppstein et al., "What's the Difference? Efficient Set
Reconciliation without Prior Context", 2011): every id is added to one cell of each of four tables.
The difference of two sketches has only ids that are in one set and not in the other, and a cell
with exactly one id reveals it. The size does not depend on the number of ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_TABLES = 4
CELLS_PER_TABLE = 64
MAX_DIFFERENCE = 100
"""Differences of up to this many ids are decoded with probability above 0.999."""
_NUM_CELLS = NUM_TABLES * CELLS_PER_TABLE
_IDS_PER_PART = 2**15
_CHECK_SALT = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class RowSketch:
    """Sketch of a set of ids.

    Example: `RowSketch.of(a).difference(RowSketch.of(b))` is `(ids only in a, ids only in b)`.
    """

    counts: np.ndarray
    """int64 [tables x cells]: number of ids in each cell."""
    ids: np.ndarray
    """uint64 [tables x cells]: exclusive or of the ids in each cell."""
    checks: np.ndarray
    """uint64 [tables x cells]: exclusive or of a hash of each id, which distinguishes a cell of one
    id from a cell of several.
    """

    @classmethod
    def of(cls, ids: np.ndarray) -> RowSketch:
        """Return the sketch of distinct `ids`, uint64 [N]."""
        counts = np.zeros(_NUM_CELLS, np.int64)
        id_xors = np.zeros(_NUM_CELLS, np.uint64)
        check_xors = np.zeros(_NUM_CELLS, np.uint64)
        # In parts, because the hashes of millions of ids would need a hundred megabytes.
        for start in range(0, len(ids), _IDS_PER_PART):
            part = ids[start : start + _IDS_PER_PART]
            # Another hash than that of the cells; otherwise a cell could not verify itself.
            checks = mix(part ^ np.uint64(_CHECK_SALT))
            for cells in _cells(part):
                counts += np.bincount(cells, minlength=_NUM_CELLS)
                np.bitwise_xor.at(id_xors, cells, part)
                np.bitwise_xor.at(check_xors, cells, checks)
        return cls(counts, id_xors, check_xors)

    def combined(self, added: RowSketch, removed: RowSketch) -> RowSketch:
        """Return the sketch with the ids of `added`, without those of `removed`."""
        return RowSketch(
            self.counts + added.counts - removed.counts,
            self.ids ^ added.ids ^ removed.ids,
            self.checks ^ added.checks ^ removed.checks,
        )

    def difference(self, other: RowSketch) -> tuple[np.ndarray, np.ndarray] | None:
        """Decode (ids only in this set, ids only in `other`), uint64 each.

        Returns None if there are too many to decode. Both are [number of ids].
        """
        counts = self.counts - other.counts
        ids = self.ids ^ other.ids
        checks = self.checks ^ other.checks
        only: dict[int, list[int]] = {1: [], -1: []}
        pending = list(range(len(counts)))
        while pending:
            cell = pending.pop()
            sign = int(counts[cell])
            value = ids[cell : cell + 1].copy()
            check = mix(value ^ np.uint64(_CHECK_SALT))
            if abs(sign) != 1 or check[0] != checks[cell]:
                continue
            # A matching check is not enough: the id must also belong to this cell.
            value_cells = _cells(value)
            if not any(cells[0] == cell for cells in value_cells):
                continue
            only[sign].append(int(value[0]))
            # More ids than cells cannot be decoded; the loop would not end.
            if len(only[1]) + len(only[-1]) > len(counts):
                return None
            # Removing the id from its other cells may leave one id in them.
            for cells in value_cells:
                counts[cells] -= sign
                ids[cells] ^= value
                checks[cells] ^= check
                pending.append(int(cells[0]))
        if counts.any() or ids.any() or checks.any():
            return None
        return np.array(only[1], np.uint64), np.array(only[-1], np.uint64)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "counts": self.counts.tolist(),
            "ids": self.ids.tolist(),
            "checks": self.checks.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RowSketch:
        """Return the sketch that `to_dict` converted.

        Raises KeyError, ValueError or OverflowError for other values.
        """
        counts = np.array(values["counts"], np.int64)
        ids = np.array(values["ids"], np.uint64)
        checks = np.array(values["checks"], np.uint64)
        if any(array.shape != (_NUM_CELLS,) for array in (counts, ids, checks)):
            raise ValueError(f"a sketch has {_NUM_CELLS} cells, this one has {len(counts)}")
        return cls(counts, ids, checks)


def mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 [N] bijectively: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = _xor_shift(mixed, 30) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = _xor_shift(mixed, 27) * np.uint64(0x94D049BB133111EB)
    return _xor_shift(mixed, 31)


def _xor_shift(values: np.ndarray, *shifts: int) -> np.ndarray:
    """Return the exclusive or of uint64 [N] with its right shifts."""
    result = values
    for shift in shifts:
        result = result ^ (values >> np.uint64(shift))
    return result


def unmix(values: np.ndarray) -> np.ndarray:
    """Invert `mix`, uint64 [N]."""
    # The constants are the modular inverses of those in `mix`. A shift by k of 64 bits is undone by
    # repeating it with multiples of k.
    mixed = _xor_shift(values, 31, 62)
    mixed = mixed * np.uint64(0x319642B2D24D8EC3)
    mixed = _xor_shift(mixed, 27, 54)
    mixed = mixed * np.uint64(0x96DE1B173F119089)
    mixed = _xor_shift(mixed, 30, 60)
    return mixed - np.uint64(0x9E3779B97F4A7C15)


def _cells(ids: np.ndarray) -> list[np.ndarray]:
    """Return the cell of each id uint64 [N] in each table, int64 [N] each."""
    hashed = mix(mix(ids))
    cells = []
    for table in range(NUM_TABLES):
        bits = hashed >> np.uint64(16 * table)
        cell = (bits % np.uint64(CELLS_PER_TABLE)).astype(np.int64)
        cells.append(cell + table * CELLS_PER_TABLE)
    return cells
