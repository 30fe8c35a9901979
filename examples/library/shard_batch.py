"""BatchedDataDict as a library: shard a batch by tokens, iterate microbatches, restore the order.

    python examples/library/shard_batch.py [--rows 64] [--ranks 2] [--tokens 1024] [--seed 0]

The ranks are simulated in this process. Each one computes the sum of the token ids of its rows; the
results of all ranks are put back into the order of the input and compared with it.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from nemo_like.distributed.batched_data_dict import (
    BatchedDataDict,
    SequencePackingArgs,
    SlicedDataDict,
)


def random_batch(num_rows: int, max_length: int, seed: int) -> BatchedDataDict:
    """Return right-padded random rows: `input_ids` int64 [B, S] and `length` int64 [B]."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (num_rows,), generator=generator)
    input_ids = torch.randint(1, 1000, (num_rows, max_length), generator=generator)
    is_padding = torch.arange(max_length)[None] >= lengths[:, None]
    return BatchedDataDict(input_ids=input_ids.masked_fill(is_padding, 0), length=lengths)


def pack(rows: SlicedDataDict) -> Tensor:
    """Return the real tokens of some rows end to end, int64 [T]."""
    is_token = torch.arange(rows["input_ids"].shape[1]) < rows["length"][:, None]
    # A boolean index reads row after row, so the tokens of a row stay together.
    return rows["input_ids"][is_token]


def sum_per_row(shard: SlicedDataDict) -> Tensor:
    """Return the sum of the token ids of each row of one rank's shard, int64 [rows of the rank].

    A model would run once per microbatch, on the packed tokens.
    """
    sums: list[Tensor] = []
    for microbatch in shard.make_microbatch_iterator_for_packable_sequences():
        # A dummy: this rank has fewer microbatches with rows than another. A model would run it as
        # well, because every rank takes part in the collectives.
        if microbatch.size == 0:
            continue
        tokens = pack(microbatch)
        lengths = microbatch["length"].tolist()
        for row in tokens.split(lengths):
            sums.append(row.sum())
    return torch.stack(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description="Shard a batch by tokens and restore its order.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="limit of one microbatch")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    batch = random_batch(arguments.rows, max_length=400, seed=arguments.seed)
    packing = SequencePackingArgs(
        max_tokens_per_microbatch=arguments.tokens,
        input_key="input_ids",
        input_lengths_key="length",
        algorithm="balanced",
        sequence_length_pad_multiple=1,
    )
    shards, sorted_indices = batch.shard_by_batch_size(
        arguments.ranks, sequence_packing_args=packing
    )
    for rank, shard in enumerate(shards):
        count, max_tokens = shard.get_microbatch_iterator_for_packable_sequences_len()
        print(
            f"rank {rank}: {shard.size} rows in {count} microbatches of up to {max_tokens} tokens"
        )

    # Results of the ranks, end to end, are in the order of `sorted_indices`.
    results = BatchedDataDict.from_batches([{"sum": sum_per_row(shard)} for shard in shards])
    results.reorder_data(sorted_indices)
    assert torch.equal(results["sum"], batch["input_ids"].sum(dim=1))
    print(f"the sums of {results.size} rows are back in the order of the input")


if __name__ == "__main__":
    main()
