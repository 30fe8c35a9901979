"""Training steps on CUDA equal those on the CPU, and queue their work without waiting for it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_like.losses import NllLoss
from nemo_like.policy.heads.logprobs import token_logprobs
from nemo_like.policy.outputs import LogitOptions, OutputEmbedding, TokenDistribution
from tests.gpu.steps import open_policy, some_rows, two_steps

REPOSITORY = Path(__file__).parents[2]


def reference(worker: str, model: str, precision: str) -> list[float]:
    """`two_steps` on the CPU, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.steps", worker, model, "cpu", precision],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("worker", "architecture"),
    [("dtensor", "qwen3"), ("dtensor", "qwen3_window"), ("megatron", "qwen3")],
)
def test_steps_equal_those_on_the_cpu(
    model_dir: Callable[[str], str], worker: str, architecture: str, precision: str
) -> None:
    if worker == "megatron":
        pytest.importorskip("megatron.core", reason="needs the extra megatron")
    model = model_dir(architecture)
    found = two_steps(worker, model, "cuda:0", precision)
    tolerance = 1e-4 if precision == "float32" else 2e-2
    assert found == pytest.approx(reference(worker, model, precision), rel=tolerance)


def test_log_probs_of_a_large_vocabulary_equal_those_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 256, generator=generator)
    weight = torch.randn(152_064, 256, generator=generator) * 0.1
    labels = torch.randint(0, len(weight), (64,), generator=generator)
    logits = hidden.bfloat16().double() @ weight.bfloat16().double().T
    exact = logits.log_softmax(-1)
    embedding = OutputEmbedding(
        hidden=hidden.bfloat16().cuda(),
        weight=weight.bfloat16().cuda(),
        options=LogitOptions(chunk_size=24),
    )
    outputs = token_logprobs(embedding, labels.cuda(), TokenDistribution(with_entropy=True))
    expected = exact.gather(1, labels[:, None]).squeeze(1)
    entropy = -(exact.exp() * exact).sum(-1)
    assert outputs.entropy is not None
    torch.testing.assert_close(outputs.logprobs.double().cpu(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(outputs.entropy.double().cpu(), entropy, rtol=0, atol=2e-2)


def count_waits(model: str, mb_tokens: int) -> tuple[int, list[str]]:
    """(microbatches, places of waits) of one step; torch reports each wait as a warning."""
    policy = open_policy("dtensor", model, "cuda:0", "bfloat16", mb_tokens)
    rows = some_rows()
    plan = policy.plan(rows["length"])
    sharded = policy.shard(rows, plan)
    policy.train(sharded, None, NllLoss())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy.train(sharded, None, NllLoss())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    policy.shutdown()
    places = [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    return int(plan.metrics()["packing/num_microbatches"]), places


def test_further_microbatches_add_no_waits(model_dir: Callable[[str], str]) -> None:
    num_few, waits_of_few = count_waits(model_dir("llama"), 512)
    num_many, waits_of_many = count_waits(model_dir("llama"), 128)
    assert num_many > num_few
    assert len(waits_of_many) == len(waits_of_few), waits_of_many
