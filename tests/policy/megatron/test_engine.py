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
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.policy.megatron.engine import MegatronEngine
from nemo_like.policy.megatron.layers import SegmentAttention
from nemo_like.policy.outputs import TokenLogprobs
from tests.exhaustive import usually
from tests.policy.megatron.ranks import (
    PARALLEL,
    Step,
    StepResult,
    as_tensors,
    full_gradients,
    joined,
    look_around,
    meeting_in,
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
from tests.policy.tiny import grouped_batch, random_batch, relative_error, run_ranks

CASES = (
    ("qwen3_window", "packed, 4 microbatches"),
    ("qwen3_window", "packed with activation checkpointing"),
    ("qwen2_tied", "dynamic, 4 microbatches, rounded"),
    ("llama_tied", "packed, selective checkpointing"),
    ("mistral", "padded, 2 rows"),
    ("qwen3_window", "shared prefixes, groups divided"),
    ("llama_tied", "shared prefixes with activation checkpointing"),
    ("qwen2_tied", "shared prefixes, selective checkpointing"),
)
CASES_OF = {
    "one rank": CASES,
    "dp2": (CASES[0], CASES[2], CASES[5]),
    "tp2": (CASES[0], CASES[2], CASES[4], CASES[7]),
    "tp2 + sp": (CASES[1], CASES[2], CASES[3], CASES[5], CASES[6]),
    "pp2": (CASES[1], CASES[2], CASES[3], CASES[5], CASES[7]),
    "cp2": (CASES[0], CASES[2], CASES[3], CASES[5], CASES[6]),
    "dp2 x cp2, dynamic": (CASES[0], CASES[3], CASES[5], CASES[6]),
    "tp2 x cp2 + sp": (CASES[1], CASES[2], CASES[5], CASES[7]),
    "pp2 x cp2": (CASES[3], CASES[4], CASES[6]),
    "tp2 x pp2 x dp2": (CASES[0], CASES[5]),
    "tp2 x pp2 x cp2 + sp": (CASES[2], CASES[7]),
}
"""Layout -> architectures and ways of batching. Every one is computed with tensor, with pipeline
and with context parallelism.
"""
WITH_ENTROPY = ("dp2", "dp2 x cp2, dynamic", "tp2", "tp2 x cp2 + sp", "pp2 x cp2")
"""Layouts of a policy gradient; its reference is one rank."""
FILTERED = ("tp2", "cp2", "pp2")
"""Layouts that train the filtered distribution, against transformers in float64."""


def step_with_entropy(model_dir) -> Step:
    config = of_model(LAYOUTS["shared prefixes, groups divided"], model_dir("qwen3"))
    return Step(config, grouped_batch(), POLICY_GRADIENT)


@pytest.fixture(scope="module")
def of_one_rank(model_dir, pool, tmp_path_factory) -> StepResult:
    """A policy gradient with entropy on one rank."""
    world_size, parallel = PARALLEL["one rank"]
    meeting = meeting_in(tmp_path_factory.mktemp("one"))
    steps = [step_with_entropy(model_dir)]
    ((alone,),) = run_ranks(pool, take_steps, world_size, meeting, parallel, steps)
    return alone


@pytest.fixture(scope="module")
def filtered_gradients(model_dir) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the filtered distribution, by definition."""
    gradients, loss, _ = gradients_by_definition(model_dir("qwen3_tied"), random_batch(LENGTHS))
    return gradients, loss


@pytest.mark.parametrize("parallel", usually(CASES_OF, "one rank", "dp2", "tp2 + sp", "pp2", "cp2"))
def test_every_layout_gives_the_gradient_of_transformers_on_unpadded_rows(
    parallel, model_dir, expected, of_one_rank, filtered_gradients, on_ranks
):
    """And, in the same process group, the policy gradient of one rank, and that of the filtered
    distribution.
    """
    batch = grouped_batch()
    cases = CASES_OF[parallel]
    steps = [
        Step(of_model(LAYOUTS[layout], model_dir(architecture)), batch)
        for architecture, layout in cases
    ]
    if parallel in WITH_ENTROPY:
        steps.append(step_with_entropy(model_dir))
    if parallel in FILTERED:
        steps += [
            Step(filtered(layout, model_dir("qwen3_tied")), random_batch(LENGTHS), FILTERED_LOSS)
            for layout in (PACKED, DYNAMIC)
        ]
    # One list per step: the results of all ranks.
    ranks = on_ranks(take_steps, parallel, steps)
    remaining = [list(results) for results in zip(*ranks, strict=True)]
    for architecture, layout in cases:
        results = remaining.pop(0)
        gradients, loss = expected(architecture)
        assert_step_is(results, gradients, loss, (architecture, layout))
        accuracy = transformers_accuracy(model_dir(architecture))
        assert results[-1].metrics["policy/token_accuracy"] == pytest.approx(accuracy)
    if parallel in WITH_ENTROPY:
        results = remaining.pop(0)
        error = relative_error(as_tensors(results[0].gradients), as_tensors(of_one_rank.gradients))
        assert error < TOLERANCE
        assert_same_metrics(results[-1].metrics, of_one_rank.metrics)
    if parallel in FILTERED:
        gradients, loss = filtered_gradients
        for layout in (PACKED, DYNAMIC):
            results = remaining.pop(0)
            assert results[-1].metrics["policy/loss"] == pytest.approx(loss, rel=TOLERANCE), layout
            assert relative_error(as_tensors(results[0].gradients), gradients) < TOLERANCE, layout
    assert remaining == []


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
    batch = grouped_batch()
    config.pad_token_id = int(batch["input_ids"].values[3])
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    steps = [
        Step(of_model(LAYOUTS[layout], str(tmp_path / "model")), batch)
        for layout in ("packed, 2 microbatches", "shared prefixes, groups divided")
    ]
    gradients, _ = transformers_gradients(str(tmp_path / "model"))
    assert not gradients["model.embed_tokens.weight"][config.pad_token_id].any(), (
        "transformers leaves this row alone"
    )
    for parallel in ("tp2 x pp2", "tp2 x pp2 + sp"):
        ranks = on_ranks(take_steps, parallel, steps)
        for step in ranks[0]:
            assert relative_error(as_tensors(step.gradients), gradients) < TOLERANCE


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


def train_beside_a_slow_rank(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig, delay_s: float
) -> float:
    """The step's imbalance where rank 0 needs `delay_s` longer for each microbatch, and rank 1
    waits for it.
    """
    with pytest.MonkeyPatch.context() as patch, joined(context, parallel) as rank:
        # Wall-clock time passes while a rank waits, as the time of events on CUDA.
        patch.setattr(time, "process_time", time.perf_counter)
        worker = rank.worker(config)
        engine: Any = worker.engine
        if context.rank == 0:
            engine.model.register_forward_hook(lambda *_: time.sleep(delay_s))
        (metrics,) = worker.train(
            rank.shard(config, worker, random_batch(LENGTHS[:4])), None, NllLoss()
        )
        assert engine.ranks.gather_over_world(context.rank) == [0, 1]
    return metrics["policy/rank_time_worst_over_mean"].value


def test_a_rank_that_waits_for_gradients_is_not_busy(model_dir, on_ranks) -> None:
    config = dataclasses.replace(
        of_model(LAYOUTS["padded, 1 row"], model_dir("llama")), train_global_batch_size=4
    )
    for imbalance in on_ranks(train_beside_a_slow_rank, "dp2", config, 1.0):
        assert imbalance > 1.2


def test_scores_weights_and_groups(model_dir, on_ranks):
    config = of_model(LAYOUTS["shared prefixes, groups divided"], model_dir("llama_tied"))
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    for parallel in ("one rank", "tp2 x cp2 + sp", "tp2 x pp2 + sp"):
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
    context: WorkerContext, parallel: ParallelConfig, configs: list[PolicyConfig]
) -> list[dict[str, Any]]:
    """Of each config the gradient of a batch in one call of `run`, and in two; and how often
    attention ran forward.
    """
    calls = 0

    def count(module: nn.Module, *_: Any) -> None:
        nonlocal calls
        calls += isinstance(module, SegmentAttention)

    def loss(inputs: Any, outputs: TokenLogprobs) -> tuple[Tensor, None]:
        return -(outputs.logprobs * inputs.label_mask).sum(), None

    found = []
    with joined(context, parallel) as rank, register_module_forward_hook(count):
        for config in configs:
            results: dict[str, Any] = {}
            for name, sizes in {"one call": [2], "two calls": [1, 1]}.items():
                worker = rank.worker(config)
                shard = rank.shard(config, worker, random_batch(LENGTHS[:4]))
                microbatches = [
                    worker.rows(shard, shard.plan.spec).inputs(each)
                    for each in shard.plan.microbatches
                ]
                assert len(microbatches) == sum(sizes)
                engine = worker.engine
                assert isinstance(engine, MegatronEngine)
                calls = 0
                while sizes:
                    part, microbatches = microbatches[: sizes[0]], microbatches[sizes.pop(0) :]
                    engine.run(part, loss, backward=True)
                results[name] = {key: value.numpy() for key, value in full_gradients(engine)}
                results["forwards"] = calls
            found.append(results)
    return found


def test_gradients_add_up_over_calls_and_recompute_runs_layers_twice(model_dir, on_ranks):
    config = dataclasses.replace(
        of_model(LAYOUTS["packed, 4 microbatches"], model_dir("qwen3")), train_global_batch_size=4
    )
    config = dataclasses.replace(
        config, sequence_packing=dataclasses.replace(config.sequence_packing, train_mb_tokens=32)
    )
    configs = [
        dataclasses.replace(config, activation_checkpointing=kind)
        for kind in (config.activation_checkpointing, "selective", "full")
    ]
    plain, *recomputed = on_ranks(accumulate, "cp2", configs)[0]
    assert relative_error(as_tensors(plain["two calls"]), as_tensors(plain["one call"])) < TOLERANCE
    for each in recomputed:
        assert each["forwards"] == 2 * plain["forwards"]
        error = relative_error(as_tensors(each["one call"]), as_tensors(plain["one call"]))
        assert error < TOLERANCE


def lengths_per_stage(
    context: WorkerContext, parallel: ParallelConfig, config: PolicyConfig
) -> tuple[list[int], list[int]]:
    """Tokens of each planned microbatch, and of each one that the attention of a stage received."""
    received: list[int] = []

    def note(module: nn.Module, args: tuple[Any, ...], *_: Any) -> None:
        if isinstance(module, SegmentAttention):
            received.append(len(args[0]))

    def loss(inputs: Any, outputs: TokenLogprobs) -> tuple[Tensor, None]:
        return -(outputs.logprobs * inputs.label_mask).sum(), None

    with joined(context, parallel) as rank, register_module_forward_hook(note):
        worker = rank.worker(config)
        shard = rank.shard(config, worker, random_batch(LENGTHS[:4]))
        rows = worker.rows(shard, shard.plan.spec)
        received.clear()
        worker.engine.run(map(rows.inputs, shard.plan.microbatches), loss, backward=True)
        return [each.num_tokens for each in shard.plan.microbatches], received


def test_pipeline_stages_receive_packs_of_the_same_length(model_dir, on_ranks):
    config = dataclasses.replace(
        of_model(LAYOUTS["packed, 4 microbatches"], model_dir("qwen3")), train_global_batch_size=4
    )
    config = dataclasses.replace(
        config, sequence_packing=dataclasses.replace(config.sequence_packing, train_mb_tokens=32)
    )
    stages = on_ranks(lengths_per_stage, "pp2", config)
    planned = stages[0][0]
    assert len(set(planned)) > 1, "packs of different lengths need no padding"
    for _, received in stages:
        # Each layer of a stage receives each microbatch once.
        num_layers = len(received) // len(planned)
        assert received == [length for length in planned for _ in range(num_layers)]
