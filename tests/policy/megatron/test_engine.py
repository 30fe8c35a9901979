"""One gradient, one set of outputs, wherever Megatron's ranks stand: those of transformers on
unpadded rows.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.policy import engine_base
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.engine import TokenLogprobs
from nemo_like.policy.megatron.engine import MegatronEngine
from nemo_like.policy.megatron.layers import SegmentAttention
from tests.policy.megatron.ranks import (
    PARALLEL,
    Step,
    as_tensors,
    full_gradients,
    joined,
    look_around,
    of_model,
    take_steps,
)
from tests.policy.megatron.reference import (
    assert_same_logprobs,
    assert_step_is,
    transformers_accuracy,
    transformers_gradients,
)
from tests.policy.test_filtered_policy import (
    DYNAMIC,
    FILTERED_LOSS,
    PACKED,
    filtered,
    gradients_by_definition,
)
from tests.policy.test_gradient_equality import (
    LAYOUTS,
    LENGTHS,
    POLICY_GRADIENT,
    TOLERANCE,
    assert_same_metrics,
)
from tests.policy.tiny import random_batch, relative_error


@pytest.mark.parametrize(
    "parallel",
    [
        "one rank",
        "dp2",
        "tp2",
        "tp2 + sp",
        "pp2",
        "cp2",
        "tp2 x cp2 + sp",
        "pp2 x cp2",
        "tp2 x pp2 x dp2",
        "tp2 x pp2 x cp2 + sp",
    ],
)
def test_every_layout_gives_the_gradient_of_transformers_on_unpadded_rows(
    parallel, model_dir, expected, on_ranks
):
    cases = [
        ("qwen3_window", "packed, 4 microbatches"),
        ("qwen3_window", "packed with activation checkpointing"),
        ("qwen2_tied", "dynamic, 4 microbatches, rounded"),
        ("llama_tied", "packed, selective checkpointing"),
        ("mistral", "padded, 2 rows"),
    ]
    steps = [
        Step(of_model(LAYOUTS[layout], model_dir(architecture)), random_batch(LENGTHS))
        for architecture, layout in cases
    ]
    ranks = on_ranks(take_steps, parallel, steps)
    for index, (architecture, layout) in enumerate(cases):
        results = [steps_of_rank[index] for steps_of_rank in ranks]
        gradients, loss = expected(architecture)
        assert_step_is(results, gradients, loss, (architecture, layout))
        accuracy = transformers_accuracy(model_dir(architecture))
        assert results[-1].metrics["policy/token_accuracy"] == pytest.approx(accuracy)


def test_layers_and_heads_that_do_not_divide_evenly(on_ranks, tmp_path):
    """Three layers on two stages, two tensor ranks for one head of keys and values, and a token
    that is not trained.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 16
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=3,
        num_key_value_heads=1,
        rope_parameters=rope,
        initializer_range=0.2,
    )
    batch = random_batch(LENGTHS)
    config.pad_token_id = int(batch["input_ids"].values[3])
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    steps = [Step(of_model(LAYOUTS["packed, 2 microbatches"], str(tmp_path / "model")), batch)]
    gradients, _ = transformers_gradients(str(tmp_path / "model"))
    assert not gradients["model.embed_tokens.weight"][config.pad_token_id].any(), (
        "transformers leaves this row alone"
    )
    for parallel in ("tp2 x pp2", "tp2 x pp2 + sp"):
        ranks = on_ranks(take_steps, parallel, steps)
        assert relative_error(as_tensors(ranks[0][0].gradients), gradients) < TOLERANCE


def test_a_policy_gradient_with_entropy_has_the_same_metrics_everywhere(model_dir, on_ranks):
    steps = [
        Step(
            of_model(LAYOUTS["packed, 4 microbatches"], model_dir("qwen3")),
            random_batch(LENGTHS),
            POLICY_GRADIENT,
        )
    ]
    (alone,) = on_ranks(take_steps, "one rank", steps)
    for parallel in ("tp2", "tp2 x cp2 + sp", "pp2 x cp2", "dp2"):
        ranks = on_ranks(take_steps, parallel, steps)
        assert (
            relative_error(as_tensors(ranks[0][0].gradients), as_tensors(alone[0].gradients))
            < TOLERANCE
        ), parallel
        assert_same_metrics(ranks[-1][0].metrics, alone[0].metrics)


@pytest.mark.parametrize("parallel", ["dp2", "pp2 x cp2"])
def test_a_rank_without_rows_runs_dummies_and_changes_nothing(parallel, model_dir, on_ranks):
    steps = [
        Step(
            of_model(LAYOUTS["packed, 2 microbatches"], model_dir("qwen2")),
            random_batch(LENGTHS[:1]),
        )
    ]
    (alone,) = on_ranks(take_steps, "one rank", steps)
    ranks = on_ranks(take_steps, parallel, steps)
    assert (
        relative_error(as_tensors(ranks[0][0].gradients), as_tensors(alone[0].gradients))
        < TOLERANCE
    )
    assert_same_metrics(ranks[-1][0].metrics, alone[0].metrics)


class WallClock(ComputeClock):
    """Wall-clock time, as on CUDA: it passes while a rank waits."""

    def _now(self) -> float:
        return time.perf_counter()


def train_beside_a_slow_rank(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig, delay_s: float
) -> float:
    """The step's imbalance where rank 0 needs `delay_s` longer for each microbatch, and rank 1
    waits for it.
    """
    with pytest.MonkeyPatch.context() as patch, joined(context, parallel) as rank:
        patch.setattr(engine_base, "ComputeClock", WallClock)
        worker = rank.worker(config)
        engine: Any = worker._policy
        if context.rank == 0:
            engine._model.register_forward_hook(lambda *_: time.sleep(delay_s))
        (metrics,) = worker.train(
            rank.shard(config, worker, random_batch(LENGTHS[:4])), None, NllLoss()
        )
        assert engine.gather_over_world(context.rank) == [0, 1]
    return metrics["policy/rank_time_worst_over_mean"].value


def test_a_rank_that_waits_for_gradients_is_not_busy(model_dir, on_ranks) -> None:
    config = dataclasses.replace(
        of_model(LAYOUTS["padded, 1 row"], model_dir("llama")), train_global_batch_size=4
    )
    for imbalance in on_ranks(train_beside_a_slow_rank, "dp2", config, 1.0):
        assert imbalance > 1.2


def test_megatron_trains_the_filtered_distribution(model_dir, on_ranks) -> None:
    """Against transformers in float64: tensor, sequence, context and pipeline parallelism, packed
    and padded.
    """
    batch = random_batch(LENGTHS)
    expected, loss, _ = gradients_by_definition(model_dir("qwen3_tied"), batch)
    layouts = (PACKED, DYNAMIC)
    steps = [
        Step(filtered(layout, model_dir("qwen3_tied")), batch, FILTERED_LOSS) for layout in layouts
    ]
    for name in ("tp2", "tp2 + sp", "cp2", "pp2"):
        ranks = on_ranks(take_steps, name, steps)
        for index, layout in enumerate(layouts):
            assert ranks[-1][index].metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE), (
                name,
                layout,
            )
            found = as_tensors(ranks[0][index].gradients)
            assert relative_error(found, expected) < TOLERANCE, (name, layout)


def test_scores_weights_and_groups(model_dir, on_ranks):
    config = of_model(LAYOUTS["packed, 2 microbatches"], model_dir("llama_tied"))
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    for parallel in ("one rank", "tp2 x cp2 + sp", "tp2 x pp2 x cp2 + sp"):
        world_size, degrees = PARALLEL[parallel]
        ranks = on_ranks(look_around, parallel, config)
        rows = ranks[-1]["rows"]
        assert len(rows["input_ids"]) == len(LENGTHS), "dp is 1: every row is on every rank"
        for found, row in zip(
            ranks[-1]["outputs"]["prev_logprobs"], zip(*rows.values(), strict=True), strict=True
        ):
            assert_same_logprobs(model, found, *row)
        for name, parameter in model.named_parameters():
            assert np.array_equal(ranks[0]["weights"][name], parameter.detach().numpy()), name
        parallel_layout = build_layout(degrees, world_size)
        for ranks_of_group in parallel_layout.groups("dp", "cp"):
            assert all(ranks[rank]["gathered"] == list(ranks_of_group) for rank in ranks_of_group)
        assert ranks[0]["sum"] == [1.0, 0.0]
        assert ranks[0]["cp"] == [
            value for cp in range(degrees.context) for value in (float(cp), -1.0)
        ]
        if degrees.pipeline > 1:
            assert ranks[0]["outputs"] == {}, "only the last stage has outputs"
        last_stage = ranks[-world_size // degrees.pipeline :]
        assert all(seen["kept"] == seen["sent"] for seen in last_stage)
        # The model is unchanged, so the log-probs that were kept are those of training.
        ratios = [seen["trained"]["policy/ratio_mean"] for seen in last_stage]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-5)


def accumulate(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig
) -> dict[str, Any]:
    """The gradient of a batch in one call of `run`, and in two; and how often attention ran
    forward.
    """
    calls = 0
    attend = SegmentAttention.forward

    def counted(self: SegmentAttention, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(self, *args, **kwargs)

    def loss(inputs: Any, outputs: TokenLogprobs) -> tuple[Tensor, None]:
        return -(outputs.logprobs * inputs.label_mask).sum(), None

    results: dict[str, Any] = {}
    with joined(context, parallel) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentAttention, "forward", counted)
        for name, sizes in {"one call": [2], "two calls": [1, 1]}.items():
            worker = rank.worker(config)
            shard = rank.shard(config, worker, random_batch(LENGTHS[:4]))
            microbatches = [
                worker._rows(shard, shard.plan.spec).inputs(each)
                for each in shard.plan.microbatches
            ]
            assert len(microbatches) == sum(sizes)
            engine = worker._policy
            assert isinstance(engine, MegatronEngine)
            calls = 0
            while sizes:
                part, microbatches = microbatches[: sizes[0]], microbatches[sizes.pop(0) :]
                engine.run(part, loss, backward=True)
            results[name] = {key: value.numpy() for key, value in full_gradients(engine)}
            results["forwards"] = calls
    return results


def test_gradients_add_up_over_calls_and_recompute_runs_layers_twice(model_dir, on_ranks):
    config = dataclasses.replace(
        of_model(LAYOUTS["packed, 4 microbatches"], model_dir("qwen3")), train_global_batch_size=4
    )
    config = dataclasses.replace(
        config, sequence_packing=dataclasses.replace(config.sequence_packing, train_mb_tokens=32)
    )
    plain = on_ranks(accumulate, "cp2", config)
    assert (
        relative_error(as_tensors(plain[0]["two calls"]), as_tensors(plain[0]["one call"]))
        < TOLERANCE
    )
    for kind in ("selective", "full"):
        recomputed = on_ranks(
            accumulate, "cp2", dataclasses.replace(config, activation_checkpointing=kind)
        )
        assert recomputed[0]["forwards"] == 2 * plain[0]["forwards"]
        assert (
            relative_error(as_tensors(recomputed[0]["one call"]), as_tensors(plain[0]["one call"]))
            < TOLERANCE
        )
