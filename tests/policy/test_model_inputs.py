"""Layout: packing loses nothing, adds nothing and shifts labels by one, complete and sharded over
context-parallel ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import Microbatch, PlanSpec
from nemo_like.policy.inputs.grid import cp_gather_positions, cp_shard_positions, segment_lengths
from nemo_like.policy.inputs.model_inputs import (
    NUM_TRAINED,
    ModelInputs,
    build_inputs,
    num_predicted_tokens,
    unpack_tokens,
)


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def make_shard(lengths: list[int], seed: int = 0) -> dict[str, object]:
    """Rows of distinct token ids (token i of row r is 1000 (r+1) + i), with columns that repeat the
    ids.
    """
    rows = [1000 * (row + 1) + np.arange(length) for row, length in enumerate(lengths)]
    mask = np.random.default_rng(seed).random(sum(lengths)) < 0.5
    input_ids = Jagged.from_rows(rows, np.int32)
    return {
        "input_ids": input_ids,
        "prev_logprobs": Jagged(input_ids.values.astype(np.float32), input_ids.offsets),
        "token_mask": Jagged(mask.astype(np.uint8), input_ids.offsets),
        "advantages": np.arange(len(lengths), dtype=np.float32),
        "text": [f"row {row}" for row in range(len(lengths))],
    }


def packed(
    rows: list[int], lengths: list[int], multiple: int = 1, total_multiple: int = 1
) -> Microbatch:
    padded = tuple(round_up(length, multiple) for length in lengths)
    return Microbatch(tuple(rows), tuple(lengths), padded, round_up(sum(padded), total_multiple))


def padded(rows: list[int], lengths: list[int], multiple: int = 1) -> Microbatch:
    width = round_up(max(lengths), multiple)
    return Microbatch(tuple(rows), tuple(lengths), (width,) * len(rows), width * len(rows))


def spec_of(layout: str, cp_size: int = 1) -> PlanSpec:
    return PlanSpec(layout=layout, max_tokens=1 << 20, cp_size=cp_size)  # type: ignore[arg-type]


def test_packed_rows_example() -> None:
    shard = {"input_ids": Jagged.from_rows([[5, 6, 7], [8, 9]], np.int32)}
    inputs = build_inputs(shard, Microbatch((0, 1), (3, 2), (4, 2), 6), spec_of("packed"))
    assert inputs.input_ids.tolist() == [[5, 6, 7, 0, 8, 9]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 4, 6]
    assert inputs.labels.tolist() == [6, 7, 0, 0, 9, 0]
    assert inputs.label_mask.tolist() == [True, True, False, False, True, False]
    assert inputs.row_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert inputs.max_seqlen == 4
    assert (inputs.input_ids.dtype, inputs.cu_seqlens.dtype, inputs.labels.dtype) == (
        torch.int64,
        torch.int32,
        torch.int64,
    )


def test_trailing_padding_is_its_own_segment() -> None:
    inputs = build_inputs(
        make_shard([3, 2]), Microbatch((0, 1), (3, 2), (3, 2), 8), spec_of("packed"), pad_token_id=9
    )
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert inputs.input_ids[0, 5:].tolist() == [9, 9, 9]
    assert inputs.position_ids[0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert not inputs.label_mask[5:].any()
    assert inputs.row_ids[5:].tolist() == [0, 0, 0]


def test_padded_rows_example() -> None:
    shard = make_shard([3, 1, 4])
    inputs = build_inputs(
        shard, Microbatch((2, 0), (4, 3), (6, 6), 12), spec_of("padded"), pad_token_id=7
    )
    assert inputs.input_ids.tolist() == [
        [3000, 3001, 3002, 3003, 7, 7],
        [1000, 1001, 1002, 7, 7, 7],
    ]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert inputs.cu_seqlens is None
    assert inputs.labels.reshape(2, 6).tolist() == [
        [3001, 3002, 3003, 0, 0, 0],
        [1001, 1002, 0, 0, 0, 0],
    ]
    assert inputs.row_columns["advantages"].tolist() == [2.0, 0.0]
    assert "text" not in inputs.row_columns


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_dummy_goes_through_a_model_and_counts_nothing(layout: str) -> None:
    shard = make_shard([3, 2])
    dummy = Microbatch((), (), (), 4)
    inputs = build_inputs(shard, dummy, spec_of(layout), pad_token_id=9)
    assert inputs.input_ids.tolist() == [[9, 9, 9, 9]]
    assert inputs.position_ids.tolist() == [[0, 0, 0, 0]]
    assert not inputs.label_mask.any()
    assert inputs.row_columns["advantages"].tolist() == [0.0]
    assert inputs.row_columns["advantages"][inputs.row_ids].shape == (4,)
    assert set(inputs.columns) == {"prev_logprobs", "token_mask"}
    assert len(unpack_tokens(torch.zeros(4), inputs)) == 0
    assert num_predicted_tokens(shard["token_mask"], dummy).tolist() == [0]  # type: ignore[arg-type]
    shares = [
        build_inputs(shard, dummy, spec_of(layout, cp_size=2), cp_rank=rank) for rank in (0, 1)
    ]
    assert [share.input_ids.shape for share in shares] == [(1, 2), (1, 2)]


def test_truncated_rows_lose_their_end() -> None:
    shard = make_shard([5])
    inputs = build_inputs(shard, Microbatch((0,), (3,), (3,), 3), spec_of("packed"))
    assert inputs.input_ids.tolist() == [[1000, 1001, 1002]]
    assert inputs.labels.tolist() == [1001, 1002, 0]
    assert unpack_tokens(torch.tensor([1.0, 2.0, 3.0]), inputs)[0].tolist() == [0.0, 1.0, 2.0]


def test_masks_are_bool_and_numbers_keep_their_type() -> None:
    shard = make_shard([4, 3])
    inputs = build_inputs(shard, packed([0, 1], [4, 3]), spec_of("packed"))
    assert inputs.columns["token_mask"].dtype == torch.bool
    assert inputs.columns["prev_logprobs"].dtype == torch.float32
    assert inputs.row_columns["advantages"].dtype == torch.float32


def test_read_only_columns_are_accepted() -> None:
    shard = make_shard([4, 3])
    for column in shard.values():
        if isinstance(column, Jagged):
            column.values.flags.writeable = False
        elif isinstance(column, np.ndarray):
            column.flags.writeable = False
    inputs = build_inputs(shard, packed([0, 1], [4, 3]), spec_of("packed"))
    inputs.row_columns["advantages"].add_(1)
    assert inputs.row_columns["advantages"].tolist() == [1.0, 2.0]


def test_token_columns_may_have_more_dims() -> None:
    input_ids = Jagged.from_rows([[1, 2, 3], [4, 5]], np.int32)
    experts = Jagged(np.arange(10, dtype=np.int64).reshape(5, 2), input_ids.offsets)
    inputs = build_inputs(
        {"input_ids": input_ids, "experts": experts}, packed([1, 0], [2, 3]), spec_of("packed")
    )
    assert inputs.columns["experts"].tolist() == [[8, 9], [0, 0], [2, 3], [4, 5], [0, 0]]


def test_a_short_token_column_is_named() -> None:
    shard = make_shard([3, 4])
    shard["prev_logprobs"] = Jagged.from_rows([[0.0] * 3, [0.0] * 2], np.float32)
    with pytest.raises(
        ValueError, match=r"column 'prev_logprobs' has 2 tokens in row 1, but the plan reads 4"
    ):
        build_inputs(shard, packed([0, 1], [3, 4]), spec_of("packed"))


def test_cp_worked_example_of_six_tokens() -> None:
    """Length 6 on 2 ranks: padded to 8, chunks 01|23|45|pp go to ranks 0, 1, 1, 0."""
    assert cp_shard_positions([8], cp_size=2, cp_rank=0).tolist() == [0, 1, 6, 7]
    assert cp_shard_positions([8], cp_size=2, cp_rank=1).tolist() == [2, 3, 4, 5]


def test_cp_worked_example_of_four_rows() -> None:
    """Rows of 5, 8, 1 and 3 tokens, each padded to a multiple of 4, cut and then packed."""
    lengths, padded_lengths = [5, 8, 1, 3], [8, 8, 4, 4]
    pack = "".join(
        str(row) * length + "p" * (size - length)
        for row, (length, size) in enumerate(zip(lengths, padded_lengths, strict=True))
    )
    shares = [
        "".join(np.array(list(pack))[cp_shard_positions(padded_lengths, 2, rank)])
        for rank in (0, 1)
    ]
    assert shares == ["00pp11112p3p", "000p1111pp33"]


def test_cp_share_example_with_labels() -> None:
    shard = {"input_ids": Jagged.from_rows([[1, 2, 3, 4, 5, 6]], np.int32)}
    microbatch = Microbatch((0,), (6,), (8,), 8)
    first, second = (
        build_inputs(shard, microbatch, spec_of("packed", 2), cp_rank=rank) for rank in (0, 1)
    )
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([[1, 2, 0, 0]], [[3, 4, 5, 6]])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == (
        [[0, 1, 6, 7]],
        [[2, 3, 4, 5]],
    )
    assert (first.labels.tolist(), second.labels.tolist()) == ([2, 3, 0, 0], [4, 5, 6, 0])
    assert first.cu_seqlens is not None and first.cu_seqlens.tolist() == [0, 8]
    assert (first.max_seqlen, first.num_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("lengths", "cp_size", "cp_rank", "message"),
    [([6], 2, 0, "multiples of 2 x cp_size = 4"), ([8], 2, 2, "cp_rank 2")],
)
def test_cp_positions_refuse(lengths: list[int], cp_size: int, cp_rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cp_shard_positions(lengths, cp_size, cp_rank)


@given(chunks=st.lists(st.integers(0, 5), max_size=6), cp_size=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_gathering_the_shares_gives_the_pack_back(chunks: list[int], cp_size: int) -> None:
    lengths = [2 * cp_size * chunk for chunk in chunks]
    pack = np.arange(sum(lengths))
    shares = [pack[cp_shard_positions(lengths, cp_size, rank)] for rank in range(cp_size)]
    assert len({len(share) for share in shares}) == 1
    assert np.array_equal(np.concatenate(shares)[cp_gather_positions(lengths, cp_size)], pack)


def rows_of_microbatches() -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """Lengths of a shard's rows, and which rows a microbatch takes, in any order."""
    return st.lists(st.integers(1, 12), min_size=1, max_size=7).flatmap(
        lambda lengths: st.tuples(
            st.just(lengths),
            st.lists(
                st.sampled_from(range(len(lengths))), min_size=1, max_size=len(lengths), unique=True
            ),
        )
    )


def reference_columns(shard: dict, microbatch: Microbatch, column: str) -> list[float]:
    """The shift written as a plain loop: value of token i+1 at i, 0 elsewhere."""
    flat: list[float] = []
    for row, length, size in zip(
        microbatch.rows, microbatch.lengths, microbatch.padded_lengths, strict=True
    ):
        values = shard[column][row][:length].tolist()
        flat += values[1:] + [0] * (size - length + 1)
    return flat + [0] * (microbatch.num_tokens - len(flat))


@given(
    case=rows_of_microbatches(),
    layout=st.sampled_from(["packed", "padded"]),
    cp_size=st.sampled_from([1, 2, 4]),
    round_to=st.sampled_from([1, 3, 4]),
    total=st.sampled_from([1, 5]),
)
@settings(max_examples=150, deadline=None)
def test_every_layout_is_the_plain_loop_and_undoes_itself(
    case: tuple[list[int], list[int]], layout: str, cp_size: int, round_to: int, total: int
) -> None:
    all_lengths, rows = case
    shard = make_shard(all_lengths)
    multiple = int(np.lcm(round_to, 2 * cp_size if cp_size > 1 else 1))
    lengths = [all_lengths[row] for row in rows]
    microbatch = (
        packed(rows, lengths, multiple, multiple * total)
        if layout == "packed"
        else padded(rows, lengths, multiple)
    )
    shares = [
        build_inputs(shard, microbatch, spec_of(layout, cp_size), cp_rank=rank, pad_token_id=-1)
        for rank in range(cp_size)
    ]
    gather = torch.from_numpy(
        cp_gather_positions(
            segment_lengths(microbatch.padded_lengths, microbatch.num_tokens), cp_size
        )
    )

    def full(read) -> torch.Tensor:
        return torch.cat([read(share).reshape(-1) for share in shares])[gather]

    ids = full(lambda share: share.input_ids)
    expected = [shard["input_ids"][row].tolist() for row in rows]  # type: ignore[index]
    assert ids[ids >= 0].tolist() == [token for row in expected for token in row]
    labels, label_mask = full(lambda share: share.labels), full(lambda share: share.label_mask)
    assert labels.tolist() == reference_columns(shard, microbatch, "input_ids")
    assert label_mask.tolist() == [label != 0 for label in labels.tolist()]
    assert full(lambda share: share.columns["prev_logprobs"]).tolist() == labels.tolist()
    assert full(lambda share: share.columns["token_mask"]).tolist() == reference_columns(
        shard, microbatch, "token_mask"
    )
    row_ids = full(lambda share: share.row_ids)
    assert (labels[label_mask] // 1000 - 1).tolist() == [
        rows[row] for row in row_ids[label_mask].tolist()
    ]
    assert torch.equal(full(lambda share: share.position_ids)[label_mask], ids[label_mask] % 1000)
    check_unpacking(shard, microbatch, shares[0], labels)


def check_unpacking(
    shard: dict, microbatch: Microbatch, inputs: ModelInputs, labels: torch.Tensor
) -> None:
    unpacked = unpack_tokens(labels.float(), inputs)
    assert unpacked.dtype == np.float32
    for position, row in enumerate(microbatch.rows):
        assert unpacked[position].tolist() == [0.0, *shard["input_ids"][row].tolist()[1:]]
    trained = num_predicted_tokens(shard["token_mask"], microbatch)
    assert trained.tolist() == [int(shard["token_mask"][row][1:].sum()) for row in microbatch.rows]
    if inputs.layout == "packed":
        assert inputs.cu_seqlens is not None
        bounds = inputs.cu_seqlens.tolist()
        assert bounds == [
            0,
            *np.cumsum(segment_lengths(microbatch.padded_lengths, microbatch.num_tokens)).tolist(),
        ]


def test_padding_of_a_microbatch_is_divided_into_segments_no_longer_than_its_rows() -> None:
    microbatch = Microbatch((0, 1), (5, 2), (5, 2), 20)
    inputs = build_inputs(make_shard([5, 2]), microbatch, spec_of("packed"))
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 5, 7, 12, 17, 20]
    assert inputs.max_seqlen == 5 and int(inputs.position_ids.max()) == 4
    assert inputs.label_positions.tolist() == [0, 1, 2, 3, 5]


def test_unpack_refuses_one_share() -> None:
    inputs = build_inputs(make_shard([4]), Microbatch((0,), (4,), (4,), 4), spec_of("packed", 2))
    with pytest.raises(ValueError, match="2 values for a microbatch of 4 outputs"):
        unpack_tokens(torch.zeros(2), inputs)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_only_trained_tokens_of_trained_rows_have_a_label(layout: str) -> None:
    shard = make_shard([5, 4, 6], seed=3)
    microbatch = (
        packed([2, 0, 1], [6, 5, 4]) if layout == "packed" else padded([2, 0, 1], [6, 5, 4])
    )
    counts = num_predicted_tokens(shard["token_mask"], microbatch)  # type: ignore[arg-type]
    counts[1] = 0
    plain = build_inputs(shard, microbatch, spec_of(layout))
    inputs = build_inputs(shard, microbatch, spec_of(layout), num_trained=counts)
    expected = plain.label_mask & plain.columns["token_mask"] & (plain.row_ids != 1)
    assert torch.equal(inputs.label_mask, expected)
    assert torch.equal(inputs.label_positions, expected.nonzero().squeeze(1))
    assert torch.equal(plain.label_positions, plain.label_mask.nonzero().squeeze(1))
    assert torch.equal(inputs.labels, plain.labels)
    assert inputs.row_columns[NUM_TRAINED].tolist() == counts.tolist()
    assert inputs.row_columns[NUM_TRAINED].dtype == torch.float32
    assert inputs.host_row_columns[NUM_TRAINED].tolist() == counts.tolist()


def test_a_row_column_may_be_a_tensor_of_any_dtype() -> None:
    shard = make_shard([3, 2]) | {"scale": torch.tensor([1.5, 2.5], dtype=torch.bfloat16)}
    inputs = build_inputs(shard, packed([1, 0], [2, 3]), spec_of("packed"))
    assert inputs.row_columns["scale"].tolist() == [2.5, 1.5]
    assert "scale" not in inputs.host_row_columns
    dummy = build_inputs(shard, Microbatch((), (), (), 4), spec_of("packed"))
    assert dummy.row_columns["scale"].tolist() == [0.0]
