"""Encodes the rows of a run with Ray Data: a pool of actors on the nodes of the cluster.

The dataset has one entry per block of rows: its number. The text of a block is sent separately,
when enough earlier blocks have returned. So the rows and bytes between this process and the actors
are bounded, and a large file is never in the object store at once. Ray Data places the actors,
schedules the blocks and returns them in order.

Reading stays in this process, which also checks the rows; tokenizing scales with the actors.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from nemo_like.config.errors import ConfigError
from nemo_like.data.encoding_pool import Receive, unpack_rows
from nemo_like.data.row_files import Row
from nemo_like.distributed.errors import ClusterError
from nemo_like.distributed.ray.encoding_actors import RAISED, start_actors

logger = logging.getLogger(__name__)

_JOIN_S = 20.0
"""Time that `close` waits for Ray Data to stop its actors."""
_CHECK_NODES_S = 5.0
_MAX_AUTO_ACTORS = 64


@dataclass(frozen=True, kw_only=True)
class FlowLimits:
    """Rows and bytes of text that may be between this process and the actors, for each actor.

    A single block is sent even if it has more bytes.
    """

    rows_per_block: int = 64
    rows_per_actor: int = 512
    bytes_per_actor: int = 16 * 2**20


def check_ray_data(key: str) -> None:
    """Raise ConfigError that names `key` if a package that Ray Data needs is missing."""
    for package in ("pandas", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key} needs {package}, which is not installed; install the extra ray-data: pip"
                " install 'nemo-like[ray-data]'"
            )


class RayDataPool:
    """Encodes rows with the actors of a Ray Data pipeline; an `encoding_pool.RowPool`.

    This process must be connected to Ray.
    """

    def __init__(
        self,
        module: str,
        setup: dict[str, Any],
        rows: Sequence[Row],
        receive: Receive,
        *,
        num_actors: int | None = None,
        limits: FlowLimits | None = None,
    ) -> None:
        """Encode with `open_encode(setup)` of `module`, in `num_actors` actors of one CPU each.

        By default as many as CPUs are free. Raises ClusterError if fewer are free, or without a
        connection to Ray.
        """
        if not ray.is_initialized():
            # A call of Ray would otherwise connect to any cluster that it finds.
            raise ClusterError("Ray Data encodes rows on a cluster, and this process is in none")
        self.num_actors = _choose_num_actors(num_actors)
        self.max_rows_in_flight = 0
        """Maximum of rows that were sent and had not returned."""
        self.max_bytes_in_flight = 0
        """Maximum of their bytes as JSON."""
        self.rows_of_node: dict[str, int] = {}
        """Number of rows encoded on each node, by node id."""
        self._limits = limits or FlowLimits()
        self._rows = rows
        self._receive = receive
        self._module = module
        self._setup = setup
        # Guarded by `_lock`, like everything below it.
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._sent: dict[int, _SentBlock] = {}
        self._next_block: tuple[list[int], bytes] | None = None
        self._num_sent = 0
        self._num_pending = 0
        self._is_closed = False
        self._nodes = _alive_nodes()
        self._next_check = 0.0
        self._feed: Any = None
        self._pipeline: Any = None
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """True if every submitted row is encoded."""
        with self._lock:
            if self._num_pending == 0:
                return True
        self._check_nodes()
        return False

    def _check_nodes(self) -> None:
        """Report a lost node. Ray Data would wait for a free CPU to restart its actors."""
        now = time.monotonic()
        if now < self._next_check or self._is_closed:
            return
        self._next_check = now + _CHECK_NODES_S
        lost = self._nodes - _alive_nodes()
        if lost:
            reason = f"node {', '.join(sorted(lost))} was lost"
            self._receive(-1, None, _failed(reason))

    def submit(self, indices: Sequence[int] | np.ndarray, *, first: bool = False) -> None:
        """Start to encode rows in this order; with `first` move queued rows to the front.

        Rows, int64 [n] if an array, can be submitted once. Rows that are with an actor already
        return before the others.
        """
        # Blocks of rows are sent as JSON, which has no numbers of NumPy.
        rows = np.asarray(indices, dtype=np.int64).tolist()
        with self._lock:
            if first:
                self._move_to_front(rows)
                return
            if self._thread is not None:
                raise RuntimeError("the rows of this pool were submitted already")
            self._waiting.extend(rows)
            self._num_pending = len(rows)
            num_blocks = -(-len(rows) // self._limits.rows_per_block)
            self._feed, self._pipeline = start_actors()
            run = self._pipeline.run.options(num_returns="streaming")
            answers = run.remote(
                num_blocks,
                num_actors=self.num_actors,
                module=self._module,
                setup=self._setup,
                feed=self._feed,
            )
            self._thread = threading.Thread(
                target=self._run, args=(answers,), name="ray-data-encoding", daemon=True
            )
            self._send_blocks()
            self._thread.start()

    def close(self) -> None:
        """Stop the pipeline and its actors; queued rows are not encoded."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
        self._kill_actors()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _kill_actors(self) -> None:
        """End the pipeline and with it the encoders, which it owns, even in the middle of a row."""
        with self._lock:
            actors = [self._pipeline, self._feed]
            self._pipeline = None
            self._feed = None
            self._sent.clear()
        for actor in actors:
            if actor is not None and ray.is_initialized():
                ray.kill(actor)

    def _move_to_front(self, indices: Sequence[int]) -> None:
        """Move those of `indices` that are queued to the front, in this order."""
        queued = set(self._waiting)
        moved = [row for row in dict.fromkeys(indices) if row in queued]
        if not moved:
            return
        if self._next_block is not None:
            # Formed, but not sent: it gets other rows. The number of blocks does not change.
            self._waiting.extendleft(reversed(self._next_block[0]))
            self._next_block = None
        chosen = set(moved)
        others = [row for row in self._waiting if row not in chosen]
        self._waiting = deque([*moved, *others])

    def _send_blocks(self) -> None:
        """Send blocks while the limits allow it. The caller holds the lock."""
        max_rows = self._limits.rows_per_actor * self.num_actors
        max_bytes = self._limits.bytes_per_actor * self.num_actors
        num_rows = sum(len(block.rows) for block in self._sent.values())
        num_bytes = sum(block.num_bytes for block in self._sent.values())
        while (block := self._form_block()) is not None:
            rows, text = block
            is_over = num_rows + len(rows) > max_rows or num_bytes + len(text) > max_bytes
            if self._sent and is_over:
                return
            # In a list, so that the feed gets the reference and not the text.
            reference = [ray.put(text)]
            self._feed.add.remote(self._num_sent, reference)
            self._sent[self._num_sent] = _SentBlock(rows, len(text), reference)
            self._num_sent += 1
            self._next_block = None
            num_rows += len(rows)
            num_bytes += len(text)
            self.max_rows_in_flight = max(self.max_rows_in_flight, num_rows)
            self.max_bytes_in_flight = max(self.max_bytes_in_flight, num_bytes)

    def _form_block(self) -> tuple[list[int], bytes] | None:
        """Return the rows of the next block with their JSON text, or None without rows."""
        if self._next_block is None and self._waiting:
            size = min(self._limits.rows_per_block, len(self._waiting))
            rows = [self._waiting.popleft() for _ in range(size)]
            # The same form as in the messages to encoding processes.
            text = json.dumps([self._rows[row] for row in rows], default=str).encode()
            self._next_block = (rows, text)
        return self._next_block

    def _run(self, answers: Iterator[Any]) -> None:
        """Receive the encoded blocks, in a thread."""
        try:
            for reference in answers:
                table: pyarrow.Table = ray.get(reference)
                for answer in table.to_pylist():
                    if self._is_closed or not self._take(answer):
                        return
            if self._num_pending and not self._is_closed:
                raise RuntimeError(f"{self._num_pending} rows were not returned")
        except (RayError, RuntimeError) as error:
            if not self._is_closed:
                self._receive(-1, None, _failed(f"{type(error).__name__}: {error}"))
        finally:
            self._kill_actors()

    def _take(self, answer: dict[str, Any]) -> bool:
        """Pass the rows of an encoded block on and send further blocks; False for a failure."""
        if answer["block"] == RAISED:
            self._receive(-1, None, _failed(answer["values"]))
            return False
        with self._lock:
            if self._is_closed:
                return False
            block = self._sent.pop(answer["block"])
            node = answer["node"]
            self.rows_of_node[node] = self.rows_of_node.get(node, 0) + len(block.rows)
            self._send_blocks()
        results = unpack_rows(json.loads(answer["values"]), answer["data"])
        for row, (encoded, problem) in zip(block.rows, results, strict=True):
            self._receive(row, encoded, problem)
        if self._num_pending == len(block.rows):
            # Before the pool is idle, because the run may close it then.
            logger.info("rows encoded with Ray Data per node: %s", self.rows_of_node)
        with self._lock:
            self._num_pending -= len(block.rows)
        return True


@dataclass(frozen=True)
class _SentBlock:
    """A block that was sent and has not returned."""

    rows: list[int]
    num_bytes: int
    reference: list[Any]
    """Keeps the text in the object store."""


def _choose_num_actors(requested: int | None) -> int:
    """Return the number of actors. Raises ClusterError if fewer CPUs are free, or none."""
    free = available_resources_per_node()
    num_free = sum(int(resources.get("CPU", 0.0)) for resources in free.values())
    if num_free >= max(requested or 0, 1):
        return requested or min(num_free, _MAX_AUTO_ACTORS)
    key = "" if requested is None else f" (data.num_encoding_workers {requested})"
    raise ClusterError(
        f"data.encoding_backend=ray_data needs {requested or 1} CPU beside those of the"
        f" workers{key}; {num_free} are free on {len(free)} nodes. Lower cluster.cpus_per_worker,"
        " add nodes, or set data.encoding_backend=processes"
    )


def _alive_nodes() -> set[str]:
    """Return the ids of the nodes of the cluster."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _failed(reason: str) -> str:
    short = " ".join(reason.split())[:400]
    return (
        f"the Ray Data pipeline that encodes rows failed: {short}; see the logs of Ray, or set"
        " data.encoding_backend=processes to encode in processes of the driver's machine"
    )
