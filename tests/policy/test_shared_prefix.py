"""Rows that share prefixes: what the model computes, what each position sees, and the gradient."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.spec import Microbatch, PlanSpec
from nemo_like.data.routed_experts import ROUTED_EXPERTS, join_experts
from nemo_like.integer_math import round_up
from nemo_like.models.routers import RouterReplay
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.exchange import make_exchange
from nemo_like.policy.inputs.model_inputs import ModelInputs, build_inputs
from tests.policy.tiny import VOCABULARY

FORESTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=8
)
"""Rows of few different tokens, so that they have common prefixes of all lengths."""


def microbatch_of(rows: list[tuple[int, ...]], multiple: int, trailing: int) -> Microbatch:
    """Sorted `rows` with the longest prefix that each has in common with the one before it."""
    shared = [0]
    for before, row in pairwise(rows):
        same = [a == b for a, b in zip(before, row, strict=False)]
        shared.append((*same, False).index(False))
    lengths = tuple(map(len, rows))
    padded = [round_up(len(row) - n, multiple) for row, n in zip(rows, shared, strict=True)]
    return Microbatch(
        tuple(range(len(rows))),
        lengths,
        tuple(padded),
        sum(padded) + trailing * multiple,
        tuple(shared),
    )


def inputs_of(
    rows: list[tuple[int, ...]],
    cp_size: int = 1,
    trailing: int = 0,
    experts: list[np.ndarray] | None = None,
) -> tuple[list[ModelInputs], Microbatch]:
    """The inputs of each context-parallel rank, and their microbatch."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    microbatch = microbatch_of(rows, multiple, trailing)
    spec = PlanSpec(max_tokens=max(microbatch.num_tokens, multiple), cp_size=cp_size)
    shard = {"input_ids": Jagged.from_rows([np.array(row) for row in rows], np.int32)}
    if experts is not None:
        shard[ROUTED_EXPERTS] = Jagged.from_rows(experts, np.uint8)
    inputs = [
        build_inputs(shard, microbatch, spec, cp_rank=rank, pad_token_id=9)
        for rank in range(cp_size)
    ]
    return inputs, microbatch


@settings(max_examples=150)
@given(rows=FORESTS, cp_size=st.sampled_from([1, 2, 4]), trailing=st.integers(0, 2))
def test_each_token_of_each_row_is_predicted_once_from_its_own_past(rows, cp_size, trailing):
    rows = sorted(rows)
    ranks, microbatch = inputs_of(rows, cp_size, trailing)
    # Each prefix is computed once: the number of nodes of the trie.
    num_computed = len({row[: end + 1] for row in rows for end in range(len(row))})
    num_stored = sum(microbatch.lengths) - sum(microbatch.shared)
    assert num_stored == num_computed
    ids = torch.cat([inputs.input_ids[0] for inputs in ranks])
    positions = torch.cat([inputs.position_ids[0] for inputs in ranks])
    found = []
    for rank, inputs in enumerate(ranks):
        for label, hidden in zip(inputs.label_positions, inputs.hidden_positions, strict=True):
            row = int(inputs.row_ids[label])
            keys = keys_of(inputs, int(hidden), rank)
            past = tuple(ids[keys].tolist())
            assert positions[keys].tolist() == list(range(len(past)))
            assert rows[row][: len(past)] == past
            assert int(inputs.labels[label]) == rows[row][len(past)]
            found.append((row, len(past)))
        for hidden, row in zip(inputs.last_positions, inputs.last_rows, strict=True):
            assert tuple(ids[keys_of(inputs, int(hidden), rank)].tolist()) == rows[int(row)]
    assert sorted(found) == [(i, end) for i, row in enumerate(rows) for end in range(1, len(row))]
    assert sum(len(inputs.last_rows) for inputs in ranks) == len(rows)


def keys_of(inputs: ModelInputs, position: int, cp_rank: int) -> torch.Tensor:
    """The keys that a position attends to, as indices into the positions of all ranks."""
    assert inputs.cu_seqlens is not None
    if inputs.exchange is None and inputs.cp_size == 1:
        start = inputs.cu_seqlens[inputs.cu_seqlens <= position][-1]
        return torch.arange(int(start), position + 1)
    exchange = inputs.exchange or make_exchange(
        inputs.cu_seqlens,
        inputs.max_seqlen,
        inputs.cp_size,
        cp_rank,
        inputs.num_tokens // inputs.cp_size,
    )
    spans = exchange.spans
    segment = int((spans.cu_seqlens_q <= position).sum()) - 1
    # Queries and keys of a segment end at the same position.
    num_after = int(spans.cu_seqlens_q[segment + 1]) - 1 - position
    start, end = spans.cu_seqlens_k[segment : segment + 2].tolist()
    return exchange.kv_index[start : end - num_after]


def float64_model(model_dir: Any, architecture: str) -> Any:
    attention.register()
    # transformers computes its norms in float32, so a model without rounding needs them in float64.
    model = AutoModelForCausalLM.from_pretrained(
        model_dir(architecture), dtype=torch.float64, attn_implementation=attention.IMPLEMENTATION
    ).eval()
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, module=module: torch.nn.functional.rms_norm(
                x, x.shape[-1:], module.weight, module.variance_epsilon
            )
    return model


def logprobs_of(model: Any, inputs: ModelInputs) -> torch.Tensor:
    """Log-probs of the labels in the order of `label_positions`, in the precision of the model."""
    hidden = model.base_model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        cu_seqlens=inputs.cu_seqlens,
        max_seqlen=inputs.max_seqlen,
        exchange=inputs.exchange,
    ).last_hidden_state[0]
    logits = model.get_output_embeddings()(hidden.index_select(0, inputs.hidden_positions))
    labels = inputs.labels.index_select(0, inputs.label_positions)
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_window"])
def test_log_probs_and_gradients_are_those_of_separate_rows_in_float64(architecture, model_dir):
    model = float64_model(model_dir, architecture)
    generator = np.random.default_rng(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, VOCABULARY, length).tolist())

    root, branch, other = tokens(20), tokens(7), tokens(9)
    ends = [5, 1, 12, 30, 3]
    rows = [root + branch + tokens(end) for end in ends]
    rows += [root + tokens(8), root, other + tokens(4), other + tokens(2), tokens(6)]
    rows = sorted(rows)
    weights = [torch.from_numpy(generator.normal(size=len(row) - 1)) for row in rows]
    (inputs,), _ = inputs_of(rows)
    assert inputs.exchange is not None
    model.zero_grad()
    found = logprobs_of(model, inputs)
    (found * torch.cat(weights)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = []
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.tensor([row])
        logits = model(ids).logits[0, :-1]
        expected.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
        (expected[-1] * weight).sum().backward()
    assert torch.allclose(found, torch.cat(expected), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-12, name


@settings(max_examples=30, deadline=None)
@given(rows=FORESTS, data=st.data())
def test_a_token_changes_only_the_rows_that_have_it(model_dir, rows, data):
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir("llama"), attn_implementation=attention.IMPLEMENTATION
    ).eval()
    rows = sorted(rows)
    (inputs,), _ = inputs_of(rows)
    position = data.draw(st.integers(0, inputs.input_ids.shape[1] - 1))
    changed_ids = inputs.input_ids.clone()
    changed_ids[0, position] = 7
    changed = dataclasses.replace(inputs, input_ids=changed_ids)
    with torch.no_grad():
        before, after = (logprobs_of(model, each) for each in (inputs, changed))
    sees = [
        bool((keys_of(inputs, hidden, 0) == position).any())
        for hidden in inputs.hidden_positions.tolist()
    ]
    is_equal = before == after
    assert is_equal[~torch.tensor(sees, dtype=torch.bool)].all()


def recorded_experts(row: tuple[int, ...]) -> np.ndarray:
    """Experts [L, 2 layers, 2] of 4: equal where two rows have the same past; none of the last."""
    known = []
    for end in range(1, len(row)):
        generator = np.random.default_rng([end, *row[:end]])
        known.append([generator.permutation(4)[:2] for _ in range(2)])
    part = np.array(known, dtype=np.uint8).reshape(-1, 2, 2)
    return join_experts([part], len(row))


@settings(max_examples=100)
@given(rows=FORESTS, cp_size=st.sampled_from([1, 2]), trailing=st.integers(0, 2))
def test_each_label_is_computed_with_the_experts_recorded_for_its_past(rows, cp_size, trailing):
    rows = sorted(rows)
    ranks, _ = inputs_of(rows, cp_size, trailing, [recorded_experts(row) for row in rows])
    parts: list[Any] = [inputs.routed_experts for inputs in ranks]
    experts = torch.cat(parts)
    for rank, inputs in enumerate(ranks):
        for label, hidden in zip(inputs.label_positions, inputs.hidden_positions, strict=True):
            row = rows[int(inputs.row_ids[label])]
            found = experts[keys_of(inputs, int(hidden), rank)].numpy()
            assert np.array_equal(found, recorded_experts(row)[: len(found)])


def forced_logprobs(model: Any, row: tuple[int, ...]) -> torch.Tensor:
    """Log-probs of one row alone, with routers written out here; the last token has expert 0."""
    experts = torch.from_numpy(recorded_experts(row).astype(np.int64))
    experts[-1] = 0
    routers = [layer.mlp.gate for layer in model.model.layers]
    for index, router in enumerate(routers):

        def route(hidden: Any, router: Any = router, index: int = index) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            chosen = experts[:, index]
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(1, keepdim=True), chosen

        router.forward = route
    ids = torch.tensor([row])
    logits = model(ids).logits[0, :-1]
    for router in routers:
        del router.forward
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def test_recorded_experts_with_shared_prefixes_give_the_log_probs_of_separate_rows(model_dir):
    attention.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir("qwen3_moe"), dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
    ).eval()
    prompt = (5, 9, 2, 31, 7)
    # An empty completion, one that another row continues, and one that branches from both.
    rows: list[tuple[int, ...]] = [
        prompt,
        (*prompt, 11, 4),
        (*prompt, 11, 4, 8, 3, 20),
        (*prompt, 11, 6, 1),
    ]
    rows.sort()
    expected = torch.cat([forced_logprobs(model, row) for row in rows])
    (inputs,), _ = inputs_of(rows, experts=[recorded_experts(row) for row in rows])
    replay = RouterReplay(model)
    replay.set(inputs.routed_experts)
    found = logprobs_of(model, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    replay.set(None)
    assert (logprobs_of(model, inputs) - expected).abs().max() > 0.01
