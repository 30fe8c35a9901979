"""Input and element of a plan: `PlanSpec`, which holds all settings, and `Microbatch`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.planning.cost import CostModel
from nemo_like.integer_math import check_integer
from nemo_like.parallel_layout import Oversize, PaddingMultiples, ParallelLayout, RowLayout, Sync

Balance = Literal["flops", "tokens", "none"]
MicrobatchOrder = Literal["packer", "largest_first"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Input of one forward pass on one data-parallel rank.

    Example: rows 4 and 7 of 5 and 3 tokens, rounded to 4 and packed with a total multiple of 8:
    `Microbatch(rows=(4, 7), lengths=(5, 3), padded_lengths=(8, 4), num_tokens=16)`; padded it would
    be `padded_lengths=(8, 8), num_tokens=16`.
    """

    rows: tuple[int, ...]
    """Row indices: of the batch in a `BatchPlan`, of the rank's own shard in a `RankPlan`. Empty
    for a dummy with zero loss.
    """
    lengths: tuple[int, ...]
    """Real tokens of each row, without those removed by `oversize="truncate"`."""
    padded_lengths: tuple[int, ...]
    """Positions of each row: its length rounded up in the packed layout, the longest row of the
    microbatch in the padded layout.
    """
    num_tokens: int
    """Positions of the microbatch: the sum of `padded_lengths`, in the packed layout rounded up to
    `PlanSpec.total_multiple`.
    """

    @property
    def is_dummy(self) -> bool:
        """True without rows: it exists so that every rank runs the same number of microbatches."""
        return not self.rows


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """All inputs of the planner besides lengths. Raises ValueError for inconsistent values."""

    layout: RowLayout = "packed"
    """Rows concatenated, or rows padded to the longest row of their microbatch."""
    max_tokens: int | None = None
    """Maximum positions of a microbatch; None only in the padded layout with `max_rows`."""
    max_rows: int | None = None
    """Padded layout: maximum rows of a microbatch. Without `max_tokens` each microbatch takes this
    many rows in the given order.
    """
    num_ranks: int = 1
    """Data-parallel size."""
    global_batch_size: int | None = None
    """Rows per optimizer step; None: the batch is one step. Only the last step may have fewer."""
    algorithm: PackingAlgorithm | str = PackingAlgorithm.BALANCED
    """Packed layout: `balanced` packs rows and assigns them to ranks jointly. The bins of any other
    algorithm are unchanged and assigned to ranks by work.
    """
    balance: Balance = "flops"
    """Measure of work by which ranks are balanced. `none` assigns bins round-robin: bin b to rank
    b % num_ranks.
    """
    sync: Sync = "microbatch"
    """When ranks wait for each other: at every microbatch (sharded parameters, experts, pipelines)
    or once per optimizer step.
    """
    microbatch_order: MicrobatchOrder = "packer"
    """`largest_first` runs the microbatches of a rank by decreasing size, so that memory peaks at
    the first.
    """
    sequence_length_round: int = 1
    """Rows are padded to a multiple of this, in addition to what cp and tp require."""
    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    microbatch_multiple: int = 1
    """The number of microbatches of a step is a multiple of this, as a pipeline schedule may
    require.
    """
    oversize: Oversize = "error"
    """Policy for a row above the token limit: raise, truncate, run it alone with a warning, or drop
    it and count it.
    """
    cost: CostModel = field(default_factory=CostModel)
    """Work of a row, for `balance="flops"`."""
    seed: int = 0

    def __post_init__(self) -> None:
        # The dataclass is frozen; names are accepted in any case and stored as members.
        object.__setattr__(self, "algorithm", PackingAlgorithm(self.algorithm))
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is one of {', '.join(get_args(kind))}; got {getattr(self, name)!r}"
                )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, 1)
        self._check_limits()
        if self.layout == "packed" and self.balance == "none":
            self._check_round_robin()

    def _check_limits(self) -> None:
        """Raise ValueError unless the limits of a microbatch suit the layout and a row."""
        if self.max_tokens is None and self.layout == "packed":
            raise ValueError("the packed layout needs max_tokens")
        if self.max_tokens is None and self.max_rows is None:
            raise ValueError(
                "the padded layout needs max_tokens (a token budget) or max_rows (rows at a time)"
            )
        if self.max_rows is not None and self.layout == "packed":
            raise ValueError(
                "max_rows applies to the padded layout; the packed layout is limited by max_tokens"
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

    def _check_round_robin(self) -> None:
        """Raise ValueError for `balanced`, which cannot work without a measure of work."""
        if self.algorithm == PackingAlgorithm.BALANCED:
            raise ValueError(
                "algorithm balanced assigns rows to ranks by work and balance is none: set balance"
                " to flops or tokens, or algorithm to a bin packer such as best_fit_decreasing"
            )

    @property
    def row_multiple(self) -> int:
        """Number that divides every padded length: the lcm of `sequence_length_round` and 2 * cp,
        in the padded layout also of `total_multiple`.
        """
        return self.padding_multiples.row

    @property
    def total_multiple(self) -> int:
        """Number that divides the positions of a microbatch: the lcm of 2 * cp and, with sequence
        parallelism, cp * tp.
        """
        return self.padding_multiples.total

    @cached_property
    def padding_multiples(self) -> PaddingMultiples:
        """Multiples of tokens that follow from `cp_size`, `tp_size` and `sequence_parallel`."""
        parallel_layout = ParallelLayout(
            cp=self.cp_size,
            tp=self.tp_size,
            # Without tensor parallelism there is nothing to shard, and no multiple.
            sequence_parallel=self.sequence_parallel and self.tp_size > 1,
        )
        return parallel_layout.padding_multiples(
            self.layout, sequence_length_round=self.sequence_length_round
        )

    @property
    def dummy_tokens(self) -> int:
        """Positions of a dummy: one row of the smallest legal length."""
        return self.padding_multiples.min_tokens

    @property
    def capacity(self) -> int | None:
        """`max_tokens` rounded down to a multiple of `total_multiple`."""
        if self.max_tokens is None:
            return None
        return self.padding_multiples.capacity(self.max_tokens)

    @property
    def max_row_tokens(self) -> int:
        """Maximum padded length of a row within the capacity. Raises ValueError without a limit."""
        if self.max_tokens is None:
            raise ValueError("microbatches of max_rows rows have no token limit")
        return self.padding_multiples.max_row_tokens(self.max_tokens)

    @property
    def bins_multiple(self) -> int:
        """Number that divides the number of microbatches of a step over all ranks."""
        return self.num_ranks * self.microbatch_multiple

    @property
    def budget_key(self) -> str:
        """Configuration key of `max_tokens`, for messages."""
        section = "sequence_packing" if self.layout == "packed" else "dynamic_batching"
        return f"policy.{section}.train_mb_tokens"

    @property
    def logprob_budget_key(self) -> str:
        """Configuration key of the token limit of the log-prob pass."""
        return self.budget_key.replace("train_mb_tokens", "logprob_mb_tokens")

    def with_budget(self, max_tokens: int | None, max_rows: int | None) -> PlanSpec:
        """Return the same spec with other limits."""
        return replace(self, max_tokens=max_tokens, max_rows=max_rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "algorithm": str(self.algorithm)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PlanSpec:
        """Return the spec that `to_dict` converted."""
        return cls(**{**values, "cost": CostModel(**values["cost"])})


_CHOICES = {
    "layout": RowLayout,
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
