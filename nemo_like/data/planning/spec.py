"""The words of a plan: a microbatch, and everything the planner is told besides lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import lcm
from typing import Any, Literal, get_args

from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.planning.cost import CostModel

Layout = Literal["packed", "padded"]
Balance = Literal["flops", "tokens", "none"]
Sync = Literal["microbatch", "step"]
MicrobatchOrder = Literal["packer", "largest_first"]
Oversize = Literal["error", "truncate", "singleton", "drop"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one forward sees on one data-parallel rank.

    Example: rows 4 and 7 of 5 and 3 tokens, rounded to 4 and packed with a total multiple of 8:
    `Microbatch(rows=(4, 7), lengths=(5, 3), padded_lengths=(8, 4), num_tokens=16)`; padded it would
    be `padded_lengths=(8, 8), num_tokens=16`.
    """

    rows: tuple[int, ...]
    """Row indices: of the batch in a `BatchPlan`, of the rank's own shard in a `RankPlan`. Empty: a
    dummy with zero loss.
    """
    lengths: tuple[int, ...]
    """Real tokens kept of each row; fewer than it has only where its end was cut off
    (`oversize="truncate"`).
    """
    padded_lengths: tuple[int, ...]
    """Positions each row occupies: its length rounded up when packed, the longest of the microbatch
    when padded.
    """
    num_tokens: int
    """Positions of the microbatch: the sum of `padded_lengths`, when packed rounded up to
    `PlanSpec.total_multiple`.
    """

    @property
    def is_dummy(self) -> bool:
        """No rows: it runs so that every rank runs the same number of microbatches."""
        return not self.rows


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Everything the planner needs besides lengths. Raises ValueError with the way out where values
    do not fit together.
    """

    layout: Layout = "packed"
    """Rows end to end, or rows padded to the longest of their microbatch."""
    max_tokens: int | None = None
    """Cap on the positions of a microbatch; None only in the padded layout with `max_rows`."""
    max_rows: int | None = None
    """Padded layout: most rows of a microbatch. Without `max_tokens` rows are taken in the given
    order, so many at a time.
    """
    num_ranks: int = 1
    """Data-parallel ranks."""
    global_batch_size: int | None = None
    """Rows per optimizer step; None: the whole batch is one step. Only the last step may have
    fewer.
    """
    algorithm: PackingAlgorithm | str = PackingAlgorithm.BEST_FIT_DECREASING
    """The packer. Best fit decreasing is formed and balanced in one; another's bins are kept and
    dealt to ranks by work.
    """
    balance: Balance = "flops"
    """What ranks are balanced by. `none` deals the packer's bins in turn: bin b to rank b %
    num_ranks.
    """
    sync: Sync = "microbatch"
    """Where ranks wait for each other: at every microbatch (sharded parameters, experts, pipelines)
    or once a step.
    """
    microbatch_order: MicrobatchOrder = "packer"
    """`largest_first` runs the microbatches of a rank by decreasing size, so that memory peaks at
    the first.
    """
    sequence_length_round: int = 1
    """Rows are padded to a multiple of this, together with what cp and tp need."""
    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    microbatch_multiple: int = 1
    """Microbatches of a step are a multiple of this, as a pipeline schedule may need."""
    oversize: Oversize = "error"
    """A row above the cap: stop, cut its end off, run it alone with a warning, or leave it out and
    count it.
    """
    cost: CostModel = field(default_factory=CostModel)
    """Work of a row, for `balance="flops"`."""
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", PackingAlgorithm(self.algorithm))
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is one of {', '.join(get_args(kind))}; got {getattr(self, name)!r}"
                )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is an integer >= 1; got {value}")
        if self.max_tokens is None and (self.layout == "packed" or self.max_rows is None):
            needed = (
                "max_tokens"
                if self.layout == "packed"
                else "max_tokens (a token budget) or max_rows (rows at a time)"
            )
            raise ValueError(f"the {self.layout} layout needs {needed}")
        if self.max_rows is not None and self.layout == "packed":
            raise ValueError(
                "max_rows is of the padded layout; the packed layout is bounded by max_tokens"
            )
        if self.max_tokens is not None and self.max_row_tokens < self.row_multiple:
            raise ValueError(
                f"{self.budget_key} is {self.max_tokens}, less than the shortest row: rows are"
                f" padded to multiples of "
                f"{self.row_multiple} and microbatches to multiples of {self.total_multiple} "
                f"(sequence_length_round={self.sequence_length_round}, cp_size={self.cp_size},"
                f" tp_size={self.tp_size}, "
                f"sequence_parallel={self.sequence_parallel}); it must be at least"
                f" {self.dummy_tokens}"
            )

    @property
    def row_multiple(self) -> int:
        """What every padded length is a multiple of: the rounding asked and 2 * cp; when padded
        also `total_multiple`.
        """
        multiple = lcm(self.sequence_length_round, 2 * self.cp_size if self.cp_size > 1 else 1)
        return multiple if self.layout == "packed" else lcm(multiple, self.total_multiple)

    @property
    def total_multiple(self) -> int:
        """What the positions of a microbatch are a multiple of: 2 * cp, and cp * tp under sequence
        parallelism.
        """
        chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        return lcm(chunks, self.cp_size * self.tp_size if self.sequence_parallel else 1)

    @property
    def dummy_tokens(self) -> int:
        """Positions of a dummy: one row of the smallest legal length."""
        return round_up(self.row_multiple, self.total_multiple)

    @property
    def capacity(self) -> int | None:
        """Most positions of a microbatch that are a legal total, at most `max_tokens`."""
        return (
            None
            if self.max_tokens is None
            else self.max_tokens // self.total_multiple * self.total_multiple
        )

    @property
    def max_row_tokens(self) -> int:
        """Longest row that fits the cap alone, a multiple of `row_multiple`; without a cap there is
        none.
        """
        if self.capacity is None:
            raise ValueError("rows taken max_rows at a time have no token cap")
        return self.capacity // self.row_multiple * self.row_multiple

    @property
    def bins_multiple(self) -> int:
        """What the number of microbatches of a step over all ranks is a multiple of."""
        return self.num_ranks * self.microbatch_multiple

    @property
    def budget_key(self) -> str:
        """The configuration key behind `max_tokens`, for messages."""
        return f"policy.{'sequence_packing' if self.layout == 'packed' else 'dynamic_batching'}.train_mb_tokens"

    @property
    def logprob_budget_key(self) -> str:
        """The configuration key behind the token limit of the log-prob pass."""
        return self.budget_key.replace("train_mb_tokens", "logprob_mb_tokens")

    def with_budget(self, max_tokens: int | None, max_rows: int | None) -> PlanSpec:
        """The same under other caps."""
        return replace(self, max_tokens=max_tokens, max_rows=max_rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "algorithm": str(self.algorithm)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PlanSpec:
        """The inverse of `to_dict`."""
        return cls(**{**values, "cost": CostModel(**values["cost"])})


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


_CHOICES = {
    "layout": Layout,
    "balance": Balance,
    "sync": Sync,
    "microbatch_order": MicrobatchOrder,
    "oversize": Oversize,
}
_COUNTS = (
    "max_tokens",
    "max_rows",
    "num_ranks",
    "global_batch_size",
    "sequence_length_round",
    "cp_size",
    "tp_size",
    "microbatch_multiple",
)
