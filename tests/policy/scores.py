"""Scores, loss and gradients of a reward model by plain transformers, in float64 if possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.models.output_head import initial_scores
from nemo_like.models.spec import load_spec
from tests.policy.preferences import pair_batch

CENTER = 0.05
SEED = 0
MARGINS = [0.0, 0.5, 1.25, 0.2]
"""One per pair of `preferences.PAIR_LENGTHS`."""


def reward_batch() -> BatchedDataDict:
    """Pairs of random rows with margins."""
    batch = pair_batch()
    batch["margin"] = np.repeat(np.array(MARGINS, dtype=np.float32), 2)
    return batch


def open_reward_model(directory: str, seed: int | None = None) -> Any:
    """The reward model of a directory in float64; with a seed a causal model with a new head."""
    # transformers computes experts in no higher precision than float32.
    is_moe = load_spec(directory).moe is not None
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, dtype=torch.float32 if is_moe else torch.float64
    )
    if seed is not None:
        config = model.config
        weight = initial_scores(config.hidden_size, config.initializer_range, seed)
        with torch.no_grad():
            model.score.weight.copy_(weight)
    return model


def scores_by_definition(model: Any, batch: BatchedDataDict) -> Tensor:
    """Score of each row by itself and unpadded, float64 [B]."""
    scores = []
    for ids in batch["input_ids"]:
        scores.append(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 0])
    return torch.stack(scores)


def loss_of_scores(scores: Tensor) -> Tensor:
    """The loss of `reward_batch` from the scores of its rows, float64 [B]."""
    chosen = scores[0::2]
    rejected = scores[1::2]
    margins = torch.tensor(MARGINS, dtype=torch.float64)
    losses = torch.log1p(torch.exp(-(chosen - rejected - margins)))
    return (losses + CENTER * (chosen + rejected) ** 2).mean()


def reward_gradients(
    directory: str, batch: BatchedDataDict
) -> tuple[dict[str, Tensor], float, np.ndarray]:
    """Gradients, loss and scores [B] of the model with an initial head."""
    model = open_reward_model(directory, SEED)
    scores = scores_by_definition(model, batch)
    loss = loss_of_scores(scores)
    loss.backward()
    gradients = {name: weight.grad.float() for name, weight in model.named_parameters()}
    return gradients, float(loss.detach()), scores.detach().numpy()
