"""What the teachers of distillation computed for the microbatches of one pass.

Either the teacher's last hidden states at the trained positions, from which the training pass
computes its logits chunk by chunk, or its k most probable tokens. Both stay in host memory on the
rank that trains on the same positions, so nothing of vocabulary size is stored or communicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.data.planning.plan import Microbatch
from nemo_like.device_transfer import tensor_to_device
from nemo_like.losses.likelihood import (
    DIVERGENCE,
    STUDENT_ENTROPY,
    TEACHER_ENTROPY,
    TEACHER_LOGPROBS,
    Divergence,
)
from nemo_like.policy.collectives import gather_objects
from nemo_like.policy.heads.divergence import TopKTarget, VocabularyTarget, token_divergence
from nemo_like.policy.heads.logprobs import token_logprobs
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.outputs import OutputEmbedding, TokenLogprobs, VocabShard

TEACHER = "teacher"
"""Row column: index of the teacher of each row, int64 [B]; needed with several teachers."""
Stored = Mapping[str, Tensor]
"""Results of one teacher for one microbatch, [N, ...] each in host memory, by name."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The divergence that is trained, and what it needs of the teachers."""

    divergence: Divergence = field(default_factory=Divergence)
    top_k: int | None = None
    """Number of the most probable tokens of the teacher; None is the complete vocabulary."""


@dataclass
class TeacherEmbedding:
    """The output embedding of a teacher, this rank's rows, as a copy on the device."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None
    vocab: VocabShard | None
    _aligned: tuple[Tensor, Tensor | None] | None = None

    def aligned(self, student: OutputEmbedding) -> tuple[Tensor, Tensor | None]:
        """Return the rows [C, H] and biases [C] of the first C of the student's tokens here.

        Only the last rank's tokens, or none, are not in both vocabularies. Every rank of the group
        calls.
        """
        if self._aligned is None:
            start = student.vocab_start
            weight = _moved_rows(self.weight, self.vocab, start, len(student.weight))
            bias = self.bias
            if bias is not None:
                bias = _moved_rows(bias, self.vocab, start, len(student.weight))
            self._aligned = (weight, bias)
        return self._aligned


class Targets:
    """The results of the teachers for the microbatches of one plan on one rank."""

    def __init__(
        self,
        settings: TargetSettings,
        *,
        has_several: bool,
        embeddings: Mapping[int, TeacherEmbedding],
        stored: Mapping[tuple[int, ...], Mapping[int, Stored]],
    ) -> None:
        """`embeddings` are by teacher; `stored` by the rows of a microbatch, then by teacher.

        Both are empty on all pipeline stages but the last.
        """
        self._settings = settings
        self._has_several = has_several
        self._embeddings = embeddings
        self._stored = stored

    def head(self, microbatch: Microbatch) -> DistillationHead:
        """Return the head that computes the divergence of the tokens of a microbatch."""
        stored = self._stored.get(microbatch.rows, {})
        return DistillationHead(
            self._settings,
            embeddings=self._embeddings,
            stored=stored,
            has_several=self._has_several,
        )


class DistillationHead:
    """Computes the divergence from the teachers; a `ModelInputs.head`."""

    def __init__(
        self,
        settings: TargetSettings,
        *,
        embeddings: Mapping[int, TeacherEmbedding],
        stored: Mapping[int, Stored],
        has_several: bool,
    ) -> None:
        self._settings = settings
        self._embeddings = embeddings
        self._stored = stored
        self._has_several = has_several

    def __call__(self, embedding: OutputEmbedding, inputs: ModelInputs) -> TokenLogprobs:
        """Return the log-probs of the labels, and the columns of `losses.likelihood`; [T] each.

        Raises ValueError for a microbatch that the teachers' pass did not have.
        """
        size = len(inputs.labels)
        device = embedding.hidden.device
        columns = [torch.zeros(size, dtype=torch.float32, device=device) for _ in range(5)]
        # Several matrices of logits exist at a time, where log-probs need one or two.
        chunk_size = max(embedding.options.chunk_size // 4, 1)
        options = dataclasses.replace(embedding.options, chunk_size=chunk_size)
        num_found = 0
        for teacher, stored in self._stored.items():
            positions, hidden_positions = self._positions(inputs, teacher)
            _check_length(stored, len(positions))
            num_found += len(positions)
            if len(positions) == 0:
                continue
            target = self._target(embedding, teacher, stored)
            student = dataclasses.replace(
                embedding,
                hidden=embedding.hidden.index_select(0, hidden_positions),
                options=options,
            )
            labels = inputs.labels.index_select(0, positions)
            outputs = token_divergence(student, labels, target, self._settings.divergence)
            for index, values in enumerate(outputs):
                columns[index] = columns[index].index_copy(0, positions, values)
        if num_found != len(inputs.label_positions):
            raise ValueError(
                f"the teachers have targets for {num_found} of {len(inputs.label_positions)}"
                " tokens of a microbatch; call compute_targets for this batch and this plan"
            )
        if num_found == 0:
            # The backward must reach the weights on every rank, also on one without a token.
            nothing = dataclasses.replace(embedding, hidden=embedding.hidden[:0])
            empty = token_logprobs(nothing, inputs.labels[:0]).logprobs
            columns[:2] = [columns[0] + empty.sum(), columns[1] + empty.sum()]
        divergence, logprobs, student_entropy, teacher_entropy, teacher_logprobs = columns
        return TokenLogprobs(
            logprobs,
            None,
            columns={
                DIVERGENCE: divergence,
                STUDENT_ENTROPY: student_entropy,
                TEACHER_ENTROPY: teacher_entropy,
                TEACHER_LOGPROBS: teacher_logprobs,
            },
        )

    def _positions(self, inputs: ModelInputs, teacher: int) -> tuple[Tensor, Tensor]:
        """Return `label_positions` and `hidden_positions` of a teacher's rows, int64 [N] each."""
        positions = inputs.label_positions
        if not self._has_several:
            return positions, inputs.hidden_positions
        # On the host: the number of positions is a shape, and reading it would wait for the device.
        teachers = inputs.host_row_columns[TEACHER][inputs.host_label_rows]
        selected = torch.from_numpy(np.flatnonzero(teachers == teacher))
        index = tensor_to_device(selected, positions.device)
        return positions.index_select(0, index), inputs.hidden_positions.index_select(0, index)

    def _target(
        self, embedding: OutputEmbedding, teacher: int, stored: Stored
    ) -> VocabularyTarget | TopKTarget:
        device = embedding.hidden.device
        tensors = {name: tensor_to_device(tensor, device) for name, tensor in stored.items()}
        if self._settings.top_k is None:
            weight, bias = self._embeddings[teacher].aligned(embedding)
            return VocabularyTarget(tensors["hidden"], weight, bias)
        return TopKTarget(
            token_ids=tensors["token_ids"],
            logprobs=tensors["logprobs"],
            entropy=tensors["entropy"],
            label_logprobs=tensors["label_logprobs"],
            start=embedding.vocab_start,
        )


def _check_length(stored: Stored, num_tokens: int) -> None:
    """Raise ValueError unless a teacher's results have `num_tokens` tokens."""
    for tensor in stored.values():
        if len(tensor) != num_tokens:
            raise ValueError(
                f"the teacher has targets for {len(tensor)} tokens of a microbatch, which has"
                f" {num_tokens}; call compute_targets for this batch and this plan"
            )


def _moved_rows(rows: Tensor, source: VocabShard | None, start: int, num_rows: int) -> Tensor:
    """Return the rows [start, start + num_rows) of a table, without those beyond its end.

    `rows` [V, ...] are the rows of this rank; without `source` all rows.
    """
    if source is None:
        return rows[start : start + num_rows]
    group = source.group
    gathered = gather_objects(group, (source.start, len(rows), start, num_rows))
    if all(bounds[:2] == bounds[2:] for bounds in gathered):
        return rows
    table_size = sum(count for _, count, _, _ in gathered)
    stop = max(min(start + num_rows, table_size), start)
    moved = rows.new_empty((stop - start, *rows.shape[1:]))
    # One rank's rows at a time, so that the complete table is never on one rank.
    for rank, (first, count, _, _) in enumerate(gathered):
        is_own = first == source.start and count == len(rows)
        buffer = rows if is_own else rows.new_empty((count, *rows.shape[1:]))
        dist.broadcast(buffer, src=dist.get_global_rank(group, rank), group=group)
        low = max(start, first)
        high = min(stop, first + count)
        if low < high:
            moved[low - start : high - start] = buffer[low - first : high - first]
    return moved
