"""Ray clusters whose workers are forked from a process that has imported torch, transformers and
Megatron-Core: importing them costs 8 seconds of a core per worker.

A raylet starts the program `setup_worker_path` for each worker. Here it is `send_worker.py`, which
sends the worker's command, environment and standard files to a process of the fork server of
multiprocessing. That process forks the worker, which runs Ray's own program.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from tests.distributed.fork_workers import serve
from tests.distributed.send_worker import SOCKET


@contextmanager
def cluster_of(
    *nodes: dict[str, Any], modules: Sequence[str] = (), separate: Path | None = None
) -> Iterator[Cluster]:
    """Start a Ray cluster on this machine with one node per argument; the first is the head.

    Its workers have also imported `modules`, which must not import Ray. In the folder `separate`
    they have an empty file system that they do not share with this process.
    """
    with _forked_workers(modules, separate):
        # Only the processes of Ray that these tests need.
        options: dict[str, Any] = {
            "include_dashboard": False,
            "no_monitor": True,
            "include_log_monitor": False,
            "setup_worker_path": str(Path(__file__).with_name("send_worker.py")),
        }
        cluster = Cluster(initialize_head=True, head_node_args=options | nodes[0])
        try:
            for node in nodes[1:]:
                cluster.add_node(**options, **node)
            yield cluster
        finally:
            cluster.shutdown()


@contextmanager
def _forked_workers(modules: Sequence[str], separate: Path | None) -> Iterator[None]:
    """Fork the workers of the raylets that are started inside the block."""
    with tempfile.TemporaryDirectory(prefix="fork_") as folder:
        path = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(64)
            # Not a thread of this process: Ray holds the GIL while it waits for a first worker.
            context: Any = multiprocessing.get_context("forkserver")
            folder_of_workers = None if separate is None else str(separate)
            server = context.Process(
                target=serve, args=(listener, tuple(modules), folder_of_workers)
            )
            server.start()
        os.environ[SOCKET] = path
        try:
            yield
        finally:
            del os.environ[SOCKET]
            server.terminate()
            server.join()
