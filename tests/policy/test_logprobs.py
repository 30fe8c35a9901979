"""Chunked log-probs equal the naive ones in value and gradient, in a fraction of the memory, on one
rank or several.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import nemo_like.policy.heads.logprobs as logprobs_module
from nemo_like.policy.heads.logit_chunks import scaled_logits
from nemo_like.policy.outputs import VocabShard
from nemo_like.sampling_filter import SamplingFilter
from tests.filter_definition import kept_tokens
from tests.policy.thread_ranks import run_thread_ranks
from tests.policy.token_heads import token_logprobs


def naive_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
):
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(1, labels[:, None]).squeeze(1), entropy


def random_inputs(
    num_tokens: int, dim: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden, weight, bias, labels


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    chunk_size=st.integers(1, 24),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
    entropy_weight=st.sampled_from([0.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_values_and_gradients_equal_the_naive_ones(
    num_tokens, chunk_size, temperature, with_bias, entropy_weight, softcap
):
    hidden, weight, bias, labels = random_inputs(num_tokens, 8, 33)
    parameters = [hidden, weight, *([bias] if with_bias else [])]
    token_weights = torch.linspace(-1, 1, num_tokens)

    def gradients(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = (token_weights * logprobs).sum() + entropy_weight * (
            token_weights.square() * entropy
        ).sum()
        return torch.autograd.grad(loss, parameters)

    expected = naive_logprobs(
        hidden, weight, labels, temperature, bias if with_bias else None, softcap
    )
    logprobs, entropy, *_ = token_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=True,
        # `ModelSpec.logit_softcap` is that of the logits before the temperature.
        softcap=None if softcap is None else softcap * temperature,
        bias=bias if with_bias else None,
    )
    assert entropy is not None
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-6, atol=1e-5)
    for found, naive in zip(gradients(logprobs, entropy), gradients(*expected), strict=True):
        largest = float(naive.abs().max()) if naive.numel() else 0.0
        torch.testing.assert_close(found, naive, rtol=1e-6, atol=2e-6 * max(1.0, largest))


def test_without_entropy_none_is_computed_and_the_gradient_is_the_same():
    hidden, weight, _, labels = random_inputs(11, 8, 33)
    logprobs, entropy, *_ = token_logprobs(hidden, weight, labels, chunk_size=4)
    assert entropy is None
    expected, _ = naive_logprobs(hidden, weight, labels, 1.0)
    found = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    torch.testing.assert_close(
        found, torch.autograd.grad(expected.sum(), (hidden, weight)), rtol=1e-6, atol=2e-6
    )


def test_impossible_tokens_leave_values_and_gradients_finite():
    hidden, weight, _, labels = random_inputs(6, 8, 33)
    bias = torch.zeros(33)
    bias[20:] = float("-inf")
    logprobs, entropy, *_ = token_logprobs(
        hidden, weight, labels % 20, with_entropy=True, bias=bias
    )
    assert entropy is not None
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (logprobs, entropy, *gradients))
    assert float(gradients[1][20:].abs().max()) == 0.0


def test_half_precision_hidden_states_give_float32_logprobs_near_the_exact_ones():
    hidden, weight, _, labels = random_inputs(40, 16, 64, dtype=torch.bfloat16)
    logprobs, *_ = token_logprobs(hidden, weight, labels, chunk_size=16)
    exact, _ = naive_logprobs(hidden.float(), weight.float(), labels, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=0.1)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    expected = torch.autograd.grad(exact.sum(), (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(gradients, expected, rtol=0.05, atol=0.1)


def test_compiled_passes_give_the_same_values_and_gradients():
    """With entropy, a filter and a sharded vocabulary; of plain log-probs is
    `dtensor/test_compile.py`.
    """
    num_tokens = 16
    hidden, weight, _, labels = random_inputs(num_tokens, 8, 33)

    def score(group: dist.ProcessGroup, *, compile: bool) -> list[Tensor]:
        rows = weight.tensor_split(2)[group.rank()]
        vocab = VocabShard(group, 17 * group.rank())
        outputs = token_logprobs(
            hidden,
            rows,
            labels,
            temperature=0.7,
            chunk_size=8,
            with_entropy=True,
            vocab=vocab,
            token_filter=SamplingFilter(top_k=12),
            is_compiled=compile,
        )
        found = [output for output in outputs if isinstance(output, Tensor)]
        token_weights = torch.linspace(-1, 1, num_tokens)
        loss = sum(((token_weights * output).sum() for output in found), torch.zeros(()))
        gradients = torch.autograd.grad(loss, (hidden, weight))
        return [*(output.detach() for output in found), *gradients]

    def both(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
        return score(group, compile=False), score(group, compile=True)

    for plain, compiled in run_thread_ranks(2, both):
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_no_tensor_outlives_the_backward(num_tokens):
    hidden, weight, _, labels = random_inputs(num_tokens, 8, 33)
    token_logprobs(hidden, weight, labels, chunk_size=2).logprobs.sum().backward()
    released = weakref.ref(weight)
    del hidden, weight
    assert released() is None, "a gradient of the size of the vocabulary is kept in each step"


def test_temperature_zero_is_an_error():
    hidden, weight, _, labels = random_inputs(2, 4, 8)
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(hidden, weight, labels, temperature=0.0)


class Recorder(TorchDispatchMode):
    """The bytes of floating-point tensors alive at once, the largest such tensor, and the
    collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self.collectives: list[str] = []
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives.append(func._opname)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._record(tensor.untyped_storage())
        return result

    def _record(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = True
            self.alive += storage.nbytes()
            self.peak, self.largest = (
                max(self.peak, self.alive),
                max(self.largest, storage.nbytes()),
            )
            weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self.alive -= num_bytes


def test_peak_memory_is_a_fraction_of_the_naive_one():
    """2048 tokens x 8192 vocabulary: one float32 matrix of logits would be 64 MiB, one chunk of
    them is 4 MiB.
    """
    hidden, weight, _, labels = random_inputs(2048, 16, 8192)
    one_chunk, all_logits = 128 * 8192 * 4, 2048 * 8192 * 4
    with Recorder() as naive:
        torch.stack(naive_logprobs(hidden, weight, labels, 1.0)).sum().backward()
    assert naive.peak > 3 * all_logits
    with Recorder() as chunked:
        logprobs, entropy, *_ = token_logprobs(
            hidden, weight, labels, chunk_size=128, with_entropy=True
        )
        assert entropy is not None
        (logprobs + entropy).sum().backward()
    assert chunked.largest == one_chunk
    assert chunked.peak < 4 * one_chunk


@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    chunk_size=st.sampled_from([5, 24]),
    cuts=st.lists(st.integers(0, 33), min_size=1, max_size=3).map(sorted),
    temperature=st.sampled_from([0.5, 1.0]),
    entropy_weight=st.sampled_from([None, 0.3]),
)
def test_a_vocabulary_spread_over_ranks_gives_the_same(
    num_tokens, chunk_size, cuts, temperature, entropy_weight
):
    """Ranks hold rows between the cuts: uneven, some of them none."""
    hidden, weight, bias, labels = random_inputs(num_tokens, 8, 33)
    token_weights = torch.linspace(-1, 1, num_tokens)

    def score(rows: slice, vocab: VocabShard | None) -> tuple[Tensor, ...]:
        leaves = [
            tensor.detach().clone().requires_grad_()
            for tensor in (hidden, weight[rows], bias[rows])
        ]
        logprobs, entropy, *_ = token_logprobs(
            leaves[0],
            leaves[1],
            labels,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=entropy_weight is not None,
            bias=leaves[2],
            vocab=vocab,
        )
        loss = (token_weights * logprobs).sum()
        if entropy is None or entropy_weight is None:
            return logprobs.detach(), logprobs.new_zeros(0), *torch.autograd.grad(loss, leaves)
        loss = loss + entropy_weight * (token_weights.square() * entropy).sum()
        return logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)

    def score_shard(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        start, stop = [0, *cuts, 33][group.rank() : group.rank() + 2]
        return score(slice(start, stop), VocabShard(group, start))

    shards = run_thread_ranks(len(cuts) + 1, score_shard)
    for found in shards:
        assert all(
            torch.equal(mine, first) for mine, first in zip(found[:3], shards[0][:3], strict=True)
        )
    joined = [
        *shards[0][:3],
        torch.cat([shard[3] for shard in shards]),
        torch.cat([shard[4] for shard in shards]),
    ]
    # Products of other shapes round the logits otherwise, and a probability's relative error is its
    # logit's absolute one.
    tolerances = (1e-6, 1e-6, 5e-6, 5e-6, 5e-6)
    for found, wanted, tolerance in zip(joined, score(slice(0, 33), None), tolerances, strict=True):
        assert float((found - wanted).norm()) <= tolerance * float(wanted.norm())


def test_no_rank_holds_logits_of_the_full_vocabulary_and_collectives_are_two():
    num_tokens, vocabulary, chunk_size, num_ranks = 64, 4096, 16, 2
    hidden, weight, _, labels = random_inputs(num_tokens, 8, vocabulary)

    def score(group: dist.ProcessGroup) -> Recorder:
        rows = weight.detach().chunk(num_ranks)[group.rank()].clone().requires_grad_()
        with Recorder() as recorder:
            shard = VocabShard(group, start=group.rank() * len(rows))
            leaf = hidden.detach().requires_grad_()
            logprobs, entropy, *_ = token_logprobs(
                leaf, rows, labels, chunk_size=chunk_size, with_entropy=True, vocab=shard
            )
            assert entropy is not None
            torch.autograd.grad(logprobs.sum() + entropy.sum(), (leaf, rows))
        return recorder

    for recorder in run_thread_ranks(num_ranks, score):
        assert recorder.largest == chunk_size * (vocabulary // num_ranks) * 4
        assert recorder.collectives == ["_allgather_base_", "allreduce_"]


def test_the_parts_of_the_hidden_gradient_add_up_where_the_caller_sums_them():
    hidden, weight, _, labels = random_inputs(9, 8, 34)

    def grad(group: dist.ProcessGroup, partial: bool) -> Tensor:
        rows, leaf = weight.detach().chunk(2)[group.rank()], hidden.detach().requires_grad_()
        shard = VocabShard(group, 17 * group.rank(), partial_hidden_grad=partial)
        logprobs, *_ = token_logprobs(leaf, rows, labels, vocab=shard)
        return torch.autograd.grad(logprobs.sum(), leaf)[0]

    full, same = run_thread_ranks(2, lambda group: grad(group, partial=False))
    parts = run_thread_ranks(2, lambda group: grad(group, partial=True))
    assert torch.equal(full, same)
    assert not torch.allclose(parts[0], full)
    torch.testing.assert_close(sum(parts), full)


def test_a_rank_whose_tokens_are_all_impossible_adds_nothing():
    hidden, weight, _, labels = random_inputs(6, 8, 32)
    labels %= 16
    bias = torch.cat([torch.zeros(16), torch.full((16,), float("-inf"))])

    def score(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        rows = weight.detach().chunk(2)[group.rank()].clone().requires_grad_()
        shard = VocabShard(group, 16 * group.rank())
        logprobs, entropy, *_ = token_logprobs(
            hidden.detach(),
            rows,
            labels,
            with_entropy=True,
            bias=bias.chunk(2)[group.rank()],
            vocab=shard,
        )
        assert entropy is not None
        return (
            logprobs.detach(),
            entropy.detach(),
            torch.autograd.grad(logprobs.sum() + entropy.sum(), rows)[0],
        )

    expected = naive_logprobs(hidden, weight[:16], labels, 1.0)
    for logprobs, entropy, grad in run_thread_ranks(2, score):
        torch.testing.assert_close((logprobs, entropy), expected)
        assert bool(torch.isfinite(grad).all())


def test_a_label_that_no_rank_has_is_impossible():
    hidden, weight, _, labels = random_inputs(3, 8, 32)
    labels[1] = 32

    def score(group: dist.ProcessGroup) -> Tensor:
        shard = VocabShard(group, 16 * group.rank())
        return token_logprobs(
            hidden.detach(), weight.detach().chunk(2)[group.rank()], labels, vocab=shard
        )[0]

    for logprobs in run_thread_ranks(2, score):
        assert torch.isinf(logprobs).tolist() == [False, True, False]


FILTERS = st.builds(
    SamplingFilter,
    top_k=st.sampled_from([None, 1, 4, 12, 40]),
    top_p=st.sampled_from([1.0, 0.3, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
)


def filtered_by_definition(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, token_filter: SamplingFilter
) -> tuple[Tensor, Tensor, Tensor]:
    """Filtered log-probs, entropy and unfiltered log-probs, each [T] in float64 and by plain
    autograd.
    """
    logits = hidden.double() @ weight.double().t() / temperature
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, label in enumerate(labels.tolist()):
        kept[row, [*kept_tokens(logits[row].tolist(), token_filter), label]] = True
    index = labels[:, None]
    unfiltered = logits.log_softmax(-1)
    filtered = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    entropy = -(unfiltered.exp() * unfiltered).sum(-1)
    return filtered.gather(1, index).squeeze(1), entropy, unfiltered.gather(1, index).squeeze(1)


def filtered_loss(outputs: Sequence[Any], with_entropy: bool) -> Tensor:
    """A loss of all outputs with another weight at each position."""
    filtered, entropy, unfiltered, *_ = outputs
    assert filtered is not None and unfiltered is not None
    token_weights = torch.linspace(-1, 1, len(filtered), dtype=filtered.dtype)
    loss = (token_weights * filtered).sum() + 0.7 * (token_weights.square() * unfiltered).sum()
    if with_entropy:
        assert entropy is not None
        loss = loss + 0.3 * (token_weights * entropy).sum()
    return loss


@settings(max_examples=12, deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    chunk_size=st.sampled_from([3, 24]),
    temperature=st.sampled_from([0.7, 1.0]),
    with_entropy=st.booleans(),
    cuts=st.one_of(st.none(), st.lists(st.integers(0, 33), min_size=1, max_size=2).map(sorted)),
    token_filter=FILTERS.filter(lambda token_filter: token_filter.is_active),
    seed=st.integers(0, 1000),
)
def test_filtered_values_and_gradients_equal_the_definition_in_float64(
    num_tokens, chunk_size, temperature, with_entropy, cuts, token_filter, seed
):
    """On one rank and with a vocabulary sharded unevenly; labels are inside and outside of what is
    kept.
    """
    hidden, weight, _, labels = random_inputs(num_tokens, 8, 33, seed=seed)
    expected = filtered_by_definition(hidden, weight, labels, temperature, token_filter)
    wanted = torch.autograd.grad(filtered_loss(expected, with_entropy), (hidden, weight))
    bounds = [0, *(cuts or []), 33]

    def score(group: dist.ProcessGroup | None) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        start, stop = (0, 33) if group is None else bounds[group.rank() : group.rank() + 2]
        leaves = [
            hidden.detach().clone().requires_grad_(),
            weight.detach()[start:stop].clone().requires_grad_(),
        ]
        outputs = token_logprobs(
            leaves[0],
            leaves[1],
            labels,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            vocab=None if group is None else VocabShard(group, start),
            token_filter=token_filter,
        )
        found = [
            outputs.logprobs.detach(),
            *([outputs.entropy.detach()] if outputs.entropy is not None else []),
        ]
        assert outputs.unfiltered_logprobs is not None
        found.append(outputs.unfiltered_logprobs.detach())
        return found, torch.autograd.grad(filtered_loss(outputs, with_entropy), leaves)

    ranks = [score(None)] if cuts is None else run_thread_ranks(len(bounds) - 1, score)
    for values, _ in ranks:
        exact = [
            value.detach() for index, value in enumerate(expected) if with_entropy or index != 1
        ]
        torch.testing.assert_close(
            [value.double() for value in values], exact, rtol=1e-5, atol=1e-5
        )
        assert bool(torch.isfinite(values[0]).all()), "the sampled token is always kept"
    grad_hidden, grad_weight = ranks[0][1][0], torch.cat([gradients[1] for _, gradients in ranks])
    assert float((grad_hidden - wanted[0]).norm()) <= 1e-5 * max(1.0, float(wanted[0].norm()))
    assert float((grad_weight - wanted[1]).norm()) <= 1e-5 * max(1.0, float(wanted[1].norm()))


@pytest.mark.parametrize("factor", [1 - 2e-7, 1 + 2e-7])
@pytest.mark.parametrize("token_filter", [SamplingFilter(top_k=4), SamplingFilter(top_p=0.6)])
def test_logits_that_round_differently_in_the_backward_keep_the_same_tokens(
    token_filter: SamplingFilter, factor: float, monkeypatch: pytest.MonkeyPatch
):
    """The least likely kept token stays in the gradient. The factor is a rounding of float32."""
    hidden, weight, _, labels = random_inputs(16, 8, 33)
    expected = filtered_by_definition(hidden, weight, labels, 1.0, token_filter)
    wanted = torch.autograd.grad(filtered_loss(expected, False), hidden)[0]
    outputs = token_logprobs(hidden, weight, labels, chunk_size=24, token_filter=token_filter)

    def rounded(*inputs: Any) -> Tensor:
        return scaled_logits(*inputs) * factor

    monkeypatch.setattr(logprobs_module, "scaled_logits", rounded)
    found = torch.autograd.grad(filtered_loss(outputs, False), hidden)[0]
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_a_filter_that_removes_nothing_costs_nothing():
    hidden, weight, _, labels = random_inputs(64, 8, 512)

    def record(token_filter: SamplingFilter | None) -> tuple[Recorder, Tensor]:
        with Recorder() as recorder:
            outputs = token_logprobs(
                hidden, weight, labels, chunk_size=16, token_filter=token_filter
            )
            assert outputs.unfiltered_logprobs is None
            (gradient,) = torch.autograd.grad(outputs.logprobs.sum(), hidden)
        return recorder, gradient

    (plain, expected), (off, found) = record(None), record(SamplingFilter(top_k=-1))
    assert torch.equal(found, expected)
    assert (off.peak, off.largest) == (plain.peak, plain.largest)


def test_filtered_logprobs_need_a_few_chunks_and_no_collective_of_vocabulary_size():
    hidden, weight, _, labels = random_inputs(256, 8, 4096)
    one_chunk = 32 * 4096 * 4
    with Recorder() as recorder:
        outputs = token_logprobs(
            hidden, weight, labels, chunk_size=32, token_filter=SamplingFilter(top_k=50, top_p=0.8)
        )
        outputs.logprobs.sum().backward()
    assert recorder.largest <= 2 * one_chunk
    assert recorder.peak < 6 * one_chunk


@settings(max_examples=20, deadline=None)
@given(
    chunk_size=st.sampled_from([3, 24]),
    with_entropy=st.booleans(),
    cuts=st.one_of(st.none(), st.lists(st.integers(0, 33), min_size=1, max_size=2).map(sorted)),
    token_filter=st.sampled_from([None, SamplingFilter(top_k=3)]),
    seed=st.integers(0, 1000),
)
def test_labels_with_the_largest_logit_are_marked(
    chunk_size, with_entropy, cuts, token_filter, seed
):
    """As argmax in float64 does, on one rank and with a vocabulary sharded unevenly."""
    num_tokens = 20
    hidden, weight, _, labels = random_inputs(num_tokens, 8, 33, seed=seed)
    best = (hidden.detach().double() @ weight.detach().double().t()).argmax(-1)
    labels = labels.where(torch.arange(num_tokens) % 2 == 0, best)
    bounds = [0, *(cuts or []), 33]

    def score(group: dist.ProcessGroup | None) -> Tensor:
        start, stop = (0, 33) if group is None else bounds[group.rank() : group.rank() + 2]
        outputs = token_logprobs(
            hidden,
            weight.detach()[start:stop],
            labels,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            vocab=None if group is None else VocabShard(group, start),
            token_filter=token_filter,
        )
        assert outputs.is_argmax is not None and not outputs.is_argmax.requires_grad
        return outputs.is_argmax

    for found in [score(None)] if cuts is None else run_thread_ranks(len(bounds) - 1, score):
        assert found.tolist() == (labels == best).tolist()


def test_each_of_several_largest_logits_is_marked():
    hidden = torch.tensor([[1.0], [1.0], [1.0], [-1.0]])
    weight = torch.tensor([[2.0], [0.0], [2.0]])
    outputs = token_logprobs(hidden, weight, torch.tensor([0, 1, 2, 1]))
    assert outputs.is_argmax is not None
    assert outputs.is_argmax.tolist() == [True, False, True, True]
