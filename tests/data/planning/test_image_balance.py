"""Plans of rows with images: the limit of a microbatch, and the work of the tower on all ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.images import ImageRef, RowImage
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens
from nemo_like.models.spec import ModelSpec

QWEN2_5_VL_3B = ModelSpec.from_config(
    {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": True,
        "image_token_id": 151655,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 11008,
            "vocab_size": 151936,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }
)
NUM_RANKS = 8
CAPACITY = 16384
WEIGHT = 1.59


def mixed_rows(seed: int, num_rows: int = 256) -> TokenCounts:
    """Half are texts, a third have a small picture, a tenth a page, the others several photos."""
    rng = np.random.default_rng(seed)
    lengths, trained, tokens, work = [], [], [], []
    assert QWEN2_5_VL_3B.vision is not None
    for _ in range(num_rows):
        kind = rng.random()
        pixels = np.empty(0)
        mean = 6.9
        if 0.5 <= kind < 0.85:
            mean, pixels = 5.2, rng.choice([175_000, 187_500, 307_200, 786_432], 1)
        elif 0.85 <= kind < 0.95:
            mean, pixels = 5.0, np.array([1_000_000])
        elif kind >= 0.95:
            mean, pixels = 5.5, np.exp(rng.uniform(12.2, 13.8, rng.integers(2, 7)))
        text = int(rng.lognormal(mean, 0.6)) + 8
        sides = np.maximum(np.sqrt(pixels) // 28, 1).astype(np.int64) * 2
        grids = np.stack([np.ones_like(sides), sides, sides], axis=1)
        num_image = int((sides**2 // 4).sum())
        lengths.append(min(text + num_image, CAPACITY))
        trained.append(text // 2)
        tokens.append(min(num_image, CAPACITY))
        work.append(float(QWEN2_5_VL_3B.vision.flops(grids).sum()))
    counts = [np.array(each, dtype=np.int64) for each in (lengths, trained, tokens)]
    return TokenCounts(counts[0], counts[1], None, counts[2], np.array(work))


def slowest_over_ideal(plan: BatchPlan, counts: TokenCounts) -> float:
    """Sum over microbatches of max V + max L, over the mean work of a rank."""
    assert counts.image_work is not None
    assert counts.num_trained is not None
    vision = counts.image_work
    language = plan.spec.cost.of(counts.lengths, counts.num_trained)
    total = 0.0
    for microbatches in zip(*plan.ranks, strict=True):
        for work in (vision, language):
            total += max(work[list(each.rows)].sum() for each in microbatches)
    return total * NUM_RANKS / float(vision.sum() + language.sum())


SPEC = PlanSpec(max_tokens=CAPACITY, num_ranks=NUM_RANKS, cost=CostModel.from_spec(QWEN2_5_VL_3B))


def test_tower_and_language_model_are_balanced() -> None:
    found, tokens_only = [], []
    for seed in range(2):
        counts = mixed_rows(seed)
        found.append(slowest_over_ideal(plan_batch(counts, SPEC), counts))
        plain = dataclasses.replace(counts, image_tokens=None, image_work=None)
        tokens_only.append(slowest_over_ideal(plan_batch(plain, SPEC), counts))
    assert np.mean(found) <= 1.05
    assert np.mean(tokens_only) >= 1.1


def test_the_imbalance_of_the_tower_is_a_metric() -> None:
    counts = mixed_rows(0)
    plan = plan_batch(counts, SPEC)
    assert counts.image_work is not None
    by_rank = [counts.image_work[plan.rows_of_rank(rank)].sum() for rank in range(NUM_RANKS)]
    found = plan.metrics()["packing/rank_imbalance_vision"]
    assert found == pytest.approx(max(by_rank) / np.mean(by_rank))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("algorithm", ["balanced", "first_fit_decreasing"])
def test_the_weighted_limit_is_never_exceeded(seed: int, algorithm: str) -> None:
    counts = mixed_rows(seed, 100)
    assert counts.image_tokens is not None
    sizes = counts.lengths + WEIGHT * counts.image_tokens
    spec = dataclasses.replace(SPEC, image_weight=WEIGHT, algorithm=algorithm)
    plan = plan_batch(counts, spec)
    assert sorted(plan.rows.tolist()) == list(range(100))
    assert BatchPlan.from_json(plan.to_json()) == plan
    for each in (plan, plan.with_budget(2 * CAPACITY)):
        for microbatch in (each for rank in each.ranks for each in rank):
            rows = list(microbatch.rows)
            # A row above the limit is alone.
            assert len(rows) == 1 or sizes[rows].sum() <= each.spec.max_tokens
            assert microbatch.num_tokens == counts.lengths[rows].sum() or not rows


def test_a_weighted_limit_needs_fewer_microbatches_than_tokens_that_are_safe() -> None:
    counts = mixed_rows(0, 1024)
    weighted = dataclasses.replace(SPEC, image_weight=WEIGHT)
    # All tokens of a microbatch could be of images.
    safe = dataclasses.replace(SPEC, max_tokens=int(CAPACITY / (1 + WEIGHT)), oversize="singleton")
    found = plan_batch(counts, weighted).num_microbatches
    plain = dataclasses.replace(counts, image_tokens=None, image_work=None)
    assert found <= 0.7 * plan_batch(plain, safe, warn=False).num_microbatches


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans(), st.sampled_from([0.4, 1.6]))
def test_the_weighted_limit_of_groups_counts_the_images_of_a_shared_prompt_once(
    seed: int, is_shared: bool, together: bool, weight: float
) -> None:
    rng = np.random.default_rng(seed)
    rows, groups, limit = [], [], 220
    for group in range(rng.integers(1, 8)):
        num_image = int(rng.integers(0, 40))
        image = RowImage(ImageRef(f"{rng.integers(3)}"), (1, 2, 2 * num_image), 2, num_image)
        prompt = [1, 2, *[5] * num_image, 3]
        for _ in range(rng.integers(1, 4)):
            ids = np.array([*prompt, *rng.integers(6, 9, rng.integers(1, 20))], dtype=np.int32)
            mask = np.ones(len(ids), dtype=np.uint8)
            rows.append(EncodedRow(ids, mask, (image,) if num_image else ()))
            groups.append(group)
    counts = count_tokens(rows, groups if is_shared else None)
    if counts.image_tokens is not None:
        counts = dataclasses.replace(counts, image_work=counts.image_tokens * 1e9)
    spec = PlanSpec(max_tokens=limit, num_ranks=2, image_weight=weight, oversize="singleton")
    plan = plan_batch(counts, spec, groups if together else None, warn=False)
    assert sorted(plan.rows.tolist()) == list(range(len(rows)))
    for microbatch in (each for rank in plan.ranks for each in rank):
        own = [rows[row] for row in microbatch.rows]
        # Without sharing the images of a microbatch are computed once as well; a limit on them
        # need not know.
        unique = {image for row in own for image in row.images}
        size = microbatch.num_tokens + weight * sum(image.num_tokens for image in unique)
        is_alone = len({groups[row] for row in microbatch.rows}) == 1
        assert size <= limit or (is_alone if together else len(own) == 1) or not own
