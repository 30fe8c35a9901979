"""DPO runs: learning, exact resume, validation, and errors about pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.preferences.config import PreferenceLossConfig
from nemo_like.algorithms.preferences.data import collate_pairs, open_source
from nemo_like.algorithms.preferences.loop import run_dpo
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.exhaustive import usually
from tests.policy.preferences import loss_by_definition
from tests.recipe import Recipe


def write_pairs(folder: Path, rows: list[dict]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", usually(["dpo", "ipo", "simpo"], "dpo"))
def test_a_resumed_run_equals_a_straight_one_and_the_margin_grows(recipe: Recipe, kind: str):
    options = (f"loss_fn.kind={kind}", "policy.optimizer.lr=1e-3", "loss_fn.sft_loss_weight=0.1")
    straight = run_dpo(recipe.dpo(*options, "checkpointing.keep_latest=5"))
    expected = read_metrics(straight.directory.path)
    weights = (straight.directory.hf / "model.safetensors").read_bytes()
    assert [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    assert all(line["policy/num_rows"] == 16 for line in expected[1:])
    margins = [line["validation/rewards_margins"] for line in (expected[0], expected[-1])]
    assert margins[1] > margins[0]
    accuracies = [line["validation/rewards_accuracies"] for line in (expected[0], expected[-1])]
    assert accuracies[1] >= accuracies[0] and accuracies[1] > 0.9
    interrupt_at(straight.directory.path, 2)
    options += ("checkpointing.keep_latest=5", "resume=true")
    resumed = run_dpo(recipe.dpo(*options))
    assert read_metrics(resumed.directory.path) == expected
    assert (resumed.directory.hf / "model.safetensors").read_bytes() == weights


def test_batching_does_not_change_the_losses(recipe: Recipe):
    """Packed, padded together, and one pair at a time; one row order."""
    losses = []
    for name, keys in {
        "packed": ("policy.sequence_packing.enabled=true",),
        "dynamic": (
            "policy.sequence_packing.enabled=false",
            "policy.dynamic_batching.enabled=true",
        ),
        "pairs": ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=1"),
    }.items():
        result = run_dpo(recipe.dpo(f"run_name={name}", "dpo.max_num_steps=2", *keys))
        lines = read_metrics(result.directory.path)
        losses.append([line["policy/loss"] for line in lines[1:]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_conversations_compare_the_turns_after_the_common_ones(recipe: Recipe, tmp_path: Path):
    prompt = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "2+2"},
    ]
    rows = [
        {
            "chosen": [*prompt, {"role": "assistant", "content": "#### 4"}],
            "rejected": [*prompt, {"role": "assistant", "content": "#### 55"}],
        }
    ]
    path = write_pairs(tmp_path, rows)
    config = recipe.dpo(f"data.train_path={path}", "policy.train_global_batch_size=1")
    source = open_source(config)
    ((pair,),) = (next(source.loader()),)
    decode = source.data.encoder.tokenizer.decode
    compared = [str(decode(row.input_ids[row.token_mask == 1].tolist())) for row in pair.rows]
    assert [text.replace("<eos>", "") for text in compared] == ["#### 4", "#### 55"]
    assert all(set(np.unique(row.token_mask)) == {0, 1} for row in pair.rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1", "chosen": "2"}, "columns .* match no known format"),
        ({"prompt": "1+1", "chosen": "2", "rejected": "2"}, "are equal"),
        ({"chosen": "2", "rejected": "3"}, "there is no column 'prompt'"),
        ({"prompt": "1+1", "chosen": 2, "rejected": "3"}, r"'chosen' is 2 \(int\), not a text"),
        (
            {
                "chosen": [{"role": "user", "content": "1"}],
                "rejected": [{"role": "user", "content": "2"}],
            },
            "do not begin with the same turn",
        ),
        (
            {"prompt": "1+1", "chosen": [{"role": "user", "content": "1"}], "rejected": "2"},
            "does not end with an assistant turn",
        ),
    ],
)
def test_a_bad_pair_is_named(recipe: Recipe, tmp_path: Path, row: dict, message: str):
    path = write_pairs(tmp_path, [row])
    with pytest.raises(ConfigError, match=rf"pairs\.jsonl:1: .*{message}"):
        open_source(recipe.dpo(f"data.train_path={path}"))


def test_long_pairs(recipe: Recipe, tmp_path: Path):
    rows = [
        {"prompt": f"{index}+1", "chosen": f"#### {index + 1}", "rejected": "#### 0"}
        for index in range(1, 9)
    ]
    rows[3]["rejected"] = "1" * 300
    path = write_pairs(tmp_path, rows)
    keys = (f"data.train_path={path}", "data.validation_path=null", "dpo.val_period=0")
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:4: the row has 3\d\d tokens"):
        run_dpo(recipe.dpo(*keys))
    report = validate(recipe.dpo(*keys))
    assert any("max_total_sequence_length" in problem for problem in report.problems)
    dropped = recipe.dpo(*keys, "policy.oversize_rows=drop", "dpo.max_num_steps=1")
    source = open_source(dropped)
    loader = source.loader()
    source.encode_ahead(loader.order.upcoming(loader.batch_size))
    assert source.rows.num_kept == 7
    rows[3]["prompt"] = "1" * 300
    write_pairs(tmp_path, rows)
    truncated = recipe.dpo(*keys, "policy.oversize_rows=truncate")
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:4: the chosen completion has no token"):
        run_dpo(truncated)
    rows[3] |= {"prompt": "4+1", "chosen": "1" * 300 + "2", "rejected": "1" * 300 + "3"}
    write_pairs(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:4: the chosen and the rejected row have"):
        run_dpo(truncated)


def test_relations_of_the_keys_are_checked(recipe: Recipe):
    with pytest.raises(ConfigError, match=r"loss_fn\.label_smoothing is 0\.1.*ipo"):
        recipe.dpo("loss_fn.kind=ipo", "loss_fn.label_smoothing=0.1")
    with pytest.raises(ConfigError, match=r"data\.train_on is all"):
        recipe.dpo("data.train_on=all")
    adapter = ("policy.lora.enabled=true", "policy.lora.reference=adapter")
    with pytest.raises(ConfigError, match="is adapter, but there is no initial adapter"):
        recipe.dpo(*adapter)
    with pytest.raises(ConfigError, match="is adapter, but this run has no reference policy"):
        recipe.dpo(*adapter, "policy.lora.adapter_path=a", "loss_fn.kind=simpo")
    length = "policy.max_total_sequence_length=96"
    budget = "policy.sequence_packing.train_mb_tokens=100"
    with pytest.raises(ConfigError, match="a pair may have 2 rows of 96 tokens"):
        recipe.dpo("policy.sequence_packing.enabled=true", length, budget)


def test_the_reference_of_a_run_from_an_adapter(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`base` and `adapter` are the two models of PEFT; a resume keeps the initial adapter."""
    rows = (recipe.demo / "dpo_train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(rows[:8]))
    directory = save_adapter(recipe.demo / "model", tmp_path / "adapter")
    options = (
        f"data.train_path={tmp_path}/pairs.jsonl",
        "data.validation_path=null",
        "dpo.max_num_epochs=9",
        "dpo.val_period=0",
        "dpo.val_at_start=false",
        "policy.lora.enabled=true",
        "policy.lora.rank=4",
        f"policy.lora.adapter_path={directory}",
        "policy.lora.alpha=8",
        "policy.optimizer.lr=1e-2",
        "policy.scheduler.warmup_steps=0",
        "checkpointing.save_period=1",
        "checkpointing.keep_latest=5",
    )
    base = recipe.dpo(*options, "dpo.max_num_steps=1", "run_name=base")
    batch = collate_pairs(list(open_source(base).loader().first_rows(8)))
    expected = loss_of_adapter(recipe.demo / "model", directory, batch)
    assert abs(expected - math.log(2)) > 0.1
    assert run_dpo(base).last["policy/loss"] == pytest.approx(expected, rel=1e-5)
    assert "reference: the model without it" in capsys.readouterr().out
    options += ("policy.lora.reference=adapter", "dpo.max_num_steps=3")
    straight = run_dpo(recipe.dpo(*options)).directory
    assert "reference: the model with this adapter" in capsys.readouterr().out
    lines = read_metrics(straight.path)
    assert lines[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert lines[1]["policy/loss"] < 0.6
    interrupt_at(straight.path, 1)
    run_dpo(recipe.dpo(*options, "resume=true"))
    assert read_metrics(straight.path) == lines
    interrupt_at(straight.path, 1)
    with pytest.raises(ConfigError, match=r"policy\.lora\.reference was adapter and is base"):
        run_dpo(recipe.dpo(*options, "resume=true", "policy.lora.reference=base"))
    save_adapter(recipe.demo / "model", directory, seed=1)
    with pytest.raises(ConfigError, match=r"policy\.lora\.adapter_path .* the reference policy"):
        run_dpo(recipe.dpo(*options, "resume=true"))


def save_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """An adapter of PEFT with random matrices."""
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(str(directory))
    return directory


@torch.no_grad()
def loss_of_adapter(model: Path, directory: Path, batch: BatchedDataDict) -> float:
    """The loss of DPO of the adapter, with the model without it as the reference, in float64."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    adapted: Any = peft.PeftModel.from_pretrained(base, str(directory)).double()
    policy, reference = [], []
    for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True):
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        is_compared = torch.from_numpy(mask[1:].astype(bool))
        with adapted.disable_adapter():
            logits = [adapted(input_ids).logits]
        logits.append(adapted(input_ids).logits)
        for found, each in zip((reference, policy), logits, strict=True):
            logprobs = each[0, :-1].log_softmax(-1).gather(1, input_ids[0, 1:, None]).squeeze(1)
            found.append(logprobs[is_compared])
    return float(loss_by_definition(policy, reference, PreferenceLossConfig()))
