"""Batches by token count and sample sort: DeepSpeed's own code against the code here, in one run.

    python -m venv /tmp/deepspeed    # with the torch of this environment on its path, or its own
    DS_BUILD_OPS=0 /tmp/deepspeed/bin/pip install deepspeed
    python benchmarks/deepspeed_batching.py --deepspeed-python /tmp/deepspeed/bin/python

Batches: the same lengths (lognormal, CV 1, or `--lengths`) under the same limit of the sum of
lengths. `lost` are rows in no microbatch, `over` the microbatches whose rows × longest row exceed
the limit when they are padded, `padding` its share when they are. DeepSpeed has as many rows as it
batches within `--seconds`; its time for all rows is extrapolated from the two largest runs with a
power of the number of rows, and marked with ~. Times of batches are CPU seconds.

Sort: rows (key, id) on `--ranks` processes with gloo, wall-clock seconds of the slowest rank.
`share` is the number of rows of the rank with the most over the mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from packing_references import read_lengths

from nemo_like.torch_data.token_batches import batch_by_tokens

WORKER = Path(__file__).parent / "deepspeed_worker.py"
ROOT = Path(__file__).parents[1]
ORDERS = {"given": "dataloader", "length": "seqlen"}
"""Order here -> its name in DeepSpeed."""


@dataclass(frozen=True)
class Case:
    """Settings of the batcher that both systems have."""

    order: str
    microbatches_per_step: int
    same_shape: bool

    @property
    def name(self) -> str:
        kind = "same shape" if self.same_shape else "free"
        return f"{self.order}, {self.microbatches_per_step} per step, {kind}"


CASES = (Case("given", 1, False), Case("length", 1, False), Case("length", 8, True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed-python", required=True, help="interpreter with DeepSpeed")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=60, help="for one run of DeepSpeed")
    parser.add_argument("--lengths", type=Path, help="a file of lengths, drawn from with repeats")
    parser.add_argument("--columns", help="columns of that file to add up, comma separated")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    if arguments.lengths is None:
        # A lognormal with sigma² = ln 2 has a coefficient of variation of 1.
        draws = rng.lognormal(math.log(400), math.sqrt(math.log(2)), arguments.rows)
    else:
        columns = arguments.columns.split(",") if arguments.columns else []
        draws = rng.choice(read_lengths(arguments.lengths, columns), arguments.rows)
    lengths = np.clip(draws, 1, arguments.max_tokens).astype(np.int64)
    variation = lengths.std() / lengths.mean()
    print(f"{len(lengths)} lengths, mean {lengths.mean():.0f}, CV {variation:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            compare_batches(case, lengths, arguments, Path(folder))
        compare_sorts(lengths, arguments, Path(folder))


def compare_batches(
    case: Case, lengths: np.ndarray, arguments: argparse.Namespace, folder: Path
) -> None:
    print(f"\nbatches: {case.name}")
    print(
        f"{'system':<18} {'rows':>9} {'lost':>6} {'batches':>8} {'over':>6} {'padding':>8} {'s':>9}"
    )
    runs = deepspeed_runs(case, lengths, arguments, folder)
    num_rows, seconds, batches = runs[-1]
    print_batches("DeepSpeed", lengths[:num_rows], batches, arguments.max_tokens, seconds)
    for count in (num_rows, len(lengths)):
        for counts in ("summed", "padded"):
            start = time.process_time()
            formed = batch_by_tokens(
                lengths[:count],
                arguments.max_tokens,
                order=case.order,  # pyright: ignore[reportArgumentType]
                counts=counts,
                microbatches_per_step=case.microbatches_per_step,
                same_shape=case.same_shape,
            )
            seconds = time.process_time() - start
            rows = [rows for step in formed.steps() for rows in step if rows]
            print_batches(
                f"nemo_like {counts}", lengths[:count], rows, arguments.max_tokens, seconds
            )
    if len(runs) > 1 and num_rows < len(lengths):
        (rows_before, seconds_before, _), (_, last_seconds, _) = runs[-2:]
        power = math.log(last_seconds / seconds_before) / math.log(num_rows / rows_before)
        total = last_seconds * (len(lengths) / num_rows) ** power
        print(
            f"{'DeepSpeed ~':<18} {len(lengths):>9} extrapolated with rows^{power:.2f}: "
            f"{total:.1e} s, {total / 86400:.1e} days"
        )


def print_batches(
    system: str, lengths: np.ndarray, batches: list[list[int]], max_tokens: int, seconds: float
) -> None:
    used = [row for rows in batches for row in rows]
    padded = [len(rows) * int(lengths[rows].max()) for rows in batches]
    num_over = sum(tokens > max_tokens for tokens in padded)
    padding = 1 - lengths[used].sum() / sum(padded)
    print(
        f"{system:<18} {len(lengths):>9} {len(lengths) - len(used):>6} {len(batches):>8} "
        f"{num_over:>6} {padding:>8.1%} {seconds:>9.3f}"
    )


def deepspeed_runs(
    case: Case, lengths: np.ndarray, arguments: argparse.Namespace, folder: Path
) -> list[tuple[int, float, list[list[int]]]]:
    """(rows, CPU seconds, microbatches) for doubled numbers of rows within the limit of time."""
    runs = []
    num_rows = 250
    while num_rows <= len(lengths):
        np.save(folder / "lengths.npy", lengths[:num_rows])
        request = {
            "kind": "batch",
            "lengths": str(folder / "lengths.npy"),
            "result": str(folder / "result.json"),
            "max_tokens": arguments.max_tokens,
            "order": ORDERS[case.order],
            "microbatches_per_step": case.microbatches_per_step,
            "same_shape": case.same_shape,
        }
        finish([start_worker(arguments.deepspeed_python, request)])
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        runs.append((num_rows, result["seconds"], result["rows"]))
        # Doubling the rows takes four to eight times as long.
        if result["seconds"] * 6 > arguments.seconds:
            break
        num_rows *= 2
    return runs


def compare_sorts(lengths: np.ndarray, arguments: argparse.Namespace, folder: Path) -> None:
    ids = np.arange(len(lengths))
    half_equal = np.where(ids % 2 == 0, 7, lengths)
    all_equal = np.full_like(lengths, 7)
    print(f"\nsample sort, {arguments.ranks} ranks")
    print(
        f"{'system':<11} {'keys':<11} {'rows':>9} {'lost':>6} {'sorted':>7} {'share':>6} {'s':>7}"
    )
    for name, keys in (("lengths", lengths), ("half equal", half_equal), ("all equal", all_equal)):
        rows = np.stack([keys, ids], axis=1)
        for system, python in (("DeepSpeed", arguments.deepspeed_python), ("nemo_like", "")):
            print_sort(system, name, python or sys.executable, rows, arguments.ranks, folder)
    print("one rank without rows:")
    rows = np.stack([lengths, ids], axis=1)[:1000]
    for system, python in (("DeepSpeed", arguments.deepspeed_python), ("nemo_like", "")):
        print_sort(
            system, "lengths", python or sys.executable, rows, arguments.ranks, folder, empty=True
        )


def print_sort(
    system: str,
    name: str,
    python: str,
    rows: np.ndarray,
    num_ranks: int,
    folder: Path,
    *,
    empty: bool = False,
) -> None:
    """Sort `rows` int64 [N, 2], dealt to the ranks in turn, or all on rank 0 with `empty`."""
    rendezvous = folder / f"rendezvous_{time.monotonic_ns()}"
    requests: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        of_rank = rows[rank::num_ranks]
        if empty:
            of_rank = rows if rank == 0 else rows[:0]
        np.save(folder / f"rows_{rank}.npy", of_rank)
        requests.append(
            {
                "kind": "sort",
                "system": system.lower(),
                "rank": rank,
                "num_ranks": num_ranks,
                "rendezvous": str(rendezvous),
                "rows": str(folder / f"rows_{rank}.npy"),
                "sorted": str(folder / f"sorted_{rank}.npy"),
                "result": str(folder / f"result_{rank}.json"),
            }
        )
    try:
        finish([start_worker(python, request) for request in requests])
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "Error" in line]
        print(f"{system:<11} {name:<11} {len(rows):>9} fails: {(lines or ['?'])[-1].strip()}")
        return
    # DeepSpeed's result has one dimension on a rank without rows.
    parts = [np.load(request["sorted"]).reshape(-1, 2) for request in requests]
    seconds = max(
        json.loads(Path(request["result"]).read_text())["seconds"] for request in requests
    )
    result = np.concatenate(parts)
    expected = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    share = max(len(part) for part in parts) * num_ranks / len(rows)
    is_sorted = np.array_equal(result, expected)
    print(
        f"{system:<11} {name:<11} {len(rows):>9} {len(rows) - len(result):>6} "
        f"{is_sorted!s:>7} {share:>6.2f} {seconds:>7.2f}"
    )


def start_worker(python: str, request: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(request.get("rank", 0))}
    return subprocess.Popen(
        [python, str(WORKER), json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all; the first that fails ends the others, and CalledProcessError is raised."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        try:
            # Reads the pipes, which would otherwise block a process that writes much.
            next(process for process in processes if process.poll() is None).communicate(
                timeout=0.5
            )
        except subprocess.TimeoutExpired:
            continue
    failed = [process for process in processes if process.poll()]
    for process in processes:
        process.kill()
    for process in failed:
        _, errors = process.communicate()
        raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)


if __name__ == "__main__":
    main()
