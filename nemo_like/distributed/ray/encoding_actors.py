"""The actors of `ray_data`: the pipeline, its encoders, and the feed with the text of their blocks.

The pipeline has an actor of its own, so that its end ends the encoders and everything else of Ray
Data at once, and its log stays off the driver's console.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_like.data.encoding_pool import pack_rows

RAISED = -1
"""Value of the column `block` for an exception."""
_START_TIMEOUT_S = 120
"""Time for the encoders to start. Their CPUs were free, so only another run can delay them."""


class Feed:
    """Actor without a CPU that gives each block to the encoder that requests it."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Any]] = {}
        self._changed = asyncio.Condition()

    async def add(self, block: int, reference: list[Any]) -> None:
        async with self._changed:
            self._blocks[block] = reference
            self._changed.notify_all()

    async def take(self, block: int) -> list[Any]:
        """Wait for a block and return the reference to its text in a list."""
        async with self._changed:
            await self._changed.wait_for(lambda: block in self._blocks)
            return self._blocks.pop(block)


class Encoder:
    """Actor of the pipeline: encodes the blocks of rows whose numbers it is given."""

    def __init__(self, module: str, setup: dict[str, Any], feed: Any) -> None:
        """Open the tokenizer once. An exception is reported with the first block."""
        # There is one actor per CPU, so threads of the tokenizer would only compete.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._feed = feed
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        self._problem = ""
        if context.was_current_actor_reconstructed:
            # Blocks are sent once, and a row that ends the process would do so again.
            self._problem = "an actor that encodes rows ended"
            return
        try:
            self._encode = importlib.import_module(module).open_encode(setup)
        except Exception as error:  # noqa: BLE001 reported with the first block
            self._problem = f"{type(error).__name__}: {error}"

    def __call__(self, blocks: pyarrow.Table) -> pyarrow.Table:
        """Encode the block in column `block`: lengths and problems as JSON, ids and masks."""
        number = blocks["block"][0].as_py()
        if self._problem:
            # Without taking the block, which an actor that ended has taken.
            return _answer(RAISED, self._node, f"on node {self._node}: {self._problem}", b"")
        reference = ray.get(self._feed.take.remote(number))
        lengths, data = pack_rows(json.loads(ray.get(reference[0])), self._encode)
        return _answer(number, self._node, json.dumps(lengths), data)


class Pipeline:
    """Actor that runs the Ray Data pipeline and yields its blocks in order."""

    def run(self, num_blocks: int, *, num_actors: int, **encoder: Any) -> Iterator[pyarrow.Table]:
        """Encode blocks 0 to `num_blocks` - 1 with `Encoder(**encoder)` in `num_actors` actors."""
        try:
            yield from _open_batches(num_blocks, num_actors, encoder)
        except Exception as error:  # noqa: BLE001 Ray Data raises exceptions of many types
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            yield _answer(RAISED, "", f"{type(cause).__name__}: {cause}", b"")


def _open_batches(
    num_blocks: int, num_actors: int, encoder: dict[str, Any]
) -> Iterable[pyarrow.Table]:
    """Open the pipeline; each batch is the answer of an encoder."""
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    # The console has the progress of the run; Ray's files keep the log of Ray Data.
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.wait_for_min_actors_s = _START_TIMEOUT_S
    context.execution_options.preserve_order = True
    context.execution_options.verbose_progress = False
    tables = [pyarrow.table({"block": [block]}) for block in range(num_blocks)]
    dataset = ray.data.from_arrow(tables).map_batches(
        Encoder,
        fn_constructor_kwargs=encoder,
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=num_actors),
        num_cpus=1,
    )
    return dataset.iter_batches(batch_size=None, batch_format="pyarrow")


def _answer(block: int, node: str, values: str, data: bytes) -> pyarrow.Table:
    """Return the answer for a block: lengths and problems of its rows as JSON, ids and masks."""
    columns = {
        "block": [block],
        "node": [node],
        "values": [values],
        "data": pyarrow.array([data], pyarrow.large_binary()),
    }
    return pyarrow.table(columns)


def start_actors() -> tuple[Any, Any]:
    """Start the feed and the pipeline on the node of this process, without a CPU."""
    node_id = ray.get_runtime_context().get_node_id()
    # Soft: a node may be unable to start a process; the actors work from anywhere.
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
    options = {"num_cpus": 0, "scheduling_strategy": strategy}
    feed = ray.remote(Feed).options(max_concurrency=1000, **options).remote()  # pyright: ignore[reportAttributeAccessIssue]
    pipeline = ray.remote(Pipeline).options(**options).remote()  # pyright: ignore[reportAttributeAccessIssue]
    return feed, pipeline
