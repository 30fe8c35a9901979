"""The path of packed rows on CUDA, run on a CPU: torch's varlen operator with kernels that compute
its definition, under recomputation and torch.compile.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.policy.inputs import attention
from tests.policy.dtensor.test_layouts import SHARED, Rank, gradients, worst
from tests.policy.tiny import context, random_batch

LENGTHS = [9, 1, 14, 6]


def weights_of_row(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return causal attention weights, float32 [H, L, L], of queries and keys [L, H, D]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def rows_of(bounds: Tensor, group: int, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield each row with its parts of q, k, v, float32, keys and values for every query head."""
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = slice(start, stop)
        q, k, v, *others = (tensor[part].float() for tensor in tensors)
        repeated = [each.repeat_interleave(group, 1) for each in (k, v)]
        yield part, [q, *repeated, *others]


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Attention within each row, [T, H, D]; `bounds` is [R + 1]."""
    out = torch.zeros_like(q)
    for part, (queries, keys, values) in rows_of(bounds, q.shape[1] // k.shape[1], q, k, v):
        weights = weights_of_row(queries, keys, scale)
        out[part] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def gradients_of_attention(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attend`."""
    group = q.shape[1] // k.shape[1]
    found = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    for part, (queries, keys, values, upstream) in rows_of(bounds, group, q, k, v, grad):
        weights = weights_of_row(queries, keys, scale)
        of_weights = torch.einsum("qhd,khd->hqk", upstream, values)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        of_keys = torch.einsum("hqk,qhd->khd", of_scores, queries)
        of_values = torch.einsum("hqk,qhd->khd", weights, upstream)
        found[0][part] = torch.einsum("hqk,khd->qhd", of_scores, keys).to(q.dtype)
        found[1][part] = of_keys.unflatten(1, (-1, group)).sum(2).to(q.dtype)
        found[2][part] = of_values.unflatten(1, (-1, group)).sum(2).to(q.dtype)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """CPU kernels of the operator and its backward; returns the number of their calls."""
    counts: Counter[str] = Counter()
    arguments = torch.ops.torch_attn._varlen_attn.default._schema.arguments
    names = [argument.name for argument in arguments]

    def forward(*args: Any, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
        counts["forward"] += 1
        given = dict(zip(names, args, strict=False)) | keywords
        q, k, v = given["query"], given["key"], given["value"]
        out = attend(q, k, v, given["cu_seq_q"], given["scale"])
        logsumexp = torch.zeros(q.shape[1], q.shape[0])
        return out, logsumexp, torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        counts["backward"] += 1
        scale = next(each for each in rest if isinstance(each, float))
        return gradients_of_attention(grad, q, k, v, rest[2], scale)

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda q: q.dtype == torch.bfloat16)
    return counts


@pytest.mark.parametrize(
    ("options", "num_forwards"),
    [
        ({}, 1),
        # Saved, and computed again.
        ({"activation_checkpointing": "selective"}, 1),
        ({"activation_checkpointing": "full"}, 2),
        ({"compile": "layers"}, 1),
        ({"compile": "layers", "activation_checkpointing": "selective"}, 1),
    ],
)
def test_the_operator_gives_the_gradient_of_the_formula(
    model_dir: Any,
    tmp_path: Any,
    eager_layers: Any,
    calls: Counter[str],
    options: dict[str, Any],
    num_forwards: int,
) -> None:
    config = dataclasses.replace(SHARED, model_name=model_dir("qwen3"), precision="bfloat16")
    process_groups.init_process_group(context(meeting=tmp_path / "meeting"))
    try:
        rank = Rank(context(), ParallelConfig())
        shard = rank.shard(config, random_batch(LENGTHS))
        found, metrics = gradients(rank.worker(dataclasses.replace(config, **options)), shard)
        num_calls = dict(calls)
        assert num_calls["forward"] == num_forwards * num_calls["backward"] > 0
        exact = dataclasses.replace(config, precision="float32", model_name=config.model_name)
        expected, expected_metrics = gradients(rank.worker(exact), shard)
    finally:
        process_groups.destroy()
    # The formula of each row in float32; bfloat16 has 8 bits.
    assert metrics["policy/loss"] == pytest.approx(expected_metrics["policy/loss"], rel=1e-2)
    error, weight = worst(found, expected)
    assert error < 0.1, weight
