"""`ParallelLayout`: how many ranks share a model, along which axes, and what follows from that.

Pure arithmetic without process groups, Ray or a model: rank order and groups, divisibility of the
axes, the multiples that rows and microbatches are padded to, and where ranks wait for each other.

The order of ranks is Megatron's "tp-cp-dp-pp": tp varies fastest with the rank, then cp, then dp,
and pp is outermost. So the ranks of one tp group are neighbours and, as workers fill one node after
another, share a node if tp divides its size. Expert parallelism is not a further axis of this grid:
its groups are consecutive ranks of one pipeline stage, across tp, cp and dp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nemo_like.integer_math import nearest_divisors, nearest_multiples, round_up
from nemo_like.training_engines import ENGINES, EngineName

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
"""Outermost first: the shape of a device mesh whose ranks are in row-major order."""
Reshard = Literal["auto", True, False]
"""When FSDP2 frees the weights that it has all-gathered: after each layer (`always`), after the
optimizer step (`never`), or as the size of the model suggests.
"""
Sync = Literal["microbatch", "step"]
"""Where the ranks of a layout wait for each other: at every microbatch, or once per optimizer step.
A plan balances work over the ranks between two such points.
"""
Oversize = Literal["error", "truncate", "drop", "singleton"]
"""Treatment of a row above the token limit of a microbatch: an error, or it is truncated, left out
or alone.
"""
RowLayout = Literal["packed", "padded"]
"""Rows of a microbatch: concatenated, or padded to the longest row of their microbatch."""
MAX_UNSHARDED_BYTES = 8 << 30
"""Largest float32 weights, in bytes per tensor-parallel rank, that FSDP2 leaves unsharded within a
step. That takes one all-gather and one reduce-scatter per optimizer step instead of one per
microbatch, at the cost of memory for unsharded weights and gradients.

The limit does not depend on the device, so that a plan can be made without it.
"""

_WORKERS = ("cluster.num_nodes", "cluster.workers_per_node")


class LayoutProblem(NamedTuple):
    """Something that is wrong with a layout: for an engine, for a model, or by itself."""

    keys: tuple[str, ...]
    """The config keys to change, the most likely one first."""
    text: str


class LayoutError(ValueError):
    """Sizes that do not form a layout."""

    def __init__(self, problems: Sequence[LayoutProblem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = tuple(problems)


class Coordinates(NamedTuple):
    """A rank's coordinate along each axis of the grid."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class PaddingMultiples:
    """Multiples of tokens to which rows and microbatches are padded."""

    row: int
    """Divides the padded length of every row."""
    total: int
    """Divides the positions of every microbatch."""

    @property
    def min_tokens(self) -> int:
        """Positions of the smallest microbatch: one row of the smallest legal length."""
        return self.tokens_of_row(1)

    def tokens_of_row(self, length: int) -> int:
        """Return the positions of a microbatch with one row of `length` tokens.

        It is also the smallest token budget that the row fits in.
        """
        return round_up(round_up(length, self.row), self.total)

    def capacity(self, max_tokens: int) -> int:
        """Return the positions of the largest microbatch within a budget of `max_tokens`."""
        return max_tokens // self.total * self.total

    def max_row_tokens(self, max_tokens: int) -> int:
        """Return the largest padded length of a row within a budget of `max_tokens`."""
        return self.capacity(max_tokens) // self.row * self.row


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of all axes. Raises LayoutError unless they fit together.

    Example: `ParallelLayout(dp=2, tp=2)` has 4 ranks; rank 3 is dp 1, tp 1; the tp groups are
    (0, 1) and (2, 3), the dp groups (0, 2) and (1, 3); ranks 0 and 2 are the output ranks of dp 0
    and dp 1.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert-parallel size: ranks over which a pipeline stage distributes its experts."""
    sequence_parallel: bool = False
    """Norms and residuals are sharded by tokens over the tensor-parallel ranks."""
    num_replicas: int = 1
    """Copies of the weights that FSDP2 keeps (HSDP): each is sharded over dp x cp / num_replicas
    ranks. The data-parallel ranks of a copy are consecutive.
    """
    reshard: Reshard = "auto"
    vpp: int = 1
    """Virtual stages (model chunks) of each pipeline stage, for the interleaved schedule."""
    dynamic_context: bool = False
    """A microbatch is divided over groups of the `cp` ranks."""

    def __post_init__(self) -> None:
        # Sizes below 1 first: the arithmetic of the other problems divides by them.
        problems = self._small_sizes()
        if not problems:
            problems = [
                *_sequence_problems(self.tp, self.sequence_parallel),
                *self._virtual_problems(),
                *self._context_problems(),
                *self._expert_problems(),
                *self._replica_problems(),
            ]
        if problems:
            raise LayoutError(problems)

    @classmethod
    def from_world_size(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        vpp: int = 1,
        sequence_parallel: bool = False,
        num_replicas: int = 1,
        reshard: Reshard = "auto",
        dynamic_context: bool = False,
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks; dp is what the other axes leave of them.

        Raises LayoutError, with the nearest valid sizes, if pp x cp x tp does not divide it or ep
        does not divide the ranks of a pipeline stage.
        """
        replica_size = pp * cp * tp
        dp, remainder = divmod(world_size, replica_size)
        if remainder or dp == 0:
            sizes = nearest_multiples(world_size, replica_size)
            quotient = world_size / replica_size
            text = (
                f"parallel.tensor {tp} x parallel.context {cp} x parallel.pipeline {pp} ="
                f" {replica_size} workers per model replica, and {world_size} workers /"
                f" {replica_size} = {quotient:.4g} replicas, not a whole number: use {sizes}"
                " workers"
            )
            keys = ("parallel.tensor", "parallel.context", "parallel.pipeline", *_WORKERS)
            problem = LayoutProblem(keys, text)
            raise LayoutError([problem, *_sequence_problems(tp, sequence_parallel)])
        return cls(
            pp, dp, cp, tp, ep, sequence_parallel, num_replicas, reshard, vpp, dynamic_context
        )

    @property
    def shape(self) -> Coordinates:
        return Coordinates(self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def replica_size(self) -> int:
        """Ranks of one model replica."""
        return self.pp * self.cp * self.tp

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the global rank at these coordinates. Raises ValueError outside the layout."""
        coordinates = Coordinates(pp, dp, cp, tp)
        for axis, coordinate, size in zip(AXES, coordinates, self.shape, strict=True):
            if not 0 <= coordinate < size:
                raise ValueError(f"{axis} {coordinate} is outside the axis, which has {size}")
        # Row-major order of [pp, dp, cp, tp].
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size} = {self}")
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        return self.coordinates(rank).dp

    def replica(self, rank: int) -> int:
        """Return the index of the copy of the weights that a global rank has a shard of."""
        return self.dp_rank(rank) * self.num_replicas // self.dp

    def ep_rank(self, rank: int) -> int:
        """Return the rank within the expert-parallel group of a global rank."""
        # Pipeline stages start at multiples of ep, because ep divides their size.
        return rank % self.ep

    def output_rank(self, dp_rank: int) -> int:
        """Return the rank that returns the results of a dp rank: last pp stage, cp 0, tp 0."""
        # Only the last pipeline stage computes the loss and the log-probs.
        return self.rank(pp=self.pp - 1, dp=dp_rank)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the process groups along `axes`: ranks whose other coordinates are equal.

        Every rank is in exactly one group.

        Example: `ParallelLayout(dp=2, tp=2).groups("tp") == ((0, 1), (2, 3))`;
        `.groups("dp", "tp") == ((0, 1, 2, 3),)`.
        """
        # Ranks of one group agree on the coordinates of all other axes, which identify the group.
        fixed = [axis for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for coordinates in itertools.product(*map(range, self.shape)):
            values = Coordinates(*coordinates)._asdict()
            key = tuple(values[axis] for axis in fixed)
            groups.setdefault(key, []).append(self.rank(**values))
        return tuple(tuple(ranks) for ranks in groups.values())

    @property
    def context_groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The process groups of each smaller context-parallel size above 1, largest first.

        Empty without `dynamic_context`. Example: `ParallelLayout(dp=2, cp=4, dynamic_context=True)`
        has one size, with the groups (0, 1), (2, 3), (4, 5), (6, 7).
        """
        sizes = []
        size = self.cp
        while self.dynamic_context and size % 2 == 0 and size > 2:
            size //= 2
            groups = [tuple(each) for ranks in self.groups("cp") for each in _parts(ranks, size)]
            sizes.append(tuple(groups))
        return tuple(sizes)

    def padding_multiples(
        self,
        row_layout: RowLayout,
        *,
        sequence_length_round: int = 1,
        microbatch_length_round: int = 1,
    ) -> PaddingMultiples:
        """Return the multiples that context and sequence parallelism require of token counts.

        Context parallelism divides each row into 2 x cp chunks (zig-zag); sequence parallelism
        divides the tokens of each context-parallel rank over the tensor-parallel group. Rows are
        also padded to `sequence_length_round`, and packed microbatches to
        `microbatch_length_round`.
        """
        num_chunks = 2 * self.cp if self.cp > 1 else 1
        num_shards = self.cp * self.tp if self.sequence_parallel else 1
        total = math.lcm(num_chunks, num_shards)
        row = math.lcm(sequence_length_round, num_chunks)
        # Packed rows are padded one by one and the total once; padded rows are all as long as the
        # longest, so each of them must also satisfy the multiple of the total.
        if row_layout == "padded":
            row = math.lcm(row, total)
        else:
            total = math.lcm(total, microbatch_length_round)
        return PaddingMultiples(row, total)

    def keeps_unsharded(self, engine: EngineName, num_params: int) -> bool:
        """Return True if a model of `num_params` parameters stays unsharded within a step.

        Only FSDP2 (dtensor) shards weights that it needs in full; Megatron-Core never does.
        """
        if not ENGINES[engine].shards_weights or self.reshard is True:
            return False
        return self.reshard is False or 4 * num_params / self.tp <= MAX_UNSHARDED_BYTES

    @property
    def num_shards(self) -> int:
        """Ranks over which FSDP2 shards one copy of the weights of a tensor-parallel rank."""
        return self.dp * self.cp // self.num_replicas

    def sync(self, engine: EngineName, num_params: int) -> Sync:
        """Return where ranks wait for each other with this engine and this size of the model."""
        # Stages exchange activations, and expert-parallel ranks tokens, in every microbatch.
        if self.pp > 1 or self.ep > 1:
            return "microbatch"
        # FSDP2 all-gathers each microbatch's weights unless they stay unsharded.
        gathers = ENGINES[engine].shards_weights and not self.keeps_unsharded(engine, num_params)
        return "microbatch" if gathers else "step"

    def engine_problems(self, engine: EngineName) -> list[LayoutProblem]:
        """Return a problem if this engine cannot form the expert-parallel groups."""
        if ENGINES[engine].experts_span_tensor or self.num_shards % self.ep == 0:
            return []
        divisors = nearest_divisors(self.num_shards, self.ep)
        text = (
            f"parallel.expert {self.ep} must with policy.engine {engine} divide data-parallel size"
            f" {self.dp} x parallel.context {self.cp} / parallel.replicas {self.num_replicas} ="
            f" {self.num_shards}: set parallel.expert to {divisors}"
        )
        return [LayoutProblem(("parallel.expert", "policy.engine", *_WORKERS), text)]

    def _small_sizes(self) -> list[LayoutProblem]:
        sizes = {
            "parallel.pipeline": self.pp,
            "data-parallel size": self.dp,
            "parallel.context": self.cp,
            "parallel.tensor": self.tp,
            "parallel.expert": self.ep,
            "parallel.virtual_pipeline": self.vpp,
            "parallel.replicas": self.num_replicas,
        }
        problems = []
        for key, size in sizes.items():
            if size < 1:
                text = f"{key} is {size}; a size is at least 1, which turns the axis off"
                problems.append(LayoutProblem((key,), text))
        return problems

    def _expert_problems(self) -> list[LayoutProblem]:
        """The experts of a pipeline stage are distributed over groups of equal size."""
        stage_size = self.world_size // self.pp
        if stage_size % self.ep == 0:
            return []
        quotient = stage_size / self.ep
        divisors = nearest_divisors(stage_size, self.ep)
        text = (
            f"parallel.expert {self.ep} must divide the workers of a pipeline stage,"
            f" {self.world_size} workers / parallel.pipeline {self.pp} = {stage_size}, and"
            f" {stage_size} / {self.ep} = {quotient:.4g}, not a whole number: set parallel.expert"
            f" to {divisors}"
        )
        return [LayoutProblem(("parallel.expert", "parallel.pipeline", *_WORKERS), text)]

    def _virtual_problems(self) -> list[LayoutProblem]:
        """Virtual stages need a pipeline."""
        if self.vpp == 1 or self.pp > 1:
            return []
        text = (
            f"parallel.virtual_pipeline is {self.vpp}, but it interleaves the layers of pipeline"
            " stages and parallel.pipeline is 1: set it to 1, or parallel.pipeline to 2 or more"
        )
        return [LayoutProblem(("parallel.virtual_pipeline", "parallel.pipeline"), text)]

    def _context_problems(self) -> list[LayoutProblem]:
        """Groups of context-parallel ranks need several ranks."""
        if not self.dynamic_context or self.cp > 1:
            return []
        text = (
            "parallel.dynamic_context is true, but it divides microbatches over the"
            " context-parallel ranks and parallel.context is 1: set it to false, or"
            " parallel.context to 2 or more"
        )
        return [LayoutProblem(("parallel.dynamic_context", "parallel.context"), text)]

    def _replica_problems(self) -> list[LayoutProblem]:
        """All copies of the weights have the same number of data-parallel ranks."""
        if self.dp % self.num_replicas == 0:
            return []
        divisors = nearest_divisors(self.dp, self.num_replicas)
        text = (
            f"parallel.replicas {self.num_replicas} must divide the data-parallel size, {self.dp}:"
            f" set it to {divisors}"
        )
        return [LayoutProblem(("parallel.replicas",), text)]

    def __str__(self) -> str:
        sizes = [f"{axis} {getattr(self, axis)}" for axis in AXES]
        text = " x ".join(sizes)
        if self.vpp > 1:
            text += f", {self.vpp} virtual stages"
        if self.dynamic_context:
            text += " (dynamic context)"
        if self.ep > 1:
            text += f", ep {self.ep}"
        if self.sequence_parallel:
            text += ", sequence parallel"
        if self.num_replicas > 1:
            text += f", {self.num_replicas} replicas"
        return text


def _parts(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Divide `ranks` into consecutive parts of `size`."""
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def engine_problems(
    engine: EngineName, *, pp: int, vpp: int = 1, num_replicas: int = 1, reshard: Reshard = "auto"
) -> list[LayoutProblem]:
    """Return a problem for each of these axes and options that the engine does not have."""
    problems = []
    if not ENGINES[engine].shards_weights:
        # Megatron-Core keeps the weights of a rank complete and shards the optimizer state.
        if num_replicas > 1:
            problems.append(
                f"parallel.replicas is {num_replicas}, but policy.engine megatron has the complete"
                " weights on every data-parallel rank: set it to 1, or policy.engine to dtensor"
            )
        if reshard != "auto":
            problems.append(
                f"parallel.reshard is {str(reshard).lower()}, but policy.engine megatron does not"
                " shard weights over the data-parallel ranks: set it to auto, or policy.engine to"
                " dtensor"
            )
    if not ENGINES[engine].has_pipeline:
        for name, size in (("pipeline", pp), ("virtual_pipeline", vpp)):
            if size > 1:
                problems.append(
                    f"parallel.{name} is {size}, but policy.engine dtensor has no pipeline: set it"
                    " to 1, or policy.engine to megatron"
                )
    return [LayoutProblem((text.split()[0], "policy.engine"), text) for text in problems]


def _sequence_problems(tp: int, sequence_parallel: bool) -> list[LayoutProblem]:
    """Sequence parallelism needs tensor-parallel ranks."""
    if not sequence_parallel or tp > 1:
        return []
    text = (
        "parallel.sequence is true, but it shards activations over the tensor-parallel group and"
        " parallel.tensor is 1: set it to false, or parallel.tensor to 2 or more"
    )
    return [LayoutProblem(("parallel.sequence", "parallel.tensor"), text)]
