"""Few shapes for compiled models: padded lengths, a warmup of all shapes, and torch.compile with a
limit on their number.

A model compiled for static shapes is compiled once per shape. Rows are therefore padded to a few
lengths, and the first steps have every shape on every rank: a rank that compiles later than the
others would let them wait in a collective for as long as the compilation takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters as torch_counters

from nemo_like.data.packing.packers import checked_lengths, prefix_sums
from nemo_like.integer_math import check_integer, round_up

logger = logging.getLogger(__name__)

OnLimit = Literal["error", "reset", "eager"]

_MAX_GRAPHS = 2**20
"""Limit of torch over all compiled functions, larger than the limits per function allow."""


@dataclass(frozen=True)
class ShapeBuckets:
    """Padded lengths: a row is padded to the smallest that it does not exceed.

    Raises ValueError unless `lengths` are increasing and at least 1.

    Example: `ShapeBuckets((16, 64))` pads rows of 10, 16 and 17 tokens to 16, 16 and 64.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        is_increasing = list(self.lengths) == sorted(set(self.lengths))
        if not self.lengths or not is_increasing or self.lengths[0] < 1:
            raise ValueError(f"lengths are {self.lengths}: give increasing lengths of at least 1")

    @classmethod
    def from_lengths(
        cls, lengths: np.ndarray, num_buckets: int, *, multiple: int = 1
    ) -> ShapeBuckets:
        """Choose up to `num_buckets` padded lengths with minimal padding of observed `lengths`.

        `lengths` are integers [N], N >= 1. All padded lengths are multiples of `multiple`. The time
        grows with num_buckets × (distinct multiples)². Raises ValueError.
        """
        check_integer("num_buckets", num_buckets, 1)
        values = round_up(checked_lengths(lengths), check_integer("multiple", multiple, 1))
        if len(values) == 0:
            raise ValueError("lengths is empty: give at least one observed length")
        return cls(_minimal_padding(*np.unique(values, return_counts=True), num_buckets))

    def padded_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the padded length of each row, int64 [N], from integers [N].

        Raises ValueError for a row above the last bucket.
        """
        values = checked_lengths(lengths)
        if len(values) and values.max() > self.lengths[-1]:
            row = int(np.argmax(values))
            raise ValueError(
                f"row {row} has {values[row]} tokens, the largest bucket {self.lengths[-1]}: "
                "truncate the row or add a bucket"
            )
        bounds = np.array(self.lengths, dtype=np.int64)
        return bounds[np.searchsorted(bounds, values)]

    def shapes(self, max_tokens: int, max_rows: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return one shape (rows, length) per bucket, with as many rows as `max_tokens` allows.

        A microbatch with fewer rows is filled up with dummy rows, so these are all shapes that
        occur. Raises ValueError if not even one row of the largest bucket is within `max_tokens`.
        """
        if self.lengths[-1] > max_tokens:
            raise ValueError(
                f"max_tokens is {max_tokens}: give at least the largest bucket, {self.lengths[-1]}"
            )
        limit = max_tokens if max_rows is None else max_rows
        return tuple((min(max_tokens // length, limit), length) for length in self.lengths)


def _minimal_padding(lengths: np.ndarray, counts: np.ndarray, num_buckets: int) -> tuple[int, ...]:
    """Choose at most `num_buckets` of the distinct, increasing `lengths` int64 [D] with `counts`
    int64 [D] rows each.

    Dynamic programming: with C[j] rows among the first j lengths, the padded tokens of the first j
    lengths with one bucket more are min over i < j of tokens[i] + lengths[j - 1] × (C[j] - C[i]).
    """
    rows_before = prefix_sums(counts)
    num_lengths = len(lengths)
    tokens = np.append(0, lengths * rows_before[1:])
    # For each number of buckets and j: the first length of the last bucket.
    starts = [np.zeros(num_lengths + 1, dtype=np.int64)]
    for _ in range(1, min(num_buckets, num_lengths)):
        new_tokens = np.zeros_like(tokens)
        last_starts = np.zeros_like(starts[0])
        for stop in range(1, num_lengths + 1):
            last_bucket = lengths[stop - 1] * (rows_before[stop] - rows_before[:stop])
            candidates = tokens[:stop] + last_bucket
            last_starts[stop] = candidates.argmin()
            new_tokens[stop] = candidates[last_starts[stop]]
        tokens = new_tokens
        starts.append(last_starts)
    chosen = []
    stop = num_lengths
    for last_starts in reversed(starts):
        if stop > 0:
            chosen.append(int(lengths[stop - 1]))
            stop = int(last_starts[stop])
    return tuple(reversed(chosen))


@dataclass(frozen=True, eq=False)
class WarmupPlan:
    """Steps that have every shape on every rank, before all other microbatches."""

    shapes: tuple[tuple[int, int], ...]
    """S shapes (rows, length): step s computes `shapes[s]` on all ranks."""
    microbatches: np.ndarray
    """int64 [S, ranks], the microbatch of each step and rank; -1 is one of dummy rows."""
    remaining: np.ndarray
    """int64, the microbatches that follow the warmup, in their given order."""


def warmup_plan(shapes: Sequence[tuple[int, int]] | np.ndarray, num_ranks: int) -> WarmupPlan:
    """Plan steps in which every rank computes every shape once, before all others.

    `shapes` are the (rows, length) of M microbatches, int64 [M, 2]. A step uses the first
    microbatches of its shape, one per rank; where a shape has fewer microbatches than ranks, the
    others compute dummy rows without loss. The shape with the most tokens is first, so that memory
    is exceeded in the first step or not at all, and smaller shapes reuse its memory. Raises
    ValueError for less than one rank.

    Example: three microbatches of shape a and one of b on two ranks: step 0 has a on both ranks,
    step 1 has b and a dummy microbatch of shape b, and one microbatch of shape a remains.
    """
    check_integer("num_ranks", num_ranks, 1)
    microbatches_of: dict[tuple[int, int], list[int]] = {}
    for microbatch, (num_rows, length) in enumerate(shapes):
        microbatches_of.setdefault((int(num_rows), int(length)), []).append(microbatch)
    steps = sorted(microbatches_of, key=lambda shape: (-shape[0] * shape[1], shape))
    planned = np.full((len(steps), num_ranks), -1, dtype=np.int64)
    for step, shape in enumerate(steps):
        first = microbatches_of[shape][:num_ranks]
        planned[step, : len(first)] = first
    remaining = np.setdiff1d(np.arange(len(shapes)), planned)
    return WarmupPlan(tuple(steps), planned, remaining)


class ShapeLimitError(RuntimeError):
    """A call had one shape more than `max_shapes`."""


class StaticCompiler:
    """A compiled module or function that is compiled once per shape of its arguments.

    A key is what decides about a compilation: shape, dtype, device and `requires_grad` of each
    tensor argument, the value of each number, string or None, whether gradients are recorded, and
    whether a module is in training mode. At a key beyond `max_shapes`, `on_limit` decides:

    * `error`: raise ShapeLimitError
    * `reset`: call `torch.compiler.reset()` and start again with this key. It frees the graphs of
      all compiled functions of the process. For rows ordered by length, whose early shapes do not
      occur again.
    * `eager`: call the function without compilation for this and all other keys that are not
      compiled

    Without a limit here, torch compiles 8 shapes (`torch._dynamo.config.recompile_limit`) and runs
    further ones without compilation, with a warning only.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        max_shapes: int = 16,
        on_limit: OnLimit = "error",
        backend: str = "inductor",
        mode: str | None = None,
    ) -> None:
        """Compile `function` of tensors, which may be a module, at the first call of each shape.

        `mode` is passed to torch.compile, for the backend inductor. By default one process with a
        GPU uses CUDA graphs (`reduce-overhead`), whose outputs the next call overwrites. Several
        processes cannot, as there are collectives between the graphs. Calls raise torch's
        FailOnRecompileLimitHit after 2 × `max_shapes` compilations, which only unexpected
        recompilations can reach. Raises ValueError for an invalid argument.
        """
        check_integer("max_shapes", max_shapes, 1)
        if on_limit not in get_args(OnLimit):
            raise ValueError(f"on_limit is {on_limit!r}: give error, reset or eager")
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if mode == "reduce-overhead" and not is_alone:
            raise ValueError(
                f"mode is reduce-overhead with {dist.get_world_size()} processes: CUDA graphs need"
                " one process, leave mode out"
            )
        if mode is None and backend == "inductor" and is_alone and torch.cuda.is_available():
            mode = "reduce-overhead"
        self.num_compilations = 0
        """Graphs compiled so far; one per key, and more for a function with graph breaks."""
        self._is_eager_logged = False
        self._function = function
        self._max_shapes = max_shapes
        self._on_limit: OnLimit = on_limit
        # The overloads of torch.compile do not list its last parameters.
        self._compiled = torch.compile(  # pyright: ignore[reportCallIssue]
            function,
            backend=backend,
            mode=mode,
            dynamic=False,
            # Twice as many, for recompilations of known keys.
            recompile_limit=2 * max_shapes,
            isolate_recompiles=True,
        )
        self._keys: set[Any] = set()

    @property
    def num_shapes(self) -> int:
        """Keys that are compiled at present."""
        return len(self._keys)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; compiles it for a new key. Raises ShapeLimitError."""
        is_training = isinstance(self._function, torch.nn.Module) and self._function.training
        gradients = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        mode = f"{gradients}, training mode" if is_training else gradients
        key = f"({', '.join(map(_key_of, [*args, *kwargs.items()]))}), {mode}"
        is_new = key not in self._keys
        if is_new and len(self._keys) >= self._max_shapes:
            if self._on_limit == "error":
                raise ShapeLimitError(
                    f"a call with {key} needs compilation {len(self._keys) + 1}, max_shapes is "
                    f"{self._max_shapes}: pad to fewer shapes, raise max_shapes, or set on_limit to"
                    " reset or eager"
                )
            if self._on_limit == "eager":
                if not self._is_eager_logged:
                    logger.warning("no compilation beyond max_shapes=%d: %s", self._max_shapes, key)
                self._is_eager_logged = True
                return self._function(*args, **kwargs)
            torch.compiler.reset()
            self._keys.clear()
            logger.warning(
                "max_shapes=%d is reached: reset all compiled functions, for %s",
                self._max_shapes,
                key,
            )
        graphs_before = torch_counters["stats"]["unique_graphs"]
        started = time.monotonic()
        # Beyond its limits torch would run without compilation, with a warning only.
        with torch._dynamo.config.patch(
            accumulated_recompile_limit=_MAX_GRAPHS, fail_on_recompile_limit_hit=True
        ):
            result = self._compiled(*args, **kwargs)
        # A key counts once its call succeeded.
        self._keys.add(key)
        num_graphs = torch_counters["stats"]["unique_graphs"] - graphs_before
        self.num_compilations += num_graphs
        if num_graphs:
            # A known key compiles again for example because of other strides.
            level = logging.INFO if is_new else logging.WARNING
            text = "compiled %d graphs%s in %.2f s for shape %d of at most %d: %s"
            again = "" if is_new else " again (TORCH_LOGS=recompiles shows why)"
            seconds = time.monotonic() - started
            limit = self._max_shapes
            logger.log(level, text, num_graphs, again, seconds, len(self._keys), limit, key)
        return result


def _key_of(value: Any) -> str:
    """Return a key of an argument: tensors by their properties, others by type or value.

    Containers are entered. Objects of other types are represented by their type.
    """
    if isinstance(value, torch.Tensor):
        gradient = " requires_grad" if value.requires_grad else ""
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{device}{gradient}"
    if isinstance(value, Mapping):
        return _key_of(list(value.items()))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_key_of, value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__
