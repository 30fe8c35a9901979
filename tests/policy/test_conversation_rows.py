"""Conversations of several turns in training: only the model's turns have log-probs and a loss, and
packing them with other rows changes neither loss nor gradient.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import NllLoss
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.shard_rows import ShardRows
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import build_rollout
from tests.policy.test_gradient_equality import (
    POLICY_GRADIENT,
    TOLERANCE,
    fixed,
    gradient_of,
    packed,
)
from tests.policy.tiny import VOCABULARY, compute_and_fetch, context, relative_error, row_loss

TURNS = [5, 1, 2, 1, 3]
"""Turns of the model in each conversation; the first is packed with the others."""


def conversation_batch() -> BatchedDataDict:
    """Rows of random ids, with every column that a policy-gradient loss reads."""
    rng = np.random.default_rng(0)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, rng.integers(low, high)).astype(np.int32)

    conversations = []
    for num_turns in TURNS:
        prompt = Prompt(token_ids=ids(2, 6), text="", answer=None)
        conversation = ConversationRow.start(prompt, 0)
        for turn in range(num_turns):
            if turn:
                conversation.segments.append(ids(1, 5))
            conversation.segments.append(ids(1, 6))
            size = len(conversation.segments[-1])
            conversation.logprobs.append(rng.normal(-4.0, 0.3, size).astype(np.float32))
            conversation.weight_versions.append(np.zeros(size, np.int32))
        conversations.append(conversation)
    rewards = np.zeros(len(TURNS), np.float32)
    batch = build_rollout(conversations, 1, rewards, {}).batch
    for name in ("prev_logprobs", "reference_logprobs"):
        values = rng.normal(-4.0, 0.3, len(batch["input_ids"].values)).astype(np.float32)
        batch[name] = Jagged(values, batch["input_ids"].offsets)
    batch["advantages"] = rng.normal(size=len(TURNS)).astype(np.float32)
    return batch


def only(batch: BatchedDataDict, row: int) -> BatchedDataDict:
    """The batch with one trained row."""
    return BatchedDataDict({**batch, "row_mask": np.arange(len(TURNS)) == row})


CONFIG: Any = dataclasses.replace(packed(128), train_global_batch_size=len(TURNS))
ALONE: Any = dataclasses.replace(fixed(1), train_global_batch_size=len(TURNS))


def test_a_conversation_of_five_turns_packed_with_others_equals_the_row_by_itself(
    model_dir: Any, tmp_path: Path
) -> None:
    batch = conversation_batch()
    model = str(model_dir("llama"))
    for loss in (POLICY_GRADIENT, NllLoss()):
        out = tmp_path / type(loss).__name__
        found, metrics = gradient_of(CONFIG, model, only(batch, 0), loss, out / "packed")
        expected, expected_metrics = gradient_of(ALONE, model, only(batch, 0), loss, out / "alone")
        assert relative_error(found, expected) < TOLERANCE
        assert metrics["policy/loss"] == pytest.approx(expected_metrics["policy/loss"], rel=1e-5)
        assert metrics["policy/num_tokens"] == batch["token_mask"][0].sum()
    reference = AutoModelForCausalLM.from_pretrained(model)
    value = row_loss(reference, only(batch, 0))
    value.backward()
    gradients: Any = {name: each.grad for name, each in reference.named_parameters()}
    assert relative_error(found, gradients) < TOLERANCE
    assert metrics["policy/loss"] == pytest.approx(value.item(), rel=1e-5)


def test_only_the_turns_of_the_model_have_logits(model_dir: Any) -> None:
    batch = conversation_batch()
    for name in ("prev_logprobs", "reference_logprobs"):
        del batch[name]
    config = dataclasses.replace(CONFIG, model_name=str(model_dir("llama")))
    worker = DTensorPolicyWorker(context(), config=config)
    spec = plan_spec(
        config,
        purpose="train",
        parallel_layout=ParallelLayout(),
        model=load_spec(config.model_name),
    )
    (shard,) = batch.shard(plan_batch(batch["length"], spec))
    assert shard.plan is not None
    rows = ShardRows(shard, spec, 0, torch.device("cpu"))
    mask = shard["token_mask"].values.astype(bool)
    # The head computes logits at these positions only, in the log-prob pass and in training.
    num_positions = 0
    for microbatch in shard.plan.microbatches:
        inputs = rows.inputs(microbatch)
        num_positions += len(inputs.label_positions)
        assert torch.equal(inputs.label_mask.nonzero().squeeze(1), inputs.label_positions)
    assert num_positions == mask.sum()
    logprobs = compute_and_fetch(worker, shard)["prev_logprobs"].values
    process_groups.destroy()
    assert (logprobs[~mask] == 0).all() and (logprobs[mask] < 0).all()
