"""The policy computes the experts that the generator chose, also where its own routers differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import ParallelConfig, PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.routed_experts import ROUTED_EXPERTS
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import local_context
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationStart, SamplingParams
from nemo_like.losses import NllLoss
from nemo_like.losses.policy_gradient import ClippedPolicyGradientLoss
from nemo_like.models.spec import load_spec
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.worker import PolicyWorker
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import build_rollout, rollout_metrics
from tests.exhaustive import usually
from tests.generation.driven import generate
from tests.policy.megatron.ranks import (
    RecordingEngine,
    Step,
    as_tensors,
    joined,
    of_model,
    take_steps,
)
from tests.policy.planned import planned
from tests.policy.test_gradient_equality import LAYOUTS, LENGTHS, TOLERANCE
from tests.policy.tiny import (
    VOCABULARY,
    compute_and_fetch,
    random_batch,
    relative_error,
    row_loss,
    saved_tensors,
)

HEADS: dict[str, Any] = {"head_dim": 16}
NOISE = 1e-5
"""Of router weights: it changes the order of experts with equal logits, and nothing else."""


def save_models(folder: Path, tokenizer: str) -> None:
    """A model whose experts have equal router weights, two and two, and the same with noise."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1, 3],
        **HEADS,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "noisy")
    for name, noise in (("equal", 0.0), ("noisy", NOISE)):
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / name)
        (folder / name / "config.json").write_text((folder / "noisy/config.json").read_text())
        weights = load_file(folder / "noisy/model.safetensors")
        for key, weight in weights.items():
            if key.endswith("mlp.gate.weight"):
                weight[1::2] = weight[::2]
                weight.add_(noise * torch.randn_like(weight))
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class Sampled:
    """Completions of the model `equal`, and the directory of both models."""

    folder: Path
    batch: BatchedDataDict
    bytes_per_token: float

    @property
    def without_experts(self) -> BatchedDataDict:
        return BatchedDataDict(
            {name: column for name, column in self.batch.items() if name != ROUTED_EXPERTS}
        )


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], str]) -> Sampled:
    folder = tmp_path_factory.mktemp("replay")
    save_models(folder, model_dir("qwen3_moe"))
    worker = HFGenerationWorker(
        local_context(num_threads=1),
        start=GenerationStart(model_name=str(folder / "equal"), router_replay=True),
    )
    random = np.random.default_rng(0)
    prompts = [
        random.integers(2, VOCABULARY, size).astype(np.int32) for size in (5, 9, 5, 12, 3, 9)
    ]
    # Two completions of one prompt, which share it.
    prompts[2] = prompts[0]
    completions = generate(
        worker,
        Jagged.from_rows(prompts, np.int32),
        np.arange(6, dtype=np.uint64),
        SamplingParams(max_new_tokens=10),
        64,
    )
    conversations = []
    for index, token_ids in enumerate(prompts):
        row = ConversationRow.start(Prompt(token_ids=token_ids, text="", answer=None), seed=index)
        row.add_turn(completions, index)
        conversations.append(row)
    rollout = build_rollout(conversations, 1, np.zeros(6, dtype=np.float32), {})
    metrics = rollout_metrics(rollout)
    rollout.batch["group"] = np.array([0, 1, 0, 2, 3, 4], dtype=np.int64)
    return Sampled(
        folder, rollout.batch, metrics["generation/routed_experts_bytes_per_token"].value
    )


def fix_experts(model: Any, experts: Callable[[int], Tensor | None]) -> None:
    """Let the routers choose `experts(layer)` [tokens, 3]; the definition, in plain torch."""
    for index, layer in enumerate((0, 2)):
        router = model.model.layers[layer].mlp.gate

        def route(hidden: Tensor, index: int = index, router: Any = router) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.t()
            probabilities = logits.softmax(-1)
            chosen = probabilities.topk(3).indices
            fixed = experts(index)
            if fixed is not None:
                chosen[: len(fixed)] = fixed
            weights = probabilities.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        router.forward = route


def reference_gradients(sampled: Sampled) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the noisy model with the generator's experts, in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        sampled.folder / "noisy",
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float64,
    )
    rows = iter(sampled.batch[ROUTED_EXPERTS])
    current: list[Tensor] = []

    def next_row(module: Any, args: Any) -> None:
        # The last token has no experts.
        current[:] = [torch.from_numpy(next(rows)[:-1].astype(np.int64))]

    model.register_forward_pre_hook(next_row)
    fix_experts(model, lambda layer: current[0][:, layer])
    loss = row_loss(model, sampled.batch)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.float()
    return gradients, float(loss)


@torch.no_grad()
def share_of_changed_choices(sampled: Sampled) -> float:
    """Share of tokens and layers for which the noisy model chooses other experts by itself."""
    model = AutoModelForCausalLM.from_pretrained(sampled.folder / "noisy")
    changed = []
    for row, experts in zip(sampled.batch["input_ids"], sampled.batch[ROUTED_EXPERTS], strict=True):
        logits = model(
            torch.from_numpy(row.astype(np.int64))[None], output_router_logits=True
        ).router_logits
        for layer in range(2):
            own = logits[layer].topk(3).indices[:-1].sort(-1).values.numpy()
            changed.append((own != np.sort(experts[:-1, layer].astype(np.int64), -1)).any(-1))
    return float(np.concatenate(changed).mean())


@dataclass(frozen=True)
class Found:
    """Log-probs of a rank's rows, those of the generator, and the gradients of one step."""

    logprobs: list[np.ndarray]
    expected: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    loss: float


def compute(worker: PolicyWorker, shard: Any, gradients: Callable[[], dict[str, Any]]) -> Found:
    columns = compute_and_fetch(worker, shard)
    expected = [
        row * mask
        for row, mask in zip(shard["generation_logprobs"], shard["token_mask"], strict=True)
    ]
    (metrics,) = worker.train(shard, None, NllLoss())
    loss = metrics["policy/loss"].value if "policy/loss" in metrics else float("nan")
    return Found(list(columns.get("prev_logprobs", [])), expected, gradients(), loss)


def replay(
    context: WorkerContext,
    parallel: ParallelConfig,
    configs: list[PolicyConfig],
    batch: BatchedDataDict,
) -> list[Found]:
    """Compute `batch` with each of `configs`, all in one process group."""
    results = []
    with joined(context, parallel) as rank:
        for config in configs:
            worker = rank.worker(config)
            engine: Any = worker.engine
            assert isinstance(engine, RecordingEngine)
            shard = rank.shard(config, worker, batch)
            results.append(compute(worker, shard, lambda engine=engine: engine.gradients))
    return results


def replay_dtensor(
    context: WorkerContext,
    parallel: ParallelConfig,
    config: PolicyConfig,
    batch: BatchedDataDict,
    out: Path,
) -> Found:
    """Compute `batch` with the other engine, whose checkpoint has the gradient as `exp_avg`."""
    worker = DTensorPolicyWorker(context, config=config, start=PolicyStart(parallel=parallel))
    layout = build_layout(parallel, context.world_size)
    spec = plan_spec(
        config, purpose="train", parallel_layout=layout, model=load_spec(config.model_name)
    )
    plan = planned(batch, spec, config.shared_prefix)
    shard = batch.shard(plan)[layout.dp_rank(context.rank)]
    try:
        found = compute(worker, shard, dict)
        worker.save(out)
    finally:
        process_groups.destroy()
    return found


def difference(found: Found) -> float:
    """Largest difference of a log-prob from the generator's."""
    assert len(found.logprobs) == len(found.expected)
    pairs = zip(found.logprobs, found.expected, strict=True)
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)


def in_common_order(found: Found) -> list[np.ndarray]:
    """The log-probs of all rows, in an order that does not depend on the plan."""
    pairs = zip(found.expected, found.logprobs, strict=True)
    return [logprobs for _, logprobs in sorted(pairs, key=lambda pair: pair[0].tobytes())]


CASES = {
    "one rank": ("packed, 4 microbatches", "shared prefixes, 1 microbatch"),
    "ep2": ("dynamic, 4 microbatches, rounded", "packed with activation checkpointing"),
    "pp2 x ep2": ("packed with activation checkpointing", "packed, selective checkpointing"),
    "pp2 x v2": ("packed with activation checkpointing", "packed, 4 microbatches"),
    "tp2 x ep2 + sp": ("packed, 4 microbatches", "packed with activation checkpointing"),
    "tp2 x cp2 x ep4 + sp": ("packed, 4 microbatches", "shared prefixes, 1 microbatch"),
}


@pytest.mark.parametrize("parallel", usually(CASES, "pp2 x ep2", "tp2 x cp2 x ep4 + sp"))
def test_the_policy_computes_the_experts_of_the_generator(parallel, sampled, on_ranks):
    """With noise that changes choices, log-probs are the generator's and gradients those of fixed
    experts in float64.
    """
    assert share_of_changed_choices(sampled) > 0.05
    configs = [of_model(LAYOUTS[name], str(sampled.folder / "noisy")) for name in CASES[parallel]]
    gradients, loss = reference_gradients(sampled)
    ranks = on_ranks(replay, parallel, configs, sampled.batch)
    for index, name in enumerate(CASES[parallel]):
        results = [results_of_rank[index] for results_of_rank in ranks]
        for found in results:
            if found.logprobs:
                assert difference(found) < 1e-4, name
        assert results[-1].loss == pytest.approx(loss, rel=TOLERANCE), name
        assert relative_error(as_tensors(results[0].gradients), gradients) < 2 * TOLERANCE, name


@pytest.mark.parametrize(
    "parallel", usually(("one rank", "dp2", "tp2 + sp", "ep2"), "tp2 + sp", "ep2")
)
@pytest.mark.parametrize("layout", ["padded, 2 rows", "shared prefixes, selective checkpointing"])
def test_the_other_engine_computes_the_experts_of_the_generator(
    parallel, layout, sampled, on_ranks, tmp_path
):
    config = of_model(LAYOUTS[layout], str(sampled.folder / "noisy"))
    gradients, loss = reference_gradients(sampled)
    results = on_ranks(replay_dtensor, parallel, config, sampled.batch, tmp_path / "saved")
    for found in results:
        assert difference(found) < 1e-4
        assert found.loss == pytest.approx(loss, rel=TOLERANCE)
    saved = saved_tensors(tmp_path / "saved", "exp_avg")
    assert relative_error(saved, gradients) < 2 * TOLERANCE


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gpt_oss"])
def test_routers_of_other_families_use_given_experts(architecture, model_dir, on_ranks, tmp_path):
    """As the other engine does; here the experts are random."""
    config = of_model(LAYOUTS["packed, 2 microbatches"], model_dir(architecture))
    batch = random_batch(LENGTHS)
    moe = load_spec(config.model_name).moe
    assert moe is not None
    random = np.random.default_rng(0)
    sizes = (sum(LENGTHS), len(moe.layers), moe.num_experts)
    experts = random.random(sizes).argsort(-1)[..., : moe.num_active_experts]
    batch[ROUTED_EXPERTS] = Jagged.from_lengths(experts.astype(np.uint8), np.asarray(LENGTHS))
    saved = tmp_path / "saved"
    (expected,) = on_ranks(replay_dtensor, "one rank", config, batch, saved)
    ranks = on_ranks(replay, "tp2 x ep2 + sp", [config], batch)
    ((found,), *_) = ranks
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    for ours, theirs in zip(in_common_order(found), in_common_order(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    gradients = saved_tensors(saved, "exp_avg")
    assert relative_error(as_tensors(found.gradients), gradients) < 2 * TOLERANCE


def test_the_mismatch_with_and_without_replay(sampled, on_ranks):
    loss = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig()).for_num_steps(1)
    config = of_model(LAYOUTS["packed, 4 microbatches"], str(sampled.folder / "noisy"))
    batches = (sampled.batch, sampled.without_experts)
    steps = []
    for batch in batches:
        advantages = np.ones(len(batch["length"]), dtype=np.float32)
        steps.append(Step(config, BatchedDataDict({**batch, "advantages": advantages}), loss))
    ((with_replay, without),) = on_ranks(take_steps, "one rank", steps)
    for name in ("mismatch/gen_kl_k3", "mismatch/logprob_diff_max"):
        assert with_replay.metrics[name] < 1e-4
        assert without.metrics[name] > 100 * max(with_replay.metrics[name], 1e-6)


def test_without_replay_the_policy_computes_other_experts(sampled, on_ranks):
    config = of_model(LAYOUTS["packed, 4 microbatches"], str(sampled.folder / "noisy"))
    ((found,),) = on_ranks(replay, "one rank", [config], sampled.without_experts)
    assert difference(found) > 0.01
    equal = of_model(config, str(sampled.folder / "equal"))
    ((found,),) = on_ranks(replay, "one rank", [equal], sampled.batch)
    assert difference(found) < 1e-4
    assert sampled.bytes_per_token == 2 * 3, "two layers with experts, three of one byte each"
