"""Predicted memory of the teachers of distillation on one GPU; see `policy.teachers`."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import Placement


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of the teachers of a placement on one rank, in the parallel layout of the policy.

    One teacher at a time is on the device, without the activations of the policy.
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
        """Bytes of the copies of output embeddings that stay on the device during training.

        With top-k targets there are none.
        """
        if not self.placement.keeps_teacher_embeddings:
            return 0.0
        return sum(self._embedding(teacher) for teacher in self.placement.teachers)

    def assumptions(self) -> list[str]:
        """Return the formulas in words; empty without teachers."""
        if not self.placement.teachers:
            return []
        text = (
            "teachers: one at a time is on the device, beside the state of the policy and without"
            " its activations, with its weights in compute precision in the layout of the policy"
            " and the tensors of one layer; "
        )
        if self.placement.keeps_teacher_embeddings:
            return [text + "copies of all output embeddings stay during training."]
        return [text + "only log-probs of k tokens stay during training."]

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
        if place.engine == "megatron":
            return weights
        shard = weights / place.num_shards
        if not place.has_compute_copy:
            return shard
        if layout.keeps_unsharded("dtensor", teacher.num_params):
            return shard + weights
        return shard + self._embedding(teacher) + 2 * size * teacher.layer_params / layout.tp

    def _forward_bytes(self, teacher: ModelSpec) -> float:
        """Return the bytes per token of the largest tensors that exist at a time in a layer.

        They are the residual, the input of the feed-forward, its gate and up projections and the
        activation.
        """
        tp = self.placement.parallel_layout.tp
        width = teacher.active_mlp_size / tp
        return self.placement.compute_bytes * (2 * teacher.hidden_size + 3 * width)
