"""The predicted GRPO step: its splits, their times, and the calibration with a past run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.lora import LoraConfig
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import PlanSpec, plan_batch
from nemo_like.models.presets import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.grpo_request import (
    Calibration,
    GrpoStepRequest,
    MeasuredTimes,
    RolloutLengths,
    ScoringModel,
    Split,
)
from nemo_like.prediction.grpo_step import calibrate, possible_splits, predict_grpo_step
from nemo_like.prediction.past_run import read_run
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.rollout_time import Batching

MODEL = load_spec("1b")
SCORER = ScoringModel(
    name="quality", cost=CostModel(linear=1e9, quadratic=1e4), max_tokens=2048, num_workers=0
)


def request(
    policy: int = 8, generation: int = 0, *, tp: int = 1, num_rollouts: int = 2, **keys: Any
) -> GrpoStepRequest:
    generator = np.random.default_rng(0)
    rollouts = []
    for _ in range(num_rollouts):
        prompts = np.repeat(generator.integers(20, 200, 16), 4)
        rollouts.append(RolloutLengths(prompts, generator.integers(10, 600, 64)))
    values: dict[str, Any] = {
        "rollouts": tuple(rollouts),
        "source": "a test",
        "group_size": 4,
        "model": MODEL,
        "placement": Placement(parallel_layout=ParallelLayout(dp=policy // tp, tp=tp)),
        "spec": PlanSpec(
            max_tokens=4096,
            num_ranks=policy // tp,
            global_batch_size=32,
            cost=CostModel.from_spec(MODEL),
        ),
        "split": Split(
            policy=policy, generation=generation or policy, is_colocated=generation == 0
        ),
        "batching": Batching(max_running=16),
    }
    return GrpoStepRequest(**values | keys)


@settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from([2, 4, 6, 8, 24]),
    generation=st.sampled_from([0, 1, 2, 8]),
    tp=st.sampled_from([1, 2]),
    num_passes=st.integers(0, 2),
)
def test_the_step_times_of_every_split_follow_from_its_phases(policy, generation, tp, num_passes):
    wanted = request(
        policy, generation, tp=tp, num_logprob_passes=num_passes, reward_models=(SCORER,)
    )
    prediction = predict_grpo_step(wanted)
    assert prediction.configured.split == wanted.split
    num_devices = wanted.split.num_devices
    for times in prediction.splits:
        split = times.split
        assert split.num_devices == num_devices and split.policy % tp == 0
        training = times.logprobs + times.train
        scoring = float(times.reward_model.mean())
        total = float((times.rollout + training).mean()) + scoring + times.weight_sync
        assert times.synchronous == pytest.approx(total)
        assert bool((times.logprobs > 0).all()) == (num_passes > 0)
        if split.is_colocated:
            assert times.staleness_1 is None
            continue
        assert times.staleness_1 is not None
        assert times.staleness_1 >= max(times.rollout.mean(), training.mean()) + scoring
        assert times.staleness_1 <= times.synchronous
    separate = [times for times in prediction.splits if not times.split.is_colocated]
    for fewer, more in itertools.pairwise(separate):
        assert fewer.split.generation < more.split.generation
        assert bool((more.rollout <= fewer.rollout).all())
    best = prediction.fastest_synchronous
    assert best.synchronous == min(times.synchronous for times in prediction.splits)


def test_at_most_eight_separate_splits_are_shown_and_the_configured_one_is_among_them() -> None:
    wanted = request(policy=59, generation=5)
    splits = possible_splits(dataclasses.replace(wanted, spec=wanted.spec))
    assert wanted.split in splits and len(splits) <= 10
    # 32 rows per optimizer step cannot be divided over more data-parallel ranks.
    assert all(split.policy <= 32 or split == wanted.split for split in splits)


def test_a_weight_update_has_the_bytes_of_what_is_sent() -> None:
    merged = request()
    placement = dataclasses.replace(
        merged.placement, lora=LoraConfig(enabled=True, weight_sync="merged")
    )
    adapters = LoraConfig(enabled=True, weight_sync="adapter")
    adapted = dataclasses.replace(merged, placement=dataclasses.replace(placement, lora=adapters))
    merged = dataclasses.replace(merged, placement=placement)
    link = merged.rates.link_bytes_per_s
    sent = predict_grpo_step(adapted).configured.weight_sync * link
    # Llama 1B: 16 layers, hidden size 2048, 8 key-value heads of 64, feed-forward size 8192.
    outputs = 2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192)
    assert sent == pytest.approx(16 * 16 * outputs * merged.placement.compute_bytes)
    assert predict_grpo_step(merged).configured.weight_sync * link == pytest.approx(
        MODEL.num_params * merged.placement.compute_bytes
    )
    assert "one copy of the LoRA adapters over" in " ".join(
        predict_grpo_step(adapted).assumptions()
    )


def test_one_device_has_no_split_to_choose() -> None:
    prediction = predict_grpo_step(request(policy=1))
    assert [times.split.is_colocated for times in prediction.splits] == [True]
    assert prediction.fastest_overlapped is None


def test_replicas_take_as_many_devices_as_they_need() -> None:
    wanted = request(policy=4, generation=4, workers_per_replica=2)
    assert [split.generation for split in possible_splits(wanted)] == [8, 2, 4, 6]
    one = predict_grpo_step(wanted, splits=[wanted.split]).splits[0]
    # Two devices per replica have twice the rates: reading and computing take half as long.
    single = dataclasses.replace(wanted, workers_per_replica=1)
    many = predict_grpo_step(single, splits=[wanted.split]).splits[0]
    assert one.train.tolist() == many.train.tolist()
    assert one.rollout.mean() != many.rollout.mean()


def test_a_calibrated_prediction_has_the_measured_times_of_the_run() -> None:
    wanted = request(policy=4, generation=2, num_logprob_passes=1, reward_models=(SCORER,))
    measured = MeasuredTimes(
        seconds={"rollout": 3.0, "reward_model": 1.5, "train": 2.0, "weight_sync": 0.5},
        reward_s=0.25,
        num_steps=5,
        source="the run x",
    )
    calibration = calibrate(wanted, measured)
    prediction = predict_grpo_step(wanted, calibration)
    times = prediction.configured
    assert times.rollout.mean() == pytest.approx(3.0)
    assert times.train.mean() == pytest.approx(2.0)
    assert times.weight_sync == pytest.approx(0.5)
    # Log-probs were not measured, and take the factor of training.
    assert calibration.factor("logprobs") == calibration.factors["train"]
    assert times.reward_model.mean() == pytest.approx(1.5)
    assert times.synchronous == pytest.approx(7.25 + times.logprobs.mean())
    text = " ".join(prediction.assumptions())
    assert "calibrated with 5 steps of the run x" in text
    assert "nothing was measured" in " ".join(predict_grpo_step(wanted).assumptions())
    assert Calibration().factor("logprobs") == 1.0


def test_reward_models_compute_one_forward_pass_on_their_workers() -> None:
    own = dataclasses.replace(SCORER, num_workers=1)
    wanted = request(policy=4, generation=2, reward_models=(SCORER, own))
    both = predict_grpo_step(wanted, splits=[wanted.split]).splits[0]
    alone = dataclasses.replace(wanted, reward_models=(own,))
    one_worker = predict_grpo_step(alone, splits=[wanted.split]).splits[0]
    for index, rollout in enumerate(wanted.rollouts):
        # One worker has all rows, whatever their microbatches are.
        seconds = SCORER.cost.of(rollout.rows).sum() / wanted.rates.flops
        assert one_worker.reward_model[index] == pytest.approx(seconds)
        # The four workers of the policy have a fourth of them, up to the rows of the slowest.
        assert 1.25 <= both.reward_model[index] / seconds < 1.3


@pytest.mark.parametrize("has_rollouts", [True, False])
def test_lengths_and_times_of_a_past_run(tmp_path: Path, has_rollouts: bool) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "rollouts").mkdir()
    lengths = {1: [30, 40], 2: [25, 60], 3: [22]}
    prompts = {1: [10, 30], 2: [5, 21], 3: [4]}
    lines = [json.dumps({"step": step, "lengths": values}) for step, values in lengths.items()]
    (tmp_path / "plan" / "lengths.jsonl").write_text("\n".join(lines))
    metrics = []
    for step, row_lengths in lengths.items():
        metrics.append(
            {
                "step": step,
                "timing/generation_s": 10.0 * step,
                "timing/train_s": 1.0,
                "timing/reward_s": 0.5,
                "timing/reward_model_s": 1.0 + step,
                "generation/prompt_length_mean": float(np.mean(prompts[step])),
            }
        )
        if has_rollouts:
            rows = zip(row_lengths, prompts[step], strict=True)
            records = [json.dumps({"completion_tokens": row - prompt}) for row, prompt in rows]
            (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text("\n".join(records))
    # The time of this step includes the answers of a validation.
    metrics[1]["validation/reward_mean"] = 0.0
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    past = read_run(tmp_path)
    rollouts, source = past.rollouts()
    # The last step has fewer rows than a full one.
    assert len(rollouts) == 2
    for step, rollout in enumerate(rollouts, 1):
        assert rollout.rows.tolist() == lengths[step]
        if has_rollouts:
            assert rollout.prompts.tolist() == prompts[step]
    assert ("minus the mean prompt" in source) != has_rollouts
    if not has_rollouts:
        assert [rollout.prompts.tolist() for rollout in rollouts] == [[20, 20], [13, 13]]
    measured = past.measured_times()
    assert measured is not None
    # Without the first step, which contains warm-up.
    assert measured.seconds == {"rollout": 25.0, "reward_model": 4.0, "train": 1.0}
    assert (measured.reward_s, measured.num_steps) == (0.5, 2)


def test_the_steps_of_a_past_run_are_planned_with_their_trained_tokens(tmp_path: Path) -> None:
    lengths = [90] * 12
    num_trained = [80, 0, 0, 80, 1, 0, 80, 80, 0, 2, 0, 80]
    cost = CostModel(linear=100.0, quadratic=0.0, head=90.0)
    spec = PlanSpec(max_tokens=90, num_ranks=3, cost=cost)
    logged = plan_batch(lengths, spec, num_trained=num_trained).metrics()
    (tmp_path / "plan").mkdir()
    record = {"step": 1, "lengths": lengths, "num_trained": num_trained}
    (tmp_path / "plan" / "lengths.jsonl").write_text(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **logged}))
    compared = read_run(tmp_path).compare(spec)
    assert len(compared) == 4
    for name, (value, planned) in compared.items():
        assert planned == pytest.approx(value), name
    blind = plan_batch(lengths, spec).metrics()
    assert blind["packing/rank_imbalance_flops"] != logged["packing/rank_imbalance_flops"]


def test_a_run_without_timings_has_no_measured_times(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "lengths.jsonl").write_text('{"step": 1, "lengths": [3, 4]}\n')
    past = read_run(tmp_path)
    assert past.measured_times() is None
    assert past.rollouts()[0] == []
