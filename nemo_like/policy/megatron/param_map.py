"""Map from each rank's Megatron-Core parameters to slices of Hugging Face weights. Integers only.

Every Megatron-Core parameter is assembled from rectangular slices of Hugging Face tensors. One map
serves the reading of model files, the export of weights and gradients under their Hugging Face
names, and checkpoints.
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


class HFSlice(NamedTuple):
    """A rectangle of the Hugging Face tensor `name` and its position in the Megatron parameter."""

    name: str
    offset: Shape
    """First element in the Hugging Face tensor, one index per dim."""
    shape: Shape
    local_offset: Shape
    """First element in this rank's Megatron parameter, one index per dim."""

    @property
    def local_index(self) -> tuple[slice, ...]:
        """Index of the rectangle in this rank's Megatron parameter."""
        return _index(self.local_offset, self.shape)

    @property
    def hf_index(self) -> tuple[slice, ...]:
        """Index of the rectangle in the Hugging Face tensor."""
        return _index(self.offset, self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def rows(self, start: int, stop: int) -> HFSlice:
        """Intersect with rows [start, stop) of the Megatron parameter; the result may be empty."""
        first = max(start, self.local_offset[0])
        last = max(first, min(stop, self.local_offset[0] + self.shape[0]))
        num_skipped_rows = first - self.local_offset[0]
        return HFSlice(
            self.name,
            (self.offset[0] + num_skipped_rows, *self.offset[1:]),
            (last - first, *self.shape[1:]),
            (first, *self.local_offset[1:]),
        )


@dataclass(frozen=True)
class ParamSpec:
    """One Megatron parameter of one rank. Rows without an HFSlice are padding of the vocabulary."""

    shape: Shape
    slices: tuple[HFSlice, ...]
    is_owner: bool
    """True on the one rank that reports the parameter. False for replicas: a norm on tp ranks
    above 0, a tied embedding on the last pipeline stage.
    """
    is_expert: bool = False
    """One expert of an MoE layer. Hugging Face stacks the experts, so `shape` has a leading 1 that
    the parameter itself does not have.
    """


ParamMap = dict[str, ParamSpec]
"""Parameters of one rank by Megatron-Core name, in the order of `model.named_parameters()`."""


@dataclass(frozen=True)
class ModelSharding:
    """A Llama-like model with its pipeline-, tensor- and expert-parallel sizes.

    Example: with 4 query heads, 2 key-value heads, head_dim 16 and tp 2, tp rank 1 has 64 rows of
    the fused projection: rows 32-63 of q, then 16-31 of k, then 16-31 of v.
    """

    spec: ModelSpec
    pp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def moe_layers(self) -> frozenset[int]:
        """Indices of the MoE layers."""
        return frozenset() if self.spec.moe is None else self.spec.moe.layers

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding on each tp rank, padding of the vocabulary included."""
        return -(-self.spec.vocab_size // self.tp)

    def layers(self, stage: int) -> range:
        """Layers of a pipeline stage; the first `num_layers % pp` stages have one more."""
        size, remainder = divmod(self.spec.num_layers, self.pp)
        start = stage * size + min(stage, remainder)
        has_extra_layer = stage < remainder
        return range(start, start + size + has_extra_layer)

    def vocabulary_range(self, tp_rank: int) -> range:
        """Vocabulary rows of a tp rank without padding; may be empty."""
        start = min(tp_rank * self.vocabulary_rows, self.spec.vocab_size)
        return range(start, min(start + self.vocabulary_rows, self.spec.vocab_size))

    def experts(self, ep_rank: int) -> range:
        """Experts of an expert-parallel rank; experts themselves are not sharded."""
        num_experts = 0 if self.spec.moe is None else self.spec.moe.num_experts
        size = num_experts // self.ep
        return range(ep_rank * size, (ep_rank + 1) * size)

    def param_map(self, stage: int, tp_rank: int, ep_rank: int = 0) -> ParamMap:
        """Return the parameters of a rank at pipeline stage `stage`."""
        return dict(self._specs(stage, tp_rank, ep_rank))

    def _specs(self, stage: int, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, ParamSpec]]:
        if stage == 0:
            embedding = self._vocabulary(EMBEDDING, tp_rank, is_owner=True)
            yield "embedding.word_embeddings.weight", embedding
        for index, layer in enumerate(self.layers(stage)):
            hf_layer = f"model.layers.{layer}"
            # Megatron-Core counts layers from 0 on each pipeline stage.
            prefix = f"decoder.layers.{index}"
            for name, spec in self._attention(hf_layer, tp_rank):
                yield f"{prefix}.{name}", spec
            if layer in self.moe_layers:
                mlp = self._moe_mlp(hf_layer, tp_rank, ep_rank)
            else:
                mlp = self._dense_mlp(hf_layer, tp_rank)
            for name, spec in mlp:
                yield f"{prefix}.{name}", spec
        if stage == self.pp - 1:
            yield from self._output_specs(stage, tp_rank)

    def _output_specs(self, stage: int, tp_rank: int) -> Iterator[tuple[str, ParamSpec]]:
        norm = self._replicated("model.norm.weight", (self.spec.hidden_size,), tp_rank)
        yield "decoder.final_layernorm.weight", norm
        if not self.spec.is_tied:
            yield "output_layer.weight", self._vocabulary(HEAD, tp_rank, is_owner=True)
        elif stage > 0:
            # The first stage owns a tied embedding; the last stage has a replica of it.
            yield "output_layer.weight", self._vocabulary(EMBEDDING, tp_rank, is_owner=False)

    def _attention(self, layer: str, tp_rank: int) -> Iterator[tuple[str, ParamSpec]]:
        attention = f"{layer}.self_attn"
        hidden_shape = (self.spec.hidden_size,)
        input_norm = self._replicated(f"{layer}.input_layernorm.weight", hidden_shape, tp_rank)
        yield "input_layernorm.weight", input_norm
        width = self.spec.num_heads * self.spec.head_dim
        o_proj = self._column_range(f"{attention}.o_proj.weight", width, tp_rank)
        yield "self_attention.linear_proj.weight", o_proj
        qkv = self._qkv(attention, "weight", hidden_shape, tp_rank)
        yield "self_attention.linear_qkv.weight", qkv
        if self.spec.has_qkv_bias:
            yield "self_attention.linear_qkv.bias", self._qkv(attention, "bias", (), tp_rank)
        if self.spec.has_qk_norm:
            head_shape = (self.spec.head_dim,)
            q_norm = self._replicated(f"{attention}.q_norm.weight", head_shape, tp_rank)
            yield "self_attention.q_layernorm.weight", q_norm
            k_norm = self._replicated(f"{attention}.k_norm.weight", head_shape, tp_rank)
            yield "self_attention.k_layernorm.weight", k_norm
        norm = f"{layer}.post_attention_layernorm.weight"
        yield "pre_mlp_layernorm.weight", self._replicated(norm, hidden_shape, tp_rank)

    def _dense_mlp(self, layer: str, tp_rank: int) -> Iterator[tuple[str, ParamSpec]]:
        yield "mlp.linear_fc1.weight", self._gate_and_up(f"{layer}.mlp", tp_rank)
        down = self._column_range(
            f"{layer}.mlp.down_proj.weight", self.spec.intermediate_size, tp_rank
        )
        yield "mlp.linear_fc2.weight", down

    def _moe_mlp(self, layer: str, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, ParamSpec]]:
        moe = self.spec.moe
        assert moe is not None, "only MoE layers have experts"
        router_shape = (moe.num_experts, self.spec.hidden_size)
        router = self._replicated(f"{layer}.mlp.gate.weight", router_shape, tp_rank)
        yield "mlp.router.weight", router
        experts = f"{layer}.mlp.experts"
        fc1_shape = (1, 2 * moe.expert_size, self.spec.hidden_size)
        fc2_shape = (1, self.spec.hidden_size, moe.expert_size)
        for index, expert in enumerate(self.experts(ep_rank)):
            local_expert = f"mlp.experts.local_experts.{index}"
            fc1 = _expert_spec(f"{experts}.gate_up_proj", expert, fc1_shape)
            yield f"{local_expert}.linear_fc1.weight", fc1
            fc2 = _expert_spec(f"{experts}.down_proj", expert, fc2_shape)
            yield f"{local_expert}.linear_fc2.weight", fc2

    def _replicated(self, name: str, shape: Shape, tp_rank: int) -> ParamSpec:
        """Spec of a weight that every tp rank has in full; tp rank 0 owns it."""
        zeros = (0,) * len(shape)
        return ParamSpec(shape, (HFSlice(name, zeros, shape, zeros),), is_owner=tp_rank == 0)

    def _column_range(self, name: str, width: int, tp_rank: int) -> ParamSpec:
        """Spec of a row-parallel weight: its `width` columns (input features) are sharded."""
        shape = (self.spec.hidden_size, width // self.tp)
        hf_slice = HFSlice(name, (0, tp_rank * shape[1]), shape, (0, 0))
        return ParamSpec(shape, (hf_slice,), is_owner=True)

    def _vocabulary(self, name: str, tp_rank: int, *, is_owner: bool) -> ParamSpec:
        shape = (self.vocabulary_rows, self.spec.hidden_size)
        rows = self.vocabulary_range(tp_rank)
        if not rows:
            return ParamSpec(shape, (), is_owner)
        hf_slice = HFSlice(name, (rows.start, 0), (len(rows), self.spec.hidden_size), (0, 0))
        return ParamSpec(shape, (hf_slice,), is_owner)

    def _gate_and_up(self, mlp: str, tp_rank: int) -> ParamSpec:
        """Spec of the fused gate and up projection: this rank's gate rows, then its up rows."""
        size = self.spec.intermediate_size // self.tp
        shape = (size, self.spec.hidden_size)
        offset = (tp_rank * size, 0)
        gate = HFSlice(f"{mlp}.gate_proj.weight", offset, shape, (0, 0))
        up = HFSlice(f"{mlp}.up_proj.weight", offset, shape, (size, 0))
        return ParamSpec((2 * size, self.spec.hidden_size), (gate, up), is_owner=True)

    def _qkv(self, attention: str, kind: str, tail: Shape, tp_rank: int) -> ParamSpec:
        """Spec of the fused q, k and v projection: `weight` with `tail` [hidden], or `bias`.

        Megatron-Core orders the rows by key-value group: the q rows of a group, then its k rows,
        then its v rows. Each tp rank has an equal, contiguous part of this order.
        """
        zeros = (0,) * len(tail)
        fused_rows = self._fused_qkv_rows(attention, kind)
        size = sum(num_rows for _, _, num_rows in fused_rows) // self.tp
        start = tp_rank * size
        stop = start + size
        slices = []
        position = 0
        for name, row, num_rows in fused_rows:
            unsharded = HFSlice(name, (row, *zeros), (num_rows, *tail), (position, *zeros))
            part = unsharded.rows(start, stop)
            if part.numel:
                slices.append(part._replace(local_offset=(part.local_offset[0] - start, *zeros)))
            position += num_rows
        return ParamSpec((size, *tail), tuple(slices), is_owner=True)

    def _fused_qkv_rows(self, attention: str, kind: str) -> list[tuple[str, int, int]]:
        """(Hugging Face name, first row, number of rows) in the row order of the fused weight."""
        group_size = self.spec.num_heads // self.spec.num_kv_heads * self.spec.head_dim
        rows: list[tuple[str, int, int]] = []
        for group in range(self.spec.num_kv_heads):
            rows.append((f"{attention}.q_proj.{kind}", group * group_size, group_size))
            rows.append(
                (f"{attention}.k_proj.{kind}", group * self.spec.head_dim, self.spec.head_dim)
            )
            rows.append(
                (f"{attention}.v_proj.{kind}", group * self.spec.head_dim, self.spec.head_dim)
            )
        return rows


def parallel_coords(topology: Topology, ep: int, rank: int) -> tuple[int, int, int]:
    """Return (pipeline stage, tp rank, ep rank) of a global rank.

    An expert-parallel group is `ep` consecutive ranks of one pipeline stage, as in Megatron-Core.
    """
    coordinates = topology.coordinates(rank)
    first_rank_of_stage = topology.rank(pp=coordinates.pp)
    return coordinates.pp, coordinates.tp, (rank - first_rank_of_stage) % ep


def _expert_spec(name: str, expert: int, shape: Shape) -> ParamSpec:
    """Spec of one unsharded expert, which is index `expert` of the stacked Hugging Face tensor."""
    hf_slice = HFSlice(name, (expert, 0, 0), shape, (0, 0, 0))
    return ParamSpec(shape, (hf_slice,), is_owner=True, is_expert=True)


def _index(offset: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
