"""Models on the ranks of the policy that are not trained: the reference, and the teachers of
distillation.

The reference may be updated from the policy; a checkpoint then has its weights beside the policy's,
because they are not the initial ones any more. A teacher may have any size; its tokenizer and
vocabulary are the policy's, up to padding. It is in the policy's parallel layout, and on the device
only while it computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.schema import AdapterConfig
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.device_transfer import start_copy_to_host, wait_for_copies
from nemo_like.integer_math import round_up
from nemo_like.policy.checkpoint.sharded import PendingSave
from nemo_like.policy.checkpoint.sharded_reader import MANIFEST
from nemo_like.policy.engine import Engine
from nemo_like.policy.heads.divergence import top_k_logprobs
from nemo_like.policy.heads.logprobs import token_logprobs
from nemo_like.policy.heads.targets import (
    TEACHER,
    Stored,
    Targets,
    TargetSettings,
    TeacherEmbedding,
)
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.optim import WeightCopy
from nemo_like.policy.outputs import OutputEmbedding, TokenDistribution, TokenLogprobs
from nemo_like.policy.shard_rows import ShardRows
from nemo_like.run.files import FileRecord

_DIRECTORY = "reference"
"""Directory of the reference inside the policy's directory of a checkpoint."""


class ReferenceModel:
    """The reference engine of one rank; every rank calls every method."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_updated = False

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which `engine` computes the reference."""
        return nullcontext()

    def update(self, policy: Engine) -> None:
        """Copy the weights of the policy, which has the same model and layout."""
        self.engine.copy_weights(policy)
        self._is_updated = True

    def save(self, directory: Path, *, in_background: bool) -> PendingSave | None:
        """Write the weights into the policy's `directory`; None if they are the initial ones."""
        if not self._is_updated:
            return None
        return self.engine.save(directory / _DIRECTORY, in_background=in_background)

    def load(self, directory: Path) -> None:
        """Read the weights from the policy's `directory`, if it has weights of a reference.

        Raises CheckpointError for a damaged checkpoint.
        """
        path = directory / _DIRECTORY
        if (path / MANIFEST).is_file():
            self.engine.load(path)
            self._is_updated = True


class SharedReference:
    """The policy without its adapters, or with the adapters of `policy.lora.adapter_path`.

    It never changes and needs no engine of its own.
    """

    def __init__(self, policy: Engine, config: AdapterConfig) -> None:
        """`policy` has its initial adapters: it has not been trained and has read no checkpoint."""
        self.engine = policy
        self._initial: WeightCopy | None = None
        if config.reference == "adapter":
            # In host memory: it is used once per step, and adapters are small.
            self._initial = WeightCopy(policy.masters(), torch.device("cpu"))

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which `engine` computes the reference."""
        if self._initial is None:
            return self.engine.base_model()
        return self.engine.swapped(self._initial)

    def update(self, policy: Engine) -> None:
        """Raise ValueError: the reference is frozen."""
        raise ValueError(
            "the reference of a policy with adapters shares the frozen weights of the model and"
            " cannot be updated; set grpo.reference_update_period to 0"
        )

    def save(self, directory: Path, *, in_background: bool) -> None:
        """Write nothing: the files of the model and of the adapter have the weights."""

    def load(self, directory: Path) -> None:
        """Read nothing: the files of the model and of the adapter have the weights."""


class WorkerSave:
    """The checkpoint of one rank that is being written: the policy, and an updated reference."""

    def __init__(self, policy: PendingSave, reference: PendingSave | None) -> None:
        self._policy = policy
        self._reference = reference

    def is_written(self) -> bool:
        """Return True if `finish` does not wait for files of this rank."""
        is_reference_written = self._reference is None or self._reference.is_written()
        return self._policy.is_written() and is_reference_written

    def finish(self) -> dict[str, FileRecord]:
        """Wait for the files of all ranks; see `PendingSave.finish`.

        Files of the reference have the name of its directory in front.
        """
        records = dict(self._policy.finish())
        if self._reference is not None:
            for name, record in self._reference.finish().items():
                records[f"{_DIRECTORY}/{name}"] = record
        return records


class Teachers:
    """The teachers of one rank; every rank calls every method."""

    def __init__(self, engines: Sequence[Engine], policy: Engine) -> None:
        """`policy` is the student, whose microbatches they run; the teachers are offloaded."""
        self.engines = engines
        self._policy = policy

    def compute(
        self, rows: ShardRows, microbatches: Sequence[Microbatch], settings: TargetSettings
    ) -> Targets:
        """Run each teacher on its rows of `microbatches`. Raises ValueError without teachers."""
        if not self.engines:
            raise ValueError("this worker has no teacher; start it with teachers")
        policy_size = self._policy.spec.vocab_size
        embeddings: dict[int, TeacherEmbedding] = {}
        stored: dict[tuple[int, ...], dict[int, Stored]] = {}
        for teacher, engine in enumerate(self.engines):
            mixed = list(microbatches)
            own = mixed
            if len(self.engines) > 1:
                mixed, own = self._microbatches_of(teacher, rows, microbatches)
            head = _TeacherHead(settings, min(policy_size, engine.spec.vocab_size))
            # Dummies come last; pipeline stages but the last have no results.
            for microbatch, results in zip(mixed, _run(engine, rows, own, head), strict=False):
                stored.setdefault(microbatch.rows, {})[teacher] = results
            if head.embedding is not None:
                embeddings[teacher] = head.embedding
        return Targets(
            settings, has_several=len(self.engines) > 1, embeddings=embeddings, stored=stored
        )

    def _microbatches_of(
        self, teacher: int, rows: ShardRows, microbatches: Sequence[Microbatch]
    ) -> tuple[list[Microbatch], list[Microbatch]]:
        """Return the microbatches with rows of a teacher, and the same with these rows only.

        Dummies follow the latter, so that all ranks run equally many.
        """
        teachers = np.asarray(rows.columns[TEACHER])
        mixed = []
        own = []
        for microbatch in microbatches:
            is_kept = teachers[list(microbatch.rows)] == teacher
            if is_kept.any():
                mixed.append(microbatch)
                own.append(_only_rows(microbatch, is_kept, rows.spec))
        num_microbatches = max(self.engines[teacher].ranks.gather_over_dp_cp(len(own)))
        dummy = Microbatch((), (), (), rows.spec.dummy_tokens)
        own += [dummy] * (num_microbatches - len(own))
        return mixed, own


class _TeacherHead:
    """Computes what is kept of a microbatch of a teacher; a `ModelInputs.head`."""

    def __init__(self, settings: TargetSettings, vocab_size: int) -> None:
        """`vocab_size` is the number of tokens that teacher and policy have in common."""
        self._settings = settings
        self._vocab_size = vocab_size
        self.embedding: TeacherEmbedding | None = None
        """Output embedding for the first microbatch; not needed with top-k."""

    def __call__(self, embedding: OutputEmbedding, inputs: ModelInputs) -> TokenLogprobs:
        """Return tensors [N, ...] at the trained positions as columns, and no log-probs."""
        hidden = embedding.hidden.index_select(0, inputs.hidden_positions)
        nothing = hidden.new_empty(0)
        if self._settings.top_k is None:
            if self.embedding is None:
                self.embedding = _copied(embedding)
            return TokenLogprobs(nothing, None, columns={"hidden": hidden})
        num_common = max(self._vocab_size - embedding.vocab_start, 0)
        common = dataclasses.replace(
            embedding,
            hidden=hidden,
            weight=embedding.weight[:num_common],
            bias=None if embedding.bias is None else embedding.bias[:num_common],
        )
        token_ids, logprobs = top_k_logprobs(
            common, k=self._settings.top_k, temperature=self._settings.divergence.temperature
        )
        labels = inputs.labels.index_select(0, inputs.label_positions)
        outputs = token_logprobs(common, labels, TokenDistribution(with_entropy=True))
        assert outputs.entropy is not None, "computed with the log-probs"
        columns = {
            "token_ids": token_ids,
            "logprobs": logprobs,
            "entropy": outputs.entropy,
            "label_logprobs": outputs.logprobs,
        }
        return TokenLogprobs(nothing, None, columns=columns)


def _run(
    engine: Engine, rows: ShardRows, microbatches: Sequence[Microbatch], head: _TeacherHead
) -> list[Stored]:
    """Return the results for each microbatch; none on all pipeline stages but the last."""

    def keep(inputs: ModelInputs, outputs: TokenLogprobs) -> tuple[None, Stored]:
        columns: Mapping[str, Tensor] = outputs.columns or {}
        return None, {name: start_copy_to_host(column) for name, column in columns.items()}

    engine.onload()
    try:
        results = engine.run(_inputs(rows, microbatches, head), keep, backward=False)
        # Once, so that the device has work until the last microbatch is done.
        wait_for_copies(engine.device)
    finally:
        engine.offload()
    # Nobody reads the time of this pass.
    engine.clock.drop()
    return results


def _inputs(
    rows: ShardRows, microbatches: Iterable[Microbatch], head: _TeacherHead
) -> Iterable[ModelInputs]:
    """Yield the inputs of each microbatch, with `head`."""
    for microbatch in microbatches:
        # The recorded experts belong to the student.
        yield dataclasses.replace(rows.inputs(microbatch), head=head, routed_experts=None)


def _only_rows(microbatch: Microbatch, is_kept: np.ndarray, spec: PlanSpec) -> Microbatch:
    """Return the microbatch with the rows that `is_kept` bool [R] marks, padded as before.

    Each row keeps its positions, so that a context-parallel rank has the same share of it. Raises
    ValueError if rows of two teachers share a prefix.
    """
    kept = np.flatnonzero(is_kept).tolist()
    shared = np.array(microbatch.shared, dtype=np.int64)
    if len(shared) and np.any(shared[1:][is_kept[1:] != is_kept[:-1]]):
        raise ValueError("rows of two teachers share a prefix; plan each teacher's rows as a group")

    def take(values: tuple[int, ...]) -> tuple[int, ...]:
        """Return the values [R] of the kept rows; empty for an empty column."""
        return tuple(values[index] for index in kept) if values else ()

    padded_lengths = take(microbatch.padded_lengths)
    return Microbatch(
        take(microbatch.rows),
        take(microbatch.lengths),
        padded_lengths,
        round_up(sum(padded_lengths), spec.total_multiple),
        take(microbatch.shared),
        context_first=take(microbatch.context_first),
        context_size=take(microbatch.context_size),
    )


def _copied(embedding: OutputEmbedding) -> TeacherEmbedding:
    """Return a copy of the teacher's embedding, whose weights FSDP frees after the pass."""
    bias = None if embedding.bias is None else embedding.bias.detach().clone()
    return TeacherEmbedding(embedding.weight.detach().clone(), bias, embedding.options.vocab)
