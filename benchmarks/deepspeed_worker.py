"""One run of DeepSpeed's batcher or sample sort, or of the sample sort here, in a process of its
own. Started by `deepspeed_batching.py`, with the interpreter that has DeepSpeed installed.

Reads a request, a JSON object, from the first argument; writes the result to `request["result"]`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def batch(request: dict[str, Any]) -> None:
    """Batch `request["lengths"]`, an int64 [N] file, and write the row ids of each microbatch."""
    package = "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr"
    module = import_module(package)
    lengths = np.load(request["lengths"]).tolist()
    start = time.process_time()
    microbatches, _, _ = module.batch_by_seqlens(
        lengths,
        request["max_tokens"],
        sequence_picking_order=request["order"],
        effective_batch_size=request["microbatches_per_step"],
        required_microbatches_of_same_size=request["same_shape"],
        seed=0,
    )
    seconds = time.process_time() - start
    rows = [[int(row) for row in rows] for _, rows in microbatches]
    write(request, {"seconds": seconds, "rows": rows})


def sort(request: dict[str, Any]) -> None:
    """Sort the rows of all ranks together, and save the resulting rows of this one.

    `request["rows"]` is an int64 [n, 2] file of this rank.
    """
    import torch
    import torch.distributed as dist

    size = request["num_ranks"]
    rows = torch.from_numpy(np.load(request["rows"]))
    if request["system"] == "deepspeed":
        # Its collectives need its own initialization.
        comm = import_module("deepspeed.comm")
        analyzer = import_module("deepspeed.runtime.data_pipeline.data_sampling.data_analyzer")
        comm.init_distributed(
            "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{request['rendezvous']}",
            rank=request["rank"],
            world_size=size,
            verbose=False,
        )

        def sort_rows() -> torch.Tensor:
            return analyzer.Dist.sample_sort(rows, comm.new_group(range(size)), size)

    else:
        sample_sort = import_module("nemo_like.torch_data.curriculum").sample_sort
        dist.init_process_group(
            "gloo",
            init_method=f"file://{request['rendezvous']}",
            rank=request["rank"],
            world_size=size,
        )

        def sort_rows() -> torch.Tensor:
            return sample_sort(rows)

    dist.barrier()
    start = time.perf_counter()
    result = sort_rows()
    seconds = time.perf_counter() - start
    np.save(request["sorted"], result.numpy())
    write(request, {"seconds": seconds})
    dist.barrier()
    dist.destroy_process_group()


def write(request: dict[str, Any], result: dict[str, Any]) -> None:
    Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    if request["kind"] == "batch":
        batch(request)
    else:
        sort(request)
