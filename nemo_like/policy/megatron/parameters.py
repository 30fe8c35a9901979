"""Tensors between Hugging Face names and Megatron parameters: from model files, from checkpoints,
and whole to rank 0.

Whatever its size, a model passes here one parameter at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import is_local
from nemo_like.distributed import activity
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.policy.megatron.param_map import Entry, Geometry, Piece, Shape, place_of

Read = Callable[[str, Shape, Shape], Tensor]
"""(Hugging Face name, offset, shape) -> that block, on the CPU."""


def assemble(entry: Entry, read: Read, start: int = 0, stop: int | None = None) -> Tensor:
    """float32 rows [start, stop) of a rank's parameter, on the CPU; padding of the vocabulary is
    0.
    """
    activity.note(f"reading weights of shape {tuple(entry.shape)}")
    stop = entry.shape[0] if stop is None else stop
    rows = torch.zeros(stop - start, *entry.shape[1:])
    for piece in entry.pieces:
        part = piece.rows(start, stop)
        if part.numel:
            rows.narrow(0, part.local_offset[0] - start, part.shape[0]).copy_(
                read(part.name, part.offset, part.shape)
            )
    return rows


class ModelFiles:
    """The safetensors files of a Hugging Face model, of which any block can be read without the
    rest.

    The experts of a mixture are one tensor each in most files and stacked in the model; here they
    look stacked.
    """

    def __init__(self, model_name: str, files: Mapping[str, Any]) -> None:
        self.model_name = model_name
        self._files = files

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ConfigError unless every weight is there, in its shape."""
        for name, shape in shapes.items():
            for stored, expected in self._stored(name, shape):
                found = (
                    tuple(self._files[stored].get_slice(stored).get_shape())
                    if stored in self._files
                    else None
                )
                if found != expected:
                    state = (
                        f"have no {stored}"
                        if found is None
                        else f"have {stored} in shape {list(found)}"
                    )
                    raise ConfigError(
                        f"the files of policy.model_name={self.model_name} {state}; its config.json"
                        f" asks for {list(expected)}"
                    )

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A block, in the files' precision."""
        block = tuple(
            slice(start, start + length) for start, length in zip(offset, shape, strict=True)
        )
        if name in self._files:
            return self._files[name].get_slice(name)[block]
        experts = range(offset[0], offset[0] + shape[0])
        whole = [
            torch.cat([self._files[part].get_tensor(part) for part in _expert_parts(name, expert)])
            for expert in experts
        ]
        return torch.stack(whole)[:, *block[1:]]

    def _stored(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """The tensors that make up `name` in the files, with their shapes."""
        if name in self._files or _STACKED.fullmatch(name) is None:
            yield name, shape
            return
        for expert in range(shape[0]):
            parts = _expert_parts(name, expert)
            for part in parts:
                yield part, (shape[1] // len(parts), *shape[2:])


_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def _expert_parts(name: str, expert: int) -> list[str]:
    """The tensors of one expert of a stack, of which the rows follow each other."""
    match = _STACKED.fullmatch(name)
    assert match is not None, f"{name} is no stack of experts"
    experts, kind = match.groups()
    return [f"{experts}.{expert}.{part}_proj.weight" for part in kind.split("_")]


@contextmanager
def open_model(model_name: str) -> Iterator[ModelFiles]:
    """The files of `policy.model_name`, a directory or a cached hub name. Raises ConfigError where
    there are none.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_files(model_name):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        yield ModelFiles(model_name, files)


def _weight_files(model_name: str) -> list[Path]:
    single = _cached(model_name, SAFE_WEIGHTS_NAME)
    if single is not None:
        return [single]
    index = _cached(model_name, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise ConfigError(
            f"policy.model_name={model_name} has neither {SAFE_WEIGHTS_NAME} nor"
            f" {SAFE_WEIGHTS_INDEX_NAME};"
            " policy.engine=megatron reads only safetensors files: save the model as such"
        )
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    paths = {name: _cached(model_name, name) for name in names}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise ConfigError(
            f"policy.model_name={model_name} lacks {missing[0]}, which its"
            f" {SAFE_WEIGHTS_INDEX_NAME} names"
        )
    return [path for path in paths.values() if path is not None]


def _cached(model_name: str, file_name: str) -> Path | None:
    found = cached_file(
        model_name,
        file_name,
        local_files_only=is_local(model_name),
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)


class _Holding(NamedTuple):
    """A parameter that has pieces of some Hugging Face tensor, and who has it."""

    stage: int
    place: int
    """The tp rank; of an expert the ep rank."""
    is_expert: bool
    parameter: str
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


class Outbox:
    """Whole tensors under Hugging Face names on rank 0, from the parts the ranks hold."""

    def __init__(
        self, geometry: Geometry, topology: Topology, rank: int, device: torch.device
    ) -> None:
        self._topology = topology
        self._ep = geometry.ep
        self._rank = rank
        self._device = device
        self._holdings: dict[str, list[_Holding]] = {}
        for stage in range(geometry.pp):
            for tp_rank in range(geometry.tp):
                for parameter, entry in geometry.table(stage, tp_rank).items():
                    if not entry.is_expert:
                        self._hold(stage, tp_rank, parameter, entry)
            for ep_rank in range(geometry.ep):
                for parameter, entry in geometry.table(stage, 0, ep_rank).items():
                    if entry.is_expert:
                        self._hold(stage, ep_rank, parameter, entry)

    def whole(
        self,
        names: Sequence[str],
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        local: Callable[[str], Tensor],
    ) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor on rank 0 and an empty one elsewhere. Every rank iterates to
        the end.

        `local(parameter)` is this rank's Megatron parameter (or its gradient) in the shape of its
        table; it is called at the same time on all ranks that hold the same parameter, and so may
        use their collectives.
        """
        for name in names:
            full = torch.empty(
                shapes[name] if self._rank == 0 else 0, dtype=dtype, device=self._device
            )
            for holding in self._holdings[name]:
                self._bring(holding, full, local)
            yield name, full

    def _bring(self, holding: _Holding, full: Tensor, local: Callable[[str], Tensor]) -> None:
        stage, tp_rank, ep_rank = place_of(self._topology, self._ep, self._rank)
        holder = (
            self._topology.rank(pp=holding.stage) + holding.place
        )  # the first; tp, and ep, are neighbours
        parts = None
        if (stage, ep_rank if holding.is_expert else tp_rank) == (holding.stage, holding.place):
            parameter = local(holding.parameter)
            if self._rank == holder:
                parts = torch.cat(
                    [parameter[piece.local].reshape(-1) for piece in holding.pieces]
                ).to(full.dtype)
        if holder != 0 and self._rank == holder:
            assert parts is not None
            dist.send(parts, dst=0)
        elif holder != 0 and self._rank == 0:
            parts = torch.empty(holding.numel, dtype=full.dtype, device=full.device)
            dist.recv(parts, src=holder)
        if self._rank == 0:
            assert parts is not None
            sizes = [piece.numel for piece in holding.pieces]
            for piece, part in zip(holding.pieces, parts.split(sizes), strict=True):
                full[piece.whole] = part.view(piece.shape)

    def _hold(self, stage: int, place: int, parameter: str, entry: Entry) -> None:
        if not entry.is_owner:
            return
        for name in dict.fromkeys(piece.name for piece in entry.pieces):
            pieces = tuple(piece for piece in entry.pieces if piece.name == name)
            self._holdings.setdefault(name, []).append(
                _Holding(stage, place, entry.is_expert, parameter, pieces)
            )
