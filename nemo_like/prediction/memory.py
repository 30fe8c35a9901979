"""Predicted peak memory of one GPU, by part, as a function of the tokens per microbatch.

Arithmetic from sizes; nothing is allocated. The formulas describe this package: FSDP2 over dp x cp
with float32 master weights and AdamW, log-probs in chunks, attention that saves no score matrix.
`MemoryModel.assumptions` gives every formula in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.integer_math import ceil_div
from nemo_like.models.peft_adapter import BYTES_PER_VALUE
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.activations import Activations
from nemo_like.prediction.adapter_sizes import adapter_params, largest_linear_params, linear_params
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.teacher_memory import TeacherMemory

GIB = 1 << 30
CONTEXT_BYTES = 2 * GIB
"""CUDA context, kernels and NCCL buffers of a process."""
SAFETY_SHARE = 0.10
"""Share of the remaining memory reserved for fragmentation and for parts without a formula."""
MEASURED = (
    "predicted over measured bytes per token is 0.99 - 1.04 for small real Llamas on CPU (bfloat16"
    " and float32, with and without checkpointing, the copies of CPU attention counted); no GPU"
    " has been measured"
)


def shown_bytes(num_bytes: float) -> str:
    """Format bytes. Examples: `2.50 GiB`, `1.6 MiB`."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def usable_bytes(device_gib: float) -> float:
    """Return the bytes of a device that a plan may use."""
    return max(0.0, (device_gib * GIB - CONTEXT_BYTES) * (1.0 - SAFETY_SHARE))


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes of one GPU of the pipeline stage with the highest peak, by max tokens."""

    spec: ModelSpec
    placement: Placement

    def peak(self, max_tokens: int) -> float:
        """Return the peak bytes with microbatches of up to `max_tokens`."""
        return sum(self.parts(max_tokens).values())

    def parts(self, max_tokens: int) -> dict[str, float]:
        """Return part -> bytes at the moment of the peak, in the order of the charts."""
        # The first stage has the most microbatches in flight, the last one the logits; the stages
        # between have less of both.
        stages = {0, self.placement.parallel_layout.pp - 1}
        parts_of_stages = [self._stage(max_tokens, stage) for stage in stages]
        if self.placement.teachers:
            parts_of_stages += [self._stage_with_teacher(max_tokens, stage) for stage in stages]
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
        return Activations(self.spec, self.placement)

    def assumptions(self) -> list[str]:
        """Return each formula in words, with the place where it was checked."""
        place = self.placement
        saved = "layers x one layer"
        if place.activation_checkpointing == "full":
            saved = "layers x c hidden, and one complete layer in the backward pass"
        elif place.activation_checkpointing == "selective":
            saved = (
                "layers x the results of products and attention, c (3 hidden + 2 H d + 2 H_kv d + 2"
                " width) + 4 H, and the rest of one layer in the backward pass"
            )
        return [
            (
                f"{self.spec.name}: {self.spec.num_params / 1e9:.3f} B parameters P, counted from"
                " the configuration (equal to transformers' count for Llama, Qwen2, Qwen3 and"
                " Mixtral shapes)."
            ),
            *self._state_lines(),
            *place.trained.assumptions(self.spec),
            (
                f"activations: {saved}; a layer saves {self.activations.layer_bytes:,.0f} bytes per"
                " token: norms 2 x (4 + c) x hidden, projection inputs 2 c hidden, attention c (2"
                " H d + 2 H_kv d) + 4 H, feed-forward 4 c width; c bytes per value. Saved tensors"
                f" equal autograd's; of the peak, {MEASURED}."
            ),
            (
                "tensor parallelism divides heads and width, sequence parallelism also the norms;"
                " context parallelism divides the tokens, but keys and values are all-gathered (cp"
                " + 1/2 shares); the first pipeline stage has pp microbatches in flight."
            ),
            self._peak_assumption(),
            *TeacherMemory(place).assumptions(),
            (
                f"usable memory: device - {CONTEXT_BYTES / GIB:.0f} GiB (CUDA context, NCCL) -"
                f" {SAFETY_SHARE:.0%} of the rest (fragmentation). Generation is not included: a"
                " colocated generator is offloaded where both do not fit (cluster.offload)."
            ),
        ]

    def _state_lines(self) -> list[str]:
        place = self.placement
        tp = place.parallel_layout.tp
        if place.engine == "megatron" and place.lora is not None:
            return [
                (
                    f"Megatron: frozen weights {place.compute_bytes} P on every rank, and of the"
                    f" adapters Q weights {place.compute_bytes} Q and gradients 4 Q, AdamW with"
                    f" float32 master weights 12 Q sharded over dp x cp = {place.num_shards}."
                )
            ]
        if place.engine == "megatron":
            return [
                (
                    f"Megatron: weights {place.compute_bytes} P and gradients 4 P on every rank,"
                    " AdamW with float32 master weights 12 P sharded over dp x cp ="
                    f" {place.num_shards} (distributed optimizer); P / (tp x pp) per rank."
                )
            ]
        copy = "the output embedding and two layers at a time"
        if not place.has_compute_copy:
            copy = "nothing, a single process uses its own weights"
        elif self.keeps_unsharded:
            copy = "the complete model during a step (a small model)"
        num_replicas = place.parallel_layout.num_replicas
        values = "float32 weights 4 P, gradients 4 P and AdamW 8 P"
        if place.lora is not None:
            values = (
                f"frozen weights {place.compute_bytes} P, and of the adapters Q float32 weights 4"
                " Q, gradients 4 Q and AdamW 8 Q"
            )
            if place.lora.is_quantized:
                values = (
                    f"matrices of layers {BYTES_PER_VALUE:g} bytes per value (4 bits, and a float32"
                    " scale per block of 64) on every rank of dp x cp, one matrix at a time"
                    f" dequantized to {place.compute_bytes} bytes per value; embeddings and norms"
                    f" {place.compute_bytes} bytes per value, and of the adapters Q float32 weights"
                    " 4 Q, gradients 4 Q and AdamW 8 Q"
                )
        shards = "dp x cp x tp" if num_replicas == 1 else f"dp x cp x tp / {num_replicas} replicas"
        return [
            (
                f"FSDP2: {values}, each sharded over"
                f" {shards} = {place.num_shards * tp} ranks; all-gathered in compute precision:"
                f" {copy}."
            )
        ]

    def _stage(self, max_tokens: int, stage: int) -> dict[str, float]:
        """Return part -> bytes of one pipeline stage at its peak in training."""
        parallel_layout = self.placement.parallel_layout
        is_last = stage == parallel_layout.pp - 1
        tokens = max_tokens / parallel_layout.cp
        parts = self._stage_state(stage)
        # 1F1B: the first stage has pp microbatches in flight, the last one has one.
        num_in_flight = parallel_layout.pp - stage
        saved = self.activations.saved_bytes
        parts["activations"] = tokens * self._stage_layers * saved * num_in_flight
        peaks = {"backward": self._backward(tokens, is_last)}
        if is_last and self.spec.head == "vocabulary":
            peaks["logits"] = self._logits(tokens)
        name = max(peaks, key=lambda peak: peaks[peak])
        return parts | {name: peaks[name]}

    def _stage_with_teacher(self, max_tokens: int, stage: int) -> dict[str, float]:
        """Return part -> bytes of one pipeline stage while a teacher computes."""
        tokens = max_tokens / self.placement.parallel_layout.cp
        computing = TeacherMemory(self.placement).computing(tokens)
        return self._stage_state(stage) | {"teacher": computing}

    @property
    def _stage_layers(self) -> int:
        """Layers of the pipeline stage that has the most."""
        return ceil_div(self.spec.num_layers, self.placement.parallel_layout.pp)

    def _stage_state(self, stage: int) -> dict[str, float]:
        """Return part -> bytes of one pipeline stage that do not depend on the tokens."""
        spec = self.spec
        place = self.placement
        layout = place.parallel_layout
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
        if is_last and place.keeps_teacher_embeddings:
            parts["teacher embeddings"] = TeacherMemory(place).embeddings
        return parts

    def _state(self, params: float, embedding: float) -> dict[str, float]:
        """Return part -> bytes of everything that does not depend on the tokens.

        `params` and `embedding` are numbers of parameters of this stage and tensor-parallel rank.
        """
        place = self.placement
        if place.lora is not None:
            return self._lora_state(params, embedding)
        size = place.compute_bytes
        trained = place.trained.trained_share(self.spec)
        optimizer_bytes = place.trained.optimizer_bytes(self.spec)
        shard = params / place.num_shards
        if place.engine == "megatron":
            # Float32 weights are their own master weights; only bfloat16 needs a copy of 4 bytes.
            master_bytes = 4 if size == 2 else 0
            parts = {
                "weights": size * params,
                "gradients": 4 * trained * params,
                "optimizer": (optimizer_bytes + master_bytes) * trained * shard,
            }
            if place.has_reference:
                parts["reference"] = size * params
            return parts | self._average(trained * shard)
        parts = {
            "weights": (4 * trained + size * (1 - trained)) * shard,
            "gradients": 4 * trained * shard,
            "optimizer": optimizer_bytes * trained * shard,
        }
        parts |= self._average(trained * shard)
        if place.has_reference:
            parts["reference"] = size * shard
        if place.has_compute_copy:
            layers = 2 * self.spec.layer_params / place.parallel_layout.tp
            if self.keeps_unsharded:
                # The gradients of an unsharded model are unsharded as well, in the precision of
                # their reduction (float32).
                parts["gathered weights"] = (size + 4) * params
            else:
                parts["gathered weights"] = size * (embedding + layers)
        return parts

    def _lora_state(self, params: float, embedding: float) -> dict[str, float]:
        """Return `_state` of a frozen model with `params` weights and float32 adapters.

        A score head is part of `params`, and trained in full.
        """
        place = self.placement
        size = place.compute_bytes
        num_layers = self._stage_layers
        trained = num_layers * self._adapter_params
        frozen = params
        if self.spec.head == "scores":
            # `embedding` is the head, and 0 before the last pipeline stage.
            trained += embedding
            frozen -= embedding
        shard = trained / place.num_shards
        if place.engine == "megatron":
            return {
                "weights": size * (frozen + trained),
                "gradients": 4 * trained,
                "optimizer": (12 if size == 2 else 8) * shard,
                **self._average(shard),
            }
        # Weights in 4 bits are not sharded by FSDP.
        quantized = self._quantized_params
        frozen -= num_layers * quantized
        parts = {
            "weights": size * frozen / place.num_shards
            + BYTES_PER_VALUE * num_layers * quantized
            + 4 * shard,
            "gradients": 4 * shard,
            "optimizer": 8 * shard,
            **self._average(shard),
        }
        if quantized:
            matrix = largest_linear_params(self.spec) / place.parallel_layout.tp
            parts["dequantized matrix"] = size * matrix
        if place.has_compute_copy and self.keeps_unsharded:
            parts["gathered weights"] = size * frozen + (size + 4) * trained
        elif place.has_compute_copy:
            layer = self.spec.layer_params / place.parallel_layout.tp - quantized
            parts["gathered weights"] = size * (embedding + 2 * (layer + self._adapter_params))
        return parts

    def _average(self, num_trained: float) -> dict[str, float]:
        """Return the part of the averages of a rank's trained parameters; none without `ema`."""
        return {"ema": 4 * num_trained} if self.placement.trained.has_ema else {}

    @property
    def _adapter_params(self) -> float:
        """Adapter parameters of one layer on a tensor-parallel rank; 0 without adapters."""
        if self.placement.lora is None:
            return 0.0
        return adapter_params(self.spec, self.placement.lora, self.placement.parallel_layout.tp)

    @property
    def _quantized_params(self) -> float:
        """Values in 4 bits of one layer on a tensor-parallel rank; 0 without quantization."""
        if self.placement.lora is None or not self.placement.lora.is_quantized:
            return 0.0
        return linear_params(self.spec) / self.placement.parallel_layout.tp

    def _peak_assumption(self) -> str:
        """Return what has the peak beside state and activations, as a sentence."""
        backward = (
            "2 c (width + hidden) bytes per token and a layer's gradients before they are reduced"
        )
        if self.spec.head == "scores":
            return f"the peak is one layer's backward pass: {backward}; there are no logits."
        return (
            "the peak is the larger of logits and one layer's backward pass:"
            f" {self.placement.chunk_size} tokens x vocabulary x {self._logit_bytes} bytes of"
            f" logits and the output embedding's gradient, or {backward}."
        )

    @property
    def _logit_bytes(self) -> int:
        """Bytes per logit of a chunk: float32, beside the compute precision if that is smaller."""
        if self.placement.teachers:
            # Chunks are a quarter as large, of which up to nine exist in float32.
            return 9
        return 6 if self.placement.compute_bytes == 2 else 4

    def _logits(self, tokens: float) -> float:
        """Return the bytes of one chunk of logits and of the output embedding's gradient."""
        place = self.placement
        size = place.compute_bytes
        chunk_tokens = min(tokens, place.chunk_size)
        vocab_shard = self.spec.vocab_size / place.parallel_layout.tp
        chunk = chunk_tokens * vocab_shard * self._logit_bytes
        # Gradients of several chunks are summed in float32, beside the one of the current chunk.
        is_single = tokens <= place.chunk_size or size == 4
        embedding = self.spec.embedding_params / place.parallel_layout.tp
        gradient = (size if is_single else 4 + size) * embedding
        if place.lora is not None:
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
        if place.engine == "dtensor" and place.has_compute_copy:
            embedding = 0.0
            if is_last and not self.keeps_unsharded:
                embedding = size * spec.head_params / tp
            gradients = (size + 4) * spec.layer_params / tp + embedding
            if place.lora is not None:
                gradients = (size + 4) * self._adapter_params
        return tokens * max(norm, layer) + gradients
