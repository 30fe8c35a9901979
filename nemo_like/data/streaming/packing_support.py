"""Check that a transformers model keeps the rows of a packed batch apart.

Where it does not, the loss still falls, but tokens see other rows. So packing with a model that
cannot is an error before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.config.errors import ConfigError
from nemo_like.data.streaming.packed_batch import forward_arguments
from nemo_like.data.streaming.packed_collate import PackingCollator
from nemo_like.models.spec import ModelSpec

_LENGTHS = (5, 8)
_MAX_DIFFERENCE = 1e-6
"""Maximum difference of the logits of a row whose neighbor changed. Attention leaves them
bit-equal; experts of an MoE layer change the order of a reduction.
"""


def check_packing_support(model: nn.Module) -> None:
    """Raise ValueError unless `model`, a causal model of transformers, supports packed batches.

    Its configuration is checked, and a forward pass without gradients on two packed rows of 13
    tokens together: a change of the first row must not change the logits of the second. With FSDP
    every rank must call it. The mode of the model (training or evaluation) is restored.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if config is None or implementation is None:
        raise ValueError(
            f"{name} has no configuration of transformers, so how it separates packed rows is not"
            " known; set seq_packing_enabled=False"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder, which packed batches do not support; pad instead")
    try:
        spec = ModelSpec.from_config(config, name)
    except ConfigError as error:
        raise ValueError(f"{name} cannot be checked for packed batches: {error}") from error
    if spec.linear_attention_layers:
        raise ValueError(
            f"{name} has layers with linear attention, whose state passes from one packed row to"
            " the next; set seq_packing_enabled=False"
        )
    difference = _second_row_difference(model, implementation, spec.vocab_size)
    # Written as `not a <= b`, so that NaN fails.
    if not difference <= _MAX_DIFFERENCE:
        raise ValueError(
            f"{name} with attn_implementation {implementation!r} does not separate packed rows: a"
            f" token of one row changed the logits of the next by {difference:.2g}; use another"
            " attn_implementation, or set seq_packing_enabled=False"
        )


def _second_row_difference(model: nn.Module, implementation: str, vocab_size: int) -> float:
    """Return the largest change of the second row's logits over its largest logit."""
    device = next(model.parameters()).device
    rows = [torch.arange(length) * 7 % vocab_size for length in _LENGTHS]
    was_training = model.training
    model.eval()
    try:
        before = _second_row_logits(model, implementation, rows, device)
        rows[0] = (rows[0] + 1) % vocab_size
        after = _second_row_logits(model, implementation, rows, device)
    finally:
        model.train(was_training)
    return float((after - before).abs().max() / before.abs().max())


def _second_row_logits(
    model: nn.Module, implementation: str, rows: list[Tensor], device: torch.device
) -> Tensor:
    """Return the logits [L, V] of the second of two packed `rows`, int64 [L] each."""
    samples = [{"input_ids": row, "labels": row} for row in rows]
    batch = PackingCollator()(samples)
    for column, value in batch.items():
        if isinstance(value, Tensor):
            batch[column] = value.to(device)
    arguments = forward_arguments(batch, implementation)
    del arguments["labels"]
    with torch.no_grad():
        logits = model(**arguments).logits
    return logits[0, _LENGTHS[0] :].float()
