"""Map from each rank's Megatron-Core parameters to slices of Hugging Face weights. Integers only.

Every Megatron-Core parameter is assembled from rectangular slices of Hugging Face tensors. One map
serves the reading of model files, the export of weights and gradients under their Hugging Face
names, and checkpoints. `families.family.Family.param_map` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from nemo_like.integer_math import block_index, ceil_div
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.parallel_layout import ParallelLayout

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
        return block_index(self.local_offset, self.shape)

    @property
    def hf_index(self) -> tuple[slice, ...]:
        """Index of the rectangle in the Hugging Face tensor."""
        return block_index(self.offset, self.shape)

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
    """One expert of an MoE layer, or this rank's experts stacked. Hugging Face stacks them, so
    `shape` of a single one has a leading 1 that the parameter itself does not have.
    """


ParamMap = dict[str, ParamSpec]
"""Parameters of one rank by Megatron-Core name, in the order of `model.named_parameters()`."""


@dataclass(frozen=True)
class ModelSharding:
    """A Llama-like model with its pipeline-, tensor- and expert-parallel sizes.

    Each rank has `vpp` model chunks: chunk c of pipeline stage s is virtual stage c * pp + s.

    Example: with 4 query heads, 2 key-value heads, head_dim 16 and tp 2, tp rank 1 has 64 rows of
    the fused projection: rows 32-63 of q, then 16-31 of k, then 16-31 of v.
    """

    spec: ModelSpec
    pp: int = 1
    tp: int = 1
    ep: int = 1
    vpp: int = 1

    @classmethod
    def of(cls, spec: ModelSpec, layout: ParallelLayout) -> ModelSharding:
        """Return the sharding of a model over the ranks of `layout`."""
        return cls(spec, pp=layout.pp, tp=layout.tp, ep=layout.ep, vpp=layout.vpp)

    @property
    def num_virtual_stages(self) -> int:
        """Model chunks of all pipeline stages."""
        return self.pp * self.vpp

    def chunks(self, stage: int) -> dict[str, int]:
        """Return prefix of parameter names -> virtual stage, for each chunk of a pipeline stage."""
        # As the names in a `nn.ModuleList`; a single chunk is not in a list.
        virtual_stages = range(stage, self.num_virtual_stages, self.pp)
        if self.vpp == 1:
            return {"": stage}
        return {f"{chunk}.": virtual for chunk, virtual in enumerate(virtual_stages)}

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding on each tp rank, padding of the vocabulary included."""
        # Megatron-Core needs equal shards, so the vocabulary is padded to a multiple of tp.
        return ceil_div(self.spec.vocab_size, self.tp)

    def layers(self, stage: int) -> range:
        """Layers of a virtual stage; the first `num_layers % num_virtual_stages` have one more."""
        size, remainder = divmod(self.spec.num_layers, self.num_virtual_stages)
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


class RankParams:
    """Collects the parameter map of one rank in `specs`; a family adds the parameters of a layer.

    Methods named after a sharding take the size of the full tensor and add this rank's shard.
    """

    def __init__(self, sharding: ModelSharding, tp_rank: int, ep_rank: int) -> None:
        self.spec = sharding.spec
        self.specs: ParamMap = {}
        self.buffers: dict[str, str] = {}
        """Buffers in files, by Megatron-Core name the Hugging Face name."""
        self._sharding = sharding
        self._hidden = sharding.spec.hidden_size
        self._tp_rank = tp_rank
        self._ep_rank = ep_rank

    @property
    def experts(self) -> range:
        """Indices of the experts of this rank."""
        return self._sharding.experts(self._ep_rank)

    def add_replicated(self, name: str, hf_name: str, shape: Shape) -> None:
        """Add a weight that every tp rank has in full; tp rank 0 owns it."""
        zeros = (0,) * len(shape)
        hf_slice = HFSlice(hf_name, zeros, shape, zeros)
        self.specs[name] = ParamSpec(shape, (hf_slice,), is_owner=self._tp_rank == 0)

    def add_row_parallel(self, name: str, hf_name: str, width: int) -> None:
        """Add [hidden size, width] whose columns (input features) are sharded over the tp ranks."""
        size = width // self._sharding.tp
        shape = (self._hidden, size)
        hf_slice = HFSlice(hf_name, (0, self._tp_rank * size), shape, (0, 0))
        self.specs[name] = ParamSpec(shape, (hf_slice,), is_owner=True)

    def add_column_parallel(
        self, name: str, hf_names: Sequence[str], width: int, num_inputs: int | None = None
    ) -> None:
        """Add fused weights [width, inputs] whose rows (output features) are sharded.

        The inputs are the hidden states by default.

        The rank's rows of the first Hugging Face tensor come first, then its rows of the second,
        and so on, as in Megatron-Core's fused gate and up projection.
        """
        size = width // self._sharding.tp
        num_inputs = num_inputs or self._hidden
        shape = (size, num_inputs)
        first_row = self._tp_rank * size
        offset = (first_row, 0)
        slices = []
        num_rows = 0
        for hf_name in hf_names:
            local_offset = (num_rows, 0)
            slices.append(HFSlice(hf_name, offset, shape, local_offset))
            num_rows += size
        fused_shape = (num_rows, num_inputs)
        self.specs[name] = ParamSpec(fused_shape, tuple(slices), is_owner=True)

    def add_qkv(self, name: str, hf_attention: str, kind: Literal["weight", "bias"]) -> None:
        """Add the fused q, k and v projection: its weight [rows, hidden size], or its bias [rows].

        Each tp rank has an equal, contiguous part of the fused rows.
        """
        tail = (self._hidden,) if kind == "weight" else ()
        zeros = (0,) * len(tail)
        fused = []
        num_rows = 0
        for hf_name, first_row, length in self._fused_qkv_rows(hf_attention, kind):
            hf_slice = HFSlice(
                hf_name,
                offset=(first_row, *zeros),
                shape=(length, *tail),
                local_offset=(num_rows, *zeros),
            )
            fused.append(hf_slice)
            num_rows += length
        # A rank's rows may begin and end inside a projection.
        size = num_rows // self._sharding.tp
        start = self._tp_rank * size
        slices = []
        for unsharded in fused:
            part = unsharded.rows(start, start + size)
            if part.numel == 0:
                continue
            local_row = part.local_offset[0] - start
            slices.append(part._replace(local_offset=(local_row, *zeros)))
        shape = (size, *tail)
        self.specs[f"{name}.{kind}"] = ParamSpec(shape, tuple(slices), is_owner=True)

    def add_experts(self, name: str, hf_name: str, experts: range, shape: Shape) -> None:
        """Add unsharded experts: indices `experts` of the stacked tensor [experts, *shape]."""
        zeros = (0,) * len(shape)
        hf_slice = HFSlice(
            hf_name, (experts.start, *zeros), (len(experts), *shape), local_offset=(0, *zeros)
        )
        self.specs[name] = ParamSpec(hf_slice.shape, (hf_slice,), is_owner=True, is_expert=True)

    def add_sharded_vector(self, name: str, hf_name: str, size: int) -> None:
        """Add [size], whose elements are sharded over the tp ranks."""
        shape = (size // self._sharding.tp,)
        hf_slice = HFSlice(hf_name, (self._tp_rank * shape[0],), shape, local_offset=(0,))
        self.specs[name] = ParamSpec(shape, (hf_slice,), is_owner=True)

    def add_embedding(self, prefix: str) -> None:
        """Add the input embedding, which the first virtual stage has; `prefix` is of its chunk."""
        name = f"{prefix}embedding.word_embeddings.weight"
        self._add_vocabulary(name, EMBEDDING, is_owner=True)

    def add_output(self, prefix: str, *, is_first_stage: bool) -> None:
        """Add the final norm and the output head, which the last virtual stage has."""
        norm = f"{prefix}decoder.final_layernorm.weight"
        self.add_replicated(norm, "model.norm.weight", (self._hidden,))
        if self.spec.head == "scores":
            self.add_replicated(f"{prefix}{SCORE_WEIGHT}", SCORE_WEIGHT, (1, self._hidden))
            return
        head = f"{prefix}output_layer.weight"
        if not self.spec.is_tied:
            self._add_vocabulary(head, HEAD, is_owner=True)
        elif not is_first_stage:
            # The first stage owns a tied embedding; the last stage has a replica of it. On a single
            # stage both are one parameter.
            self._add_vocabulary(head, EMBEDDING, is_owner=False)

    def _add_vocabulary(self, name: str, hf_name: str, *, is_owner: bool) -> None:
        """Add an embedding whose rows are sharded; the last ranks may have only padding."""
        rows = self._sharding.vocabulary_range(self._tp_rank)
        slices: tuple[HFSlice, ...] = ()
        if rows:
            shape = (len(rows), self._hidden)
            offset = (rows.start, 0)
            slices = (HFSlice(hf_name, offset, shape, (0, 0)),)
        padded_shape = (self._sharding.vocabulary_rows, self._hidden)
        self.specs[name] = ParamSpec(padded_shape, slices, is_owner)

    def _fused_qkv_rows(self, hf_attention: str, kind: str) -> list[tuple[str, int, int]]:
        """Return (Hugging Face name, first row, number of rows) in the order of the fused rows.

        Megatron-Core orders them by key-value group: the q rows of a group, its k rows, its v rows.
        """
        head_dim = self.spec.head_dim
        num_kv_heads = self.spec.num_kv_heads
        heads_per_group = self.spec.num_heads // num_kv_heads
        q_size = heads_per_group * head_dim
        q_name = f"{hf_attention}.q_proj.{kind}"
        k_name = f"{hf_attention}.k_proj.{kind}"
        v_name = f"{hf_attention}.v_proj.{kind}"
        rows = []
        for group in range(num_kv_heads):
            kv_row = group * head_dim
            rows.append((q_name, group * q_size, q_size))
            rows.append((k_name, kv_row, head_dim))
            rows.append((v_name, kv_row, head_dim))
        return rows


def parallel_coords(parallel_layout: ParallelLayout, rank: int) -> tuple[int, int, int]:
    """Return (pipeline stage, tp rank, ep rank) of a global rank."""
    coordinates = parallel_layout.coordinates(rank)
    return coordinates.pp, coordinates.tp, parallel_layout.ep_rank(rank)
