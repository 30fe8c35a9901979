"""What only a CUDA device can show: the kernels equal the CPU path, a step does, and taking turns
keeps the weights.

make test-gpu
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.config.schema import PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import NllLoss
from nemo_like.models.presets import load_spec
from nemo_like.policy.attention import _flash_varlen, varlen_attention
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.context_parallel import _make_exchange
from nemo_like.policy.device_flops import peak_memory_bytes, reset_peak_memory
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.megatron.worker import MegatronPolicyWorker
from nemo_like.policy.policy import Policy
from nemo_like.policy.segment_attention import Spans, segment_attention
from nemo_like.policy.worker import PolicyWorker
from tests.policy.conftest import model_dir  # noqa: F401  (a fixture)
from tests.policy.test_attention import boundaries, random_qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("window", [None, 64])
def test_the_packed_kernel_equals_the_cpu_path_in_bfloat16(window: int | None):
    lengths = [100, 1, 37, 400, 64]
    q, k, v = (tensor.detach() for tensor in random_qkv(sum(lengths), heads=8, kv_heads=2, dim=64))
    upstream = torch.randn_like(q)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        parts = [tensor.to(device, dtype).requires_grad_() for tensor in (q, k, v)]
        cu_seqlens = boundaries(lengths).to(device)
        out = varlen_attention(
            *parts, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), scale=0.125, window=window
        )
        grads = torch.autograd.grad(out, parts, upstream.to(device, dtype))
        return [tensor.float().cpu() for tensor in (out, *grads)]

    for found, expected in zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
        )


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_query_chunks_of_a_shared_row_see_what_is_before_them(cp_rank: int, window: int | None):
    """The kernel aligns fewer queries with the end of more keys, forward and backward, as context
    parallelism needs.
    """
    lengths, size = [128, 32, 512, 4, 64], 2
    exchange = _make_exchange(
        boundaries(lengths), max(lengths), size, cp_rank, sum(lengths) // size
    )
    spans = (
        exchange.cu_seqlens_q,
        exchange.cu_seqlens_k,
        exchange.max_seqlen_q,
        exchange.max_seqlen_k,
    )
    q, k, v = (
        tensor.detach()
        for tensor in random_qkv(len(exchange.kv_index), heads=8, kv_heads=2, dim=64)
    )
    q = q[: sum(lengths) // size]
    upstream = torch.randn_like(q)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        parts = [tensor.to(device, dtype).requires_grad_() for tensor in (q, k, v)]
        attend = _flash_varlen if device == "cuda" else segment_attention
        sharded = Spans(spans[0].to(device), spans[1].to(device), *spans[2:])
        out = attend(parts[0], parts[1], parts[2], sharded, 0.125, window, True)
        return [
            tensor.float().cpu()
            for tensor in (out, *torch.autograd.grad(out, parts, upstream.to(device, dtype)))
        ]

    for found, expected in zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
        )


def open_policy(
    model: str, device: str, precision: str, worker: type[PolicyWorker] = DTensorPolicyWorker
) -> Policy:
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=256, logprob_mb_tokens=256)
    config = PolicyConfig(
        model_name=model, train_global_batch_size=24, max_total_sequence_length=64
    )
    config = replace(config, precision=precision, sequence_packing=packing)  # type: ignore[arg-type]
    kwargs = {"config": config}
    group = LocalGroup(worker, kwargs, local_context(device=device), name="policy")
    return Policy(group, config, load_spec(model))


def some_rows() -> BatchedDataDict:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 64, 24)
    input_ids = Jagged.from_lengths(rng.integers(0, 64, lengths.sum()).astype(np.int32), lengths)
    mask = Jagged(np.ones(len(input_ids.values), dtype=np.uint8), input_ids.offsets)
    return BatchedDataDict(input_ids=input_ids, token_mask=mask, length=lengths)


@pytest.mark.parametrize("worker", [DTensorPolicyWorker, MegatronPolicyWorker])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_equals_the_cpu_step(
    model_dir: Callable[[str], str],  # noqa: F811
    precision: str,
    worker: type[PolicyWorker],
):
    values = {}
    for device in ("cpu", "cuda:0"):
        policy = open_policy(model_dir("qwen3"), device, precision, worker)
        policy.probe_isolation()
        sharded = policy.shard(some_rows(), policy.plan(some_rows()["length"]))
        metrics = [policy.train(sharded, None, NllLoss())[0] for _ in range(2)]
        values[device] = [
            step[name].value for step in metrics for name in ("policy/loss", "policy/grad_norm")
        ]
        policy.shutdown()
    tolerance = 1e-4 if precision == "float32" else 2e-2
    assert values["cuda:0"] == pytest.approx(values["cpu"], rel=tolerance)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sleep_frees_the_device_and_wake_brings_everything_back(
    model_dir: Callable[[str], str],  # noqa: F811
    precision: str,
):
    losses: dict[bool, list[float]] = {}
    for naps in (False, True):
        policy = open_policy(model_dir("llama_tied"), "cuda:0", precision)
        sharded = policy.shard(some_rows(), policy.plan(some_rows()["length"]))
        losses[naps] = []
        for _ in range(3):
            losses[naps].append(policy.train(sharded, None, NllLoss())[0]["policy/loss"].value)
            if naps:
                policy.group.run_all_workers("offload")
                policy.group.run_all_workers("onload")
        policy.shutdown()
    assert losses[True] == losses[False], "weights or optimizer moments were lost on the way"


def test_asleep_the_policy_holds_almost_nothing_on_the_device(model_dir: Callable[[str], str]):  # noqa: F811
    policy = open_policy(model_dir("llama"), "cuda:0", "float32")
    sharded = policy.shard(some_rows(), policy.plan(some_rows()["length"]))
    policy.train(sharded, None, NllLoss())
    before = policy.fetch_logprobs(policy.compute_logprobs(sharded))["prev_logprobs"]
    used = torch.cuda.memory_allocated()
    policy.group.run_all_workers("offload")
    assert torch.cuda.memory_allocated() < used / 2
    policy.group.run_all_workers("onload")
    after = policy.fetch_logprobs(policy.compute_logprobs(sharded))["prev_logprobs"]
    np.testing.assert_array_equal(after.values, before.values)
    policy.shutdown()


def test_the_clock_times_kernels_and_not_what_is_excluded():
    """`_sleep` occupies the stream as waiting for a collective does."""
    device = torch.device("cuda")
    clock = ComputeClock(device)

    def occupy() -> None:
        torch.cuda._sleep(200_000_000)

    with clock.running():
        occupy()
    busy_s = clock.pop_seconds()
    with clock.running():
        clock.excluded(occupy)()
    assert busy_s > 0.02
    assert clock.pop_seconds() < busy_s / 4


def test_peak_memory_is_that_since_the_reset():
    device = torch.device("cuda")
    large = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    with_large = peak_memory_bytes(device)
    del large
    reset_peak_memory(device)
    without_large = peak_memory_bytes(device)
    assert with_large is not None and without_large is not None
    assert with_large - without_large >= 64 << 20
