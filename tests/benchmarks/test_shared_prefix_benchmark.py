"""The benchmark of shared prefixes: equal losses, fewer tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared_prefix import main
from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer


@pytest.mark.filterwarnings("ignore")
def test_both_variants_train_the_same_and_share_prompts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rows = [{"question": "the quick", "answer": "brown fox"} for _ in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "--model": tmp_path / "model",
        "--data": tmp_path / "rows.jsonl",
        "--json": tmp_path / "result.json",
        "--layers": 1,
        "--rounds": 1,
        "--prompts": 2,
        "--generations": 2,
        "--long-prompt": 20,
        "--long-generations": 4,
        "--long-completion": 5,
    }
    num_threads = torch.get_num_threads()
    try:
        assert main([str(part) for pair in options.items() for part in pair]) == 0
    finally:
        torch.set_num_threads(num_threads)
    result = json.loads((tmp_path / "result.json").read_text())
    # Four rows of 25 tokens; 20 of them are computed once.
    assert result["long"]["false"]["train"]["tokens"] == 100
    assert result["long"]["true"]["train"]["tokens"] <= 40 + 8
    for case in ("gsm8k", "long"):
        without, shared = result[case]["false"], result[case]["true"]
        assert shared["logprobs"]["tokens"] < without["logprobs"]["tokens"]
        losses = [records["train"]["rounds"][0]["loss"] for records in (without, shared)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert without["train"]["rounds"][0]["peak_mb"] > 0
