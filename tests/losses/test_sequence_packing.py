"""A loss of unpacked rows gives the same loss and gradient on packed logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.losses.sequence_packing import SequencePackingLossWrapper

VOCABULARY = 11


def nll(
    next_token_logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Token mean of one or more padded rows; `sample_mask` [B], `token_mask` [B, S]."""
    logprobs = next_token_logits[:, :-1].log_softmax(-1)
    own = logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(own * mask).sum() / global_valid_toks
    counted = own[mask.bool()]
    lowest = counted.min().item() if len(counted) else 0.0
    return loss, {"loss": loss.item(), "rows": len(own) / global_valid_seqs.item(), "p_min": lowest}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 7), min_size=1, max_size=5),
    multiple=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
def test_packed_logits_give_the_loss_and_gradient_of_padded_rows(
    lengths: list[int], multiple: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    is_token = torch.arange(width) < torch.tensor(lengths)[:, None]
    data = {
        "input_ids": torch.randint(VOCABULARY, (len(lengths), width), generator=generator),
        "token_mask": is_token & (torch.rand(len(lengths), width, generator=generator) < 0.7),
        "sample_mask": torch.ones(len(lengths)),
        "names": [f"row {row}" for row in range(len(lengths))],
        "temperature": 1.0,
    }
    counts = torch.tensor(float(len(lengths))), torch.tensor(17.0)
    padded = torch.randn(len(lengths), width, VOCABULARY, generator=generator, requires_grad=True)
    expected, expected_metrics = nll(padded, data, *counts)
    expected.backward()

    sizes = [-(-length // multiple) * multiple for length in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    places = torch.tensor([0, *sizes]).cumsum(0)
    packed = torch.zeros(1, int(places[-1]), VOCABULARY)
    for row, length in enumerate(lengths):
        packed[0, places[row] : places[row] + length] = padded.detach()[row, :length]
    packed.requires_grad_()
    wrapper = SequencePackingLossWrapper(nll, bounds, places)
    loss, metrics = wrapper(packed, data, *counts)
    loss.backward()

    torch.testing.assert_close(loss, expected)
    assert metrics["rows"] == pytest.approx(1.0)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=1e-5)
    if data["token_mask"][:, 1:].any(1).all():
        assert metrics["p_min"] == pytest.approx(expected_metrics["p_min"])
    assert packed.grad is not None and padded.grad is not None
    for row, length in enumerate(lengths):
        own = packed.grad[0, places[row] : places[row + 1]]
        torch.testing.assert_close(own[:length], padded.grad[row, :length])
        assert not own[length:].any()


def test_rows_of_another_number_are_refused() -> None:
    bounds = torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match="2 rows and cu_seqlens_q_padded 1"):
        SequencePackingLossWrapper(nll, bounds, torch.tensor([0, 4]))
    data = {"input_ids": torch.zeros(3, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match="data has 3 rows"):
        SequencePackingLossWrapper(nll, bounds)(torch.zeros(1, 4, 3), data, None, None)
