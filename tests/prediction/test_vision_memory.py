"""Predicted memory of models with a vision tower, against the sizes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.spec import CostModel, PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.lengths import RowLengths
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.plan_report import PlanRequest, make_plan
from tests.data.planning.test_image_balance import QWEN2_5_VL_3B, mixed_rows
from tests.vision import FAMILIES, tiny_vision_model

Trained = Literal["frozen", "projector", "all"]


@pytest.mark.parametrize("trained", ["frozen", "projector", "all"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_state_of_the_tower_is_that_of_its_parameters(model_type: str, trained: Trained) -> None:
    model = tiny_vision_model(model_type)
    spec = ModelSpec.from_config(model.config)
    num_trained, num_all = 0, 0
    for name, parameter in model.named_parameters():
        is_frozen = "visual." in name and (
            trained == "frozen" or (trained == "projector" and "merger" not in name)
        )
        num_all += parameter.numel()
        num_trained += 0 if is_frozen else parameter.numel()
    place = Placement(precision="float32", trained_vision=trained, has_reference=True)
    parts = MemoryModel(spec, place).parts(1)
    assert parts["weights"] == parts["reference"] == 4 * num_all
    assert parts["gradients"] == 4 * num_trained
    assert parts["optimizer"] == 8 * num_trained
    # Stored in bfloat16 where it is frozen.
    parts = MemoryModel(spec, replace(place, precision="bfloat16")).parts(1)
    assert parts["weights"] == 2 * (num_all - num_trained) + 4 * num_trained


def test_activations_of_images_are_those_of_the_tower_and_their_pixels() -> None:
    place = Placement(trained_vision="all")
    vision = QWEN2_5_VL_3B.vision
    assert vision is not None
    text = MemoryModel(QWEN2_5_VL_3B, place, image_share=0.0).parts(10_000)
    half = MemoryModel(QWEN2_5_VL_3B, place, image_share=0.5).parts(10_000)
    assert text["images"] == 0
    # 28 x 28 pixels of 3 channels: 8 bits, and two equal frames in float32.
    pixels = 28 * 28 * 3 * (1 + 2 * 4)
    assert half["images"] == pytest.approx(5_000 * (vision.saved_bytes() + pixels), rel=1e-3)
    assert half["activations"] == text["activations"]
    # A token of the language model has 4.68 MB in 36 layers of Qwen2.5-3B.
    weight = MemoryModel(QWEN2_5_VL_3B, place).image_weight
    assert weight == pytest.approx(vision.saved_bytes() / 4.684e6, rel=1e-3)
    frozen = MemoryModel(QWEN2_5_VL_3B, Placement(), image_share=0.5).parts(10_000)
    assert frozen["images"] == 5_000 * pixels
    # Ranks of context parallelism divide the tokens and not the images.
    layout = ParallelLayout(cp=2)
    divided = MemoryModel(QWEN2_5_VL_3B, replace(place, parallel_layout=layout), image_share=0.5)
    assert divided.parts(10_000)["images"] == pytest.approx(half["images"], rel=1e-3)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["frozen", "all"]),
    st.sampled_from([1, 2]),
    st.integers(1, 60_000),
    st.floats(0, 1),
)
def test_no_microbatch_within_a_limit_needs_more_than_its_peak(
    trained: Trained, cp: int, limit: int, share: float
) -> None:
    place = Placement(trained_vision=trained, parallel_layout=ParallelLayout(cp=cp))
    memory = MemoryModel(QWEN2_5_VL_3B, place)
    tokens = int(limit / (1 + share * memory.image_weight))
    found = replace(memory, image_share=share).peak(tokens)
    assert found <= memory.peak(limit) * (1 + 1e-9)


def test_a_plan_predicts_memory_and_time_of_the_tower() -> None:
    counts = mixed_rows(0)
    assert counts.image_tokens is not None and counts.image_work is not None
    place = Placement(trained_vision="all")
    memory = MemoryModel(QWEN2_5_VL_3B, place)
    spec = PlanSpec(
        max_tokens=32_768,
        num_ranks=8,
        cost=CostModel.from_spec(QWEN2_5_VL_3B),
        image_weight=memory.image_weight,
    )
    request = PlanRequest(
        rows=RowLengths(counts, "a test", is_ordered=True),
        spec=spec,
        max_tokens=32_768,
        model=QWEN2_5_VL_3B,
        placement=place,
        memory_gib=80.0,
    )
    report = make_plan(request)
    chosen = report.comparison.chosen
    peaks = []
    for rank in chosen.plan.ranks:
        for each in rank:
            share = counts.image_tokens[list(each.rows)].sum() / each.num_tokens
            peaks.append(replace(memory, image_share=share).peak(each.num_tokens))
    assert report.peak_bytes(chosen) == pytest.approx(max(peaks), rel=1e-3)
    assert report.parts(chosen.largest_microbatch)["images"] > 0
    assert chosen.rank_flops == pytest.approx(chosen.metrics["packing/rank_imbalance_flops"])
    # Work of tower and language model, each by hand.
    language = spec.cost.of(counts.lengths, counts.num_trained)
    assert chosen.real_work.sum() == pytest.approx(language.sum() + counts.image_work.sum())
    assert report.recommendation is not None
    budget = report.recommendation.max_tokens
    assert 0 < memory.peak(budget) <= report.recommendation.usable_gib * 2**30
    text = TokenCounts(counts.lengths, counts.num_trained)
    without = make_plan(replace(request, rows=RowLengths(text, "a test", is_ordered=True)))
    assert without.comparison.chosen.total_work < chosen.total_work
    assert np.isfinite(report.peak_bytes(without.comparison.chosen))
