"""Batches formed after preprocessing: coverage, equal steps on all ranks, exact resume, errors."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import AlignmentError, Coordinator
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.datasets import ShardedIterableDataset
from nemo_like.torch_data.online import OnlineBatchLoader
from nemo_like.torch_data.packed_collate import PackingCollator
from tests.data.streaming.stream_cases import stream_specs
from tests.torch_data.online_ranks import Seen, run_gloo_rank, run_ranks, seen
from tests.torch_data.row_datasets import AugmentedRows, FailingRows, Rows, StatelessStream, Stream

pytestmark = pytest.mark.filterwarnings("ignore::nemo_like.data.planning.oversize.OversizeWarning")

SPEC = StreamSpec(
    plan=PlanSpec(layout="padded", max_tokens=24, oversize="singleton"),
    microbatches_per_step=2,
    window_rows=5,
    window_tokens=0,
)
LENGTHS = np.random.default_rng(3).integers(1, 20, 29).tolist()


def make(dataset: Any, spec: StreamSpec = SPEC, **options: Any) -> OnlineBatchLoader[Any, Any]:
    return OnlineBatchLoader(dataset, spec, **{"collate_fn": list, **options})


def run(loader: OnlineBatchLoader[Any, Any]) -> list[Seen]:
    return [seen(step) for step in loader]


def rows_of(steps: list[Seen]) -> list[int]:
    return [row for step in steps for rows in step.rows for row in rows]


def error_of(loader: OnlineBatchLoader[Any, Any]) -> str:
    try:
        run(loader)
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return "no error"


# One rank


def test_each_row_is_in_one_step_with_its_numbers() -> None:
    steps = list(make(Rows(LENGTHS)))
    rows = [row for step in steps for rows in step.rows for row in rows]
    assert sorted(rows) == list(range(len(LENGTHS)))
    assert rows != sorted(rows)
    for number, step in enumerate(steps):
        assert step.step == number
        assert len(step.microbatches) == len(step.rows) == len(step.is_dummy)
        for batch, numbers in zip(step.microbatches, step.rows, strict=True):
            assert [row["number"] for row in batch] == list(numbers)
        lengths = [LENGTHS[row] for rows in step.rows for row in rows]
        # The first token of a row is not predicted.
        assert step.num_trained == sum(length - 1 for length in lengths)
        assert step.loss_scale == pytest.approx(1 / step.num_trained)
        assert step.num_rows == len(lengths)
        assert step.metrics["packing/num_rows"] == len(lengths)
        assert step.metrics["packing/window_wait_s"] >= 0
        assert [scale for _, scale in step.scaled()] == [step.loss_scale] * len(step.rows)


def test_rows_without_loss_have_the_scale_0() -> None:
    steps = list(make(Rows([1, 1, 1])))
    assert [step.num_trained for step in steps] == [0]
    assert steps[0].loss_scale == 0


def test_numbers_of_samples_come_from_the_functions_of_the_caller() -> None:
    samples = ["a", "bb" * 4, "ccc", "dd"]
    loader = OnlineBatchLoader(
        samples,
        StreamSpec(plan=PlanSpec(max_tokens=100), max_extra=3),
        collate_fn=list,
        length_of=len,
        num_trained_of=lambda sample: sample.count("b"),
        extra_of=lambda sample: 2 if sample.startswith("d") else 1,
        shuffle=False,
    )
    steps = list(loader)
    batches = [batch for step in steps for batch in step.microbatches]
    assert sorted(sample for batch in batches for sample in batch) == sorted(samples)
    assert len(batches) == 2
    assert sum(step.num_trained for step in steps) == 8


@pytest.mark.parametrize(
    ("num_workers", "method"), [(1, "fork"), (2, "fork"), (1, "spawn"), (1, "forkserver")]
)
def test_workers_and_start_methods_give_the_same_steps(num_workers: int, method: str) -> None:
    expected = run(make(AugmentedRows(LENGTHS)))
    loader = make(AugmentedRows(LENGTHS), num_workers=num_workers, multiprocessing_context=method)
    steps = []
    for step in loader:
        for batch in step.microbatches:
            assert not any(row["input_ids"].is_shared() for row in batch)
        steps.append(seen(step))
    assert steps == expected


def test_epochs_follow_and_can_be_set() -> None:
    loader = make(Rows(LENGTHS))
    epochs = [rows_of(run(loader)) for _ in range(3)]
    assert loader.epoch == 3
    assert len({tuple(rows) for rows in epochs}) == 3
    assert all(sorted(rows) == list(range(len(LENGTHS))) for rows in epochs)
    loader.set_epoch(1)
    again = run(loader)
    assert rows_of(again) == epochs[1]
    # The number of steps goes on, for the warm-up of the token limit.
    assert again[0].step > 3 * 3
    unshuffled = run(make(Rows([12] * 6), shuffle=False))
    assert [sorted(rows) for step in unshuffled for rows in step.rows] == [[0, 1], [2, 3], [4, 5]]


def test_a_left_iteration_begins_again_and_cannot_go_on() -> None:
    loader = make(Rows(LENGTHS))
    left = iter(loader)
    begun = [seen(next(left)) for _ in range(2)]
    again = run(loader)
    assert [step.rows for step in again[:2]] == [step.rows for step in begun]
    assert sorted(rows_of(again)) == list(range(len(LENGTHS)))
    with pytest.raises(RuntimeError, match="replaced this one"):
        next(left)


def test_random_numbers_of_the_process_are_not_touched() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    run(make(AugmentedRows(LENGTHS)))
    run(make(AugmentedRows(LENGTHS), num_workers=1, multiprocessing_context="fork"))
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(states[2], torch.get_rng_state())


def test_the_window_is_bounded_in_rows() -> None:
    rows = Rows([2] * 60)
    wide = StreamSpec(plan=PlanSpec(max_tokens=40), window_rows=30, window_tokens=0)
    first = next(iter(make(rows, wide, shuffle=False)))
    assert len(rows.fetched) == 30
    assert first.num_rows == 20


# Errors


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [IndexError, KeyError, StopIteration])
def test_errors_of_a_row_are_raised(num_workers: int, error: type[Exception]) -> None:
    loader = make(
        FailingRows(LENGTHS, 20, error),
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    message = error_of(loader)
    assert "row 20" in message
    assert message.startswith("RuntimeError" if error is StopIteration else error.__name__)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="tail is wrap"):
        make(Rows([1]), StreamSpec(plan=PlanSpec(max_tokens=4), tail="wrap"))
    with pytest.raises(ValueError, match="oversize is truncate"):
        make(Rows([1]), StreamSpec(plan=PlanSpec(max_tokens=4, oversize="truncate")))
    with pytest.raises(ValueError, match="generator is neither"):
        make(row for row in range(3))
    with pytest.raises(ValueError, match="num_workers is -1"):
        make(Rows([1]), num_workers=-1)
    with pytest.raises(ValueError, match="prefetch_factor is 0"):
        make(Rows([1]), prefetch_factor=0)
    with pytest.raises(ValueError, match="num_ranks must be 1"):
        make(Rows([1]), StreamSpec(plan=PlanSpec(max_tokens=4, num_ranks=2)))
    with pytest.raises(ValueError, match="no column 'input_ids'"):
        run(make([{"text": "a"}]))


# Several ranks


def run_group(
    num_ranks: int, lengths: list[int], spec: StreamSpec, **options: Any
) -> list[list[Seen]]:
    def work(coordinator: Coordinator) -> list[Seen]:
        loader = make(Rows(lengths), spec, coordinator=coordinator, dummy=list, **options)
        return run(loader)

    return run_ranks(num_ranks, work)


@given(
    spec=stream_specs(st.just(1), ("singleton", "drop"), ("emit", "drop")),
    lengths=st.lists(st.integers(1, 200), max_size=40),
    num_ranks=st.integers(1, 4),
    join=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ranks_have_equal_steps_and_every_row_once(
    spec: StreamSpec, lengths: list[int], num_ranks: int, join: bool
) -> None:
    ranks = run_group(num_ranks, lengths, spec, join=join)
    assert len({len(steps) for steps in ranks}) == 1
    for aligned in zip(*ranks, strict=True):
        assert len({len(step.rows) for step in aligned}) == 1
        assert len({step.num_trained for step in aligned}) == 1
        rows = [row for step in aligned for microbatch in step.rows for row in microbatch]
        assert aligned[0].num_rows == len(rows)
        assert aligned[0].num_trained == sum(lengths[row] - 1 for row in rows)
    found = [row for steps in ranks for row in rows_of(steps)]
    assert len(found) == len(set(found))
    if join and spec.tail != "drop" and spec.plan.oversize == "singleton":
        assert sorted(found) == list(range(len(lengths)))


def test_a_rank_without_rows_left_repeats_its_last_row_without_loss() -> None:
    def work(coordinator: Coordinator) -> list[Any]:
        streams = [Stream([4, 2]), Stream([20] * 8)]
        loader = make(streams[coordinator.rank], coordinator=coordinator)
        return list(loader)

    short, long = run_ranks(2, work)
    assert len(short) == len(long) == 4
    for step in short[1:]:
        assert step.is_dummy == (True, True)
        assert [row["number"] for batch in step.microbatches for row in batch] == [1, 1]
        assert [scale for _, scale in step.scaled()] == [0, 0]
        assert step.loss_scale == 2 / step.num_trained
    assert not any(any(step.is_dummy) for step in long)


def test_a_rank_without_rows_runs_dummies_or_reports_an_error_to_all() -> None:
    def run_map(coordinator: Coordinator) -> list[Any]:
        return list(make(Rows([3]), coordinator=coordinator))

    full, empty = run_ranks(2, run_map)
    assert [step.is_dummy for step in empty] == [(True,)]
    assert [row["number"] for row in empty[0].microbatches[0]] == [0]
    assert full[0].is_dummy == (False,)

    def run_stream(coordinator: Coordinator) -> str:
        return error_of(make([Stream([3]), Stream([])][coordinator.rank], coordinator=coordinator))

    errors = run_ranks(2, run_stream)
    assert errors[0].startswith("AlignmentError")
    assert errors[1].startswith("ValueError: rank 1 has no row")
    assert "pass dummy" in errors[1]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def work(coordinator: Coordinator) -> str:
        # Row 21 is on rank 0.
        loader = make(FailingRows(LENGTHS, 21, IndexError), coordinator=coordinator, shuffle=False)
        return error_of(loader)

    errors = run_ranks(3, work)
    assert errors[0] == "IndexError: row 21 is bad"
    assert all(error.startswith("AlignmentError") for error in errors[1:])


# Resume


@given(
    spec=stream_specs(st.just(1), ("singleton", "drop"), ("emit", "drop")),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    kind=st.sampled_from(["rows", "augmented", "stream"]),
)
@settings(max_examples=40, deadline=None)
def test_a_resume_at_every_step_equals_the_uninterrupted_epochs(
    spec: StreamSpec, lengths: list[int], kind: str
) -> None:
    kinds: dict[str, Any] = {"rows": Rows, "augmented": AugmentedRows, "stream": Stream}

    def loader() -> OnlineBatchLoader[Any, Any]:
        return make(kinds[kind](lengths), spec)

    full = loader()
    steps = []
    states = [full.state_dict()]
    for _ in range(2):
        for step in full:
            steps.append(seen(step))
            states.append(full.state_dict())
    for number, state in enumerate(states):
        resumed = loader()
        resumed.load_state_dict(state if kind == "stream" else json.loads(json.dumps(state)))
        assert resumed.state_dict().keys() == state.keys()
        rest = []
        while resumed.epoch < 2:
            rest += run(resumed)
        assert rest == steps[number:]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_a_resume_with_another_number_of_workers(before: int, after: int) -> None:
    def loader(num_workers: int) -> OnlineBatchLoader[Any, Any]:
        rows = AugmentedRows(LENGTHS)
        method = "fork" if num_workers else None
        return make(rows, num_workers=num_workers, multiprocessing_context=method)

    expected = run(loader(0))
    interrupted = loader(before)
    done = [seen(step) for step in itertools.islice(interrupted, 2)]
    resumed = loader(after)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    resumed.set_epoch(0)
    assert done + run(resumed) == expected


def test_a_resume_fetches_only_the_waiting_rows_again() -> None:
    loader = make(Rows([6] * 200))
    list(itertools.islice(loader, 20))
    state = loader.state_dict()
    rows = Rows([6] * 200)
    resumed = make(rows)
    resumed.load_state_dict(state)
    next(iter(resumed))
    # Window, the incomplete step, the row that a dummy would repeat, and the rows of a step.
    assert len(rows.fetched) <= 5 + 1 + 8


@given(
    lengths=st.lists(st.integers(1, 30), min_size=5, max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    num_steps=st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_an_epoch_continues_on_another_number_of_ranks(
    lengths: list[int], sizes: list[int], num_steps: int
) -> None:
    found: list[int] = []
    states: list[Any] = []
    num_before = 0
    for number, num_ranks in enumerate(sizes):
        is_last = number == len(sizes) - 1
        previous = states

        def work(
            coordinator: Coordinator, previous: Any = previous, is_last: bool = is_last
        ) -> tuple[list[Seen], Any]:
            loader = make(Rows(lengths), coordinator=coordinator, dummy=list)
            if previous:
                loader.load_global_state(previous)
                loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            max_steps = None if is_last else num_steps
            return [seen(step) for step in itertools.islice(loader, max_steps)], loader.state_dict()

        outcomes = run_ranks(num_ranks, work)
        states = [state for _, state in outcomes]
        for steps, _ in outcomes:
            found += rows_of(steps)
        steps = outcomes[0][0]
        assert [step.step for step in steps] == list(range(num_before, num_before + len(steps)))
        num_before += len(steps)
        if states[0]["feed"]["order"]["epoch"] == 1:
            break
    assert sorted(found) == list(range(len(lengths)))


def test_a_rank_that_has_no_rows_after_a_change_repeats_one_of_another() -> None:
    def train(coordinator: Coordinator) -> Any:
        loader = make(Rows([20] * 9), coordinator=coordinator)
        list(itertools.islice(loader, 2))
        return loader.state_dict()

    states = run_ranks(2, train)

    def resume(coordinator: Coordinator) -> list[Seen]:
        loader = make(Rows([20] * 9), coordinator=coordinator)
        loader.load_global_state(states)
        return run(loader)

    ranks = run_ranks(3, resume)
    assert [len(rows_of(steps)) for steps in ranks] == [1, 0, 0]
    assert ranks[1][0].is_dummy == (True,)


def test_states_that_do_not_fit_are_refused() -> None:
    loader = make(Rows(LENGTHS), seed_rows=False)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="version None"):
        loader.load_state_dict({})
    with pytest.raises(ValueError, match="num_rows=29"):
        make(Rows([1])).load_state_dict(state)
    with pytest.raises(ValueError, match="this one is iterable"):
        make(Stream(LENGTHS)).load_state_dict(state)
    changed = make(Rows([length + 1 for length in LENGTHS]))
    changed.load_state_dict(state)
    with pytest.raises(ValueError, match="when fetched again"):
        run(changed)

    def other_size(coordinator: Coordinator) -> str:
        try:
            make(Rows(LENGTHS), coordinator=coordinator).load_state_dict(state)
        except ValueError as error:
            return str(error)
        return "no error"

    assert all("load_global_state" in message for message in run_ranks(2, other_size))


# Iterable datasets


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["stream", "shard"])
def test_iterable_datasets_resume(num_workers: int, kind: str) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> OnlineBatchLoader[Any, Any]:
        method = "fork" if num_workers else None
        stream: Any = Stream(LENGTHS)
        if kind == "shard":
            stream = ShardedIterableDataset(AugmentedRows(LENGTHS))
        return make(stream, num_workers=num_workers, multiprocessing_context=method)

    full = loader()
    expected = [run(full), run(full)]
    for steps in expected:
        numbers = sorted(rows_of(steps))
        assert len(numbers) == len(LENGTHS)
    last = len(expected[0])
    for num_done in (1, last // 2, last):
        interrupted = loader()
        done = [seen(step) for step in itertools.islice(interrupted, num_done)]
        resumed = loader()
        resumed.load_state_dict(interrupted.state_dict())
        assert done + run(resumed) == expected[0]
        assert run(resumed) == expected[1]


def test_iterable_datasets_without_a_state_train_but_cannot_be_saved() -> None:
    loader = make(StatelessStream(LENGTHS))
    assert len(rows_of(run(loader))) == len(LENGTHS)
    with pytest.raises(ValueError, match="StatelessStream is an iterable dataset without"):
        loader.state_dict()
    with pytest.raises(ValueError, match="shards itself"):
        make(Stream(LENGTHS)).load_global_state([])


# Processes of a gloo group


def test_gloo_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        futures = [pool.submit(run_gloo_rank, rank, 2, tmp_path / "meeting") for rank in range(2)]
        first, second = [future.result(timeout=600) for future in futures]
    for case in ("map", "workers", "after a failure"):
        assert len(first[case]) == len(second[case])
        assert sorted(rows_of(first[case]) + rows_of(second[case])) == list(range(11))
        assert first[case] == first["map"]
    assert rows_of(first["empty"]) == []
    assert sorted(rows_of(second["empty"])) == list(range(6))
    assert all(all(step.is_dummy) for step in first["empty"])
    assert first["empty without dummy"].startswith("ValueError: rank 0 has no row")
    assert second["empty without dummy"].startswith(AlignmentError.__name__)
    assert first["empty without join"] == second["empty without join"] == []
    # Row 4 is on rank 0.
    assert first["failing"].startswith("KeyError")
    assert second["failing"].startswith(AlignmentError.__name__)


# Training


class Predictor(nn.Module):
    """Logits of the next token from the token alone: rows are independent without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11)

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(batch["input_ids"])))
        return F.cross_entropy(logits[0], batch["shift_labels"][0], reduction="sum")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_averaged_gradient_is_the_token_mean_of_all_rows(num_ranks: int) -> None:
    torch.manual_seed(0)
    model = Predictor().double()
    collator = PackingCollator(pad_multiple=4, shift_labels=True)
    dataset = Rows(LENGTHS)
    spec = StreamSpec(plan=PlanSpec(max_tokens=32), microbatches_per_step=3, window_rows=4)
    parameters = list(model.parameters())

    def without_number(samples: list[dict[str, Any]]) -> dict[str, Any]:
        columns = ("input_ids", "labels")
        return collator([{name: sample[name] for name in columns} for sample in samples])

    def work(coordinator: Coordinator) -> list[tuple[tuple[int, ...], tuple[Tensor, ...]]]:
        loader: OnlineBatchLoader[Any, dict[str, Any]] = OnlineBatchLoader(
            dataset,
            spec,
            collate_fn=without_number,
            coordinator=coordinator,
            dummy=collator.dummy if num_ranks == 3 else None,
        )
        found = []
        for step in loader:
            losses = [scale * model.loss_sum(batch) for batch, scale in step.scaled()]
            gradients = torch.autograd.grad(sum(losses, torch.zeros(())), parameters)
            found.append((tuple(itertools.chain(*step.rows)), gradients))
        return found

    ranks = run_ranks(num_ranks, work)
    for aligned in zip(*ranks, strict=True):
        averaged = [sum(parts) / num_ranks for parts in zip(*(g for _, g in aligned), strict=True)]
        rows = [dataset[row] for numbers, _ in aligned for row in numbers]
        batch = without_number(rows)
        num_trained = int((batch["shift_labels"] != -100).sum())
        loss = model.loss_sum(batch) / num_trained
        expected = torch.autograd.grad(loss, parameters)
        for found, wanted in zip(averaged, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_limits_of_microbatches_hold() -> None:
    for step in make(Rows(LENGTHS)):
        for rows in step.rows:
            lengths = [LENGTHS[row] for row in rows]
            assert len(rows) == 1 or len(rows) * max(lengths) <= 24


def test_a_step_is_printed_without_its_tensors() -> None:
    step = next(iter(make(Rows([3, 2]))))
    assert "num_trained" in repr(step) and "microbatches=" not in repr(step)
