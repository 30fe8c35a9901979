"""The start-up probe passes on every supported architecture and stops models that mix rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import PlanSpec, plan_batch
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.dtensor.engine import DTensorEngine
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.inputs import attention
from nemo_like.policy.isolation import IsolationError, probe_isolation
from tests.policy.tiny import ARCHITECTURES, VOCABULARY, context


def engine(model: str) -> DTensorEngine:
    config = PolicyConfig(model_name=model)
    groups = Groups(layout=ParallelLayout(), rank=0, device=torch.device("cpu"))
    return DTensorEngine(config, groups, trainable=False)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_architectures_pass(architecture, layout, model_dir):
    report = probe_isolation(
        engine(model_dir(architecture)),
        layout=layout,
        vocab_size=VOCABULARY,
        precision="float32",
        with_shared_prefixes=layout == "packed",
    )
    assert report.layout == layout
    assert report.mean_difference < 1e-5


def ignores_boundaries(
    module, query, key, value, attention_mask, *, cu_seqlens=None, max_seqlen=0, **kwargs
):
    """Plain causal attention over the complete pack: what a model does that never looks at
    cu_seqlens.
    """
    return attention.attention_forward(module, query, key, value, attention_mask, **kwargs)


def sees_padding(
    module, query, key, value, attention_mask, *, cu_seqlens=None, scaling=None, **kwargs
):
    """Attention without a causal mask: padding behind a row reaches its tokens."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=True
    ).transpose(1, 2), None


def adds_the_batch(module, query, key, value, attention_mask, **kwargs):
    """A right result plus a trace of the other rows."""
    out, _ = attention.attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out + 1e-3 * out.mean(dim=0, keepdim=True), None


@pytest.mark.parametrize(
    ("broken", "layout", "message"),
    [
        (
            ignores_boundaries,
            "packed",
            "a token of row 0 changed the log-probs of row 1.*dynamic_batching",
        ),
        (sees_padding, "padded", "padding changed log-probs"),
        (
            adds_the_batch,
            "padded",
            "a token of row 0 changed the log-probs.*train_micro_batch_size=1",
        ),
    ],
)
def test_a_model_that_mixes_rows_is_stopped(broken, layout, message, model_dir):
    AttentionInterface.register(broken.__name__, broken)
    AttentionMaskInterface.register(broken.__name__, lambda *args, **kwargs: None)
    mixing = engine(model_dir("llama"))
    mixing.model_config._attn_implementation = broken.__name__
    with pytest.raises(IsolationError, match=message):
        probe_isolation(mixing, layout=layout, vocab_size=VOCABULARY, precision="float32")


def sees_other_prefixes(module, query, key, value, attention_mask, *, exchange=None, **kwargs):
    """Right for complete rows; where rows share prefixes a segment sees the one before its own."""
    if exchange is not None:
        exchange = exchange._replace(kv_index=(exchange.kv_index - 1).clamp(min=0))
    return attention.attention_forward(
        module, query, key, value, attention_mask, exchange=exchange, **kwargs
    )


def sees_no_prefix(module, query, key, value, attention_mask, *, exchange=None, **kwargs):
    """Right for complete rows; the tokens behind a shared prefix do not see it."""
    return attention.attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("broken", [sees_other_prefixes, sees_no_prefix])
def test_a_model_that_mixes_rows_with_shared_prefixes_is_stopped(broken, model_dir):
    AttentionInterface.register(broken.__name__, broken)
    AttentionMaskInterface.register(broken.__name__, lambda *args, **kwargs: None)
    mixing = engine(model_dir("llama"))
    mixing.model_config._attn_implementation = broken.__name__
    options: Any = {"layout": "packed", "vocab_size": VOCABULARY, "precision": "float32"}
    probe_isolation(mixing, **options)
    with pytest.raises(IsolationError, match=r"policy\.shared_prefix=false"):
        probe_isolation(mixing, **options, with_shared_prefixes=True)


def test_positions_that_do_not_restart_are_noticed(model_dir):
    shifted = engine(model_dir("llama"))
    rotary: Any = shifted.model.causal_lm.base_model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(
        x, torch.arange(x.shape[1])[None].expand(x.shape[:2]) ** 2
    )
    with pytest.raises(IsolationError, match="differ from the log-probs of each row alone"):
        probe_isolation(shifted, layout="packed", vocab_size=VOCABULARY, precision="float32")


def test_log_probs_that_overflow_are_no_leak(model_dir):
    overflowing = engine(model_dir("llama"))
    for weight in overflowing.local_weights():
        weight.data *= 1e18
    with pytest.raises(ConfigError, match="log-probs that are not finite"):
        probe_isolation(overflowing, layout="packed", vocab_size=VOCABULARY, precision="float32")


def with_changed_calls(tested: DTensorEngine, changed_calls: Container[int]) -> DTensorEngine:
    """Change some forward passes, counted from 1, as another reduction order does."""
    rotary: Any = tested.model.causal_lm.base_model.rotary_emb
    forward = rotary.forward
    num_calls = 0

    def forward_changed(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        nonlocal num_calls
        num_calls += 1
        cos, sin = forward(x, position_ids)
        scale = 1 + 1e-6 * num_calls if num_calls in changed_calls else 1.0
        return scale * cos, sin

    rotary.forward = forward_changed
    return tested


def test_a_difference_that_does_not_occur_again_is_rounding(model_dir):
    tested = with_changed_calls(engine(model_dir("llama")), {2})
    probe_isolation(tested, layout="packed", vocab_size=VOCABULARY, precision="float32")


def test_differences_of_every_attempt_stop_the_run(model_dir):
    tested = with_changed_calls(engine(model_dir("llama")), range(1000))
    with pytest.raises(IsolationError, match="a token of row 0 changed"):
        probe_isolation(tested, layout="packed", vocab_size=VOCABULARY, precision="float32")


def test_a_model_that_cannot_be_called_is_refused_at_the_start_and_an_error_later_is_not_changed(
    model_dir,
):
    worker = DTensorPolicyWorker(context(), config=PolicyConfig(model_name=model_dir("qwen3")))

    def fails(**inputs: Any) -> None:
        raise TypeError("forward() got an unexpected keyword argument 'cu_seqlens'")

    assert isinstance(worker.engine, DTensorEngine)
    worker.engine.model.causal_lm.base_model.forward = fails
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM of transformers is not a backbone"):
        worker.probe_isolation()
    ids, mask = (Jagged.from_rows([np.arange(1, 9)], dtype) for dtype in (np.int32, np.uint8))
    rows = BatchedDataDict(input_ids=ids, token_mask=mask, length=np.array([8]))
    shard = rows.shard(plan_batch(rows["length"], PlanSpec(layout="padded", max_rows=1)))[0]
    with pytest.raises(TypeError, match="unexpected keyword argument 'cu_seqlens'"):
        worker.compute_logprobs(shard)


def test_a_worker_probes_the_layout_it_will_train_in(model_dir):
    plain = PolicyConfig(model_name=model_dir("qwen3"))
    packing = dataclasses.replace(plain, sequence_packing=SequencePackingConfig(enabled=True))
    dynamic = dataclasses.replace(plain, dynamic_batching=DynamicBatchingConfig(enabled=True))
    layouts = [
        DTensorPolicyWorker(context(), config=config).probe_isolation().layout
        for config in (plain, packing, dynamic)
    ]
    assert layouts == ["padded", "packed", "padded"]
