"""Packed attention equals each row alone, complete or sharded over context-parallel ranks, and no
row sees another.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.policy.inputs.attention import (
    IMPLEMENTATION,
    attention_forward,
    padded_attention,
    register,
    varlen_attention,
)
from nemo_like.policy.inputs.exchange import Exchange, plan_exchange
from nemo_like.policy.inputs.grid import cp_gather_positions, cp_shard_positions
from nemo_like.policy.inputs.segment_attention import AttentionOptions, Spans
from tests.policy.thread_ranks import run_thread_ranks


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool = True
) -> Tensor:
    """[L, H, D] of one row by the textbook formula."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    outputs = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        allowed = allowed & (distance.abs() < window)
    return torch.einsum("hqk,khd->qhd", outputs.masked_fill(~allowed, float("-inf")).softmax(-1), v)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def random_qkv(
    length: int, heads: int = 4, kv_heads: int = 2, dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim)]
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
    return q, k, v


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum),
    window=st.sampled_from([None, 1, 5, 64]),
    causal=st.booleans(),
)
def test_packed_equals_each_row_alone(lengths, window, causal):
    q, k, v = random_qkv(sum(lengths))
    upstream = torch.randn_like(q)
    rows = [
        naive_attention(*row, 0.3, window, causal)
        for row in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    expected = torch.cat(rows)
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream)
    out = varlen_attention(
        q, k, v, boundaries(lengths), max(lengths), scale=0.3, window=window, causal=causal
    )
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=10),
    data=st.data(),
    window=st.sampled_from([None, 7]),
)
def test_changing_one_row_leaves_the_others_bit_equal(lengths, data, window):
    changed = data.draw(st.integers(0, len(lengths) - 1))
    q, k, v = (tensor.detach() for tensor in random_qkv(sum(lengths)))
    cu_seqlens = boundaries(lengths)
    before = varlen_attention(q, k, v, cu_seqlens, max(lengths), scale=0.3, window=window)
    start, end = cu_seqlens[changed], cu_seqlens[changed + 1]
    for tensor in (q, k, v):
        tensor[start:end] += 1000.0
    after = varlen_attention(q, k, v, cu_seqlens, max(lengths), scale=0.3, window=window)
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[end:], after[end:])


def test_segments_longer_than_a_group_are_attended_alone():
    lengths = [300, 3, 257, 300, 4]
    q, k, v = (tensor.detach() for tensor in random_qkv(sum(lengths)))
    out = varlen_attention(q, k, v, boundaries(lengths), 300, scale=0.3)
    rows = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([naive_attention(*row, 0.3, None) for row in rows])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_padded_rows_equal_each_row_alone_and_ignore_their_padding(window):
    lengths, size = [7, 3, 10], 10
    q, k, v = (
        tensor.detach().view(3, size, -1, 8).transpose(1, 2) for tensor in random_qkv(3 * size)
    )
    out = padded_attention(q, k, v, AttentionOptions(0.3, window))
    for row, length in enumerate(lengths):
        alone = (tensor[row, :, :length].transpose(0, 1) for tensor in (q, k, v))
        expected = naive_attention(*alone, scale=0.3, window=window)
        torch.testing.assert_close(
            out[row, :, :length].transpose(0, 1), expected, rtol=1e-5, atol=1e-5
        )


def attend_in_shares(
    tensors: tuple[Tensor, Tensor, Tensor],
    upstream: Tensor,
    lengths: list[int],
    cp_size: int,
    window: int | None,
) -> list[Tensor]:
    """Output and gradients of q, k, v, each put together from what `cp_size` ranks compute with
    their shares.
    """

    def attend(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        held = torch.from_numpy(cp_shard_positions(lengths, cp_size, group.rank()))
        q, k, v = (tensor.detach()[held].requires_grad_() for tensor in tensors)
        out = varlen_attention(
            q, k, v, boundaries(lengths), max(lengths), scale=0.3, window=window, cp_group=group
        )
        return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream[held])

    in_order = torch.from_numpy(cp_gather_positions(lengths, cp_size))
    return [
        torch.cat(shares)[in_order]
        for shares in zip(*run_thread_ranks(cp_size, attend), strict=True)
    ]


@settings(max_examples=12, deadline=None)
@given(
    units=st.lists(st.integers(0, 12), min_size=1, max_size=15).filter(sum),
    long=st.sampled_from([0, 90]),
    cp_size=st.sampled_from([2, 4]),
    window=st.sampled_from([None, 1, 7, 100]),
)
def test_shares_of_context_parallel_ranks_equal_the_full_attention(units, long, cp_size, window):
    lengths = [2 * cp_size * unit for unit in [*units, long]]
    tensors = random_qkv(sum(lengths))
    upstream = torch.randn_like(tensors[0])
    full = varlen_attention(*tensors, boundaries(lengths), max(lengths), scale=0.3, window=window)
    expected = (full.detach(), *torch.autograd.grad(full, tensors, upstream))
    for found, wanted in zip(
        attend_in_shares(tensors, upstream, lengths, cp_size, window), expected, strict=True
    ):
        assert float((found - wanted).norm()) <= 1e-5 * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("window", [None, 5])
def test_changing_one_row_leaves_the_others_bit_equal_across_ranks_too(window):
    lengths = [8, 40, 8, 400, 12, 16]
    tensors = random_qkv(sum(lengths))
    upstream = torch.randn_like(tensors[0])
    bounds = boundaries(lengths).tolist()
    before = attend_in_shares(tensors, upstream, lengths, 2, window)
    for start, end in itertools.pairwise(bounds):
        q, k, v = (tensor.detach().clone() for tensor in tensors)
        for tensor in (q, k, v):
            tensor[start:end] += 1000.0
        after = attend_in_shares((q, k, v), upstream, lengths, 2, window)
        assert not torch.equal(after[0][start:end], before[0][start:end])
        for found, wanted in zip(after, before, strict=True):
            assert torch.equal(found[:start], wanted[:start])
            assert torch.equal(found[end:], wanted[end:])


def test_the_exchange_of_a_forward_is_planned_once_and_without_waiting_for_the_device():
    def plan(group: dist.ProcessGroup) -> None:
        cu_seqlens = boundaries([8])
        exchange = plan_exchange(cu_seqlens, 8, group, 4)
        assert plan_exchange(cu_seqlens, 8, group, 4) is exchange
        if group.rank() == 0:
            assert exchange.kv_index.tolist() == [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]
            assert (exchange.spans.cu_seqlens_q.tolist(), exchange.spans.cu_seqlens_k.tolist()) == (
                [0, 2, 4],
                [0, 2, 10],
            )
            assert (exchange.spans.max_seqlen_q, exchange.spans.max_seqlen_k) == (2, 8)
        # A tensor on the meta device has no values: asking for one would fail.
        assert plan_exchange(cu_seqlens.to("meta"), 8, group, 4).kv_index.shape == (10,)

    run_thread_ranks(2, plan)


@given(st.integers(1, 8), st.data())
def test_the_gradient_of_selected_rows_is_the_sum_over_the_selections(num_rows, data):
    index = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1)))
    bounds = boundaries([len(index)])
    exchange = Exchange.of(index, Spans(bounds, bounds, len(index), len(index)), num_rows)
    rows = torch.randn(num_rows, 2, 3, dtype=torch.float64, requires_grad=True)
    selected = exchange.select(rows)
    assert torch.equal(selected, rows[index])
    upstream = torch.randn_like(selected)
    selected.backward(upstream)
    # [num_rows, len(index)]: 1 where a row is selected.
    is_selected = (torch.arange(num_rows)[:, None] == index).double()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.einsum("rk,khd->rhd", is_selected, upstream))


def test_shares_that_do_not_fit_the_boundaries_are_refused():
    def attend(lengths: list[int], num_positions: int) -> None:
        q, k, v = random_qkv(num_positions)
        run_thread_ranks(
            2,
            lambda group: varlen_attention(
                q, k, v, boundaries(lengths), 8, scale=0.3, cp_group=group
            ),
        )

    with pytest.raises(ValueError, match="cu_seqlens ends at 8 but there are 2 x 5 positions"):
        attend([8], 5)
    with pytest.raises(ValueError, match=r"\[0, 6, 8\] are not all multiples of 2 x 2"):
        attend([6, 2], 4)


def test_context_parallelism_needs_packed_rows():
    def attend(group: dist.ProcessGroup) -> None:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in random_qkv(5))
        attention_forward(torch.nn.Linear(1, 1), q, k, v, None, scaling=0.3, cp_group=group)

    with pytest.raises(ValueError, match="needs packed rows"):
        run_thread_ranks(2, attend)


def test_boundaries_must_cover_every_position():
    q, k, v = random_qkv(5)
    with pytest.raises(ValueError, match="cu_seqlens ends at 4 but there are 5 positions"):
        varlen_attention(q, k, v, boundaries([4]), 4, scale=0.3)


@pytest.mark.parametrize("extra", [{"position_bias": torch.zeros(5, 5)}, {"dropout": 0.1}])
def test_attention_of_another_kind_is_refused(extra):
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in random_qkv(5))
    with pytest.raises(ValueError, match=r"policy\.model_name"):
        attention_forward(torch.nn.Linear(1, 1), q, k, v, None, scaling=0.3, **extra)


@pytest.mark.parametrize("window", [None, 5, 4096])
@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe", "qwen3_moe"])
def test_a_window_that_only_a_mask_has_is_refused(model_type, window):
    """Otherwise the logits are those of transformers, which applies the window by its mask."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=31,
        hidden_size=32,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        use_sliding_window=window is not None,
        max_window_layers=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        sliding_window=window,
    )
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation(IMPLEMENTATION)
        if window == 5 and model_type != "qwen3_moe":
            with pytest.raises(ConfigError, match="has a window in its config"):
                model(input_ids=ids, use_cache=False)
        else:
            found = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
