"""A DataLoader over microbatches that are formed already, as DeepSpeed has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch.utils.data import DataLoader

from nemo_like.data.row_order import check_rank
from nemo_like.integer_math import check_integer

MicrobatchIds = tuple[int, Sequence[int]]
"""The step of a microbatch, and its rows; -1 is a dummy row."""


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: Sequence[MicrobatchIds],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    dummy_sample: Any = None,
) -> DataLoader[Any]:
    """Return a DataLoader of the batches of one rank, over the steps of `microbatch_ids` once.

    The arguments are as in DeepSpeed, except the last one. Each step deals its microbatches to
    the ranks in turn, and all ranks have equally many batches in it. DeepSpeed repeats microbatches
    to that end, so that their rows count twice; here the ranks that have none get a dummy.

    Args:
        dataset: the rows; `dataset[row]` is called in the workers.
        microbatch_ids: `TokenBatches.microbatch_ids()`, or those of some consecutive steps.
        batch_max_seqlens: the length of each step, `TokenBatches.max_lengths()`.
        dataloader_rank: this rank.
        dataloader_batch_size: microbatches of the step that are joined to one batch.
        dataloader_num_replicas: the number of ranks.
        dataloader_collate_fn: takes the list of samples of a batch; None returns the list.
        dataloader_num_workers: worker processes, as of a DataLoader.
        dataloader_pin_memory: as of a DataLoader.
        required_microbatches_of_same_seqlen: pad every sample with `sample_padding_fn`.
        sample_padding_fn: takes a sample and the length of its step, returns the padded sample.
        dummy_sample: a sample without loss in the place of dummy rows, which only the last step
            of `batch_by_tokens` has.

    Raises:
        ValueError: for a rank or number out of range, without a `sample_padding_fn` that is
            required, and without a `dummy_sample` where one is needed on any rank.
    """
    check_rank(dataloader_rank, dataloader_num_replicas)
    check_integer("dataloader_batch_size", dataloader_batch_size, 1)
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ValueError(
            "required_microbatches_of_same_seqlen is True: give sample_padding_fn, a function of a"
            " sample and the length to pad it to"
        )
    batches: list[tuple[int, list[int]]] = []
    for step, group in groupby(microbatch_ids, key=lambda microbatch: microbatch[0]):
        rows = [list(ids) or [-1] for _, ids in group]
        rows += [[-1]] * (-len(rows) % dataloader_num_replicas)
        if dummy_sample is None and any(row < 0 for ids in rows for row in ids):
            raise ValueError(
                f"step {step} has dummy rows, as it has no row for each place of"
                f" {dataloader_num_replicas} ranks: give dummy_sample, a sample without loss"
            )
        own = rows[dataloader_rank::dataloader_num_replicas]
        for first in range(0, len(own), dataloader_batch_size):
            joined = own[first : first + dataloader_batch_size]
            batches.append((step, [row for ids in joined for row in ids]))
    pad = sample_padding_fn if required_microbatches_of_same_seqlen else None
    collate = partial(
        _collate, dataset, batch_max_seqlens, dataloader_collate_fn, pad, dummy_sample
    )
    return DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=dataloader_num_workers,
        collate_fn=collate,
        pin_memory=dataloader_pin_memory,
    )


def _collate(
    dataset: Any,
    lengths: Sequence[int],
    collate_fn: Callable[[list[Any]], Any] | None,
    pad: Callable[[Any, int], Any] | None,
    dummy_sample: Any,
    batch: Any,
) -> Any:
    """Read the samples of a batch, (step, rows), and pad and collate them."""
    step, rows = batch
    samples = [dummy_sample if row < 0 else dataset[row] for row in rows]
    if pad is not None:
        samples = [pad(sample, lengths[step]) for sample in samples]
    return samples if collate_fn is None else collate_fn(samples)
