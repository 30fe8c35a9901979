"""What `packing.py` measures against: length distributions, naive loops as systems write them, and
peers' own code.

The loops here are plain on purpose: O(rows x bins), ranks in turn. Peers are loaded from checkouts
named on the command line, function by function, so that neither their code nor their dependencies
are needed here.
"""

from __future__ import annotations

import ast
import csv
import heapq
import io
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

Bins = list[list[int]]
RankBins = list[list[list[int]]]
WORK = (24576.0, 1.0)
"""Work a * L + b * L^2 of every comparison here: what peers use for a 7B model."""
KINDS = ("rl", "sft", "bimodal", "uniform", "trace")


def lengths_of(
    kind: str, num_rows: int, capacity: int, seed: int, trace: np.ndarray | None
) -> np.ndarray:
    """Row lengths, int64 [num_rows], at most `capacity`.

    rl: lognormal rollouts of median 1200, clipped at 8192. sft: a Pareto tail from 32. bimodal:
    nine tenths near 0.08 of the capacity, one near 0.8. uniform: 1 to 8192. trace: the lengths file
    resampled, or without one, as of a chat service, a mixture of short and long prompts.
    """
    rng = np.random.default_rng([seed, num_rows, KINDS.index(kind)])
    most = min(8192, capacity)
    if kind == "rl":
        lengths = rng.lognormal(np.log(1200), 0.95, num_rows)
    elif kind == "sft":
        lengths, most = 32 * (1 + rng.pareto(0.9, num_rows)), capacity
    elif kind == "bimodal":
        short, long = (
            rng.normal(0.08 * capacity, 0.03 * capacity, num_rows),
            rng.normal(0.8 * capacity, 0.12 * capacity, num_rows),
        )
        lengths, most = np.where(rng.random(num_rows) < 0.9, short, long), capacity
    elif kind == "uniform":
        lengths = rng.integers(1, most + 1, num_rows)
    elif trace is not None:
        lengths = rng.choice(trace, num_rows)
    else:
        is_long = rng.random(num_rows) < 0.35
        lengths = np.where(
            is_long, rng.normal(3000, 900, num_rows), rng.lognormal(np.log(450), 0.7, num_rows)
        )
    return np.clip(lengths.astype(np.int64), 1 if kind == "uniform" else 16, most)


def read_lengths(path: Path, columns: list[str]) -> np.ndarray:
    """Lengths from a CSV (the named columns, or all whole numbers, added up), a JSONL file (fields
    likewise) or a list of integers; raises ValueError naming the file where there are none.
    """
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    elif path.suffix in (".jsonl", ".json"):
        rows = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    else:
        rows = [{"length": word} for word in path.read_text().split()]
    if rows and not columns:
        columns = [name for name, value in rows[0].items() if str(value).isdigit()]
    if not rows or not columns:
        raise ValueError(f"{path} has no column of whole numbers; name one with --columns")
    return np.array([sum(int(row[name]) for name in columns) for row in rows], dtype=np.int64)


def work_of(lengths: np.ndarray) -> np.ndarray:
    return WORK[0] * lengths + WORK[1] * lengths.astype(np.float64) ** 2


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> Bins:
    """Longest first, each to the first bin with room, found by looking at all of them."""
    bins: Bins = []
    rooms: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b, room in enumerate(rooms):
            if room >= lengths[i]:
                bins[b].append(i)
                rooms[b] -= lengths[i]
                break
        else:
            bins.append([i])
            rooms.append(capacity - lengths[i])
    return bins


def naive_modified_first_fit_decreasing(lengths: list[int], capacity: int) -> Bins:
    """Johnson and Garey's phases with lists that are searched and popped, first fit decreasing
    last.
    """
    descending = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    large = [i for i in descending if 2 * lengths[i] > capacity]
    medium = [i for i in descending if 2 * lengths[i] <= capacity < 3 * lengths[i]]
    small = [i for i in reversed(descending) if 3 * lengths[i] <= capacity < 6 * lengths[i]]
    tiny = [i for i in descending if 6 * lengths[i] <= capacity]
    bins = [[i] for i in large]
    rooms = [capacity - lengths[i] for i in large]

    def put(i: int, b: int) -> None:
        bins[b].append(i)
        rooms[b] -= lengths[i]

    for b in range(len(bins)):
        found = next((k for k, i in enumerate(medium) if lengths[i] <= rooms[b]), None)
        if found is not None:
            put(medium.pop(found), b)
    for b in reversed(range(len(bins))):
        if len(bins[b]) > 1 or len(small) < 2 or lengths[small[0]] + lengths[small[1]] > rooms[b]:
            continue
        put(small.pop(0), b)
        put(
            small.pop(
                next(k for k in reversed(range(len(small))) if lengths[small[k]] <= rooms[b])
            ),
            b,
        )
    rest = sorted([*medium, *small, *tiny], key=lambda i: -lengths[i])
    for b in range(len(bins)):
        while rest and lengths[rest[-1]] <= rooms[b]:
            put(rest.pop(next(k for k, i in enumerate(rest) if lengths[i] <= rooms[b])), b)
    left = naive_first_fit_decreasing([lengths[i] for i in rest], capacity)
    return bins + [[rest[k] for k in bin_] for bin_ in left]


def in_turn(bins: Bins, num_ranks: int) -> RankBins:
    """Bin b to rank b % num_ranks; where bins run short, single rows of the fullest are split off
    first.
    """
    bins = [list(bin_) for bin_ in bins]
    donors = sorted(bins, key=len, reverse=True)
    while len(bins) % num_ranks and any(len(bin_) > 1 for bin_ in donors):
        bins.append([next(bin_ for bin_ in donors if len(bin_) > 1).pop()])
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def load_functions(path: Path, names: list[str], scope: dict[str, Any]) -> dict[str, Any]:
    """The named functions and classes of a source file, without running the rest of it; `scope` is
    what they may use.
    """
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    missing = set(names) - {getattr(node, "name", None) for node in tree.body}
    if missing:
        raise ValueError(
            f"{path} does not define {', '.join(sorted(missing))}; this benchmark knows another"
            f" version of it"
        )
    # Annotations may name modules that are not there.
    code = compile("from __future__ import annotations\n" + ast.unparse(tree), str(path), "exec")
    exec(code, scope)
    return scope


def nemo_rl(checkout: Path) -> Callable[[str, list[int], int, int], Bins]:
    """`get_packer(...).pack` of a NeMo-RL checkout: (algorithm, lengths, capacity, multiple) to
    bins.
    """
    path = checkout / "nemo_rl/data/packing/algorithms.py"
    spec = spec_from_file_location("peer_nemo_rl_packing", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not there; --nemo-rl takes the root of a NeMo-RL checkout")
    module = module_from_spec(spec)
    sys.path.append(str(checkout))
    spec.loader.exec_module(module)

    def pack(algorithm: str, lengths: list[int], capacity: int, multiple: int) -> Bins:
        with redirect_stdout(io.StringIO()):
            return module.get_packer(algorithm, capacity, bin_count_multiple=multiple).pack(lengths)

    return pack


def verl(checkout: Path) -> Callable[[np.ndarray, int, int], RankBins]:
    """Balancing of verl: rows to ranks by Karmarkar-Karp with equal numbers, then each rank's into
    as many microbatches as the rank with most tokens needs, by work alone.
    """
    names = ["karmarkar_karp", "get_seqlen_balanced_partitions"]
    scope = load_functions(checkout / "verl/utils/seqlen_balancing.py", names, {"heapq": heapq})
    partition = scope["get_seqlen_balanced_partitions"]

    def balance(lengths: np.ndarray, capacity: int, num_ranks: int) -> RankBins:
        work = [int(value) for value in work_of(lengths)]
        ranks = partition(work, num_ranks, equal_size=True)
        count = max(-(-int(lengths[rows].sum()) // capacity) for rows in ranks)
        parts = [
            partition([work[i] for i in rows], min(count, len(rows)), equal_size=False)
            for rows in ranks
        ]
        return [
            [[rows[k] for k in part] for part in bins]
            for rows, bins in zip(ranks, parts, strict=True)
        ]

    return balance


def trl(checkout: Path) -> Callable[[list[int], int], Bins]:
    """TRL's best fit decreasing: its segment tree in its placement loop, without the tokens it
    would copy.
    """
    tree_class = load_functions(
        checkout / "trl/data_utils.py", ["_SegmentTree"], {"defaultdict": defaultdict}
    )["_SegmentTree"]

    def pack(lengths: list[int], capacity: int) -> Bins:
        tree, with_room, bins = tree_class(capacity), defaultdict(deque), []
        tree.add(capacity)
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            room = tree.search(lengths[i])
            if room < capacity:
                bin_ = with_room[room].popleft()
                if not with_room[room]:
                    tree.remove(room)
            else:
                bin_ = []
                bins.append(bin_)
            bin_.append(i)
            with_room[room - lengths[i]].append(bin_)
            if room > lengths[i]:
                tree.add(room - lengths[i])
        return bins

    return pack
