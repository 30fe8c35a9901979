"""Predicted peak memory of one GPU, by part, as a function of the tokens per microbatch.

Arithmetic from sizes; nothing is allocated. The formulas describe this package: FSDP2 over dp x cp
with float32 master weights and AdamW, log-probs in chunks, attention that saves no score matrix.
docs/planner.md has every formula in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from nemo_like.config.schema import ActivationCheckpointing
from nemo_like.integer_math import ceil_div
from nemo_like.models.adapters import BYTES_PER_VALUE
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import Placement, frozen_share, matrix_sizes
from nemo_like.training_engines import ENGINES

GIB = 1 << 30
CONTEXT_BYTES = 2 * GIB
"""CUDA context, kernels and NCCL buffers of a process."""
SAFETY_SHARE = 0.10
"""Share of the remaining memory reserved for fragmentation and for parts without a formula."""


def usable_bytes(device_gib: float) -> float:
    """Return the bytes of a device that a plan may use."""
    return max(0.0, (device_gib * GIB - CONTEXT_BYTES) * (1.0 - SAFETY_SHARE))


def fitting_checkpointing(
    peaks: Mapping[ActivationCheckpointing, float], device_bytes: float | None
) -> ActivationCheckpointing:
    """Return the first mode of `peaks`, mode -> predicted bytes, that fits into a device.

    The last one if none fits; `none` without peaks and for a device without a limit (None).
    """
    if device_bytes is None or not peaks:
        return "none"
    usable = usable_bytes(device_bytes / GIB)
    for mode, peak in peaks.items():
        if peak <= usable:
            return mode
    return list(peaks)[-1]


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes of one GPU of the pipeline stage with the highest peak, by max tokens."""

    spec: ModelSpec
    placement: Placement
    keys_per_token: float = 1.0
    """Keys that attention reads per token of a microbatch: a row with a shared prefix reads copies
    of its keys.
    """
    image_share: float | None = None
    """Share of the tokens of a microbatch that are of images. None: any, and `max_tokens` is a
    limit that counts an image token `image_weight` times more.
    """

    def peak(self, max_tokens: int) -> float:
        """Return the peak bytes with microbatches of up to `max_tokens`."""
        return sum(self.parts(max_tokens).values())

    def checkpointing_peaks(self, max_tokens: int) -> dict[ActivationCheckpointing, float]:
        """Return mode of `policy.activation_checkpointing` -> `peak`, the fastest mode first."""
        peaks = {}
        for mode in get_args(ActivationCheckpointing):
            placement = replace(self.placement, activation_checkpointing=mode)
            peaks[mode] = replace(self, placement=placement).peak(max_tokens)
        return peaks

    def parts(self, max_tokens: int) -> dict[str, float]:
        """Return part -> bytes at the moment of the peak, in the order of the charts."""
        if self.spec.vision is None:
            return self._parts(max_tokens, 0.0)
        if self.image_share is not None:
            return self._parts(max_tokens, self.image_share * max_tokens)
        # Text alone has the most logits, images alone the most pixels.
        tokens = max_tokens / (1 + self.image_weight)
        either = (self._parts(max_tokens, 0.0), self._parts(tokens, tokens))
        return max(either, key=lambda parts: sum(parts.values()))

    @property
    def image_weight(self) -> float:
        """Activations of an image token in a trained tower over those of a token of the language
        model; 0 for another tower, which keeps none.

        Each rank of context parallelism computes all images of its rows.
        """
        place = self.placement
        if self.spec.vision is None or place.trained_vision != "all":
            return 0.0
        recomputed = place.activation_checkpointing != "none"
        saved = self.spec.vision.saved_bytes(itemsize=place.compute_bytes, recomputed=recomputed)
        language = self.spec.num_layers * self.activations.saved_bytes
        return round(place.parallel_layout.cp * saved / language, 3)

    def _parts(self, max_tokens: float, image_tokens: float) -> dict[str, float]:
        """See `parts`; `image_tokens` of the tokens are of images."""
        # The first stage has the most microbatches in flight, the last one the logits; the stages
        # between have less of both.
        stages = {0, self.placement.parallel_layout.pp - 1}
        parts_of_stages = [self._stage(max_tokens, image_tokens, stage) for stage in stages]
        if self.placement.teachers:
            # A teacher computes beside the state of the policy and without its activations.
            tokens = max_tokens / self.placement.parallel_layout.cp
            computing = {"teacher": TeacherMemory(self.placement).computing(tokens)}
            parts_of_stages += [self._stage_state(stage) | computing for stage in stages]
        return max(parts_of_stages, key=lambda parts: sum(parts.values()))

    def largest_budget(self, num_bytes: float, multiple: int) -> int:
        """Return the largest multiple of `multiple` tokens whose peak is at most `num_bytes`.

        It is 0 if even `multiple` tokens do not fit.
        """
        if self.peak(multiple) > num_bytes:
            return 0
        # Doubling, then bisection; `low` always fits and `high` never does.
        low = 1
        high = 2
        while self.peak(high * multiple) <= num_bytes:
            low = high
            high = 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.peak(middle * multiple) <= num_bytes:
                low = middle
            else:
                high = middle
        return low * multiple

    @property
    def keeps_unsharded(self) -> bool:
        """True if the engine leaves a small model unsharded between the microbatches of a step."""
        place = self.placement
        return place.parallel_layout.keeps_unsharded(place.engine, self.spec.num_params)

    @property
    def activations(self) -> Activations:
        """Activations per token."""
        return Activations(self.spec, self.placement, self.keys_per_token)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of optimizer state per trained parameter, without master weights.

        AdamW has two float32 moments. Muon has one for the matrices of layers, whose norms and
        biases are neglected. 8-bit moments have a code per value and a float32 scale per block of
        256. Adapters are trained with AdamW.
        """
        place = self.placement
        if place.has_adapters or place.optimizer == "adamw":
            return 8.0
        if place.optimizer == "adamw_8bit":
            return 2 * (1 + 4 / 256)
        in_layers = self.spec.num_layers * self.spec.layer_params / self.spec.num_params
        return 8.0 - 4.0 * in_layers

    @property
    def logit_bytes(self) -> int:
        """Bytes per logit of a chunk: float32, beside the compute precision if that is smaller."""
        if self.placement.teachers:
            # Chunks are a quarter as large, of which up to nine exist in float32.
            return 9
        return 6 if self.placement.compute_bytes == 2 else 4

    def _stage(self, max_tokens: float, image_tokens: float, stage: int) -> dict[str, float]:
        """Return part -> bytes of one pipeline stage at its peak in training."""
        parallel_layout = self.placement.parallel_layout
        is_last = stage == parallel_layout.pp - 1
        tokens = max_tokens / parallel_layout.cp
        parts = self._stage_state(stage)
        saved = self.activations.saved_bytes
        parts["activations"] = tokens * self._stage_layers * saved * self.num_in_flight(stage)
        if self.spec.vision is not None:
            language = self.spec.num_layers * saved / parallel_layout.cp
            per_token = self.spec.vision.patch_bytes + self.image_weight * language
            parts["images"] = image_tokens * per_token
        peaks = {"backward": self._backward(tokens, is_last)}
        if is_last and self.spec.head == "vocabulary":
            peaks["logits"] = self._logits(tokens)
        name = max(peaks, key=lambda peak: peaks[peak])
        return parts | {name: peaks[name]}

    @property
    def _stage_layers(self) -> int:
        """Layers of the pipeline stage that has the most."""
        layout = self.placement.parallel_layout
        # The first virtual stages have one layer more.
        size, remainder = divmod(self.spec.num_layers, layout.pp * layout.vpp)
        return size * layout.vpp + ceil_div(remainder, layout.pp)

    def num_in_flight(self, stage: int) -> float:
        """Return the microbatches whose activations a pipeline stage has at its peak."""
        pp, vpp = self.placement.parallel_layout.pp, self.placement.parallel_layout.vpp
        if vpp == 1:
            # 1F1B: the first stage has pp microbatches in flight, the last one has one.
            return pp - stage
        # Interleaved, of one chunk each: those of the warm-up and one more.
        return (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp

    def _stage_state(self, stage: int) -> dict[str, float]:
        """Return part -> bytes of one pipeline stage that do not depend on the tokens."""
        spec = self.spec
        layout = self.placement.parallel_layout
        is_first = stage == 0
        is_last = stage == layout.pp - 1
        # Tied embeddings are one table, unless they are on different stages.
        tables = spec.embedding_params / layout.tp
        head = spec.head_params / (layout.tp if spec.head == "vocabulary" else 1)
        if not (spec.is_tied and layout.pp == 1):
            tables = is_first * tables + is_last * head
        layer_params = self._stage_layers * spec.layer_params / layout.tp
        final_norm = is_last * spec.hidden_size
        parts = self._state(layer_params + tables + final_norm, head if is_last else 0.0)
        if is_last and self.placement.keeps_teacher_embeddings:
            parts["teacher embeddings"] = TeacherMemory(self.placement).embeddings
        return parts

    def _state(self, params: float, head: float) -> dict[str, float]:
        """Return part -> bytes of weights, gradients, optimizer state and copies of weights.

        `params` is the number of parameters of this stage and tensor-parallel rank, and `head` the
        number of them in the output embedding or the score head.
        """
        place = self.placement
        size = place.compute_bytes
        engine = ENGINES[place.engine]
        # Float32 weights are their own master weights; only bfloat16 needs a copy of 4 bytes.
        master_bytes = 4 if engine.has_master_copy and size == 2 else 0
        quantized = self._quantized_params
        frozen, trained = self._frozen_and_trained(params, head)
        tower_frozen, tower_trained = self._tower_params
        frozen, trained = frozen + tower_frozen, trained + tower_trained
        params += tower_frozen + tower_trained
        shards = place.num_shards
        if not engine.shards_weights:
            parts = {"weights": size * (frozen + trained), "gradients": 4 * trained}
        else:
            # Weights in 4 bits are not sharded by FSDP.
            frozen -= self._stage_layers * quantized
            packed_bytes = BYTES_PER_VALUE * self._stage_layers * quantized
            parts = {
                "weights": (size * frozen + 4 * trained) / shards + packed_bytes,
                "gradients": 4 * trained / shards,
            }
        parts["optimizer"] = (self.optimizer_bytes + master_bytes) * trained / shards
        if place.has_ema:
            parts["ema"] = 4 * trained / shards
        if place.has_reference:
            parts["reference"] = size * params / (shards if engine.shards_weights else 1)
        if quantized:
            largest = max(matrix_sizes(self.spec)) / place.parallel_layout.tp
            parts["dequantized matrix"] = size * largest
        if not engine.shards_weights or not place.has_compute_copy:
            return parts
        if self.keeps_unsharded:
            # Gradients of an unsharded model are unsharded as well, in the precision of their
            # reduction (float32). Their shards are created after the last backward.
            layer = self.spec.layer_params / place.parallel_layout.tp
            others = self._stage_layers * (layer - place.gathered_layer_params(self.spec))
            num_gradients = trained if place.has_adapters else params - others - tower_frozen
            parts["gathered weights"] = size * (frozen + trained - others)
            parts["gradients"] = 4 * num_gradients
        else:
            layer = place.gathered_layer_params(self.spec) - quantized
            # The root of the model has the projector of images as well as the output embedding.
            root = head + (0 if self.spec.vision is None else self.spec.vision.root_params)
            parts["gathered weights"] = size * (
                root + 2 * (layer + place.adapter_params(self.spec))
            )
        return parts

    @property
    def _tower_params(self) -> tuple[float, float]:
        """Frozen and trained parameters of a vision tower, which every rank computes completely."""
        vision = self.spec.vision
        if vision is None:
            return 0.0, 0.0
        trained = {"frozen": 0, "projector": vision.projector_params, "all": vision.num_params}
        num_trained = trained[self.placement.trained_vision]
        return vision.num_params - num_trained, num_trained

    def _frozen_and_trained(self, params: float, head: float) -> tuple[float, float]:
        """Return the numbers of frozen and trained parameters of a stage and rank; see `_state`.

        Adapters are not part of `params`. A score head is, and is trained in full beside them.
        """
        place = self.placement
        if not place.has_adapters:
            trained = params * (1.0 - frozen_share(self.spec, place.freeze))
            return params - trained, trained
        score_head = head if self.spec.head == "scores" else 0.0
        return params - score_head, self._stage_layers * place.adapter_params(
            self.spec
        ) + score_head

    @property
    def _quantized_params(self) -> float:
        """Values in 4 bits of one layer on a tensor-parallel rank; 0 without quantization."""
        place = self.placement
        if not place.has_quantized_weights:
            return 0.0
        return sum(matrix_sizes(self.spec)) / place.parallel_layout.tp

    def _logits(self, tokens: float) -> float:
        """Return the bytes of one chunk of logits and of the output embedding's gradient."""
        place = self.placement
        size = place.compute_bytes
        chunk_tokens = min(tokens, place.chunk_size)
        vocab_shard = self.spec.vocab_size / place.parallel_layout.tp
        chunk = chunk_tokens * vocab_shard * self.logit_bytes
        # Gradients of several chunks are summed in float32, beside the one of the current chunk.
        is_single = tokens <= place.chunk_size or size == 4
        embedding = self.spec.embedding_params / place.parallel_layout.tp
        gradient = (size if is_single else 4 + size) * embedding
        if place.has_adapters:
            # The output embedding is frozen.
            gradient = 0.0
        token_bytes = self.activations.head_bytes + size * self.spec.hidden_size
        if place.keeps_teacher_embeddings:
            token_bytes += size * max(teacher.hidden_size for teacher in place.teachers)
        return chunk + gradient + tokens * token_bytes

    def _backward(self, tokens: float, is_last: bool) -> float:
        """Return the bytes of the backward pass of the last norm or of a layer, the larger.

        They are the gradients of activations, and of weights before they are reduced.
        """
        spec = self.spec
        place = self.placement
        size = place.compute_bytes
        tp = place.parallel_layout.tp
        hidden = spec.hidden_size
        norm = 0.0
        if is_last:
            # Beside what it saved, the norm's backward pass has three float32 tensors and a result.
            activations = self.activations
            norm = activations.head_bytes + (12 + size) * hidden / activations.token_shares
        layer = 2 * size * spec.active_mlp_size / tp + 2 * size * hidden
        layer += self.activations.recomputed_bytes
        gradients = 0.0
        if ENGINES[place.engine].shards_weights and place.has_compute_copy:
            embedding = 0.0
            if is_last and not self.keeps_unsharded:
                embedding = size * spec.head_params / tp
            gradients = (size + 4) * place.gathered_layer_params(spec) + embedding
            if place.has_adapters:
                gradients = (size + 4) * place.adapter_params(self.spec)
        return tokens * max(norm, layer) + gradients


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of the teachers of distillation on one rank, in the parallel layout of the policy.

    One teacher at a time is on the device; see `policy.frozen_models`.
    """

    placement: Placement

    def computing(self, tokens: float) -> float:
        """Return the bytes of the largest teacher while it runs forward on `tokens` of this rank.

        They are its weights, what FSDP gathers of them, and the tensors of one layer.
        """
        return max(
            self._weights(teacher) + tokens * self._forward_bytes(teacher)
            for teacher in self.placement.teachers
        )

    @property
    def embeddings(self) -> float:
        """Bytes of the copies of output embeddings that stay on the device during training."""
        return sum(self._embedding(teacher) for teacher in self.placement.teachers)

    def _embedding(self, teacher: ModelSpec) -> float:
        """Return the bytes of the output embedding on one tensor-parallel rank."""
        layout = self.placement.parallel_layout
        return self.placement.compute_bytes * teacher.embedding_params / layout.tp

    def _weights(self, teacher: ModelSpec) -> float:
        """Return the bytes of the weights, sharded and gathered."""
        place = self.placement
        layout = place.parallel_layout
        size = place.compute_bytes
        weights = size * teacher.num_params / (layout.tp * layout.pp)
        if not ENGINES[place.engine].shards_weights:
            return weights
        shard = weights / place.num_shards
        if not place.has_compute_copy:
            return shard
        if layout.keeps_unsharded(place.engine, teacher.num_params):
            return shard + weights
        layer = place.gathered_layer_params(teacher)
        return shard + self._embedding(teacher) + 2 * size * layer

    def _forward_bytes(self, teacher: ModelSpec) -> float:
        """Return the bytes per token of the largest tensors that exist at a time in a layer.

        They are the residual, the input of the feed-forward, its gate and up projections and the
        activation.
        """
        tp = self.placement.parallel_layout.tp
        width = teacher.active_mlp_size / tp
        return self.placement.compute_bytes * (2 * teacher.hidden_size + 3 * width)


@dataclass(frozen=True)
class Activations:
    """Bytes per token of the activations of a model."""

    spec: ModelSpec
    placement: Placement
    keys_per_token: float = 1.0

    @property
    def layer_bytes(self) -> float:
        """Bytes that autograd saves for the backward pass of one layer."""
        spec = self.spec
        place = self.placement
        size = place.compute_bytes
        tp = place.parallel_layout.tp
        cp = place.parallel_layout.cp
        query, key = self._widths
        # Eager code saves the input of a norm in float32 and its output. A compiled layer saves the
        # input as it is. Both save one float32 number per token.
        is_compiled = place.is_compiled and spec.moe is None
        norm_bytes = size if is_compiled else 4 + size
        norms = 2 * (norm_bytes * spec.hidden_size + 4) / self.token_shares
        if spec.has_qk_norm:
            num_heads = (spec.num_heads + spec.num_kv_heads) / tp
            norms += norm_bytes * (query + key) + 4 * num_heads
        # The inputs of attention and feed-forward; each active expert after the first has a copy.
        num_active_experts = 0 if spec.moe is None else spec.moe.num_active_experts
        num_copies = max(num_active_experts - 1, 0)
        inputs = 2 * size * spec.hidden_size * (1 + num_copies / 2)
        # Context parallelism all-gathers keys and values: the own chunks and all chunks
        # before them are saved.
        key_shares = self.keys_per_token * (1 if cp == 1 else cp + 0.5)
        # Query, output, keys and values, and the log-sum-exp of each head in float32.
        attention = size * (2 * query + 2 * key * key_shares) + 4 * spec.num_heads / tp
        # Gate, up projection, activation and their product. A compiled layer computes the
        # activation again.
        feed_forward = (3 if is_compiled else 4) * size * spec.active_mlp_size / tp
        return norms + inputs + attention + feed_forward + self._adapter_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes of one layer that are kept from forward to backward pass."""
        kind = self.placement.activation_checkpointing
        if kind == "none":
            return self.layer_bytes
        layer_input = self.placement.compute_bytes * self.spec.hidden_size / self.token_shares
        if kind == "full":
            return layer_input
        return layer_input + sum(self._selected_bytes)

    @property
    def recomputed_bytes(self) -> float:
        """Bytes of one layer that its recomputation in the backward pass adds to `saved_bytes`."""
        kind = self.placement.activation_checkpointing
        if kind == "none":
            return 0.0
        if kind == "full":
            return self.layer_bytes
        # The recomputation of a layer releases what autograd does not need.
        return self.layer_bytes - sum(self._selected_bytes)

    @property
    def head_bytes(self) -> float:
        """Bytes of the last norm and of the hidden states for the log-probs."""
        size = self.placement.compute_bytes
        hidden = self.spec.hidden_size
        norm = ((4 + size) * hidden + 4) / self.token_shares
        return norm + 2 * size * hidden

    @property
    def token_shares(self) -> int:
        """Ranks over which sequence parallelism shards the tokens of norms and residuals."""
        layout = self.placement.parallel_layout
        return layout.tp if layout.sequence_parallel else 1

    @property
    def _adapter_bytes(self) -> float:
        """Bytes that autograd saves for the adapters of one layer."""
        return self.placement.compute_bytes * self.placement.adapter_activations(self.spec)

    @property
    def _widths(self) -> tuple[float, float]:
        """Widths of queries and of keys on one rank.

        Where values have another width, as in latent attention, the means with the output and with
        the values.
        """
        query = self.spec.attention_width / 2 / self.placement.parallel_layout.tp
        return query, query * self.spec.num_kv_heads / self.spec.num_heads

    @property
    def _selected_bytes(self) -> tuple[float, float]:
        """Bytes that selective checkpointing saves besides the input of a layer.

        The first number is of tensors that autograd saves as well, the second of tensors that it
        does not save.
        """
        spec = self.spec
        size = self.placement.compute_bytes
        tp = self.placement.parallel_layout.tp
        query, key = self._widths
        # Values, output and log-sum-exp of attention; gate and up projection.
        width = spec.active_mlp_size / tp
        used = size * (key + query + 2 * width) + 4 * spec.num_heads / tp
        # Queries and keys before the rotary embedding; results of the output and down projection.
        unused = query + key + 2 * spec.hidden_size + self.placement.adapter_outputs(spec)
        return used + self._adapter_bytes, size * unused
