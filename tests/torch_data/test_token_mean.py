"""The gradient of a step is the one of a single batch of all rows, however these are distributed
over microbatches and ranks.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like.torch_data.packed_batch import (
    count_supervised_tokens,
    sum_over_ranks,
    token_mean_scale,
)
from nemo_like.torch_data.packed_collate import PackingCollator
from tests.policy.thread_ranks import run_thread_ranks

VOCABULARY = 11
COLLATOR = PackingCollator(pad_multiple=4, shift_labels=True)


def make_model() -> nn.Module:
    """Next-token logits from the token alone: rows are independent without attention."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, 5)
    head = nn.Linear(5, VOCABULARY)
    return nn.Sequential(embedding, nn.Tanh(), head).double()


def make_row(length: int, prompt: int, seed: int) -> dict[str, Tensor]:
    """A row of random tokens whose first `prompt` tokens are not trained."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (length,), generator=generator)
    is_prompt = torch.arange(length) < prompt
    return {"input_ids": tokens, "labels": tokens.masked_fill(is_prompt, -100)}


def loss_sum(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[0], batch["labels"][0], reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    """Gradients of all parameters, zero where there was no backward pass."""
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(torch.zeros_like(parameter) if gradient is None else gradient.clone())
    return found


def single_batch_gradients(rows: list[dict[str, Tensor]]) -> list[Tensor]:
    """Gradients of the token mean over `rows` in one batch, by PyTorch's own mean."""
    model = make_model()
    batch = COLLATOR(rows)
    F.cross_entropy(model(batch["input_ids"])[0], batch["labels"][0]).backward()
    return gradients(model)


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def microbatch_loss(
    model: nn.Module, batch: dict[str, Any], total: int, world_size: int, use_means: bool
) -> Tensor:
    """Scaled loss of a microbatch, from the sum of its token losses or from their mean."""
    local = count_supervised_tokens([batch["labels"]])
    token_sum = loss_sum(model, batch)
    if use_means and local > 0:
        return token_sum / local * local * token_mean_scale(total, world_size)
    return token_sum * token_mean_scale(total, world_size)


@settings(max_examples=40)
@given(
    world_size=st.integers(1, 4),
    num_microbatches=st.integers(1, 3),
    # Length, number of prompt tokens, and slot of each row.
    sizes=st.lists(
        st.tuples(st.integers(2, 9), st.integers(0, 10), st.integers(0, 11)), max_size=10
    ),
    is_averaged=st.booleans(),
    use_means=st.booleans(),
)
def test_gradients_of_all_microbatches_and_ranks_are_those_of_one_batch(
    world_size: int,
    num_microbatches: int,
    sizes: list[tuple[int, int, int]],
    is_averaged: bool,
    use_means: bool,
) -> None:
    # The first row is trained, so that the step has a token mean. Some ranks may have no rows.
    rows = [make_row(6, 2, seed=99)]
    slots = {0: [rows[0]]}
    for seed, (length, prompt, slot) in enumerate(sizes):
        rows.append(make_row(length, prompt, seed))
        slots.setdefault(slot % (world_size * num_microbatches), []).append(rows[-1])
    batches = {slot: COLLATOR(group) for slot, group in slots.items()}
    total = count_supervised_tokens(batch["labels"] for batch in batches.values())
    ranks = [make_model() for _ in range(world_size)]
    divisor = world_size if is_averaged else 1
    for slot, batch in batches.items():
        model = ranks[slot % world_size]
        microbatch_loss(model, batch, total, divisor, use_means).backward()
    reduced = []
    for of_ranks in zip(*map(gradients, ranks), strict=True):
        reduced.append(torch.stack(of_ranks).sum(0) / divisor)
    assert_close(reduced, single_batch_gradients(rows))


def test_a_dummy_has_zero_loss_and_zero_gradients() -> None:
    model = make_model()
    loss = loss_sum(model, COLLATOR.dummy()) * token_mean_scale(10)
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all((gradient == 0).all() for gradient in gradients(model))


def ddp_gradients(rank: int, rendezvous: str) -> list[list[float]]:
    """Gradients of one step on one of two ranks: two microbatches on rank 0, one on rank 1."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    rows = ddp_rows()
    groups = [[rows[:1], rows[1:3]], [rows[3:]]][rank]
    batches = [COLLATOR(group) for group in groups]
    model = DistributedDataParallel(make_model())
    total = sum_over_ranks(count_supervised_tokens(batch["labels"] for batch in batches))
    scale = token_mean_scale(total, world_size=2)
    with model.no_sync():
        for batch in batches[:-1]:
            (loss_sum(model, batch) * scale).backward()
    (loss_sum(model, batches[-1]) * scale).backward()
    found = [gradient.flatten().tolist() for gradient in gradients(model)]
    # The reducer must not have the last reference to the process group: its destructor holds the
    # GIL, for which the thread of gloo that it joins may wait.
    del model
    dist.destroy_process_group()
    return found


def ddp_rows() -> list[dict[str, Tensor]]:
    sizes = [(9, 0), (3, 1), (5, 5), (2, 0), (7, 4)]
    return [make_row(length, prompt, seed) for seed, (length, prompt) in enumerate(sizes)]


def test_gradients_averaged_by_ddp_are_those_of_one_batch(tmp_path: Path) -> None:
    method = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=method) as pool:
        futures = [pool.submit(ddp_gradients, rank, str(tmp_path / "file")) for rank in range(2)]
        found = [future.result(timeout=600) for future in futures]
    expected = [tensor.flatten() for tensor in single_batch_gradients(ddp_rows())]
    for rank_gradients in found:
        actual = [torch.tensor(values, dtype=torch.float64) for values in rank_gradients]
        assert_close(actual, expected)


@pytest.mark.parametrize(
    ("local", "total", "world_size", "scale"),
    [(20, 100, 4, 0.8), (2, 8, 2, 0.5), (6, 8, 2, 1.5), (4, 8, 2, 1.0), (0, 8, 2, 0.0)],
)
def test_examples_of_odb(local: int, total: int, world_size: int, scale: float) -> None:
    assert local * token_mean_scale(total, world_size) == pytest.approx(scale)


def test_counts_are_summed_over_ranks() -> None:
    counts = run_thread_ranks(3, lambda group: sum_over_ranks(group.rank() * 10, group))
    assert counts == [30, 30, 30]
    with pytest.raises(ValueError, match="init_process_group"):
        sum_over_ranks(1)


def test_numbers_without_a_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="0 supervised tokens"):
        token_mean_scale(0)
    with pytest.raises(ValueError, match="world_size is 0"):
        token_mean_scale(1, 0)
