"""Teachers, settings and batches of distillation, and its loss and gradient by definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses.likelihood import Divergence
from nemo_like.policy.heads.targets import TargetSettings
from tests.policy.tiny import VOCABULARY, grouped_batch

SFT_WEIGHT = 0.25
SETTINGS = {
    "reverse_kl": TargetSettings(divergence=Divergence(temperature=1.3)),
    "forward_kl": TargetSettings(divergence=Divergence(kind="forward_kl")),
    "jsd": TargetSettings(divergence=Divergence(kind="jsd", weight=0.3, temperature=0.8)),
    "top-k": TargetSettings(divergence=Divergence(kind="mixed_kl"), top_k=5),
}


def save_teachers(folder: Path) -> list[str]:
    """Two models: one larger than the student with padding rows, one smaller."""
    directories = []
    for index, (hidden_size, vocab_size) in enumerate([(48, VOCABULARY + 4), (16, VOCABULARY)]):
        torch.manual_seed(10 + index)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=index == 1,
        )
        LlamaForCausalLM(config).save_pretrained(folder / str(index))
        directories.append(str(folder / str(index)))
    return directories


def taught_batch() -> BatchedDataDict:
    """Random rows, some of each teacher; those of one group have one teacher."""
    batch = grouped_batch()
    batch["teacher"] = np.array([0, 1, 1, 0, 1, 0, 0, 0], dtype=np.int64)
    return batch


def gradients_by_definition(
    student: str, teachers: list[str], batch: BatchedDataDict, settings: TargetSettings
) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss by plain transformers on unpadded rows, in float64."""
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64)
    taught = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64) for each in teachers]
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for ids, mask, teacher, is_trained in zip(
        batch["input_ids"], batch["token_mask"], batch["teacher"], batch["row_mask"], strict=True
    ):
        trained = torch.from_numpy(mask[1:].astype(bool))
        if not is_trained or not trained.any():
            continue
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model(input_ids).logits[0, :-1][trained]
        with torch.no_grad():
            teacher_logits = taught[teacher](input_ids).logits[0, :-1][trained]
        values = _divergence(logits, teacher_logits[:, :VOCABULARY], settings)
        labels = input_ids[0, 1:][trained]
        logprobs = logits.log_softmax(-1).gather(1, labels[:, None])
        total = total + values.sum() - SFT_WEIGHT * logprobs.sum()
        count += int(trained.sum())
    loss = total / count
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.float()
    return gradients, float(loss.detach())


def _divergence(logits: Tensor, teacher_logits: Tensor, settings: TargetSettings) -> Tensor:
    """Divergence [T] of the distributions of two logits [T, V]."""
    divergence = settings.divergence
    p = (logits / divergence.temperature).softmax(-1)
    q = (teacher_logits / divergence.temperature).softmax(-1)
    if settings.top_k is not None:
        ids = q.topk(settings.top_k, dim=-1).indices
        p, q = p.gather(1, ids), q.gather(1, ids)
        p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], dim=-1) for each in (p, q))

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first * (first.log() - second.log())).sum(-1)

    kinds: dict[str, Callable[[], Tensor]] = {
        "reverse_kl": lambda: kl(p, q),
        "forward_kl": lambda: kl(q, p),
        "mixed_kl": lambda: 0.5 * kl(q, p) + 0.5 * kl(p, q),
        "jsd": lambda: _jensen_shannon(p, q, divergence.weight, kl),
    }
    return kinds[divergence.kind]()


def _jensen_shannon(
    p: Tensor, q: Tensor, beta: float, kl: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    mixture = beta * q + (1 - beta) * p
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
