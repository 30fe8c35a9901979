"""A DataLoader over microbatches by tokens: every row once, in its step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.torch_data.curriculum import sample_sort
from nemo_like.torch_data.learning_rate import VariableBatchSizeLR
from nemo_like.torch_data.token_batches import TokenBatches, batch_by_tokens
from nemo_like.torch_data.variable_batch import dataloader_for_variable_batch_size

Sample = tuple[int, int]


def pad_sample(sample: Sample, length: int) -> Sample:
    """A sample is (row, tokens); the dummy is row -1."""
    assert sample[1] <= length
    return sample[0], length


@st.composite
def batches_of(draw: st.DrawFn) -> TokenBatches:
    lengths = np.array(draw(st.lists(st.integers(1, 20), min_size=1, max_size=30)))
    return batch_by_tokens(
        lengths,
        20,
        counts=draw(st.sampled_from(["padded", "summed"])),
        order=draw(st.sampled_from(["given", "random", "length"])),
        microbatches_per_step=draw(st.integers(1, 5)),
        same_shape=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(batches_of(), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_every_row_is_once_in_its_step_and_ranks_have_equally_many_batches(
    batches: TokenBatches, num_ranks: int, batch_size: int, pads: bool
) -> None:
    dataset = [(row, int(length)) for row, length in enumerate(batches.lengths)]
    loaders = [
        dataloader_for_variable_batch_size(
            dataset,
            batches.microbatch_ids(),
            batches.max_lengths(),
            dataloader_rank=rank,
            dataloader_batch_size=batch_size,
            dataloader_num_replicas=num_ranks,
            dataloader_num_workers=0,
            required_microbatches_of_same_seqlen=pads,
            sample_padding_fn=pad_sample,
            dummy_sample=(-1, 1),
        )
        for rank in range(num_ranks)
    ]
    assert len({len(loader) for loader in loaders}) == 1
    found = [list(loader) for loader in loaders]
    rows = [sample[0] for rank in found for batch in rank for sample in batch]
    assert sorted(row for row in rows if row >= 0) == list(range(len(dataset)))
    step_of = {row: step for step, ids in batches.microbatch_ids() for row in ids}
    for position in range(len(loaders[0])):
        # Samples of all ranks at one position are of one step, and as long where that is required.
        samples = [sample for rank in found for sample in rank[position]]
        real = [row for row, _ in samples if row >= 0]
        assert len({step_of[row] for row in real}) <= 1
        if pads and real:
            length = batches.max_lengths()[step_of[real[0]]]
            assert {tokens for _, tokens in samples} == {length}


def test_one_microbatch_is_one_batch_without_joining() -> None:
    batches = batch_by_tokens(np.array([3] * 10 + [7] * 5), 30)
    assert batches.max_lengths() == [3, 7, 7]
    loader = dataloader_for_variable_batch_size(
        torch.arange(15),
        batches.microbatch_ids(),
        batches.max_lengths(),
        dataloader_collate_fn=torch.stack,
        dataloader_num_workers=1,
    )
    assert [batch.tolist() for batch in loader] == [list(range(10)), [10, 11, 12, 13], [14]]


def test_errors() -> None:
    batches = batch_by_tokens(np.full(5, 5), 10)
    arguments = ([0] * 5, batches.microbatch_ids(), batches.max_lengths())
    with pytest.raises(ValueError, match="step 0 has dummy rows, as it has no row for each place"):
        dataloader_for_variable_batch_size(*arguments, dataloader_num_replicas=2)
    with pytest.raises(ValueError, match="give sample_padding_fn"):
        dataloader_for_variable_batch_size(*arguments, required_microbatches_of_same_seqlen=True)
    with pytest.raises(ValueError, match="rank 1 of 1"):
        dataloader_for_variable_batch_size(*arguments, dataloader_rank=1)


def test_a_loop_with_the_calls_of_the_description() -> None:
    """30 tokens per batch, a reference batch size of 2 and rate of 1e-3: 10 and 4 rows."""
    batches = batch_by_tokens(np.array([3] * 10 + [7] * 4), 30)
    dataset = [(row, int(length)) for row, length in enumerate(batches.lengths)]
    dataloader = dataloader_for_variable_batch_size(
        dataset=dataset,
        microbatch_ids=batches.microbatch_ids(),
        batch_max_seqlens=batches.max_lengths(),
        dataloader_rank=0,
        dataloader_batch_size=1,
        dataloader_num_replicas=1,
        dataloader_collate_fn=None,
        dataloader_num_workers=2,
        dataloader_pin_memory=False,
        required_microbatches_of_same_seqlen=True,
        sample_padding_fn=pad_sample,
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    lr_scheduler = VariableBatchSizeLR(
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        2,
        batches.step_num_rows.tolist(),
        dataloader,
        lr_scaling_method="linear",
        last_epoch=-1,
        verbose=False,
    )
    applied = []
    for batch in dataloader:
        applied.append((len(batch), round(float(lr_scheduler.get_last_lr()[0]), 9)))
        optimizer.step()
        lr_scheduler.step()
    assert applied == [(10, 5e-3), (4, 2e-3)]
    tensor = torch.tensor([[length, row] for row, length in dataset])
    ordered = sample_sort(tensor.flip(0), None, 1, n_samples=100)
    assert ordered.tolist() == tensor.tolist()
    with pytest.raises(ValueError, match="last_epoch is 3: leave it out"):
        VariableBatchSizeLR(lr_scheduler.base_scheduler, 2, [1], last_epoch=3)
