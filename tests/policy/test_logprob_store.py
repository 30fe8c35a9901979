"""Log-probs stay on the workers: equal results, small messages, and errors for invalid handles."""

from __future__ import annotations

import dataclasses
import pickle
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import OptimizerConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.errors import WorkerError
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import load_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.policy.shard_rows import LogprobHandle, LogprobStore
from tests.policy.tiny import random_batch

LENGTHS = [9, 14, 6, 23, 2, 17, 1, 12]
# Two optimizer steps of several microbatches; the log-prob pass has other, larger microbatches.
CONFIG = PolicyConfig(
    model_name="",
    train_global_batch_size=4,
    optimizer=OptimizerConfig(lr=1e-2),
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=32, logprob_mb_tokens=64),
)
LOSS = ClippedPolicyGradientLoss(config=PolicyGradientLossConfig(reference_policy_kl_penalty=0.1))


class MeasuringGroup(LocalGroup):
    """A local group that adds up the pickled size of what its calls transfer.

    Values that were `put` are not counted: they do not pass through the driver again.
    """

    num_bytes = 0

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        handles = super().submit_all(method, *args, **kwargs)
        sent = [value for value in (*args, *kwargs.values()) if not hasattr(value, "outcome")]
        self.num_bytes += len(pickle.dumps((sent, [handle.value for handle in handles])))
        return handles


def open_policy(model: str, **kwargs: Any) -> Policy:
    config = dataclasses.replace(CONFIG, model_name=model)
    group = MeasuringGroup(
        DTensorPolicyWorker,
        {"config": config, "start": PolicyStart(**kwargs)},
        local_context(num_threads=1),
        name="policy",
    )
    return Policy(group, config, load_spec(model))


@pytest.fixture
def policy(model_dir) -> Iterator[Policy]:
    policy = open_policy(model_dir("qwen3"), needs_reference=True)
    yield policy
    policy.shutdown()


def rollout(lengths: Sequence[int] = LENGTHS) -> BatchedDataDict:
    """Rows as a rollout has them, without log-probs of the policy."""
    batch = random_batch(list(lengths))
    del batch["prev_logprobs"], batch["reference_logprobs"]
    return batch


def test_kept_logprobs_give_the_step_that_sent_ones_give(model_dir):
    found = []
    for is_kept in (True, False):
        policy = open_policy(model_dir("qwen3"), needs_reference=True)
        batch = rollout()
        metrics = []
        # The second rollout starts from trained weights, so policy and reference differ.
        for _ in range(2):
            sharded = policy.shard(batch, policy.plan(batch["length"]))
            logprobs = policy.compute_logprobs(sharded)
            policy.group.run_all_workers("offload")
            policy.group.run_all_workers("onload")
            if is_kept:
                steps = policy.train(sharded, None, LOSS, logprobs)
            else:
                steps = policy.train(sharded, policy.fetch_logprobs(logprobs), LOSS)
            values = [metric_values(step) for step in steps]
            # Without clocks.
            metrics += [
                {name: value for name, value in step.items() if "rank_time" not in name}
                for step in values
            ]
        logprobs = policy.compute_logprobs(policy.shard(batch, policy.plan(batch["length"])))
        found.append((metrics, policy.fetch_logprobs(logprobs)["prev_logprobs"].values.tobytes()))
        policy.shutdown()
    assert found[0] == found[1]
    metrics, _ = found[0]
    assert len(metrics) == 4
    assert metrics[-1]["policy/grad_norm"] > 0
    assert metrics[-1]["policy/reference_kl_k3"] > 0


def test_bytes_through_the_driver_do_not_grow_with_tokens(policy):
    sizes = []
    for factor in (1, 10):
        packing = dataclasses.replace(
            CONFIG.sequence_packing, train_mb_tokens=32 * factor, logprob_mb_tokens=64 * factor
        )
        config = dataclasses.replace(policy.config, sequence_packing=packing)
        group = policy.group
        assert isinstance(group, MeasuringGroup)
        scaled = Policy(group, config, policy.model)
        batch = rollout([length * factor for length in LENGTHS])
        sharded = scaled.shard(batch, scaled.plan(batch["length"]))
        group.num_bytes = 0
        logprobs = scaled.compute_logprobs(sharded)
        advantages = np.linspace(-1, 1, len(LENGTHS), dtype=np.float32)
        scaled.train(sharded, {"advantages": advantages}, LOSS, logprobs)
        sizes.append(group.num_bytes)
        # The former route, to show that the measurement sees it.
        group.num_bytes = 0
        scaled.fetch_logprobs(logprobs)
        assert group.num_bytes > 8 * sum(LENGTHS) * factor
    assert sizes[0] == sizes[1]


def test_the_names_select_the_passes(policy, model_dir):
    batch = rollout()
    sharded = policy.shard(batch, policy.plan(batch["length"]))
    both = policy.fetch_logprobs(policy.compute_logprobs(sharded))
    assert set(both) == {"prev_logprobs", "reference_logprobs"}
    for name, expected in both.items():
        logprobs = policy.compute_logprobs(sharded, [name])
        assert logprobs.names == (name,)
        (column,) = policy.fetch_logprobs(logprobs).values()
        assert np.array_equal(column.values, expected.values)
    without_reference = open_policy(model_dir("qwen3"))
    sharded = without_reference.shard(batch, without_reference.plan(batch["length"]))
    assert without_reference.compute_logprobs(sharded).names == ("prev_logprobs",)
    with pytest.raises(WorkerError, match="cannot compute reference_logprobs, but prev_logprobs"):
        without_reference.compute_logprobs(sharded, ["reference_logprobs"])
    without_reference.shutdown()


def test_evaluation_reads_kept_logprobs(policy):
    batch = rollout()
    sharded = policy.shard(batch, policy.plan(batch["length"], "evaluate"))
    logprobs = policy.compute_logprobs(sharded)
    metrics = metric_values(policy.evaluate(sharded, LOSS, logprobs))
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_a_released_handle_is_an_error(policy):
    batch = rollout()
    sharded = policy.shard(batch, policy.plan(batch["length"]))
    old = policy.compute_logprobs(sharded)
    new = policy.compute_logprobs(sharded)
    with pytest.raises(WorkerError, match=r"log-probs of pass 0 were released: .*pass 1"):
        policy.train(sharded, None, LOSS, old)
    with pytest.raises(WorkerError, match="pass 0 were released"):
        policy.fetch_logprobs(old)
    assert len(policy.train(sharded, None, LOSS, new)) == 2


def test_logprobs_of_another_batch_and_duplicate_columns_are_errors(policy):
    batch = rollout()
    sharded = policy.shard(batch, policy.plan(batch["length"]))
    logprobs = policy.compute_logprobs(sharded)
    same_rows = policy.shard(batch, policy.plan(batch["length"]))
    with pytest.raises(ValueError, match="computed for another sharded batch"):
        policy.train(same_rows, None, LOSS, logprobs)
    column = batch["generation_logprobs"]
    with pytest.raises(ValueError, match="the batch already has prev_logprobs"):
        policy.train(sharded, {"prev_logprobs": column}, LOSS, logprobs)
    full = random_batch(LENGTHS)
    sharded = policy.shard(full, policy.plan(full["length"]))
    logprobs = policy.compute_logprobs(sharded)
    with pytest.raises(ValueError, match="already has prev_logprobs, reference_logprobs"):
        policy.evaluate(sharded, LOSS, logprobs)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_only_the_latest_pass_is_kept(lengths):
    store = LogprobStore()
    with pytest.raises(ValueError, match="here none"):
        store.columns(LogprobHandle(0, ("prev_logprobs",)), Jagged.from_rows([], np.int32))
    handles = []
    released: list[Any] = []
    for num_rows in lengths:
        store.start_pass()
        assert all(reference() is None for reference in released)
        column = Jagged.from_rows([[1.0]] * num_rows, np.float32)
        released.append(weakref.ref(column.values))
        handles.append(store.keep({"prev_logprobs": column}, ("prev_logprobs",)))
        input_ids = Jagged.from_rows([[7]] * num_rows, np.int32)
        assert store.columns(handles[-1], input_ids)["prev_logprobs"] is column
        del column
        for handle in handles[:-1]:
            with pytest.raises(ValueError, match="were released"):
                store.columns(handle, input_ids)
        with pytest.raises(ValueError, match="belongs to another batch"):
            store.columns(handles[-1], Jagged.from_rows([[7, 7]] * num_rows, np.int32))
