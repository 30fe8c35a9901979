"""A tiny reward model in files, with another tokenizer and chat template than the demo's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer


def save_reward_model(directory: Path, *, max_positions: int = 256, num_labels: int = 1) -> Path:
    """Write a reward model with random weights; scores of different texts differ clearly."""
    tokenizer: Any = tiny_tokenizer(CHATML, pad_token="<|eos|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class ReferenceScores:
    """Scores of transformers, of one conversation at a time."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForSequenceClassification.from_pretrained(directory)

    def token_ids(self, *turns: tuple[str, str]) -> list[int]:
        """Token ids of a ChatML conversation of (role, text) up to the end of its last turn."""
        *before, (role, answer) = turns
        text = "".join(f"<|im_start|>{name}\n{turn}<|im_end|>\n" for name, turn in before)
        # As in training: an answer is tokenized by itself, as it is sampled.
        parts = [f"{text}<|im_start|>{role}\n", f"{answer}<|im_end|>"]
        ids: list[int] = []
        for part in parts:
            ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    def score(self, token_ids: list[int]) -> float:
        with torch.no_grad():
            return float(self._model(input_ids=torch.tensor([token_ids])).logits[0, 0])

    def answer(self, prompt: str, answer: str) -> float:
        """The score of one answer to a prompt."""
        return self.score(self.token_ids(("user", prompt), ("assistant", answer)))
