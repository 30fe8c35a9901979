"""The rows of an episode have the gradient of one row per call, also with shared prefixes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nemo_like.agents.calls import Call, CallOptions, Episode, Sampled
from nemo_like.config.loss import LossNormalization, PolicyGradientLossConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import ClippedPolicyGradientLoss
from tests.agents.scripted import codec_of
from tests.policy.test_gradient_equality import gradient_of, packed, sharing
from tests.policy.tiny import VOCABULARY, relative_error, save_tiny_model

TOLERANCE = 1e-5
NORMALIZATIONS: tuple[LossNormalization, ...] = ("token", "sequence", "constant")
RowValues = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids, mask and log-probs of the sampler."""


class Random:
    """An episode of calls with random tokens."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.episode = Episode(codec_of(), seed, max_total_tokens=1000)

    def tokens(self, count: int) -> np.ndarray:
        return self._random.integers(0, VOCABULARY, count).astype(np.int32)

    def call(self, *prompt: np.ndarray, num_tokens: int = 5) -> np.ndarray:
        """Sample after a prompt; return the sampled tokens."""
        call = self.episode.request(np.concatenate(prompt), CallOptions())
        ids = self.tokens(num_tokens)
        logprobs = self._random.normal(-4, 0.3, num_tokens).astype(np.float32)
        self.episode.answer(call, Sampled(ids, logprobs, np.zeros(num_tokens, np.int32)))
        return ids


def linear(random: Random) -> int:
    context = [random.tokens(6)]
    for _ in range(4):
        context += [random.call(*context), random.tokens(3)]
    return 1


def compacted(random: Random) -> int:
    prompt = random.tokens(6)
    context = [prompt]
    for _ in range(2):
        context += [random.call(*context), random.tokens(3)]
    summary = random.call(*context, num_tokens=4)
    context = [prompt, summary]
    for _ in range(2):
        context += [random.call(*context), random.tokens(3)]
    return 2


def without_reasoning(random: Random) -> int:
    """The first three tokens of earlier turns are removed."""
    context = [random.tokens(6)]
    for _ in range(4):
        context += [random.call(*context)[3:], random.tokens(3)]
    return 4


def parallel(random: Random) -> int:
    context = [random.tokens(6)]
    for _ in range(3):
        for count in (4, 3):
            random.call(*context, num_tokens=count)
        context += [random.call(*context), random.tokens(3)]
    return 7


def with_sub_agents(random: Random) -> int:
    context = [random.tokens(6)]
    context += [random.call(*context), random.tokens(3)]
    for _ in range(2):
        inner = [random.tokens(4)]
        inner += [random.call(*inner), random.tokens(2)]
        random.call(*inner)
    random.call(*context)
    return 3


KINDS = (linear, compacted, without_reasoning, parallel, with_sub_agents)


def row_per_call(call: Call) -> RowValues:
    assert call.sampled is not None
    zeros = np.zeros(len(call.prompt_ids))
    ids = np.concatenate([call.prompt_ids, call.sampled.token_ids])
    mask = np.concatenate([zeros, np.ones(len(call.sampled.token_ids))]).astype(np.uint8)
    return ids, mask, np.concatenate([zeros, call.sampled.logprobs]).astype(np.float32)


def halves_of(row: RowValues) -> list[RowValues]:
    """Two rows of the same tokens: the even ones are trained in one, the odd ones in the other."""
    ids, mask, logprobs = row
    is_even = (np.arange(len(ids)) % 2 == 0).astype(np.uint8)
    return [(ids, mask * is_even, logprobs), (ids, mask * (1 - is_even), logprobs)]


def loss_of(normalization: LossNormalization) -> ClippedPolicyGradientLoss:
    config = PolicyGradientLossConfig(
        normalization=normalization,
        constant_length=30 if normalization == "constant" else None,
        reference_policy_kl_penalty=0.1,
    )
    return ClippedPolicyGradientLoss(config=config)


def batch_of(rows: list[RowValues], groups: list[int]) -> BatchedDataDict:
    ids, masks, logprobs = zip(*rows, strict=True)
    token_logprobs = Jagged.from_rows(logprobs, np.float32)
    input_ids = Jagged.from_rows(ids, np.int32)
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=Jagged.from_rows(masks, np.uint8),
        generation_logprobs=token_logprobs,
        prev_logprobs=token_logprobs,
        reference_logprobs=token_logprobs,
        # Another one for each episode.
        advantages=np.array([0.7 - 0.3 * group for group in groups], dtype=np.float32),
        length=input_ids.lengths,
        row_mask=np.ones(len(rows), dtype=bool),
        group=np.array(groups, dtype=np.int64),
        episode=np.array(groups, dtype=np.int64),
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_rows_of_every_kind_of_episode_have_the_gradient_of_one_row_per_call(
    normalization: LossNormalization, tmp_path: Path
) -> None:
    model = str(save_tiny_model(tmp_path / "model", "qwen2_tied"))
    per_call: list[RowValues] = []
    rows: list[RowValues] = []
    call_groups: list[int] = []
    row_groups: list[int] = []
    for group, kind in enumerate(KINDS):
        random = Random(group)
        num_rows = kind(random)
        found = random.episode.rows()
        assert len(found) == num_rows, kind.__name__
        per_call += map(row_per_call, random.episode.calls)
        rows += [(row.token_ids, row.token_mask, row.logprobs) for row in found]
        call_groups += [group] * len(random.episode.calls)
        row_groups += [group] * num_rows
    halves = [half for row in rows for half in halves_of(row)]
    batches = (
        batch_of(per_call, call_groups),
        batch_of(rows, row_groups),
        batch_of(halves, np.repeat(row_groups, 2).tolist()),
    )
    shared = SharedPrefixes.of_tokens(row_groups, batches[1]["input_ids"])
    sizes = [int(batch["length"].sum()) for batch in batches]
    assert sizes[0] > sizes[1] > sizes[1] - int(shared.shared.sum())
    gradients = []
    for name, config, batch in (
        ("calls", packed(512), batches[0]),
        ("rows", packed(512), batches[1]),
        ("shared", sharing(512), batches[1]),
        ("halves", sharing(512), batches[2]),
    ):
        sized = dataclasses.replace(config, train_global_batch_size=len(KINDS))
        gradient, metrics = gradient_of(
            sized, model, batch, loss_of(normalization), tmp_path / name
        )
        assert metrics["policy/num_rows"] == len(KINDS), name
        gradients.append(gradient)
    for gradient in gradients[1:]:
        assert relative_error(gradient, gradients[0]) < TOLERANCE
