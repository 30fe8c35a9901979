"""Random preference pairs, and their loss and gradient by definition in float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.preferences.config import PreferenceLossConfig
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from tests.policy.tiny import random_batch, share_tokens

PAIR_LENGTHS = [9, 14, 6, 23, 5, 17, 11, 12]
"""Two rows per pair."""
LOSSES = {
    "dpo": PreferenceLossConfig(beta=0.3),
    "dpo, smoothed": PreferenceLossConfig(beta=0.3, label_smoothing=0.2, sft_loss_weight=0.5),
    "ipo": PreferenceLossConfig(kind="ipo", beta=0.4),
    "simpo": PreferenceLossConfig(kind="simpo", beta=2.0, simpo_gamma=0.7),
}


def pair_batch(lengths: list[int] | None = None) -> BatchedDataDict:
    """Pairs of random rows with random reference log-probs; the last tokens are compared.

    Of the pairs of `PAIR_LENGTHS` the first and the last have one prompt of three tokens, and one
    row of the second is the start of the other. Compared tokens are among those that rows share.
    """
    is_grouped = lengths is None
    lengths = lengths or PAIR_LENGTHS
    batch = random_batch(lengths)
    if is_grouped:
        share_tokens(batch, {0: (1, 6), 2: (3, 6), 4: (5, 2), 6: (0, 3), 7: (6, 10)})
        batch["group"] = np.array([0, 0, 1, 1, 2, 2, 0, 0], dtype=np.int64)
    mask = batch["token_mask"]
    for start, end in zip(mask.offsets[:-1], mask.offsets[1:], strict=True):
        mask.values[start:end] = 0
        mask.values[start + (end - start) // 2 : end] = 1
    batch["row_mask"] = np.ones(len(lengths), dtype=bool)
    batch["pair"] = np.repeat(np.arange(len(lengths) // 2, dtype=np.int64), 2)
    batch["is_chosen"] = np.tile([True, False], len(lengths) // 2)
    return batch


def loss_by_definition(
    logprobs: list[Tensor], references: list[Tensor], config: PreferenceLossConfig
) -> Tensor:
    """Mean loss of the pairs from the log-probs of the compared tokens of each row, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(0, len(logprobs), 2):
        values = []
        for policy, reference in zip(
            logprobs[index : index + 2], references[index : index + 2], strict=True
        ):
            value = policy.sum() if config.kind == "simpo" else policy.sum() - reference.sum()
            values.append(value if config.kind == "dpo" else value / len(policy))
        difference = values[0] - values[1]
        if config.kind == "ipo":
            loss = (difference - 1 / (2 * config.beta)) ** 2
        else:
            margin = config.beta * difference
            if config.kind == "simpo":
                margin = margin - config.simpo_gamma
            right = torch.log(1 + torch.exp(-margin))
            wrong = torch.log(1 + torch.exp(margin))
            loss = (1 - config.label_smoothing) * right + config.label_smoothing * wrong
        total = total + loss - config.sft_loss_weight * logprobs[index].mean()
    return total / (len(logprobs) // 2)


def gradients_by_definition(
    model: str, batch: BatchedDataDict, config: PreferenceLossConfig
) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss by plain transformers on unpadded rows, in float64."""
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    )
    logprobs, references = [], []
    for ids, mask, reference in zip(
        batch["input_ids"], batch["token_mask"], batch["reference_logprobs"], strict=True
    ):
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        all_logprobs = policy(input_ids).logits[0, :-1].log_softmax(-1)
        labels = input_ids[0, 1:, None]
        is_compared = torch.from_numpy(mask[1:].astype(bool))
        logprobs.append(all_logprobs.gather(1, labels).squeeze(1)[is_compared])
        references.append(torch.from_numpy(reference[1:].astype(np.float64))[is_compared])
    loss = loss_by_definition(logprobs, references, config)
    assert math.isfinite(float(loss.detach()))
    loss.backward()
    gradients = {}
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.float()
    return gradients, float(loss.detach())
