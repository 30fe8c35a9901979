"""Predicted memory of the teachers of distillation on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.memory import MemoryModel, Placement, shown_bytes


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of the teachers on one rank."""

    computing: float
    """Of the largest teacher while it computes: its weights, and what FSDP gathers of them."""
    embeddings: float
    """Of all teachers while the policy trains: copies of their output embeddings."""

    def peak(self, policy: MemoryModel, max_tokens: int) -> float:
        """Return the peak bytes of a worker with microbatches of up to `max_tokens`.

        A teacher computes beside the state of the policy, without its activations.
        """
        training = policy.peak(max_tokens) + self.embeddings
        return max(training, policy.peak(0) + self.embeddings + self.computing)


def teacher_memory(
    teachers: Sequence[ModelSpec],
    place: Placement,
    *,
    keeps_embeddings: bool,
) -> TeacherMemory:
    """Return the memory of `teachers` in the layout of the policy; see `policy.teachers`.

    With top-k targets `keeps_embeddings` is False.
    """
    computing = 0.0
    embeddings = 0.0
    for spec in teachers:
        embedding = place.compute_bytes * spec.embedding_params / place.parallel_layout.tp
        computing = max(computing, _weights(spec, place, embedding))
        if keeps_embeddings:
            embeddings += embedding
    return TeacherMemory(computing, embeddings)


def teacher_note(
    teachers: Sequence[ModelSpec],
    place: Placement,
    *,
    keeps_embeddings: bool,
) -> str:
    """Describe the memory that a plan leaves out."""
    memory = teacher_memory(teachers, place, keeps_embeddings=keeps_embeddings)
    text = (
        "the memory is that of the policy; a teacher has"
        f" {shown_bytes(memory.computing)} per worker beside the state of the policy while it"
        " computes, and none of the activations"
    )
    if keeps_embeddings:
        text += f"; during training {shown_bytes(memory.embeddings)} of output embeddings stay"
    return text


def _weights(
    spec: ModelSpec,
    place: Placement,
    embedding: float,
) -> float:
    """Return the bytes of a frozen model on one rank, `embedding` of them its output embedding."""
    layout = place.parallel_layout
    size = place.compute_bytes
    weights = size * spec.num_params / (layout.tp * layout.pp)
    if place.engine == "megatron":
        return weights
    shard = weights / place.num_shards
    if not place.has_compute_copy:
        return shard
    if layout.keeps_unsharded("dtensor", spec.num_params):
        return shard + weights
    return shard + embedding + 2 * size * spec.layer_params / layout.tp
