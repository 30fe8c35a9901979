"""The test that decides: one gradient, whatever the layout, the microbatches, the row order or the
number of ranks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like import parallel_layout as parallel_layout_module
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import (
    DynamicBatchingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import ClippedPolicyGradientLoss, Loss, NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from tests.policy.planned import planned
from tests.policy.tiny import (
    ARCHITECTURES,
    GROUPED_LENGTHS,
    context,
    grouped_batch,
    predictable_batch,
    random_batch,
    relative_error,
    row_accuracy,
    row_loss,
    run_ranks,
    saved_tensors,
)

LENGTHS = GROUPED_LENGTHS
TOLERANCE = 1e-5
BASE = PolicyConfig(
    model_name="",
    train_global_batch_size=len(LENGTHS),
    logprob_chunk_size=16,
    max_grad_norm=0.0,
    shared_prefix=False,
    optimizer=OptimizerConfig(
        lr=1e-3, beta1=0.0
    ),  # with beta1 = 0 Adam's first moment is the gradient
)


def packed(max_tokens: int, **keys: Any) -> PolicyConfig:
    return dataclasses.replace(
        BASE,
        sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=max_tokens, **keys),
    )


def sharing(max_tokens: int, **keys: Any) -> PolicyConfig:
    """Packed rows of which common leading tokens are computed once."""
    return dataclasses.replace(packed(max_tokens, **keys), shared_prefix=True)


def dynamic(max_tokens: int, **keys: Any) -> PolicyConfig:
    return dataclasses.replace(
        BASE,
        dynamic_batching=DynamicBatchingConfig(enabled=True, train_mb_tokens=max_tokens, **keys),
    )


def fixed(rows: int) -> PolicyConfig:
    return dataclasses.replace(BASE, train_micro_batch_size=rows)


LAYOUTS = {
    "packed, 1 microbatch": packed(128),
    "packed, 2 microbatches": packed(48),
    "packed, 4 microbatches": packed(24),
    "packed, rows rounded to 8": packed(64, sequence_length_round=8),
    "packed, microbatches of one length": packed(64, microbatch_length_round=64),
    "packed, first fit shuffle": packed(40, algorithm="first_fit_shuffle"),
    "dynamic, 2 microbatches": dynamic(72),
    "dynamic, 4 microbatches, rounded": dynamic(40, sequence_length_round=4),
    "padded, 8 rows": fixed(8),
    "padded, 2 rows": fixed(2),
    "padded, 1 row": fixed(1),
    "packed with activation checkpointing": dataclasses.replace(
        packed(48), activation_checkpointing="full"
    ),
    "packed, selective checkpointing": dataclasses.replace(
        packed(48), activation_checkpointing="selective"
    ),
    "padded, selective checkpointing": dataclasses.replace(
        fixed(4), activation_checkpointing="selective"
    ),
    "shared prefixes, 1 microbatch": sharing(128),
    # The first group needs 37 tokens.
    "shared prefixes, groups divided": sharing(28),
    "shared prefixes, rounded": sharing(36, sequence_length_round=4, microbatch_length_round=36),
    "shared prefixes with activation checkpointing": dataclasses.replace(
        sharing(28), activation_checkpointing="full"
    ),
    "shared prefixes, selective checkpointing": dataclasses.replace(
        sharing(28), activation_checkpointing="selective"
    ),
}
SOME_LAYOUTS = (
    "packed, 2 microbatches",
    "packed, rows rounded to 8",
    "packed, microbatches of one length",
    "dynamic, 4 microbatches, rounded",
    "padded, 2 rows",
    "packed, selective checkpointing",
    "shared prefixes, groups divided",
)
IN_EVERY_LAYOUT = ("qwen2_tied", "qwen3_window")
POLICY_GRADIENT = ClippedPolicyGradientLoss(
    config=PolicyGradientLossConfig(
        normalization="sequence",
        reference_policy_kl_penalty=0.1,
        entropy_coefficient=0.05,
        ratio_clip_c=3.0,
    )
)


def train_once(
    worker_context: WorkerContext,
    config: PolicyConfig,
    batch: BatchedDataDict,
    loss: Loss,
    out: Path,
) -> dict[str, float]:
    """One optimizer step on this rank's share; the gradient is in the checkpoint `out` as
    `exp_avg`.
    """
    worker = DTensorPolicyWorker(worker_context, config=config)
    spec = plan_spec(
        config,
        purpose="train",
        parallel_layout=ParallelLayout(dp=worker_context.world_size),
        model=load_spec(config.model_name),
    )
    plan = planned(batch, spec, config.shared_prefix)
    (metrics,) = worker.train(batch.shard(plan)[worker_context.rank], None, loss)
    worker.save(out)
    process_groups.destroy()
    return {name: metric.value for name, metric in metrics.items()}


def gradient_of(
    config: PolicyConfig, model: str, batch: BatchedDataDict, loss: Loss, out: Path
) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics = train_once(context(), dataclasses.replace(config, model_name=model), batch, loss, out)
    return saved_tensors(out, "exp_avg"), metrics


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layout_gives_the_gradient_of_transformers_on_unpadded_rows(
    architecture, model_dir, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(
        model_dir(architecture), attn_implementation="eager"
    )
    batch = predictable_batch(model)
    loss = row_loss(model, batch)
    loss.backward()
    accuracy = row_accuracy(model, batch)
    assert 0.2 < accuracy < 0.8
    expected = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for name in LAYOUTS if architecture in IN_EVERY_LAYOUT else SOME_LAYOUTS:
        found, metrics = gradient_of(
            LAYOUTS[name], model_dir(architecture), batch, NllLoss(), tmp_path / name
        )
        assert relative_error(found, expected) < TOLERANCE, name
        assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=TOLERANCE), name
        assert metrics["policy/token_accuracy"] == pytest.approx(accuracy), name
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=TOLERANCE), name


@pytest.mark.parametrize("loss", [NllLoss(), POLICY_GRADIENT], ids=["nll", "policy_gradient"])
def test_row_order_and_microbatches_leave_gradient_and_metrics_as_they_are(
    loss, model_dir, tmp_path
):
    batch = grouped_batch()
    expected, expected_metrics = gradient_of(
        fixed(1), model_dir("qwen3"), batch, loss, tmp_path / "one"
    )
    for seed, (name, config) in enumerate(LAYOUTS.items()):
        shuffled = batch.select_indices(np.random.default_rng(seed).permutation(len(LENGTHS)))
        found, metrics = gradient_of(config, model_dir("qwen3"), shuffled, loss, tmp_path / name)
        assert relative_error(found, expected) < TOLERANCE, name
        assert_same_metrics(metrics, expected_metrics)


def train_once_in_shards(
    worker_context: WorkerContext,
    config: PolicyConfig,
    batch: BatchedDataDict,
    loss: Loss,
    out: Path,
) -> dict[str, float]:
    """`train_once` as a model too large to stay unsharded does it: gathered and reduced layer by
    layer, each microbatch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_layout_module, "MAX_UNSHARDED_BYTES", 0)
        return train_once(worker_context, config, batch, loss, out)


@pytest.mark.parametrize("architecture", ["llama_tied", "qwen3"])
def test_two_ranks_give_the_gradient_of_one(architecture, model_dir, rank_pool, tmp_path):
    batch = grouped_batch()
    expected, expected_metrics = gradient_of(
        fixed(8), model_dir(architecture), batch, POLICY_GRADIENT, tmp_path / "one"
    )
    first, second = train_once, train_once_in_shards
    if architecture == "qwen3":
        first, second = second, first
    runs = {
        "packed, 2 microbatches": first,
        "packed with activation checkpointing": second,
        "dynamic, 2 microbatches": second,
        "padded, 2 rows": first,
        "shared prefixes, groups divided": second,
    }
    for name, train in runs.items():
        config = dataclasses.replace(LAYOUTS[name], model_name=model_dir(architecture))
        out = tmp_path / name
        meeting = tmp_path / f"meeting of {name}"
        metrics = run_ranks(rank_pool, train, 2, meeting, config, batch, POLICY_GRADIENT, out)
        assert relative_error(saved_tensors(out, "exp_avg"), expected) < TOLERANCE, name
        for rank_metrics in metrics:
            assert_same_metrics(rank_metrics, expected_metrics)


@pytest.mark.parametrize(
    "layout", ["packed, 2 microbatches", "packed, microbatches of one length", "padded, 2 rows"]
)
def test_a_rank_without_rows_runs_dummies_and_changes_nothing(
    layout, model_dir, rank_pool, meeting, tmp_path
):
    batch = random_batch(LENGTHS[:1])
    config = dataclasses.replace(LAYOUTS[layout], model_name=model_dir("qwen2"))
    expected, expected_metrics = gradient_of(
        fixed(1), config.model_name, batch, POLICY_GRADIENT, tmp_path / "one"
    )
    metrics = run_ranks(
        rank_pool, train_once, 2, meeting, config, batch, POLICY_GRADIENT, tmp_path / "two"
    )
    assert relative_error(saved_tensors(tmp_path / "two", "exp_avg"), expected) < TOLERANCE
    for rank_metrics in metrics:
        assert_same_metrics(rank_metrics, expected_metrics)


@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        ("packed, 1 microbatch", 1),
        ("packed, 2 microbatches", 2),
        ("packed, 4 microbatches", 4),
        ("dynamic, 2 microbatches", 2),
        ("dynamic, 4 microbatches, rounded", 4),
        ("padded, 8 rows", 1),
        ("padded, 2 rows", 4),
    ],
)
def test_the_layouts_have_as_many_microbatches_as_their_names_say(layout, num_microbatches):
    spec = plan_spec(
        LAYOUTS[layout], purpose="train", parallel_layout=ParallelLayout(dp=1), model=None
    )
    assert plan_batch(LENGTHS, spec).num_microbatches == num_microbatches


def test_groups_are_divided_over_microbatches_and_ranks():
    """Otherwise the layouts with shared prefixes would test less than they should."""
    config = LAYOUTS["shared prefixes, groups divided"]
    batch = grouped_batch()
    for dp in (1, 2):
        spec = plan_spec(config, purpose="train", parallel_layout=ParallelLayout(dp=dp), model=None)
        plan = planned(batch, spec, config.shared_prefix)
        assert plan.computed_lengths.sum() < batch["length"].sum()
        of_group = np.flatnonzero(batch["group"] == 0)
        microbatches = [each for rank in plan.ranks for each in rank]
        assert sum(bool(set(each.rows) & set(of_group)) for each in microbatches) > 1
        assert all(set(of_group) & set(plan.rows_of_rank(rank)) for rank in range(dp))


@pytest.mark.parametrize("max_tokens", [8, 12])
def test_truncated_rows_share_what_is_left(max_tokens, model_dir, tmp_path):
    """At 8 tokens three rows are the same, with different weights."""
    config = dataclasses.replace(sharing(max_tokens), oversize_rows="truncate")
    batch = grouped_batch()
    found, metrics = gradient_of(config, model_dir("qwen3"), batch, NllLoss(), tmp_path)
    for name in ("input_ids", "token_mask"):
        column = batch[name]
        rows = [row[:max_tokens] for row in column]
        batch[name] = Jagged.from_rows(rows, column.dtype)
    model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), attn_implementation="eager")
    loss = row_loss(model, batch)
    loss.backward()
    expected: dict[str, Any] = {name: weight.grad for name, weight in model.named_parameters()}
    assert relative_error(found, expected) < TOLERANCE
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=TOLERANCE)


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith("policy/rank_time"):
            assert found[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("keys", [packed(48), sharing(28)], ids=["packed", "shared prefixes"])
def test_a_batch_of_several_global_batches_takes_one_optimizer_step_for_each(
    keys, model_dir, tmp_path
):
    config = dataclasses.replace(keys, model_name=model_dir("llama"), train_global_batch_size=4)
    batch = grouped_batch()
    worker = DTensorPolicyWorker(context(), config=config)
    plan = planned(
        batch,
        plan_spec(
            config,
            purpose="train",
            parallel_layout=ParallelLayout(dp=1),
            model=load_spec(config.model_name),
        ),
        config.shared_prefix,
    )
    full = worker.train(batch.shard(plan)[0], None, NllLoss())
    worker.save(tmp_path / "full")
    halves = DTensorPolicyWorker(context(), config=config)
    metrics = []
    for start in (0, 4):
        half = batch.select_indices(range(start, start + 4))
        half_spec = plan_spec(
            config,
            purpose="train",
            parallel_layout=ParallelLayout(),
            model=load_spec(config.model_name),
        )
        half_plan = planned(half, half_spec, config.shared_prefix)
        metrics += halves.train(half.shard(half_plan)[0], None, NllLoss())
    halves.save(tmp_path / "halves")
    assert len(full) == 2
    losses = [each["policy/loss"].value for each in full]
    weights, expected = (saved_tensors(tmp_path / name, "weight") for name in ("full", "halves"))
    if config.shared_prefix is True:
        # Groups are in the order of their first rows, which may be in an earlier global batch.
        assert losses == pytest.approx([each["policy/loss"].value for each in metrics], rel=1e-6)
        assert relative_error(weights, expected) < TOLERANCE
        return
    assert losses == [each["policy/loss"].value for each in metrics]
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
