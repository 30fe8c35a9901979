"""The driver: plans by configuration, places rows once, and brings results back in the batch's
order.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import (
    DynamicBatchingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import ClippedPolicyGradientLoss, NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from tests.policy.tiny import random_batch

LENGTHS = [9, 14, 6, 23, 2, 17, 1, 12]
PLAIN = PolicyConfig(
    model_name="",
    train_global_batch_size=4,
    train_micro_batch_size=2,
    logprob_batch_size=3,
    optimizer=OptimizerConfig(lr=1e-3),
)
PACKED = dataclasses.replace(
    PLAIN,
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=32, logprob_mb_tokens=64),
)
DYNAMIC = dataclasses.replace(
    PLAIN,
    dynamic_batching=DynamicBatchingConfig(enabled=True, train_mb_tokens=48, logprob_mb_tokens=48),
)
SEVEN_B = load_spec("7b")
MODES = {"plain": PLAIN, "packed": PACKED, "dynamic": DYNAMIC}


@pytest.fixture(params=MODES)
def policy(request, model_dir):
    config = dataclasses.replace(MODES[request.param], model_name=model_dir("qwen3"))
    group = LocalGroup(
        DTensorPolicyWorker,
        {"config": config, "start": PolicyStart(needs_reference=True)},
        local_context(num_threads=1),
        name="policy",
    )
    yield Policy(group, config, load_spec(config.model_name))
    group.shutdown()


def test_a_step_of_the_driver(policy, tmp_path):
    batch = random_batch(LENGTHS)
    for name in ("prev_logprobs", "reference_logprobs", "advantages"):
        batch.pop(name)
    plan = policy.plan(batch["length"])
    assert plan.num_steps == 2
    assert sorted(plan.rows_of_rank(0).tolist()) == list(range(8))
    sharded = policy.shard(batch, plan)
    policy.probe_isolation()
    with policy.onloaded():
        logprobs = policy.compute_logprobs(sharded)
        outputs = policy.fetch_logprobs(logprobs)
        assert set(outputs) == {"prev_logprobs", "reference_logprobs"}
        for row, column in enumerate(outputs["prev_logprobs"]):
            expected = batch["token_mask"][row].astype(bool) & batch["row_mask"][row]
            expected[0] = False
            assert np.array_equal(column != 0, expected)
        columns = {"advantages": np.linspace(-1, 1, 8, dtype=np.float32)}
        loss = ClippedPolicyGradientLoss(
            config=PolicyGradientLossConfig(reference_policy_kl_penalty=0.1)
        )
        first, second = policy.train(sharded, columns, loss, logprobs)
    assert first["policy/ratio_mean"].value == pytest.approx(
        1.0, abs=1e-5
    )  # on-policy, columns met their rows
    assert second["policy/ratio_mean"].value != pytest.approx(1.0, abs=1e-5)
    policy.save(tmp_path / "saved")
    changed = policy.fetch_logprobs(policy.compute_logprobs(sharded))
    policy.train(sharded, None, NllLoss())
    policy.load(tmp_path / "saved")
    restored = policy.fetch_logprobs(policy.compute_logprobs(sharded))
    assert np.array_equal(restored["prev_logprobs"].values, changed["prev_logprobs"].values)


def test_evaluation_is_one_step_under_the_scoring_budget_and_equals_training_loss(policy):
    batch = random_batch(LENGTHS)
    evaluated = policy.evaluate(
        policy.shard(batch, policy.plan(batch["length"], "evaluate")), NllLoss()
    )
    full = dataclasses.replace(policy.config, train_global_batch_size=8)
    of_full_batch = Policy(policy.group, full, policy.model)
    (trained,) = of_full_batch.train(
        policy.shard(batch, of_full_batch.plan(batch["length"])), None, NllLoss()
    )
    assert evaluated["policy/loss"].value == pytest.approx(trained["policy/loss"].value, rel=1e-5)


def test_the_devices_speed_is_measured_by_a_worker(policy):
    assert policy.device_info.peak_flops > 1e8
    assert "measured" in policy.device_info.peak_flops_source


def test_specs_follow_the_configuration():
    packed = plan_spec(PACKED, purpose="train", parallel_layout=ParallelLayout(dp=2), model=SEVEN_B)
    assert (packed.layout, packed.max_tokens, packed.max_rows, packed.num_ranks) == (
        "packed",
        32,
        None,
        2,
    )
    assert (packed.global_batch_size, packed.sync) == (4, "microbatch")
    scoring = plan_spec(
        PACKED, purpose="evaluate", parallel_layout=ParallelLayout(dp=2), model=SEVEN_B
    )
    assert (scoring.max_tokens, scoring.global_batch_size) == (64, None)
    dynamic = plan_spec(
        DYNAMIC, purpose="train", parallel_layout=ParallelLayout(dp=1), model=SEVEN_B
    )
    assert (dynamic.layout, dynamic.max_tokens, dynamic.max_rows) == ("padded", 48, None)
    plain = plan_spec(PLAIN, purpose="train", parallel_layout=ParallelLayout(dp=1), model=SEVEN_B)
    assert (plain.layout, plain.max_tokens, plain.max_rows) == ("padded", None, 2)
    assert (
        plan_spec(
            PLAIN, purpose="evaluate", parallel_layout=ParallelLayout(dp=1), model=SEVEN_B
        ).max_rows
        == 3
    )


def test_each_policy_warns_of_oversize_rows_once_and_leaves_the_filters_alone(model_dir):
    config = dataclasses.replace(
        PACKED, model_name=model_dir("qwen3"), oversize_rows="truncate", train_global_batch_size=2
    )
    group = LocalGroup(DTensorPolicyWorker, {"config": config}, local_context(num_threads=1))
    for first in (40, 44):
        policy = Policy(group, config, load_spec(config.model_name))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            # A reward model has no limit that a user sets.
            policy.plan([5, 30], warn=False)
            plans = [policy.plan([5, length]) for length in (20, first, 50, 60)]
            assert warnings.filters == filters
        assert [plan.num_oversize for plan in plans] == [0, 1, 1, 1]
        (warning,) = caught
        assert f"row 1 has {first} tokens" in str(warning.message)
        assert "further such rows are counted" in str(warning.message)
    group.shutdown()


def test_columns_that_are_placed_already_do_not_travel_again(policy):
    batch = random_batch(LENGTHS)
    sharded = policy.shard(batch, policy.plan(batch["length"]))
    wrong = Jagged.from_rows(
        [[0.0]] * 8, np.float32
    )  # would raise if it replaced the sharded column
    loss = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig())
    assert len(policy.train(sharded, {"generation_logprobs": wrong}, loss)) == 2


def test_a_measured_gradient_is_that_of_the_step_and_changes_no_weight(policy):
    batch = random_batch(LENGTHS)
    for name in ("prev_logprobs", "reference_logprobs"):
        batch.pop(name)
    loss = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig(), is_single_step=True)
    sharded = policy.shard(batch, policy.plan(batch["length"]))
    before = policy.fetch_logprobs(policy.compute_logprobs(sharded, ["prev_logprobs"]))
    measured = policy.measure_gradient(sharded, None, loss)
    assert measured == policy.measure_gradient(sharded, None, loss), "no gradient is left"
    first, _ = policy.train(sharded, None, loss, keep_logprobs=True)
    for name, metric in measured.items():
        assert metric == first[name], name
    trained = policy.fetch_trained_logprobs(sharded)
    # The rows of the first optimizer step; those of the second were computed with other weights.
    for row in range(4):
        assert np.allclose(trained[row], before["prev_logprobs"][row], rtol=0, atol=1e-5)
    changed = [not np.array_equal(trained[row], before["prev_logprobs"][row]) for row in (5, 7)]
    assert all(changed)
