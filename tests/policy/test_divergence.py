"""The divergence per token equals its definition in float64, its gradient finite differences of it,
on one rank or several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.losses.likelihood import Divergence
from nemo_like.policy.heads.divergence import DivergenceOutputs, TopKTarget, VocabularyTarget
from nemo_like.policy.outputs import VocabShard
from tests.losses.divergence_definition import divergence_of, outcomes, softmax
from tests.policy.test_logprobs import Recorder
from tests.policy.thread_ranks import run_thread_ranks
from tests.policy.token_heads import token_divergence, token_logprobs, top_k_logprobs

DIVERGENCES = {
    "reverse_kl": Divergence(kind="reverse_kl", temperature=1.4),
    "forward_kl": Divergence(kind="forward_kl", temperature=0.7),
    "mixed_kl": Divergence(kind="mixed_kl", weight=0.3),
    "jsd": Divergence(kind="jsd", weight=0.2, temperature=0.8),
}
TARGETS: list[int | None] = [None, 3]
VOCABULARY = 11


class Case:
    """Random student and teacher in float64: T tokens, C common tokens of V."""

    def __init__(self, num_tokens: int, num_common: int = VOCABULARY, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.hidden = generator.normal(size=(num_tokens, 4))
        self.weight = generator.normal(size=(VOCABULARY, 4))
        self.bias = generator.normal(size=VOCABULARY)
        self.teacher_hidden = generator.normal(size=(num_tokens, 6))
        self.teacher_weight = generator.normal(size=(num_common, 6))
        self.labels = generator.integers(0, num_common, num_tokens)
        self.scales = np.linspace(-1.0, 1.0, num_tokens)

    def teacher_logits(self) -> np.ndarray:
        return self.teacher_hidden @ self.teacher_weight.T

    def loss(
        self,
        hidden: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        divergence: Divergence,
        top_k: int | None,
    ) -> float:
        """Weighted sum of the divergences and of the labels' log-probs."""
        logits = hidden @ weight.T + bias
        teacher = softmax(self.teacher_logits() / divergence.temperature)
        num_columns = len(self.teacher_weight) if top_k is None else len(weight)
        student = softmax(logits[:, :num_columns] / divergence.temperature)
        values = divergence_of(
            outcomes(student, _padded(teacher, num_columns), top_k),
            outcomes(_padded(teacher, num_columns), _padded(teacher, num_columns), top_k),
            divergence.kind,
            divergence.weight,
        )
        logprobs = np.log(softmax(logits))[np.arange(len(hidden)), self.labels]
        return float((self.scales * values + 0.3 * self.scales**2 * logprobs).sum())


def _padded(probs: np.ndarray, num_columns: int) -> np.ndarray:
    missing = num_columns - probs.shape[1]
    return np.pad(probs, ((0, 0), (0, max(missing, 0))), constant_values=0.0)


def finite_differences(function: Any, values: np.ndarray, step: float = 1e-5) -> np.ndarray:
    gradient = np.zeros_like(values)
    for index in np.ndindex(values.shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = values.copy()
            moved[index] += sign * step
            ends.append(function(moved))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).float()


def compute(
    case: Case,
    divergence: Divergence,
    top_k: int | None,
    chunk_size: int,
    rows: slice = slice(None),
    vocab: VocabShard | None = None,
) -> tuple[DivergenceOutputs, list[Tensor]]:
    """Outputs, and the gradients of hidden states, weight and bias (of this rank's rows)."""
    leaves = [
        tensor(each).requires_grad_() for each in (case.hidden, case.weight[rows], case.bias[rows])
    ]
    labels = torch.from_numpy(case.labels)
    weight = tensor(case.teacher_weight[rows])
    teacher = tensor(case.teacher_hidden)
    target: VocabularyTarget | TopKTarget = VocabularyTarget(teacher, weight)
    if top_k is not None:
        ids, logprobs = top_k_logprobs(
            teacher,
            weight,
            k=top_k,
            temperature=divergence.temperature,
            chunk_size=chunk_size,
            vocab=vocab,
        )
        of_labels = token_logprobs(teacher, weight, labels, with_entropy=True, vocab=vocab)
        assert of_labels.entropy is not None
        start = 0 if vocab is None else vocab.start
        target = TopKTarget(ids, logprobs, of_labels.entropy, of_labels.logprobs, start)
    outputs = token_divergence(
        leaves[0],
        leaves[1],
        labels,
        target,
        divergence,
        chunk_size=chunk_size,
        bias=leaves[2],
        vocab=vocab,
    )
    scales = tensor(case.scales)
    loss = (scales * outputs.divergence + 0.3 * scales**2 * outputs.logprobs).sum()
    return outputs, list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize(
    ("top_k", "num_common"), [*((top_k, VOCABULARY) for top_k in TARGETS), (None, VOCABULARY - 2)]
)
def test_values_and_gradients_are_those_of_the_definition(kind, top_k, num_common):
    case = Case(5, num_common)
    divergence = DIVERGENCES[kind]
    outputs, gradients = compute(case, divergence, top_k, chunk_size=2)

    def loss(**changed: np.ndarray) -> float:
        given = {"hidden": case.hidden, "weight": case.weight, "bias": case.bias}
        return case.loss(**(given | changed), divergence=divergence, top_k=top_k)

    scales = tensor(case.scales)
    terms = scales * outputs.divergence + 0.3 * scales**2 * outputs.logprobs
    found = float(terms.sum().detach())
    assert found == pytest.approx(loss(), rel=1e-5)
    for name, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
        values = getattr(case, name)
        expected = finite_differences(lambda moved, name=name: loss(**{name: moved}), values)
        difference = np.linalg.norm(gradient.numpy() - expected)
        assert difference < 1e-5 * np.linalg.norm(expected), name
    teacher = softmax(case.teacher_logits())
    of_labels = np.log(teacher)[np.arange(5), case.labels]
    np.testing.assert_allclose(outputs.teacher_logprobs.numpy(), of_labels, rtol=1e-5, atol=1e-6)
    temperature = divergence.temperature if top_k is None else 1.0
    tempered = softmax(case.teacher_logits() / temperature)
    entropy = -(tempered * np.log(tempered)).sum(-1)
    np.testing.assert_allclose(outputs.teacher_entropy.numpy(), entropy, rtol=1e-5)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [None, 3])
def test_few_chunks_of_logits_exist_at_a_time(kind: str, top_k: int | None) -> None:
    """Chunks are a quarter of those of log-probs, of which two to three exist."""
    num_tokens, num_columns, chunk_size = 64, 4096, 16
    generator = torch.Generator().manual_seed(0)
    hidden, weight, teacher_hidden, teacher_weight = (
        torch.randn(size, 4, generator=generator)
        for size in (num_tokens, num_columns, num_tokens, num_columns)
    )
    labels = torch.randint(num_columns, (num_tokens,), generator=generator)
    target: VocabularyTarget | TopKTarget = VocabularyTarget(teacher_hidden, teacher_weight)
    if top_k is not None:
        ids, logprobs = top_k_logprobs(
            teacher_hidden, teacher_weight, k=top_k, temperature=0.7, chunk_size=chunk_size
        )
        target = TopKTarget(ids, logprobs, logprobs[:, 0], logprobs[:, 0])
    with Recorder() as recorded:
        outputs = token_divergence(
            hidden.requires_grad_(),
            weight,
            labels,
            target,
            DIVERGENCES[kind],
            chunk_size=chunk_size,
        )
        (outputs.divergence + 0.1 * outputs.logprobs).sum().backward()
    assert recorded.peak < 9 * chunk_size * num_columns * 4


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(sorted(DIVERGENCES)),
    top_k=st.sampled_from(TARGETS),
    num_tokens=st.integers(0, 7),
    cuts=st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=2).map(sorted),
)
def test_a_vocabulary_spread_over_ranks_gives_the_same(kind, top_k, num_tokens, cuts):
    """Ranks hold rows between the cuts: uneven, some of them none."""
    case = Case(num_tokens)

    def compute_shard(group: dist.ProcessGroup) -> tuple[DivergenceOutputs, list[Tensor]]:
        start, stop = [0, *cuts, VOCABULARY][group.rank() : group.rank() + 2]
        shard = VocabShard(group, start)
        return compute(case, DIVERGENCES[kind], top_k, 3, slice(start, stop), shard)

    shards = run_thread_ranks(len(cuts) + 1, compute_shard)
    outputs, gradients = compute(case, DIVERGENCES[kind], top_k, 3)
    for found, (hidden, _, _) in shards:
        for name, values in found._asdict().items():
            torch.testing.assert_close(
                values, getattr(outputs, name), rtol=1e-5, atol=1e-6, msg=name
            )
        torch.testing.assert_close(hidden, gradients[0], rtol=1e-4, atol=1e-5)
    for index in (1, 2):
        joined = torch.cat([parts[index] for _, parts in shards])
        torch.testing.assert_close(joined, gradients[index], rtol=1e-4, atol=1e-5)


def test_a_student_equal_to_the_teacher_has_no_divergence_and_no_gradient():
    case = Case(4)
    for divergence in DIVERGENCES.values():
        hidden = tensor(case.hidden).requires_grad_()
        weight = tensor(case.weight)
        same = Divergence(kind=divergence.kind)
        target = VocabularyTarget(hidden.detach(), weight)
        outputs = token_divergence(hidden, weight, torch.from_numpy(case.labels), target, same)
        assert float(outputs.divergence.detach().abs().max()) < 1e-6
        (gradient,) = torch.autograd.grad(outputs.divergence.sum(), hidden)
        assert float(gradient.abs().max()) < 1e-6
        torch.testing.assert_close(outputs.student_entropy, outputs.teacher_entropy)


def test_impossible_tokens_leave_values_and_gradients_finite():
    """Probabilities that underflow in float32, on either side."""
    case = Case(3)
    for divergence in DIVERGENCES.values():
        hidden = (200 * tensor(case.hidden)).requires_grad_()
        target = VocabularyTarget(200 * tensor(case.teacher_hidden), tensor(case.teacher_weight))
        outputs = token_divergence(
            hidden, tensor(case.weight), torch.from_numpy(case.labels), target, divergence
        )
        (gradient,) = torch.autograd.grad(outputs.divergence.sum(), hidden)
        assert bool(outputs.divergence.isfinite().all())
        assert bool(gradient.isfinite().all())
