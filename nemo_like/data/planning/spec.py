"""Input and element of a plan: `PlanSpec`, which holds all settings, and `Microbatch`.

Ranks are balanced by the work of a row, `CostModel`. Its tokens determine memory; other modules
compare them with the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.integer_math import check_integer, round_up
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import Oversize, PaddingMultiples, ParallelLayout, RowLayout, Sync

Balance = Literal["flops", "tokens", "none"]
MicrobatchOrder = Literal["packer", "largest_first"]
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
    "microbatch_length_round",
    "cp_size",
    "tp_size",
    "microbatch_multiple",
    "pp_size",
    "vpp_size",
)


@dataclass(frozen=True)
class CostModel:
    """Forward work of a row of L tokens: `linear * L + quadratic * L^2`, for causal attention.

    `head` is the part of `linear` for the output projection, which is computed for tokens with loss
    only: with n of them the work is `head * (L - n)` less.

    With a sliding `window`, the share `windowed_share` of the quadratic part (its layers) sees at
    most `window` tokens back, so beyond the window it grows by the line `window * (2 * L - window)`
    instead of `L^2`.

    The default is a dense 7B model in units of its attention: hidden size h = 4096 gives 24 h^2 L
    of matrices and 2 h L^2 of causal attention per layer, that is 12 h = 49152 to 1.

    Example: `CostModel(linear=10, quadratic=1, window=4).of([2, 6])` is `[24, 60 + 4 * 8] = [24,
    92]`. With `head=3` and `num_trained=[2, 1]` it is `[24, 92 - 3 * 5] = [24, 77]`.
    """

    linear: float = 49152.0
    quadratic: float = 1.0
    window: int | None = None
    windowed_share: float = 1.0
    head: float = 0.0

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ValueError(
                f"a cost needs weights >= 0, not both 0; got linear={self.linear},"
                f" quadratic={self.quadratic}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is a number of tokens >= 1 or None; got {self.window}")
        if not 0.0 <= self.windowed_share <= 1.0:
            raise ValueError(f"windowed_share is between 0 and 1; got {self.windowed_share}")
        if not 0.0 <= self.head <= self.linear:
            raise ValueError(
                f"head is a part of linear, between 0 and {self.linear}; got {self.head}"
            )

    def of(
        self,
        lengths: Sequence[int] | np.ndarray,
        num_trained: Sequence[int] | np.ndarray | None = None,
        shared: np.ndarray | None = None,
    ) -> np.ndarray:
        """Work of each row, float64 of the shape of `lengths`.

        `num_trained` are the tokens of each row with loss; None: all positions. In a row with
        `shared` leading tokens that another row computes, only the others are work; they attend to
        all.
        """
        if shared is None:
            return self.products(lengths, num_trained) + self._attention(lengths)
        products = self.products(lengths - shared, num_trained)
        return products + self._attention(lengths) - self._attention(shared)

    def products(
        self,
        lengths: Sequence[int] | np.ndarray,
        num_trained: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Work of the products with weights alone, float64; see `of`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        work = self.linear * tokens
        if num_trained is None:
            return work
        return work - self.head * (tokens - np.asarray(num_trained, dtype=np.float64))

    def _attention(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.asarray(lengths, dtype=np.float64)
        square = tokens * tokens
        if self.window is not None:
            # Twice the area under min(position, window), which without a window is L^2.
            seen = np.minimum(tokens, self.window)
            full = (1.0 - self.windowed_share) * square
            square = full + self.windowed_share * seen * (2.0 * tokens - seen)
        return self.quadratic * square

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> CostModel:
        """Return the work of a model in forward FLOPs.

        It is `2 * P_active` per token and `2 * sum_layers H * d` per token squared, for H heads of
        dimension d. Layers of linear attention add no quadratic work.
        """
        linear = 2.0 * spec.num_active_params
        head = 2.0 * spec.head_params
        if spec.head == "scores":
            # One product per row, and not per token: it is not counted.
            linear -= head
            head = 0.0
        windows = []
        for layer in range(spec.num_layers):
            if layer not in spec.linear_attention_layers:
                windows.append(spec.windows[layer])
        windowed = [window for window in windows if window is not None]
        return cls(
            linear=linear,
            quadratic=float(len(windows) * spec.attention_width),
            window=max(windowed, default=None),
            windowed_share=len(windowed) / len(windows) if windowed else 1.0,
            head=head,
        )


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
    """Positions of each row: its tokens that are not `shared` rounded up in the packed layout, the
    longest row of the microbatch in the padded layout.
    """
    num_tokens: int
    """Positions of the microbatch: the sum of `padded_lengths`, in the packed layout rounded up to
    `PlanSpec.total_multiple`.
    """
    shared: tuple[int, ...] = ()
    """Leading tokens that each row has in common with the row before it, which are computed there:
    a row has positions for its other tokens only. Empty: all rows are complete.
    """
    has_images: bool = False
    """A row of this microbatch, or of one that another rank computes at the same time, has an
    image: all of them compute the vision tower.
    """
    context_first: tuple[int, ...] = ()
    """With `PlanSpec.dynamic_context` the first context-parallel rank of each row's group; the rows
    of a group are adjacent.
    """
    context_size: tuple[int, ...] = ()
    """The ranks of each row's group."""

    def on_context_rank(self, rank: int, spec: PlanSpec) -> tuple[Microbatch, PlanSpec, int]:
        """Return (the part of context-parallel rank `rank`, its spec, the rank in its group).

        Without `PlanSpec.dynamic_context` that is the microbatch itself; with it the rows of one
        group, or a dummy of one rank.
        """
        if not spec.dynamic_context:
            return self, spec, rank
        groups = zip(self.context_first, self.context_size, strict=True)
        own = [index for index, (first, size) in enumerate(groups) if first <= rank < first + size]
        if not own:
            alone = spec.of_context(1)
            return Microbatch((), (), (), alone.dummy_tokens, (), self.has_images), alone, 0
        start, stop = own[0], own[-1] + 1
        group_spec = spec.of_context(self.context_size[start])
        padded_lengths = self.padded_lengths[start:stop]
        part = Microbatch(
            self.rows[start:stop],
            self.lengths[start:stop],
            padded_lengths,
            round_up(sum(padded_lengths), group_spec.total_multiple),
            self.shared[start:stop] if any(self.shared[start:stop]) else (),
            self.has_images,
        )
        return part, group_spec, rank - self.context_first[start]

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
    """Rows, or episodes where rows belong to some, per optimizer step; None: the batch is one step.
    Only the last step may have fewer.
    """
    algorithm: PackingAlgorithm | str = PackingAlgorithm.BALANCED
    """Packed layout: `balanced` packs rows and assigns them to ranks jointly. The bins of any other
    algorithm are assigned to ranks by work. Where their number is not a multiple of the ranks (and
    of `microbatch_multiple`), the fullest ones, up to all of them, are first repacked into more
    bins.
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
    microbatch_length_round: int = 1
    """Packed layout: microbatches are padded to a multiple of this, in addition to what cp and tp
    require. With `max_tokens` all microbatches, dummies included, have this one shape.
    """
    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    microbatch_multiple: int = 1
    """The number of microbatches of a step is a multiple of this, as a pipeline schedule may
    require.
    """
    pp_size: int = 1
    """Pipeline stages; with several, `balanced` takes more microbatches for a smaller bubble."""
    vpp_size: int = 1
    """Virtual stages of each pipeline stage."""
    oversize: Oversize = "error"
    """Policy for a row above the token limit: raise, truncate, run it alone with a warning, or drop
    it and count it.
    """
    cost: CostModel = field(default_factory=CostModel)
    """Work of a row, for `balance="flops"`."""
    seed: int = 0
    dynamic_context: bool = False
    """Packed layout: the rows of a microbatch are divided over groups of the `cp_size` ranks."""
    image_weight: float = 0.0
    """Packed layout: the limit of a microbatch counts an image token as so many tokens more, for
    the activations of the vision tower.
    """

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
        if self.dynamic_context and (self.layout != "packed" or self.cp_size == 1):
            raise ValueError(
                "dynamic_context divides packed microbatches over context-parallel ranks; got"
                f" layout={self.layout}, cp_size={self.cp_size}"
            )
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
        if self.microbatch_length_round > 1 and self.layout == "padded":
            raise ValueError(
                "microbatch_length_round applies to the packed layout; set sequence_length_round"
            )
        if self.max_tokens is not None and self.max_row_tokens < self.row_multiple:
            raise ValueError(
                f"{self.budget_key} is {self.max_tokens}, less than the shortest row: rows are"
                f" padded to multiples of "
                f"{self.row_multiple} and microbatches to multiples of {self.total_multiple} "
                f"(sequence_length_round={self.sequence_length_round},"
                f" microbatch_length_round={self.microbatch_length_round}, cp_size={self.cp_size},"
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

    @cached_property
    def row_multiple(self) -> int:
        """Number that divides every padded length: the lcm of `sequence_length_round` and 2 * cp,
        in the padded layout also of `total_multiple`.
        """
        return self.padding_multiples.row

    @property
    def total_multiple(self) -> int:
        """Number that divides the positions of a microbatch: the lcm of 2 * cp, with sequence
        parallelism cp * tp, and in the packed layout `microbatch_length_round`.
        """
        return self.padding_multiples.total

    @cached_property
    def padding_multiples(self) -> PaddingMultiples:
        """Multiples of tokens that follow from `cp_size`, `tp_size` and `sequence_parallel`."""
        return self._multiples(self.cp_size, self.microbatch_length_round)

    def _multiples(self, cp_size: int, microbatch_length_round: int) -> PaddingMultiples:
        parallel_layout = ParallelLayout(
            cp=cp_size,
            tp=self.tp_size,
            # Without tensor parallelism there is nothing to shard, and no multiple.
            sequence_parallel=self.sequence_parallel and self.tp_size > 1,
        )
        return parallel_layout.padding_multiples(
            self.layout,
            sequence_length_round=self.sequence_length_round,
            microbatch_length_round=microbatch_length_round,
        )

    @property
    def dummy_tokens(self) -> int:
        """Positions of a dummy: one row of the smallest legal length."""
        return self.padding_multiples.min_tokens

    @property
    def has_token_limit(self) -> bool:
        """False if microbatches are limited by `max_rows` alone."""
        return self.max_tokens is not None

    @property
    def capacity(self) -> int:
        """`max_tokens` rounded down to a multiple of `total_multiple`.

        Raises ValueError without a token limit.
        """
        return self.padding_multiples.capacity(self._token_limit)

    @cached_property
    def max_row_tokens(self) -> int:
        """Maximum padded length of a row within the capacity. Raises ValueError without a limit."""
        return self.padding_multiples.max_row_tokens(self._token_limit)

    @property
    def _token_limit(self) -> int:
        if self.max_tokens is None:
            raise ValueError("microbatches of max_rows rows have no token limit")
        return self.max_tokens

    @cached_property
    def context_sizes(self) -> tuple[int, ...]:
        """Sizes of context-parallel groups: `cp_size`, and with `dynamic_context` its halves."""
        sizes = [self.cp_size]
        while self.dynamic_context and sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        # A dummy of a rank without rows needs no other rank.
        return tuple(dict.fromkeys((*sizes, 1))) if self.dynamic_context else tuple(sizes)

    @cached_property
    def _of_context(self) -> dict[int, PlanSpec]:
        return {size: self._with_context(size) for size in self.context_sizes}

    def of_context(self, size: int) -> PlanSpec:
        """Return the spec of a context-parallel group of `size` of the `cp_size` ranks.

        It has the share of the limit and of `microbatch_length_round`.
        """
        return self._of_context[size]

    def _with_context(self, size: int) -> PlanSpec:
        assert self.max_tokens is not None, "the packed layout has a limit"
        length_round = max(self.microbatch_length_round * size // self.cp_size, 1)
        # Room for at least the shortest row.
        multiples = self._multiples(size, length_round)
        return replace(
            self,
            cp_size=size,
            max_tokens=max(self.max_tokens * size // self.cp_size, multiples.min_tokens),
            microbatch_length_round=length_round,
            dynamic_context=False,
        )

    @property
    def bins_multiple(self) -> int:
        """Number that divides the number of microbatches of a step over all ranks."""
        return self.num_ranks * self.microbatch_multiple

    @property
    def bubble_microbatches(self) -> float:
        """Idle time of a stage while the pipeline fills and empties, in times of a microbatch.

        Each of the other stages delays a stage by a chunk, 1 / vpp of the layers of a stage.
        """
        return (self.pp_size - 1) / self.vpp_size

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
        values = {**asdict(self), "algorithm": str(self.algorithm)}
        # Plans without these have the bytes of earlier releases.
        for name in ("image_weight", "dynamic_context"):
            if not values[name]:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PlanSpec:
        """Return the spec that `to_dict` converted."""
        return cls(**{**values, "cost": CostModel(**values["cost"])})


@dataclass(frozen=True)
class RankPlan:
    """Microbatches of one rank, with row indices into the rank's own shard."""

    microbatches: tuple[Microbatch, ...]
    step_offsets: tuple[int, ...]
    """Bounds of each optimizer step in `microbatches`, equal on all ranks."""
    spec: PlanSpec

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.step_offsets) - 1

    def step(self, step: int) -> tuple[Microbatch, ...]:
        """Return the microbatches of optimizer step `step`; raises IndexError out of range."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        return self.microbatches[self.step_offsets[step] : self.step_offsets[step + 1]]
