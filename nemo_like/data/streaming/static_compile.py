"""torch.compile for static shapes, with a limit on the number of shapes and a log of each.

Every new shape adds a compiled graph to memory. Without a limit here, torch compiles 8 shapes
(`torch._dynamo.config.recompile_limit`) and runs further ones without compilation, with a warning
only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters as torch_counters

logger = logging.getLogger(__name__)

OnLimit = Literal["error", "reset", "eager"]

_MAX_GRAPHS = 2**20
"""Limit of torch over all compiled functions, larger than the limits per function allow."""


class ShapeLimitError(RuntimeError):
    """A call had one shape more than `max_shapes`."""


def compile_mode(num_processes: int) -> str:
    """Return the mode of torch.compile: CUDA graphs for one process with a GPU, else the default.

    Collectives between the graphs of a model on several processes prevent CUDA graphs.
    """
    if num_processes == 1 and torch.cuda.is_available():
        return "reduce-overhead"
    return "default"


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

    With mode `reduce-overhead` the outputs of a call are overwritten by the next one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        max_shapes: int = 16,
        on_limit: OnLimit = "error",
        backend: str = "inductor",
        mode: str | None = None,
        num_processes: int | None = None,
    ) -> None:
        """Compile at the first call of each shape.

        Args:
            function: a module or a function of tensors.
            max_shapes: maximum number of compiled keys at a time.
            on_limit: what happens above it.
            backend: backend of torch.compile.
            mode: mode of the inductor backend; None is `compile_mode(num_processes)`.
            num_processes: processes of the run; None is the size of the default process group, or 1
                without one.

        Calls raise torch's FailOnRecompileLimitHit after 2 × `max_shapes` compilations, which only
        unexpected recompilations can reach.

        Raises:
            ValueError: for an invalid argument, or for mode `reduce-overhead` with several
                processes.
        """
        if max_shapes < 1:
            raise ValueError(f"max_shapes is {max_shapes}: give at least 1")
        if on_limit not in get_args(OnLimit):
            raise ValueError(f"on_limit is {on_limit!r}: give error, reset or eager")
        if num_processes is None:
            num_processes = dist.get_world_size() if dist.is_initialized() else 1
        if backend != "inductor" and mode is not None:
            raise ValueError(f"mode is {mode!r}: only backend inductor has modes, not {backend}")
        if mode == "reduce-overhead" and num_processes > 1:
            raise ValueError(
                f"mode is reduce-overhead with {num_processes} processes: CUDA graphs need one "
                "process, leave mode out"
            )
        if mode is None and backend == "inductor":
            mode = compile_mode(num_processes)
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
        self._num_compilations = 0
        self._num_recompilations = 0
        self._num_resets = 0
        self._num_eager_calls = 0

    @property
    def num_shapes(self) -> int:
        """Keys that are compiled at present."""
        return len(self._keys)

    @property
    def num_compilations(self) -> int:
        """Graphs compiled so far; one per key, and more for a function with graph breaks."""
        return self._num_compilations

    @property
    def num_unexpected_recompilations(self) -> int:
        """Calls with a known key that compiled again, for example because of other strides."""
        return self._num_recompilations

    @property
    def num_resets(self) -> int:
        """Calls of `torch.compiler.reset()`."""
        return self._num_resets

    @property
    def num_eager_calls(self) -> int:
        """Calls without compilation."""
        return self._num_eager_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; compiles it for a new key. Raises ShapeLimitError."""
        key = self._key(args, kwargs)
        is_new = key not in self._keys
        if is_new and len(self._keys) >= self._max_shapes:
            if self._on_limit == "eager":
                self._log_eager(key)
                return self._function(*args, **kwargs)
            self._reset_or_raise(key)
        graphs_before = torch_counters["stats"]["unique_graphs"]
        start_time = time.monotonic()
        # Beyond its limits torch would run without compilation, with a warning only.
        with torch._dynamo.config.patch(
            accumulated_recompile_limit=_MAX_GRAPHS, fail_on_recompile_limit_hit=True
        ):
            result = self._compiled(*args, **kwargs)
        num_graphs = torch_counters["stats"]["unique_graphs"] - graphs_before
        # A key counts once its call succeeded.
        self._keys.add(key)
        if num_graphs:
            self._log_compilation(key, is_new, num_graphs, time.monotonic() - start_time)
        return result

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what decides whether a call with these arguments compiles."""
        is_training = isinstance(self._function, torch.nn.Module) and self._function.training
        return _key_of(args), _key_of(kwargs), torch.is_grad_enabled(), is_training

    def _log_eager(self, key: Any) -> None:
        """Count a call without compilation, and log the first."""
        self._num_eager_calls += 1
        if self._num_eager_calls == 1:
            logger.warning(
                "max_shapes=%d is reached: calls of other shapes are not compiled, first %s",
                self._max_shapes,
                _text(key),
            )

    def _reset_or_raise(self, key: Any) -> None:
        """Apply the policies `error` and `reset` to a key above the limit."""
        if self._on_limit == "error":
            raise ShapeLimitError(
                f"a call with {_text(key)} needs compilation {len(self._keys) + 1}, max_shapes is "
                f"{self._max_shapes}: pad to fewer shapes, raise max_shapes, or set on_limit to "
                "reset or eager"
            )
        torch.compiler.reset()
        self._keys.clear()
        self._num_resets += 1
        logger.warning(
            "max_shapes=%d is reached: reset %d of all compiled functions, for %s",
            self._max_shapes,
            self._num_resets,
            _text(key),
        )

    def _log_compilation(self, key: Any, is_new: bool, num_graphs: int, seconds: float) -> None:
        """Count and log the graphs that a call compiled."""
        self._num_compilations += num_graphs
        if is_new:
            logger.info(
                "compiled %d graphs in %.2f s for shape %d of %d: %s",
                num_graphs,
                seconds,
                len(self._keys),
                self._max_shapes,
                _text(key),
            )
            return
        self._num_recompilations += 1
        logger.warning(
            "compiled %d graphs again in %.2f s for a known shape, TORCH_LOGS=recompiles shows "
            "why: %s",
            num_graphs,
            seconds,
            _text(key),
        )


def _key_of(value: Any) -> Any:
    """Return a hashable key of an argument: tensors by their properties, others by type or value.

    Containers are entered. Objects of other types are represented by their type.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, str(value.device), value.requires_grad
    if isinstance(value, Mapping):
        return tuple((name, _key_of(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_key_of(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    return type(value).__name__


def _text(key: Any) -> str:
    """Return the arguments of a key for messages, without repeated modes."""
    args, kwargs, is_grad_enabled, is_training = key
    modes = f"gradients {'on' if is_grad_enabled else 'off'}"
    if is_training:
        modes += ", training mode"
    named = [f"{name}={_argument_text(item)}" for name, item in kwargs]
    return f"({', '.join([*map(_argument_text, args), *named])}), {modes}"


def _argument_text(key: Any) -> str:
    """Return the key of one argument for messages, a tensor as `[2, 8] float32`."""
    if isinstance(key, tuple) and len(key) == 4 and isinstance(key[1], torch.dtype):
        return f"{list(key[0])} {str(key[1]).removeprefix('torch.')}"
    return str(key)
