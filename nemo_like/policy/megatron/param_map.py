"""Which blocks of which Hugging Face weights a rank's Megatron parameters are made of. Pure
arithmetic: no tensors.

Every parameter is put together from rectangles of Hugging Face tensors, so one table serves reading
a model's files, handing out weights and gradients under their Hugging Face names, and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from nemo_like.distributed.parallel_layout import Topology
from nemo_like.models.spec import ModelSpec

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Piece(NamedTuple):
    """A rectangle of the Hugging Face tensor `name` and where it lies in the Megatron parameter."""

    name: str
    offset: Shape
    """Where it begins in the Hugging Face tensor."""
    shape: Shape
    local_offset: Shape
    """Where it begins in this rank's parameter."""

    @property
    def local(self) -> tuple[slice, ...]:
        return _slices(self.local_offset, self.shape)

    @property
    def whole(self) -> tuple[slice, ...]:
        return _slices(self.offset, self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows(self, start: int, stop: int) -> Piece:
        """The part in rows [start, stop) of the Megatron parameter, perhaps without any."""
        first = max(start, self.local_offset[0])
        last = max(first, min(stop, self.local_offset[0] + self.shape[0]))
        return Piece(
            self.name,
            (self.offset[0] + first - self.local_offset[0], *self.offset[1:]),
            (last - first, *self.shape[1:]),
            (first, *self.local_offset[1:]),
        )


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of one rank. Rows that no piece covers are padding of the
    vocabulary.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    is_owner: bool
    """False for a replica: of a norm on the other tp ranks, of a tied embedding on the last
    stage.
    """
    is_expert: bool = False
    """One expert of a mixture: Hugging Face stacks them, so its shape here has a leading 1 that the
    parameter has not.
    """


Table = dict[str, Entry]
"""By the name of the Megatron parameter, in the model's order."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Llama-like model and over how many ranks its layers, its matrices and its experts
    are spread.

    Example: with 4 heads, 2 of keys and values, head_dim 16 and tp 2, rank 1 holds 64 rows of the
    fused projection: rows 32-63 of q, then 16-31 of k, then 16-31 of v.
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    num_experts: int = 0
    expert_width: int = 0
    sparse_layers: frozenset[int] = frozenset()
    """Those whose feed-forward part is a mixture of experts."""
    pp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding on each tp rank; those beyond the vocabulary are padding."""
        return -(-self.vocabulary // self.tp)

    def layers(self, stage: int) -> range:
        """The layers of a pipeline stage; the first stages have one more where they do not divide
        evenly.
        """
        size, remainder = divmod(self.num_layers, self.pp)
        start = stage * size + min(stage, remainder)
        return range(start, start + size + (stage < remainder))

    def vocabulary_range(self, tp_rank: int) -> range:
        """The rows of the vocabulary a tp rank holds, perhaps none."""
        start = min(tp_rank * self.vocabulary_rows, self.vocabulary)
        return range(start, min(start + self.vocabulary_rows, self.vocabulary))

    def experts(self, ep_rank: int) -> range:
        """The experts an expert-parallel rank holds, whole ones."""
        size = self.num_experts // self.ep
        return range(ep_rank * size, (ep_rank + 1) * size)

    def table(self, stage: int, tp_rank: int, ep_rank: int = 0) -> Table:
        """The parameters of a rank at pipeline stage `stage`."""
        return dict(self._entries(stage, tp_rank, ep_rank))

    def _entries(self, stage: int, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, Entry]]:
        is_last = stage == self.pp - 1
        if stage == 0:
            yield (
                "embedding.word_embeddings.weight",
                self._vocabulary(EMBEDDING, tp_rank, is_owner=True),
            )
        for index, layer in enumerate(self.layers(stage)):
            feed_forward = self._mixture if layer in self.sparse_layers else self._dense
            parts = (self._attention, feed_forward)
            for name, entry in (
                item for part in parts for item in part(f"model.layers.{layer}", tp_rank, ep_rank)
            ):
                yield f"decoder.layers.{index}.{name}", entry
        if is_last:
            yield (
                "decoder.final_layernorm.weight",
                self._whole("model.norm.weight", (self.hidden,), tp_rank),
            )
        if is_last and not self.is_tied:
            yield "output_layer.weight", self._vocabulary(HEAD, tp_rank, is_owner=True)
        if is_last and self.is_tied and stage > 0:
            yield "output_layer.weight", self._vocabulary(EMBEDDING, tp_rank, is_owner=False)

    def _attention(self, layer: str, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, Entry]]:
        attention = f"{layer}.self_attn"
        yield (
            "input_layernorm.weight",
            self._whole(f"{layer}.input_layernorm.weight", (self.hidden,), tp_rank),
        )
        width = self.num_heads * self.head_dim
        yield (
            "self_attention.linear_proj.weight",
            self._columns(f"{attention}.o_proj.weight", width, tp_rank),
        )
        yield (
            "self_attention.linear_qkv.weight",
            self._qkv(attention, "weight", (self.hidden,), tp_rank),
        )
        if self.has_qkv_bias:
            yield "self_attention.linear_qkv.bias", self._qkv(attention, "bias", (), tp_rank)
        if self.has_qk_norm:
            yield (
                "self_attention.q_layernorm.weight",
                self._whole(f"{attention}.q_norm.weight", (self.head_dim,), tp_rank),
            )
            yield (
                "self_attention.k_layernorm.weight",
                self._whole(f"{attention}.k_norm.weight", (self.head_dim,), tp_rank),
            )
        norm = f"{layer}.post_attention_layernorm.weight"
        yield "pre_mlp_layernorm.weight", self._whole(norm, (self.hidden,), tp_rank)

    def _dense(self, layer: str, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, Entry]]:
        yield "mlp.linear_fc1.weight", self._gate_and_up(f"{layer}.mlp", tp_rank)
        yield (
            "mlp.linear_fc2.weight",
            self._columns(f"{layer}.mlp.down_proj.weight", self.intermediate, tp_rank),
        )

    def _mixture(self, layer: str, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, Entry]]:
        yield (
            "mlp.router.weight",
            self._whole(f"{layer}.mlp.gate.weight", (self.num_experts, self.hidden), tp_rank),
        )
        shapes = {
            "gate_up_proj": (1, 2 * self.expert_width, self.hidden),
            "down_proj": (1, self.hidden, self.expert_width),
        }
        for index, expert in enumerate(self.experts(ep_rank)):
            for (name, shape), linear in zip(
                shapes.items(), ("linear_fc1", "linear_fc2"), strict=True
            ):
                piece = Piece(f"{layer}.mlp.experts.{name}", (expert, 0, 0), shape, (0, 0, 0))
                entry = Entry(shape, (piece,), is_owner=True, is_expert=True)
                yield f"mlp.experts.local_experts.{index}.{linear}.weight", entry

    def _whole(self, name: str, shape: Shape, tp_rank: int) -> Entry:
        zeros = (0,) * len(shape)
        return Entry(shape, (Piece(name, zeros, shape, zeros),), is_owner=tp_rank == 0)

    def _columns(self, name: str, width: int, tp_rank: int) -> Entry:
        shape = (self.hidden, width // self.tp)
        return Entry(shape, (Piece(name, (0, tp_rank * shape[1]), shape, (0, 0)),), is_owner=True)

    def _vocabulary(self, name: str, tp_rank: int, *, is_owner: bool) -> Entry:
        rows = self.vocabulary_range(tp_rank)
        pieces = (Piece(name, (rows.start, 0), (len(rows), self.hidden), (0, 0)),) if rows else ()
        return Entry((self.vocabulary_rows, self.hidden), pieces, is_owner)

    def _gate_and_up(self, mlp: str, tp_rank: int) -> Entry:
        size = self.intermediate // self.tp
        pieces = (
            Piece(
                f"{mlp}.{half}_proj.weight",
                (tp_rank * size, 0),
                (size, self.hidden),
                (index * size, 0),
            )
            for index, half in enumerate(("gate", "up"))
        )
        return Entry((2 * size, self.hidden), tuple(pieces), is_owner=True)

    def _qkv(self, attention: str, kind: str, tail: Shape, tp_rank: int) -> Entry:
        """Rows of q, k and v alternate group by group, q rows of a group first; tp cuts this order
        in equal parts.
        """
        zeros = (0,) * len(tail)
        spans: list[tuple[str, int, int]] = []  # name, first row, rows
        group = self.num_heads // self.num_kv_heads * self.head_dim
        for index in range(self.num_kv_heads):
            spans.append((f"{attention}.q_proj.{kind}", index * group, group))
            spans.append((f"{attention}.k_proj.{kind}", index * self.head_dim, self.head_dim))
            spans.append((f"{attention}.v_proj.{kind}", index * self.head_dim, self.head_dim))
        size = sum(num_rows for _, _, num_rows in spans) // self.tp
        start, stop = tp_rank * size, (tp_rank + 1) * size
        pieces, position = [], 0
        for name, row, num_rows in spans:
            part = Piece(name, (row, *zeros), (num_rows, *tail), (position, *zeros)).rows(
                start, stop
            )
            if part.numel:
                pieces.append(part._replace(local_offset=(part.local_offset[0] - start, *zeros)))
            position += num_rows
        return Entry((size, *tail), tuple(pieces), is_owner=True)


def geometry_of(spec: ModelSpec, *, pp: int = 1, tp: int = 1, ep: int = 1) -> Geometry:
    """Return the sizes of a model of the types `llama`, `qwen2`, `qwen3` and `qwen3_moe`."""
    moe = spec.moe
    return Geometry(
        num_layers=spec.num_layers,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocabulary=spec.vocab_size,
        is_tied=spec.is_tied,
        has_qkv_bias=spec.has_qkv_bias,
        has_qk_norm=spec.has_qk_norm,
        num_experts=0 if moe is None else moe.num_experts,
        expert_width=0 if moe is None else moe.expert_size,
        sparse_layers=frozenset() if moe is None else moe.layers,
        pp=pp,
        tp=tp,
        ep=ep,
    )


def place_of(topology: Topology, ep: int, rank: int) -> tuple[int, int, int]:
    """(pipeline stage, tp rank, ep rank). Each `ep` neighbours of a stage share its experts, as
    Megatron-Core has it.
    """
    place = topology.coordinates(rank)
    return place.pp, place.tp, (rank - topology.rank(pp=place.pp)) % ep


def _slices(offset: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
