"""Predicted memory of teachers beside the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.memory import MemoryModel, TeacherMemory
from nemo_like.prediction.placement import Placement
from tests.prediction.live_memory import forward_peak_bytes
from tests.prediction.test_memory import build, config_of, inputs_of, shape_of

STUDENT, TEACHER = load_spec("1b"), load_spec("7b")
PLACE = Placement(
    parallel_layout=ParallelLayout(tp=4), teachers=(TEACHER,), keeps_teacher_embeddings=True
)


def test_a_teacher_computes_beside_the_state_of_the_policy():
    parts = MemoryModel(STUDENT, PLACE).parts(1)
    # One shard, and the layers that are gathered in bfloat16.
    assert parts["teacher"] >= 2 * TEACHER.num_params / 4
    assert "activations" not in parts
    state = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    assert state == pytest.approx(16 * STUDENT.num_params / 4, rel=1e-3)
    more_ranks = replace(PLACE, parallel_layout=ParallelLayout(tp=4, dp=8))
    assert TeacherMemory(more_ranks).computing(1) < TeacherMemory(PLACE).computing(1)
    megatron = replace(PLACE, engine="megatron")
    assert TeacherMemory(megatron).computing(0) == pytest.approx(2 * TEACHER.num_params / 4)


def test_the_output_embeddings_of_all_teachers_stay_in_training():
    both = replace(PLACE, teachers=(TEACHER, STUDENT))
    # So many tokens that training has the peak.
    parts = MemoryModel(STUDENT, both).parts(65536)
    num_values = TEACHER.embedding_params + STUDENT.embedding_params
    assert parts["teacher embeddings"] == pytest.approx(2 * num_values / 4)
    assert "activations" in parts and "teacher" not in parts
    assert TeacherMemory(both).computing(64) == TeacherMemory(PLACE).computing(64)
    top_k = replace(both, keeps_teacher_embeddings=False)
    assert "teacher embeddings" not in MemoryModel(STUDENT, top_k).parts(65536)


def test_a_large_teacher_limits_the_budget_only_where_it_has_the_peak():
    without = MemoryModel(STUDENT, replace(PLACE, teachers=(), keeps_teacher_embeddings=False))
    memory = MemoryModel(STUDENT, PLACE)
    for tokens in (1, 4096, 65536):
        assert memory.peak(tokens) > without.peak(tokens)
    large = MemoryModel(STUDENT, replace(PLACE, teachers=(load_spec("70b"),)))
    weights = 2 * load_spec("70b").num_params / 4
    assert large.peak(1) > weights > memory.peak(1)
    assert large.largest_budget(weights, 256) == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_forward_pass_grows_as_predicted(precision: Any):
    config = config_of("llama", hidden_size=96, num_attention_heads=6, intermediate_size=768)
    model = build(config, getattr(torch, precision))
    peaks = [forward_peak_bytes(model, inputs_of(size)) for size in (1024, 2048)]
    place = Placement(precision=precision, teachers=(shape_of(config),))
    memory = TeacherMemory(place)
    predicted = memory.computing(2048) - memory.computing(1024)
    assert predicted / (peaks[1] - peaks[0]) == pytest.approx(1.0, abs=0.1)
