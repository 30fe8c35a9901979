"""Predicted memory of teachers beside the policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.models.presets import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.memory import GIB, MemoryModel, Placement
from nemo_like.prediction.teacher_memory import teacher_memory, teacher_note


def test_a_teacher_has_its_weights_while_it_computes_and_its_embedding_during_training():
    student, teacher = load_spec("1b"), load_spec("7b")
    place = Placement(parallel_layout=ParallelLayout(tp=4))
    memory = teacher_memory([teacher], place, keeps_embeddings=True)
    # One shard, and the layers that are gathered in bfloat16.
    assert memory.computing >= 2 * teacher.num_params / 4
    assert memory.embeddings == pytest.approx(2 * teacher.embedding_params / 4)
    policy = MemoryModel(student, place)
    assert memory.peak(policy, 8192) >= policy.peak(8192) + memory.embeddings
    assert memory.peak(policy, 1) >= memory.computing + 16 * student.num_params / 4
    more_ranks = replace(place, parallel_layout=ParallelLayout(tp=4, dp=8))
    assert (
        teacher_memory([teacher], more_ranks, keeps_embeddings=False).computing < memory.computing
    )
    both = teacher_memory([teacher, student], place, keeps_embeddings=True)
    assert both.computing == memory.computing
    assert both.embeddings > memory.embeddings
    top_k = teacher_memory([teacher], place, keeps_embeddings=False)
    assert top_k.embeddings == 0
    megatron = replace(place, engine="megatron")
    weights = teacher_memory([teacher], megatron, keeps_embeddings=False).computing
    assert weights == pytest.approx(2 * teacher.num_params / 4)
    note = teacher_note([teacher], megatron, keeps_embeddings=False)
    assert f"a teacher has {weights / GIB:.2f} GiB per worker" in note
    small = replace(student, num_layers=1, windows=(None,), vocab_size=8, is_tied=True)
    note = teacher_note([small], megatron, keeps_embeddings=False)
    assert f"a teacher has {2 * small.num_params / 4 / 2**20:.1f} MiB per worker" in note
