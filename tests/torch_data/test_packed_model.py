"""Packing and padding do not change what a transformers model computes: losses and gradients are
those of one row at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nemo_like.policy.inputs import attention
from nemo_like.torch_data.packed_batch import (
    forward_arguments,
    shift_packed_labels,
    slice_for_sequence_parallel,
)
from nemo_like.torch_data.packed_collate import PackingCollator

LENGTHS = (5, 1, 9, 3)
FLASH_NAMES = "packed_test_names"
"""transformers loads a kernel for a name with `flash` in it."""


def flash_names_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the arguments of FlashAttention in transformers, [B, H, S, D]."""
    assert torch.equal(cu_seq_lens_q, cu_seq_lens_k) and max_length_q == max_length_k
    return attention.attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        cu_seqlens=cu_seq_lens_q,
        max_seqlen=max_length_q,
        **kwargs,
    )


attention.register()
AttentionInterface.register(FLASH_NAMES, flash_names_attention)  # type: ignore[arg-type]
AttentionMaskInterface.register(FLASH_NAMES, lambda *args, **kwargs: None)


def make_model(implementation: str) -> LlamaForCausalLM:
    """A random model in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            # The norm of transformers rounds to float32.
            model.set_submodule(name, nn.RMSNorm(16, eps=1e-6))
    return model.double()


def make_rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in LENGTHS:
        tokens = torch.randint(31, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def arguments_of(batch: dict[str, Any], implementation: str) -> dict[str, Any]:
    """Arguments of the model for a packed batch."""
    if implementation == FLASH_NAMES:
        return forward_arguments(batch, "flash_attention_2")
    return forward_arguments(batch, implementation)


def row_by_row(implementation: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the predicted tokens of each row, and gradients of their mean."""
    model = make_model(implementation)
    losses = []
    for row in make_rows():
        logits = model(input_ids=row["input_ids"].unsqueeze(0)).logits[0]
        losses.append(F.cross_entropy(logits[:-1], row["labels"][1:], reduction="none"))
    count = sum(int((row["labels"][1:] != -100).sum()) for row in make_rows())
    (torch.cat(losses).sum() / count).backward()
    return losses, gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


@pytest.mark.parametrize("pad_to_length", [None, 32])
@pytest.mark.parametrize(
    ("implementation", "tolerance"),
    [
        (attention.IMPLEMENTATION, 1e-10),
        (FLASH_NAMES, 1e-10),
        ("sdpa", 1e-10),
        # Its softmax is in float32.
        ("eager", 1e-6),
    ],
)
def test_losses_and_gradients_are_those_of_one_row_at_a_time(
    implementation: str, tolerance: float, pad_to_length: int | None
) -> None:
    reference = attention.IMPLEMENTATION if implementation == FLASH_NAMES else implementation
    expected_losses, expected_gradients = row_by_row(reference)
    batch = PackingCollator(pad_to_length, shift_labels=True)(make_rows())
    model = make_model(implementation)
    logits = model(**arguments_of(batch, implementation)).logits
    losses = F.cross_entropy(logits[0], batch["labels"][0], reduction="none")
    begin = 0
    for length, expected in zip(LENGTHS, expected_losses, strict=True):
        actual = losses[begin : begin + length - 1]
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        begin += length
    # The token mean, as PyTorch computes it from the packed and padded batch.
    F.cross_entropy(logits[0], batch["labels"][0]).backward()
    torch.testing.assert_close(gradients(model), expected_gradients, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shift_labels", [False, True])
def test_the_loss_of_transformers_shifts_labels_once(shift_labels: bool) -> None:
    losses, _ = row_by_row(attention.IMPLEMENTATION)
    count = sum(int((row["labels"][1:] != -100).sum()) for row in make_rows())
    batch = PackingCollator(32, shift_labels=shift_labels)(make_rows())
    # FlashAttention is the one implementation that the batch itself holds all arguments of.
    loss = make_model(FLASH_NAMES)(**batch).loss
    torch.testing.assert_close(loss.double(), torch.cat(losses).sum() / count, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_losses_of_sequence_parallel_ranks_add_up_to_that_of_the_batch(size: int) -> None:
    batch = PackingCollator(20)(make_rows())
    full = shift_packed_labels(batch)
    model = make_model(FLASH_NAMES)
    shares = [slice_for_sequence_parallel(batch, rank, size) for rank in range(size)]
    joined = {**shares[0], "input_ids": torch.cat([share["input_ids"] for share in shares], dim=1)}
    joined["position_ids"] = torch.cat([share["position_ids"] for share in shares], dim=1)
    del joined["labels"], joined["shift_labels"]
    with torch.no_grad():
        logits = model(**full).logits[0]
        expected = F.cross_entropy(logits, full["labels"][0], reduction="sum")
        # Every rank computes the logits of its own positions.
        parts = model(**joined).logits[0].chunk(size)
    actual = torch.zeros((), dtype=torch.float64)
    for part, share in zip(parts, shares, strict=True):
        actual += F.cross_entropy(part, share["labels"][0], reduction="sum")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_attention_that_would_mix_rows_is_refused() -> None:
    batch = PackingCollator()(make_rows())
    with pytest.raises(ValueError, match=r"'flex_attention'; use flash_attention_2"):
        forward_arguments(batch, "flex_attention")
    share = slice_for_sequence_parallel(batch, 0, 2)
    with pytest.raises(ValueError, match="sdpa attention needs the full sequence"):
        forward_arguments(share, "sdpa")
    assert forward_arguments(share, "flash_attention_2")["max_length_q"] == max(LENGTHS)
