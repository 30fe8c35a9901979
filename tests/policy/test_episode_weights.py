"""Episodes with several rows: one gradient, however they are split, on any number of ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.loss import LossNormalization, PolicyGradientLossConfig
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import PlanSpec
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.rank_groups import RankGroups
from nemo_like.policy.shard_rows import EPISODE_TRAINED, ShardRows
from tests.policy.planned import planned
from tests.policy.test_gradient_equality import fixed, gradient_of, packed, sharing, train_once
from tests.policy.tiny import VOCABULARY, context, relative_error, run_ranks, saved_tensors

TOLERANCE = 1e-5
CALLS = ([(3, 6), (8, 10), (11, 16)], [(4, 5), (7, 12)], [(2, 9)], [(5, 8), (9, 11), (12, 13)])
"""Sampled tokens of each call of each episode; those of the last episode are left out."""
ADVANTAGES = (0.7, -1.1, 0.4, 0.9)
LENGTH = 20
NUM_TRAINED_EPISODES = 3
NORMALIZATIONS: tuple[LossNormalization, ...] = ("token", "sequence", "constant")
ONE_ROW = [[[0, 1, 2]], [[0, 1]], [[0]], [[0, 1, 2]]]
"""Calls of each row of each episode."""
ONE_CALL = [[[0], [1], [2]], [[0], [1]], [[0]], [[0], [1], [2]]]
MIXED = [[[1], [0, 2]], [[1], [0]], [[0]], [[2, 1], [0]]]


def token_ids() -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, VOCABULARY, calls[-1][1]).astype(np.int32) for calls in CALLS]


def batch_of(rows: Sequence[Sequence[Sequence[int]]], first_id: int = 0) -> BatchedDataDict:
    """A row ends with its last call and trains its own calls."""
    ids, masks, episodes = [], [], []
    for episode, own_rows in enumerate(rows):
        for calls in own_rows:
            spans = [CALLS[episode][call] for call in calls]
            stop = max(stop for _, stop in spans)
            mask = np.zeros(stop, dtype=np.uint8)
            for start, end in spans:
                mask[start:end] = 1
            ids.append(token_ids()[episode][:stop])
            masks.append(mask)
            episodes.append(episode)
    input_ids = Jagged.from_rows(ids, np.int32)
    episode = np.array(episodes)
    zeros = Jagged(np.zeros(len(input_ids.values), np.float32), input_ids.offsets)
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=Jagged.from_rows(masks, np.uint8),
        generation_logprobs=zeros,
        prev_logprobs=zeros,
        advantages=np.array(ADVANTAGES, dtype=np.float32)[episode],
        length=input_ids.lengths,
        row_mask=episode < NUM_TRAINED_EPISODES,
        group=episode // 2,
        episode=first_id + episode,
    )


def loss_of(normalization: LossNormalization) -> ClippedPolicyGradientLoss:
    config = PolicyGradientLossConfig(
        surrogate="reinforce",
        normalization=normalization,
        constant_length=LENGTH if normalization == "constant" else None,
        reference_policy_kl_penalty=0.0,
    )
    return ClippedPolicyGradientLoss(config=config)


def expected_gradient(
    model_name: str, normalization: LossNormalization
) -> tuple[float, dict[str, Tensor]]:
    """-A log p by plain transformers in float64, each episode as one sequence."""
    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="eager").double()
    sums, counts = [], []
    for ids, calls in list(zip(token_ids(), CALLS, strict=True))[:NUM_TRAINED_EPISODES]:
        tokens = torch.from_numpy(ids.astype(np.int64))
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        sampled = torch.cat([torch.arange(start, stop) for start, stop in calls])
        sums.append(logprobs[sampled - 1, tokens[sampled]].sum())
        counts.append(len(sampled))
    divisors: dict[str, list[float]] = {
        "token": [sum(counts)] * len(counts),
        "sequence": [count * len(counts) for count in counts],
        "constant": [len(counts) * LENGTH] * len(counts),
    }
    terms = zip(sums, ADVANTAGES, divisors[normalization], strict=False)
    loss = torch.stack([-advantage * total / divisor for total, advantage, divisor in terms]).sum()
    loss.backward()
    gradient = {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), gradient


def sized(config: PolicyConfig, num_episodes: int = len(CALLS)) -> PolicyConfig:
    return dataclasses.replace(config, train_global_batch_size=num_episodes)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_any_split_of_episodes_has_the_gradient_of_transformers_in_float64(
    normalization: LossNormalization, model_dir, tmp_path
) -> None:
    model = model_dir("qwen2_tied")
    loss, gradient = expected_gradient(model, normalization)
    for name, config, batch in (
        ("one row", packed(64), batch_of(ONE_ROW)),
        ("one call", packed(24), batch_of(ONE_CALL)),
        ("mixed", fixed(2), batch_of(MIXED, first_id=7)),
        ("shared", sharing(32), batch_of(ONE_CALL)),
    ):
        found, metrics = gradient_of(
            sized(config), model, batch, loss_of(normalization), tmp_path / name
        )
        assert relative_error(found, gradient) < TOLERANCE, name
        assert metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE), name
        assert metrics["policy/num_rows"] == NUM_TRAINED_EPISODES, name


def test_the_gradient_depends_on_the_split_without_the_column(model_dir, tmp_path) -> None:
    """Otherwise the other tests would test nothing."""
    model = model_dir("qwen2_tied")
    _, expected = expected_gradient(model, "sequence")
    batch = batch_of(ONE_CALL)
    del batch["episode"]
    config = sized(packed(64), batch.size)
    found, metrics = gradient_of(config, model, batch, loss_of("sequence"), tmp_path)
    assert relative_error(found, expected) > 0.1
    assert metrics["policy/num_rows"] == 6


def test_rows_of_an_episode_may_be_on_different_ranks(model_dir, rank_pool, tmp_path) -> None:
    model = model_dir("qwen2_tied")
    batch = batch_of(ONE_CALL).select_indices([0, 3, 5, 1, 6, 2, 4, 7, 8])
    config = dataclasses.replace(sized(fixed(1)), model_name=model)
    spec = plan_spec(
        config, purpose="train", parallel_layout=ParallelLayout(dp=2), model=load_spec(model)
    )
    plan = planned(batch, spec, config.shared_prefix)
    ranks = [set(batch["episode"][plan.rows_of_rank(rank)].tolist()) for rank in range(2)]
    assert {0, 1} <= ranks[0] & ranks[1]
    for normalization in NORMALIZATIONS:
        loss, expected = expected_gradient(model, normalization)
        out, meeting = tmp_path / normalization, tmp_path / f"meeting of {normalization}"
        metrics: list[dict[str, Any]] = run_ranks(
            rank_pool, train_once, 2, meeting, config, batch, loss_of(normalization), out
        )
        assert relative_error(saved_tensors(out, "exp_avg"), expected) < TOLERANCE
        for own in metrics:
            assert own["policy/loss"] == pytest.approx(loss, rel=TOLERANCE)
            assert own["policy/num_rows"] == NUM_TRAINED_EPISODES


def test_a_global_batch_is_a_number_of_episodes(model_dir, tmp_path) -> None:
    """Two steps of two episodes, whose rows may be in any order."""
    config = dataclasses.replace(sized(packed(64), 2), model_name=model_dir("qwen2_tied"))
    spec = plan_spec(
        config,
        purpose="train",
        parallel_layout=ParallelLayout(),
        model=load_spec(config.model_name),
    )
    losses, weights = [], []
    # The second split has the rows of the first two episodes in turns.
    interleaved = batch_of(ONE_CALL).select_indices([3, 0, 4, 1, 2, 5, 6, 7, 8])
    for index, batch in enumerate((batch_of(ONE_ROW), interleaved)):
        worker = DTensorPolicyWorker(context(), config=config)
        plan = planned(batch, spec, config.shared_prefix)
        shard = batch.shard(plan)[0]
        evaluated = worker.evaluate(shard, loss_of("sequence"))
        steps = worker.train(shard, None, loss_of("sequence"))
        assert [step["policy/num_rows"].value for step in steps] == [2, 1]
        losses.append([each["policy/loss"].value for each in (evaluated, *steps)])
        worker.save(tmp_path / str(index))
        weights.append(saved_tensors(tmp_path / str(index), "weight"))
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
    assert relative_error(weights[1], weights[0]) < TOLERANCE


@dataclasses.dataclass(frozen=True)
class ContextParallelRanks:
    """Rank 0 of dp 2 x cp 2; the other dp rank has 5 trained tokens of episode 1."""

    dp_rank: int = 0

    def gather_over_dp_cp(self, value: Any) -> list[Any]:
        other = (1, Counter({1: 5}))
        return [value, value, other, other]


def test_context_parallel_ranks_do_not_count_their_rows_twice() -> None:
    batch = batch_of(ONE_CALL)
    spec = PlanSpec(max_tokens=24, cp_size=2, microbatch_multiple=8)
    plan = planned(batch, spec).rank_plan(0)
    assert any(not each.rows for each in plan.microbatches)
    shard = batch.shard(planned(batch, spec))[0]
    rows = ShardRows(shard, spec, 0, torch.device("cpu"))
    counted = rows.with_episodes(plan.microbatches, cast(RankGroups, ContextParallelRanks()))
    tokens = [sum(stop - start for start, stop in calls) for calls in CALLS]
    totals = np.array([tokens[0], tokens[1] + 5, tokens[2], 0], dtype=np.float32)
    assert counted.columns[EPISODE_TRAINED].tolist() == totals[shard["episode"]].tolist()
    num_tokens, num_rows = counted.count(plan.microbatches)
    assert num_tokens == sum(tokens[:NUM_TRAINED_EPISODES])
    assert num_rows == pytest.approx(1 + tokens[1] / totals[1] + 1, rel=1e-12)
