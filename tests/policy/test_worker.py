"""Scores equal transformers row by row; reference, bfloat16, weight buckets, export and the errors
of a worker.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import (
    DynamicBatchingConfig,
    GenerationConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.oversize import OversizeWarning
from nemo_like.data.planning.plan import plan_batch
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.losses import NllLoss
from nemo_like.metrics import metric_values
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.checkpoint.hf_export import split_by_bytes
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from tests.policy.tiny import (
    ARCHITECTURES,
    compute_and_fetch,
    context,
    random_batch,
    run_ranks,
    save_with_value,
)
from tests.weight_sync.received import received_weights

LENGTHS = [9, 14, 6, 23, 2, 17, 1, 12]
PACKED = PolicyConfig(
    model_name="",
    train_global_batch_size=8,
    logprob_chunk_size=16,
    sequence_packing=SequencePackingConfig(
        enabled=True, train_mb_tokens=48, logprob_mb_tokens=48, sequence_length_round=4
    ),
    optimizer=OptimizerConfig(lr=1e-2),
    generation=GenerationConfig(temperature=0.7),
)
DYNAMIC = dataclasses.replace(
    PACKED,
    sequence_packing=SequencePackingConfig(),
    dynamic_batching=DynamicBatchingConfig(enabled=True, train_mb_tokens=64),
)


def shard_of(
    worker: DTensorPolicyWorker, batch: BatchedDataDict, worker_context: WorkerContext
) -> SlicedDataDict:
    spec = plan_spec(
        worker.config,
        purpose="train",
        parallel_layout=ParallelLayout(dp=worker_context.world_size),
        model=load_spec(worker.config.model_name),
    )
    return batch.shard(plan_batch(batch["length"], spec))[worker_context.rank]


def rows_of(shard: SlicedDataDict) -> list[np.ndarray]:
    return [np.asarray(row) for row in shard["input_ids"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", [PACKED, DYNAMIC], ids=["packed", "dynamic"])
def test_scores_are_those_of_transformers_on_each_row_alone(architecture, config, model_dir):
    config = dataclasses.replace(config, model_name=model_dir(architecture))
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(needs_reference=True))
    shard = shard_of(worker, random_batch(LENGTHS), context())
    outputs = compute_and_fetch(worker, shard)
    model = AutoModelForCausalLM.from_pretrained(config.model_name, attn_implementation="eager")
    for row, (ids, mask, trained) in enumerate(
        zip(shard["input_ids"], shard["token_mask"], shard["row_mask"], strict=True)
    ):
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            log_probs = (model(input_ids).logits[0] / 0.7).log_softmax(-1)
        expected = np.zeros(len(ids), dtype=np.float32)
        expected[1:] = log_probs[:-1].gather(1, input_ids[0, 1:, None]).squeeze(1).numpy()
        expected *= mask * trained
        np.testing.assert_allclose(outputs["prev_logprobs"][row], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(outputs["reference_logprobs"].values, outputs["prev_logprobs"].values)


def test_training_moves_the_policy_and_not_the_reference(model_dir):
    config = dataclasses.replace(PACKED, model_name=model_dir("llama_tied"))
    worker = DTensorPolicyWorker(context(), config=config, start=PolicyStart(needs_reference=True))
    shard = shard_of(worker, random_batch(LENGTHS), context())
    before = compute_and_fetch(worker, shard)
    losses = [worker.train(shard, None, NllLoss())[0]["policy/loss"].value for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    after = compute_and_fetch(worker, shard)
    assert np.array_equal(after["reference_logprobs"].values, before["reference_logprobs"].values)
    reference: Any = worker.engines[1]
    assert reference.clock.pop_seconds() == 0.0, "the intervals of every pass are kept"
    assert after["prev_logprobs"].values.sum() > before["prev_logprobs"].values.sum() + 1.0
    assert worker.evaluate(shard, NllLoss())["policy/loss"].value < losses[-1]


def test_a_row_that_is_cut_has_scores_of_its_own_length_and_trains_only_what_is_left(model_dir):
    config = dataclasses.replace(
        PACKED,
        model_name=model_dir("llama"),
        oversize_rows="truncate",
        sequence_packing=SequencePackingConfig(
            enabled=True, train_mb_tokens=10, logprob_mb_tokens=10
        ),
    )
    worker = DTensorPolicyWorker(context(), config=config)
    batch = random_batch([6, 25])
    batch["token_mask"] = Jagged(np.ones(31, dtype=np.uint8), batch["token_mask"].offsets)
    with pytest.warns(OversizeWarning, match="row 1 has 25 tokens"):
        shard = shard_of(worker, batch, context())
    outputs = compute_and_fetch(worker, shard)["prev_logprobs"]
    assert outputs.lengths.tolist() == shard["input_ids"].lengths.tolist()
    long = int(np.argmax(outputs.lengths))
    assert np.flatnonzero(outputs[long]).tolist() == list(range(1, 10))
    assert worker.train(shard, None, NllLoss())[0]["policy/num_tokens"].value == 5 + 9


def test_a_step_without_trained_tokens_has_zero_loss_and_gradient(model_dir):
    worker = DTensorPolicyWorker(
        context(), config=dataclasses.replace(PACKED, model_name=model_dir("llama"))
    )
    batch = random_batch([5, 8])
    batch["row_mask"] = np.zeros(2, dtype=bool)
    (metrics,) = worker.train(shard_of(worker, batch, context()), None, NllLoss())
    assert metric_values(metrics)["policy/grad_norm"] == 0.0
    assert metric_values(metrics)["policy/num_tokens"] == 0.0


def sharded_program(
    worker_context: WorkerContext, config: PolicyConfig, out: Path
) -> dict[str, object]:
    """What two ranks do in one process group: the checks are made by the test, on what this
    returns.
    """
    worker = DTensorPolicyWorker(
        worker_context, config=config, start=PolicyStart(needs_reference=True)
    )
    report = worker.probe_isolation()
    shard = shard_of(worker, random_batch(LENGTHS), worker_context)
    worker.save(out / "start")
    outputs = compute_and_fetch(worker, shard)
    start = outputs["prev_logprobs"].values
    is_reference_equal = np.array_equal(start, outputs["reference_logprobs"].values)
    reference: Any = worker.engines[1]
    losses = [worker.train(shard, None, NllLoss())[0]["policy/loss"].value for _ in range(6)]
    outputs = compute_and_fetch(worker, shard)
    worker.offload()
    worker.onload()
    worker.export_hf(out / "hf")
    num_buckets, weights = received_weights(worker, config.precision, 4000)
    worker.load(out / "start")
    restored = np.array_equal(compute_and_fetch(worker, shard)["prev_logprobs"].values, start)
    process_groups.destroy()
    return {
        "restored": restored,
        "is_reference_equal": is_reference_equal,
        "reference_dtypes": {str(weight.dtype) for weight in reference.local_weights()},
        "rows": rows_of(shard),
        "losses": losses,
        "outputs": [np.asarray(row) for row in outputs["prev_logprobs"]],
        "masks": [np.asarray(row) for row in shard["token_mask"]],
        "trained": np.asarray(shard["row_mask"]),
        "weights": {name: tensor.float().numpy() for name, tensor in weights.items()},
        "dtypes": {str(tensor.dtype) for tensor in weights.values()},
        "num_buckets": num_buckets,
        "mean_difference": report.mean_difference,
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_ranks_train_score_probe_send_and_export_the_same_model(
    precision, model_dir, rank_pool, meeting, tmp_path
):
    config = dataclasses.replace(PACKED, model_name=model_dir("qwen3_tied"), precision=precision)
    first, second = run_ranks(rank_pool, sharded_program, 2, meeting, config, tmp_path)
    assert first["restored"] and second["restored"]
    assert first["losses"] == second["losses"]
    # Of the policy FSDP stores float32 weights and computes with copies in `precision`.
    assert first["is_reference_equal"] and second["is_reference_equal"]
    assert first["reference_dtypes"] == {f"torch.{precision}"}
    assert first["losses"][-1] < 0.9 * first["losses"][0]
    assert second["weights"] == {} and first["num_buckets"] > 3
    assert first["dtypes"] == {f"torch.{precision}"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert str(model.dtype) == f"torch.{precision}"
    exported = {
        name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()
    }
    assert exported.keys() == first["weights"].keys() and "lm_head.weight" not in exported
    assert all(np.array_equal(exported[name], first["weights"][name]) for name in exported)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tolerance = 1e-4 if precision == "float32" else 0.2
    for result in (first, second):
        for ids, mask, trained, outputs in zip(
            result["rows"], result["masks"], result["trained"], result["outputs"], strict=True
        ):
            input_ids = torch.from_numpy(ids.astype(np.int64))[None]
            with torch.no_grad():
                log_probs = (model(input_ids).logits[0].float() / 0.7).log_softmax(-1)
            expected = np.zeros(len(ids), dtype=np.float32)
            expected[1:] = log_probs[:-1].gather(1, input_ids[0, 1:, None]).squeeze(1).numpy()
            np.testing.assert_allclose(outputs, expected * mask * trained, atol=tolerance)


def test_an_export_loads_with_its_tokenizer_chat_template_and_generates(model_dir, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    config = dataclasses.replace(
        PACKED, model_name=model_dir("llama_tied"), chat_template=str(template)
    )
    worker = DTensorPolicyWorker(context(), config=config)
    worker.export_hf(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "w5 w6"}], tokenize=False)
        == "w5 w6"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generate(**tokenizer("w5 w6", return_tensors="pt"), max_new_tokens=3).shape[1] <= 5


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (
            None,
            {"eos_token_id": [2, 1, 9]},
        ),  # of the model's configuration, of the tokenizer, of the template
        ({"eos_token_id": 1, "top_k": 5}, {"eos_token_id": [1, 9], "top_k": 5}),
        (
            {"eos_token_id": [9, 1], "do_sample": False, "top_p": 0.5},
            {"eos_token_id": [9, 1], "do_sample": False, "top_p": 0.5},
        ),
    ],
)
def test_an_export_declares_the_token_that_ends_a_turn(model_dir, tmp_path, declared, expected):
    source = tmp_path / "model"
    shutil.copytree(model_dir("llama_tied"), source)
    (source / "generation_config.json").unlink()
    if declared is not None:
        (source / "generation_config.json").write_text(json.dumps(declared))
    tokenizer = AutoTokenizer.from_pretrained(source, extra_special_tokens=["w9"])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}w9\n{% endfor %}"
    tokenizer.save_pretrained(source)
    worker = DTensorPolicyWorker(
        context(), config=dataclasses.replace(PACKED, model_name=str(source))
    )
    worker.export_hf(tmp_path / "hf")
    written = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert {name: written.get(name) for name in expected} == expected
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == expected["eos_token_id"]


def test_an_export_is_cut_into_files_of_bounded_size():
    shapes = {"a": (10,), "b": (20,), "c": (40,), "d": (1,)}
    assert split_by_bytes(shapes, 1, 30) == [["a", "b"], ["c"], ["d"]]


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(model_dir, monkeypatch):
    forward: Any = LlamaForCausalLM.forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    with pytest.raises(ConfigError, match="changes its logits"):
        DTensorPolicyWorker(
            context(), config=dataclasses.replace(PACKED, model_name=model_dir("llama"))
        )


def test_a_model_whose_files_lack_a_weight_is_one_sentence(model_dir, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir("llama"), path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"the files of policy\.model_name=.*model have no {name}, which"
    ):
        DTensorPolicyWorker(context(), config=dataclasses.replace(PACKED, model_name=str(path)))


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e30])
def test_a_weight_that_is_not_finite_is_named(value, model_dir, tmp_path):
    config = dataclasses.replace(PACKED, model_name=model_dir("llama"))
    name = save_with_value(config.model_name, tmp_path / "bad", value)
    damaged = dataclasses.replace(PACKED, model_name=str(tmp_path / "bad"))
    expected = rf"bad/model\.safetensors: {re.escape(name)} has values that are NaN"
    with pytest.raises(ConfigError, match=expected):
        DTensorPolicyWorker(context(), config=damaged)
    with pytest.raises(ConfigError, match=expected):
        DTensorPolicyWorker(context(), config=damaged, start=PolicyStart(head="scores"))
    with pytest.raises(ConfigError, match=expected):
        DTensorPolicyWorker(
            context(), config=config, start=PolicyStart(teachers=[damaged.model_name])
        )


def opening_message(worker_context: WorkerContext, config: PolicyConfig) -> str:
    """The error of one rank that opens a model; "" without one."""
    try:
        DTensorPolicyWorker(worker_context, config=config)
    except ConfigError as error:
        return str(error)
    finally:
        process_groups.destroy()
    return ""


def test_the_rank_that_reads_the_value_reports_it(model_dir, rank_pool, meeting, tmp_path):
    name = save_with_value(model_dir("llama"), tmp_path / "bad", math.nan)
    damaged = dataclasses.replace(PACKED, model_name=str(tmp_path / "bad"))
    first, second = run_ranks(rank_pool, opening_message, 2, meeting, damaged)
    assert first == "" and name in second
