"""The container: rows survive every way to the ranks and back, and the plan travels with them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import PlanSpec, plan_batch
from nemo_like.distributed.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
    SlicedDataDict,
    unshard,
)

ALGORITHMS = [
    "modified_first_fit_decreasing",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
    "best_fit_decreasing",
    "balanced",
]


def make_batch(lengths: list[int]) -> BatchedDataDict:
    """One column of each kind; every value identifies its row."""
    rows = [100 * (row + 1) + np.arange(length) for row, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], True)
    return BatchedDataDict(
        input_ids=padded,
        tokens=Jagged.from_rows(rows, np.int32),
        input_lengths=torch.tensor(lengths),
        reward=np.arange(len(lengths), dtype=np.float32),
        image=torch.arange(len(lengths) * 6).reshape(len(lengths), 2, 3),
        message_log=[[{"row": row}] for row in range(len(lengths))],
    )


def row_ids(batch: BatchedDataDict) -> list[int]:
    """Which rows of `make_batch` a batch holds; asserts that all columns agree."""
    rows = batch["reward"].astype(int).tolist()
    assert [tokens[0] // 100 - 1 for tokens in batch["tokens"]] == rows
    assert (batch["input_ids"][:, 0] // 100 - 1).tolist() == rows
    assert (batch["image"][:, 0, 0] // 6).tolist() == rows
    assert [log[0]["row"] for log in batch["message_log"]] == rows
    assert [len(tokens) for tokens in batch["tokens"]] == batch["input_lengths"].tolist()
    return rows


def packing_args(
    max_tokens: int = 32, algorithm: str = "balanced", multiple: int = 1
) -> SequencePackingArgs:
    return {
        "max_tokens_per_microbatch": max_tokens,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
    }


def dynamic_args(max_tokens: int = 32, multiple: int = 1) -> DynamicBatchingArgs:
    return {
        "max_tokens_per_microbatch": max_tokens,
        "sequence_length_round": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


# The container


def test_size_is_that_of_every_column() -> None:
    assert make_batch([3, 1, 2]).size == 3
    assert BatchedDataDict().size == 0
    with pytest.raises(ValueError, match="columns disagree on the number of rows: a 2, b 3"):
        BatchedDataDict(a=[1, 2], b=np.zeros(3))
    with pytest.raises(TypeError, match="column 'a' is a str"):
        BatchedDataDict(a="no column")
    batch = make_batch([3, 1, 2])
    with pytest.raises(ValueError, match=r"columns disagree .* reward 2"):
        batch["reward"] = np.zeros(2)
    assert len(batch["reward"]) == 3


def test_from_batches_pads_what_is_wide_and_joins_the_rest() -> None:
    first, second = make_batch([3, 1]), make_batch([2, 2])
    joined = BatchedDataDict.from_batches([first, {}, second], pad_value_dict={"input_ids": -1})
    assert joined["input_ids"].tolist() == [
        [100, 101, 102],
        [200, 0, 0],
        [100, 101, -1],
        [200, 201, -1],
    ]
    assert [row.tolist() for row in joined["tokens"]] == [
        [100, 101, 102],
        [200],
        [100, 101],
        [200, 201],
    ]
    assert joined["reward"].tolist() == [0, 1, 0, 1]
    assert joined["image"].shape == (4, 2, 3)
    assert joined["message_log"] == [[{"row": 0}], [{"row": 1}]] * 2
    assert list(joined) == list(first)
    assert BatchedDataDict.from_batches([]).size == 0
    arrays = BatchedDataDict.from_batches(
        [{"x": np.ones((1, 1))}, {"x": np.ones((1, 2))}], {"x": 7}
    )
    assert arrays["x"].tolist() == [[1, 7], [1, 1]]


def test_from_batches_names_what_does_not_fit() -> None:
    with pytest.raises(
        KeyError, match=r"batch 1 has rows but no column 'b'; its columns are \['a'\]"
    ):
        BatchedDataDict.from_batches([{"a": [1], "b": [2]}, {"a": [1]}])
    with pytest.raises(KeyError, match="batch 0 has rows but no column 'b'"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": [], "b": []}])
    with pytest.raises(TypeError, match=r"column 'a' is of several kinds: \['list', 'ndarray'\]"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": np.zeros(1)}])


def test_a_batch_without_rows_may_lack_a_column() -> None:
    full = make_batch([3, 1])
    empty = BatchedDataDict(
        {name: column for name, column in full.slice(0, 0).items() if name != "image"}
    )
    for batches in ([empty, full], [full, empty], [empty, full, empty]):
        joined = BatchedDataDict.from_batches(batches)
        assert row_ids(joined) == [0, 1]
        assert set(joined) == set(full)
    assert BatchedDataDict.from_batches([empty, full.slice(0, 0)]).size == 0


def test_chunk_is_a_contiguous_part() -> None:
    batch = make_batch([3, 1, 2, 4])
    assert [row_ids(batch.chunk(rank, 2)) for rank in range(2)] == [[0, 1], [2, 3]]
    part = batch.chunk(1, 4)
    part["reward"][0] = 9
    assert batch["reward"][1] == 1 and part.plan is None
    with pytest.raises(ValueError, match="4 rows are not a multiple of chunks=3"):
        batch.chunk(0, 3)
    with pytest.raises(IndexError, match="chunk 2 of 2"):
        batch.chunk(2, 2)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 16), min_size=8, max_size=24).map(
        lambda rows: rows[: len(rows) // 4 * 4]
    ),
    is_packed=st.booleans(),
    shards=st.integers(1, 4),
)
def test_the_plan_by_the_names_of_nemo_rl(lengths: list[int], is_packed: bool, shards: int) -> None:
    """Ranges of rows within each global batch of 4 rows, and what a microbatch iterator yields for
    them.
    """
    batch = make_batch(lengths)
    assert (
        batch.micro_batch_indices is batch.micro_batch_lengths is batch.elem_counts_per_gb is None
    )
    if is_packed:
        parts, _ = batch.shard_by_batch_size(
            shards, 4, sequence_packing_args=packing_args(multiple=4)
        )
    else:
        parts, _ = batch.shard_by_batch_size(
            shards, 4, dynamic_batching_args=dynamic_args(multiple=4)
        )
    num_steps = len(lengths) // 4
    for part in parts:
        indices, widths, counts = (
            part.micro_batch_indices,
            part.micro_batch_lengths,
            part.elem_counts_per_gb,
        )
        assert indices is not None and widths is not None and counts is not None
        assert len(indices) == len(widths) == len(counts) == num_steps
        assert sum(counts) == part.size
        for step in range(num_steps):
            global_batch = part.get_batch(step)
            assert global_batch.size == counts[step]
            assert global_batch.elem_counts_per_gb == [counts[step]]
            assert global_batch.micro_batch_indices == [indices[step]]
            assert global_batch.micro_batch_lengths == [widths[step]]
            if is_packed:
                microbatches = list(global_batch.make_microbatch_iterator_for_packable_sequences())
            else:
                microbatches = list(global_batch.make_microbatch_iterator_with_dynamic_shapes())
            for microbatch, (start, end), width in zip(
                microbatches, indices[step], widths[step], strict=True
            ):
                assert row_ids(microbatch) == row_ids(global_batch.slice(start, end))
                rounded = [-(-length // 4) * 4 for length in microbatch["input_lengths"].tolist()]
                if rounded:
                    assert width == (sum(rounded) if is_packed else max(rounded))
    assert sum(part.size for part in parts) == len(lengths)
    for name in ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb"):
        with pytest.raises(AttributeError):
            setattr(parts[0], name, None)


@pytest.mark.parametrize("indices", [[2, 0], np.array([2, 0]), torch.tensor([2, 0])])
def test_select_indices_copies_rows(indices: Any) -> None:
    batch = make_batch([3, 1, 2])
    selected = batch.select_indices(indices)
    assert row_ids(selected) == [2, 0]
    selected["reward"][0] = 9
    assert batch["reward"].tolist() == [0, 1, 2]


def test_slice_is_a_view() -> None:
    batch = make_batch([3, 1, 2])
    part = batch.slice(1, 3)
    assert isinstance(part, SlicedDataDict)
    assert row_ids(part) == [1, 2]
    part["input_ids"][0, 0] = 7
    part["tokens"].values[0] = 7
    assert batch["input_ids"][1, 0] == 7
    assert batch["tokens"][1].tolist() == [7]


def test_repeat_interleave_copies_what_can_change() -> None:
    repeated = make_batch([3, 1]).repeat_interleave(3)
    assert row_ids(repeated) == [0, 0, 0, 1, 1, 1]
    repeated["message_log"][0].append("more")
    assert len(repeated["message_log"][1]) == 1


def test_truncate_tensors_truncates_one_dim_in_place() -> None:
    batch = make_batch([3, 1, 2])
    batch["ids_array"] = batch["input_ids"].numpy()
    batch.truncate_tensors(dim=1, truncated_len=2)
    assert batch["input_ids"].tolist() == [[100, 101], [200, 0], [300, 301]]
    assert batch["ids_array"].shape == (3, 2)
    assert [row.tolist() for row in batch["tokens"]] == [[100, 101], [200], [300, 301]]
    assert batch["reward"].shape == (3,)
    batch.truncate_tensors(dim=2, truncated_len=1)
    assert batch["image"].shape == (3, 2, 1)


def test_to_moves_tensors_in_place() -> None:
    batch = make_batch([2])
    assert batch.to("meta") is batch
    assert batch["input_ids"].device.type == "meta"
    assert isinstance(batch["reward"], np.ndarray)


def test_reorder_data_applies_the_inverse_permutation() -> None:
    batch = make_batch([1, 2, 3])
    batch.reorder_data([2, 0, 1])
    assert row_ids(batch) == [1, 2, 0]
    with pytest.raises(ValueError, match="each of the 3 row positions exactly once"):
        batch.reorder_data([0, 0, 1])


def test_get_dict_and_pickle_keep_columns_and_plan() -> None:
    shard = make_batch([5, 3]).shard_by_batch_size(1, sequence_packing_args=packing_args())[0][0]
    again = pickle.loads(pickle.dumps(shard))
    assert isinstance(again, SlicedDataDict)
    assert again.plan == shard.plan
    assert row_ids(again) == row_ids(shard)
    assert set(shard.get_dict()) == set(make_batch([1]))


# Plain shards


def test_plain_shards_are_contiguous_parts_of_each_batch() -> None:
    batch = make_batch([1] * 8)
    shards = batch.shard_by_batch_size(2, batch_size=4)
    assert [row_ids(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [row_ids(shard) for shard in batch.shard_by_batch_size(4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert row_ids(shards[1].get_batch(1, batch_size=2)) == [6, 7]


def test_uneven_plain_shards_are_short_or_empty() -> None:
    shards = make_batch([1] * 5).shard_by_batch_size(4, allow_uneven_shards=True)
    assert [shard.size for shard in shards] == [2, 2, 1, 0]
    assert set(shards[3]) == set(shards[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"shards": 3},
            "batch_size=8 is not a multiple of shards=3; allow_uneven_shards=True splits anyway",
        ),
        ({"shards": 2, "batch_size": 3}, "8 rows are not a multiple of batch_size=3"),
        ({"shards": 2, "batch_size": 4, "allow_uneven_shards": True}, "leave batch_size out"),
        (
            {"shards": 2, "dynamic_batching_args": {}, "sequence_packing_args": {}},
            "exclude each other",
        ),
        (
            {"shards": 2, "dynamic_batching_args": {"token": 3}},
            r"missing keys \['input_key', .*unknown keys \['token'\]",
        ),
        ({"shards": 2, "sequence_packing_args": packing_args(4)}, "row"),
    ],
)
def test_shard_by_batch_size_reports_what_does_not_fit(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch([8] * 8).shard_by_batch_size(**arguments)


def test_lengths_are_checked_against_the_tokens() -> None:
    with pytest.raises(KeyError, match="input_lengths_key 'input_lengths' is not a column"):
        BatchedDataDict(input_ids=[[1], [2]]).shard_by_batch_size(
            1, sequence_packing_args=packing_args()
        )
    for tokens in (
        torch.zeros(2, 3),
        np.zeros((2, 3)),
        [[1, 2, 3]] * 2,
        Jagged.from_rows([[1, 2, 3]] * 2, np.int32),
    ):
        batch = BatchedDataDict(input_ids=tokens, input_lengths=[3, 4])
        with pytest.raises(
            ValueError, match="input_lengths gives 4 tokens for row 1, more than input_ids has"
        ):
            batch.shard_by_batch_size(1, sequence_packing_args=packing_args())


# Planned shards


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=24),
    num_shards=st.integers(1, 4),
    num_batches=st.sampled_from([1, 2, 3]),
    mode=st.sampled_from(["dynamic", *ALGORITHMS]),
    multiple=st.sampled_from([1, 4]),
)
@settings(max_examples=80, deadline=None)
def test_reorder_data_undoes_every_mode(
    lengths: list[int], num_shards: int, num_batches: int, mode: str, multiple: int
) -> None:
    lengths = lengths * num_batches
    batch = make_batch(lengths)
    batch_size = len(lengths) // num_batches
    if mode == "dynamic":
        shards, indices = batch.shard_by_batch_size(
            num_shards, batch_size, dynamic_batching_args=dynamic_args(multiple=multiple)
        )
    else:
        shards, indices = batch.shard_by_batch_size(
            num_shards,
            batch_size,
            sequence_packing_args=packing_args(algorithm=mode, multiple=multiple),
        )
    joined = BatchedDataDict.from_batches(shards)
    assert row_ids(joined) == indices
    joined.reorder_data(indices)
    assert row_ids(joined) == list(range(len(lengths)))
    for step in range(num_batches):
        steps = [shard.get_batch(step) for shard in shards]
        rows = sorted(row for part in steps for row in row_ids(part))
        assert rows == list(range(step * batch_size, (step + 1) * batch_size))
        check_microbatches(steps, mode, batch["input_ids"].shape[1])


def check_microbatches(steps: list[SlicedDataDict], mode: str, width: int) -> None:
    """Equal counts on all ranks, no microbatch above the budget, every row of the step once and in
    order.
    """
    counts = set()
    for part in steps:
        if mode == "dynamic":
            microbatches = list(part.make_microbatch_iterator_with_dynamic_shapes())
            assert len(microbatches) == part.get_microbatch_iterator_dynamic_shapes_len()
            assert all(microbatch["input_ids"].numel() <= 32 for microbatch in microbatches)
            for microbatch in microbatches:
                longest = max(microbatch["input_lengths"].tolist(), default=0)
                assert (
                    longest <= microbatch["input_ids"].shape[1] <= min(width, -(-longest // 4) * 4)
                    or not longest
                )
        else:
            microbatches = list(part.make_microbatch_iterator_for_packable_sequences())
            count, largest = part.get_microbatch_iterator_for_packable_sequences_len()
            assert (count, largest <= 32) == (len(microbatches), True)
            assert all(
                int(microbatch["input_lengths"].sum()) <= largest for microbatch in microbatches
            )
            assert all(microbatch["input_ids"].shape[1] == width for microbatch in microbatches)
        assert [row for microbatch in microbatches for row in row_ids(microbatch)] == row_ids(part)
        counts.add(len(microbatches))
    assert len(counts) == 1


def test_fewer_rows_than_shards_run_dummies_of_zero_rows() -> None:
    shards, indices = make_batch([4, 6]).shard_by_batch_size(
        4, allow_uneven_shards=True, sequence_packing_args=packing_args()
    )
    sizes = [
        [microbatch.size for microbatch in shard.make_microbatch_iterator_for_packable_sequences()]
        for shard in shards
    ]
    assert sorted(sizes) == [[0], [0], [1], [1]]
    assert sorted(indices) == [0, 1]


def test_iterators_need_one_global_batch_and_a_plan() -> None:
    shards, _ = make_batch([4] * 8).shard_by_batch_size(
        2, batch_size=4, sequence_packing_args=packing_args()
    )
    with pytest.raises(
        ValueError, match=r"these rows belong to 2 global batches; call get_batch\(i\) first"
    ):
        list(shards[0].make_microbatch_iterator_for_packable_sequences())
    with pytest.raises(ValueError, match="these rows carry no plan"):
        make_batch([4]).get_microbatch_iterator_dynamic_shapes_len()
    with pytest.raises(IndexError, match="global batch 2 of 2"):
        shards[0].get_batch(2)
    with pytest.raises(ValueError, match="get_batch needs batch_size"):
        make_batch([4]).get_batch(0)
    with pytest.raises(IndexError, match="batch 1 of 4 rows is outside the 4 rows"):
        make_batch([4] * 4).get_batch(1, batch_size=4)


def test_make_microbatch_iterator_has_one_size() -> None:
    microbatches = list(make_batch([1] * 6).make_microbatch_iterator(2))
    assert [row_ids(microbatch) for microbatch in microbatches] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="6 rows are not a multiple of the microbatch size 4"):
        make_batch([1] * 6).make_microbatch_iterator(4)


def test_dynamic_example_of_six_rows() -> None:
    """Rows of 2, 4, 7, 6, 3, 4 tokens under 16: the two long ones together, the four short ones cut
    to 4.
    """
    batch = make_batch([2, 4, 7, 6, 3, 4])
    shards, _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic_args(16))
    shapes = [
        tuple(part["input_ids"].shape)
        for part in shards[0].make_microbatch_iterator_with_dynamic_shapes()
    ]
    assert sorted(shapes) == [(2, 7), (4, 4)]


# Shards of a plan, and back


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=24), num_ranks=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_unshard_undoes_shard_for_every_kind_of_column(lengths: list[int], num_ranks: int) -> None:
    batch = make_batch(lengths)
    spec = PlanSpec(max_tokens=32, num_ranks=num_ranks, global_batch_size=max(1, len(lengths) // 2))
    plan = plan_batch(lengths, spec)
    logprob_plan = plan.with_budget(48)
    shards = batch.shard(plan, logprob_plan)
    back = BatchedDataDict(
        {name: unshard([shard[name] for shard in shards], plan) for name in batch}
    )
    assert row_ids(back) == list(range(len(lengths)))
    for dp_rank, shard in enumerate(shards):
        assert shard.plan == plan.rank_plan(dp_rank)
        check_score_plan(shard, plan.num_steps)


def check_score_plan(shard: SlicedDataDict, num_steps: int) -> None:
    """The score plan's rows are rows of the shard, of the right length and step, also after
    `get_batch`.
    """
    assert shard.plan is not None and shard.logprob_plan is not None
    lengths = shard["input_lengths"].tolist()
    for step in range(num_steps):
        part = shard.get_batch(step)
        assert part.plan is not None and part.logprob_plan is not None
        own = [row for microbatch in shard.plan.step(step) for row in microbatch.rows]
        scored = [row for microbatch in shard.logprob_plan.step(step) for row in microbatch.rows]
        assert sorted(scored) == own
        for microbatch in shard.logprob_plan.step(step):
            assert microbatch.lengths == tuple(lengths[row] for row in microbatch.rows)
        for microbatch in (*part.plan.microbatches, *part.logprob_plan.microbatches):
            assert microbatch.lengths == tuple(
                part["input_lengths"][list(microbatch.rows)].tolist()
            )


def test_shard_refuses_plans_of_other_rows() -> None:
    batch = make_batch([4, 4, 4, 4])
    in_turn = {"num_ranks": 2, "algorithm": "concatenative", "balance": "none"}
    plan = plan_batch([4] * 4, PlanSpec(max_tokens=4, **in_turn))
    with pytest.raises(ValueError, match="the plan is for 4 rows, the batch has 3"):
        make_batch([4] * 3).shard(plan)
    pairs = plan_batch([4] * 4, PlanSpec(max_tokens=8, **in_turn))
    with pytest.raises(
        ValueError, match=r"other rows on dp rank 0 than the plan; make it with plan\.with_budget"
    ):
        batch.shard(plan, pairs)
    with pytest.raises(
        ValueError, match=r"the ranks returned \[1, 1\] rows, the plan gave them \[2, 2\]"
    ):
        unshard([np.zeros(1), np.zeros(1)], plan)


def test_dropped_rows_come_back_empty() -> None:
    lengths = [4, 40, 8]
    batch = make_batch(lengths)
    with pytest.warns(UserWarning, match="row 1 has 40 tokens"):
        plan = plan_batch(lengths, PlanSpec(max_tokens=16, oversize="drop"))
    shard = batch.shard(plan)[0]
    assert [row.tolist()[:1] for row in unshard([shard["tokens"]], plan)] == [[100], [], [300]]  # type: ignore[union-attr]
    assert unshard([shard["reward"] + 1], plan).tolist() == [1, 0, 3]  # type: ignore[union-attr]
    assert unshard([shard["input_lengths"]], plan).tolist() == [4, 0, 8]  # type: ignore[union-attr]
    assert unshard([shard["message_log"]], plan) == [[{"row": 0}], None, [{"row": 2}]]


def test_rows_of_a_group_count_common_tokens_once_and_stay_complete() -> None:
    """Two groups of two rows with three common tokens: five tokens each instead of eight."""
    rows = [[1, 2, 3, 4], [5, 6, 7, 1], [1, 2, 3, 9], [5, 6, 7, 2]]
    batch = BatchedDataDict(
        input_ids=torch.tensor(rows), lengths=torch.full((4,), 4), group=np.array([7, 8, 7, 8])
    )
    args: SequencePackingArgs = {
        "max_tokens_per_microbatch": 5,
        "input_key": "input_ids",
        "input_lengths_key": "lengths",
        "algorithm": "balanced",
        "sequence_length_pad_multiple": 1,
    }
    complete, _ = batch.shard_by_batch_size(2, sequence_packing_args=args)
    assert [len(shard.plan.microbatches) for shard in complete if shard.plan] == [2, 2]
    shards, _ = batch.shard_by_batch_size(2, sequence_packing_args={**args, "group_key": "group"})
    for shard in shards:
        assert shard.plan is not None
        [microbatch] = shard.plan.microbatches
        assert (microbatch.shared, microbatch.num_tokens) == ((0, 3), 5)
        [data] = shard.make_microbatch_iterator_for_packable_sequences()
        first, second = data["input_ids"].tolist()
        assert first[:3] == second[:3] and first in rows and second in rows
    with pytest.raises(KeyError, match="group_key 'prompt' is not a column"):
        batch.shard_by_batch_size(2, sequence_packing_args={**args, "group_key": "prompt"})
