"""Token budgets behind an existing DataLoader: rows, gradients, order, resume, counts."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import AlignmentError, Coordinator
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.drop_in import OnlineBatches, online_batches, stream_spec
from nemo_like.torch_data.online import OnlineBatchLoader
from nemo_like.torch_data.packed_collate import PackingCollator
from nemo_like.torch_data.torchtitan import TitanBatches
from tests.torch_data.online_ranks import run_ranks

VOCAB = 17
LENGTHS = np.random.default_rng(5).integers(2, 30, 41).tolist()


def rows(lengths: list[int] = LENGTHS, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of random tokens, some of whose labels are masked."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        input_ids = torch.randint(VOCAB, (length,), generator=generator)
        is_masked = torch.rand(length, generator=generator) < 0.4
        made.append({"input_ids": input_ids, "labels": input_ids.masked_fill(is_masked, -100)})
    return made


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collate_fn as a user writes it."""
    length = max(len(sample["input_ids"]) for sample in samples)
    values = {"input_ids": 0, "labels": -100}
    return {
        name: torch.stack([F.pad(s[name], (0, length - len(s[name])), value=v) for s in samples])
        for name, v in values.items()
    }


def pad_left(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    flipped = [{name: value.flip(0) for name, value in sample.items()} for sample in samples]
    return {name: value.flip(1) for name, value in pad(flipped).items()}


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).double()


def loss_sum(net: nn.Module, batch: Any) -> Tensor:
    """Sum of the losses of the next tokens; the model sees each token alone, also padding."""
    logits = net(batch["input_ids"])
    if "shift_labels" in batch:
        return F.cross_entropy(logits[0], batch["shift_labels"][0], reduction="sum")
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")


def gradient_of_all(samples: list[dict[str, Any]]) -> Tensor:
    """Gradient of the mean token loss of all rows in one padded batch."""
    net = model()
    batch = pad(samples)
    num_items = int((batch["labels"][:, 1:] != -100).sum())
    (loss_sum(net, batch) / num_items).backward()
    return nn.utils.parameters_to_vector([p.grad for p in net.parameters()])  # pyright: ignore[reportArgumentType]


def accumulate(batches: OnlineBatches, net: nn.Module) -> list[Tensor]:
    """Return the gradient of each step of a loop that calls backward for every microbatch."""
    gradients = []
    for batch in batches:
        (loss_sum(net, batch) / batch.num_items).backward()
        if batch.is_last:
            parts = [p.grad for p in net.parameters()]
            gradients.append(nn.utils.parameters_to_vector(parts))  # pyright: ignore[reportArgumentType]
            net.zero_grad()
    return gradients


ONE_STEP = stream_spec(64, microbatches_per_step=40, oversize="singleton")
"""All rows of a rank are in one step."""


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("collate_fn", [pad, pad_left, PackingCollator(shift_labels=True)])
def test_the_gradient_is_that_of_one_batch_of_all_rows(num_ranks: int, collate_fn: Any) -> None:
    samples = rows()
    nets = [model() for _ in range(num_ranks)]
    spec = ONE_STEP
    if isinstance(collate_fn, PackingCollator):
        spec = stream_spec(64, packed=True, microbatches_per_step=40)

    def run(coordinator: Coordinator) -> list[Tensor]:
        loader = DataLoader(samples, batch_size=4, shuffle=True, collate_fn=collate_fn)  # pyright: ignore[reportArgumentType]
        batches = online_batches(loader, spec, coordinator=coordinator)
        return accumulate(batches, nets[coordinator.rank])

    gradients = run_ranks(num_ranks, run)
    assert {len(steps) for steps in gradients} == {1}
    # DDP averages over ranks.
    averaged = torch.stack([steps[0] for steps in gradients]).mean(0)
    torch.testing.assert_close(averaged, gradient_of_all(samples), rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    num_ranks=st.integers(1, 3),
    kind=st.sampled_from(["online", "pool", "token_budget", "dyn_bsz"]),
    per_step=st.integers(1, 3),
)
def test_every_row_is_trained_once_in_steps_of_equal_size(
    lengths: list[int], num_ranks: int, kind: Any, per_step: int
) -> None:
    spec = stream_spec(24, kind=kind, microbatches_per_step=per_step, window_rows=4)

    def run(coordinator: Coordinator) -> list[list[tuple[int, ...]]]:
        loader = DataLoader(rows(lengths), batch_size=2, collate_fn=pad)  # pyright: ignore[reportArgumentType]
        batches = online_batches(loader, spec, coordinator=coordinator, lengths=lengths)
        known = len(batches)
        steps: list[list[tuple[int, ...]]] = []
        for batch in batches:
            if batch.index == 0:
                steps.append([])
            steps[-1].append(batch.rows)
            assert batch.is_dummy == (not batch.rows)
        assert known == sum(map(len, steps))
        assert batches.epoch == 1
        return steps

    ranks = run_ranks(num_ranks, run)
    assert {len(microbatches) for steps in ranks for microbatches in steps} == {per_step}
    assert len({len(steps) for steps in ranks}) == 1
    trained = [row for steps in ranks for step in steps for batch in step for row in batch]
    assert sorted(trained) == list(range(len(lengths)))


def test_the_options_of_the_dataloader_are_used() -> None:
    initialized: list[int] = []
    loader = DataLoader(
        rows(),  # pyright: ignore[reportArgumentType]
        batch_size=5,
        shuffle=True,
        collate_fn=pad,
        num_workers=1,
        persistent_workers=True,
        timeout=60,
        worker_init_fn=initialized.append,
        multiprocessing_context="fork",
        pin_memory=True,
    )
    batches = online_batches(loader, 64, seed=1)
    orders = [[batch.rows for batch in batches] for _ in range(2)]
    assert orders[0] != orders[1]
    again = online_batches(loader, 64, seed=1)
    assert orders == [[batch.rows for batch in again] for _ in range(2)]
    for epoch in orders:
        assert sorted(row for rows in epoch for row in rows) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sequential_sampler_keeps_the_order_and_a_random_one_does_not(shuffle: bool) -> None:
    loader = DataLoader(rows(), shuffle=shuffle, collate_fn=pad)  # pyright: ignore[reportArgumentType]
    spec = stream_spec(64, kind="token_budget", window_rows=1)
    order = [row for batch in online_batches(loader, spec) for row in batch.rows]
    assert (order == sorted(order)) == (not shuffle)


def test_a_sampler_of_the_user_chooses_the_rows_and_resumes() -> None:
    weights = [1.0 if row % 2 else 0.0 for row in range(len(LENGTHS))]
    sampler = WeightedRandomSampler(weights, 30)
    loader = DataLoader(rows(), batch_size=3, sampler=sampler, collate_fn=pad)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(8)
    state = torch.get_rng_state()
    expected = [batch.rows for batch in online_batches(loader, 40)]
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [row for rows in expected for row in rows]
    assert len(drawn) == 30
    assert all(row % 2 for row in drawn)
    interrupted = online_batches(loader, 40)
    iterator = iter(interrupted)
    first = [next(iterator).rows for _ in range(3)]
    resumed = online_batches(loader, 40)
    resumed.load_state_dict(interrupted.state_dict())
    assert first + [batch.rows for batch in resumed] == expected
    other = DataLoader(
        rows(),  # pyright: ignore[reportArgumentType]
        batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 41, 30), 3, False),
        collate_fn=pad,
    )
    with pytest.raises(ValueError, match="other indices"):
        online_batches(other, 40).load_state_dict(interrupted.state_dict())


def test_ranks_share_the_indices_of_a_sampler_and_a_distributed_sampler_repeats_no_row() -> None:
    def run(coordinator: Coordinator, sampler: Any) -> list[int]:
        loader = DataLoader(rows(), sampler=sampler, collate_fn=pad)  # pyright: ignore[reportArgumentType]
        batches = online_batches(loader, 64, coordinator=coordinator)
        return [row for batch in batches for row in batch.rows]

    for make in (
        # The ranks are threads, which would share the global generator.
        lambda rank: WeightedRandomSampler(
            [1.0] * 41, 41, replacement=False, generator=torch.Generator()
        ),
        lambda rank: DistributedSampler(rows(), 2, rank, shuffle=True),  # pyright: ignore[reportArgumentType]
    ):
        ranks = run_ranks(2, lambda coordinator: run(coordinator, make(coordinator.rank)))  # noqa: B023
        assert sorted(ranks[0] + ranks[1]) == list(range(41))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_state_of_all_ranks_continues_exactly(num_ranks: int) -> None:
    spec = stream_spec(48, microbatches_per_step=2)

    def make(coordinator: Coordinator) -> OnlineBatches:
        loader = DataLoader(rows(), shuffle=True, collate_fn=pad)  # pyright: ignore[reportArgumentType]
        return online_batches(loader, spec, coordinator=coordinator)

    def run(coordinator: Coordinator) -> None:
        expected = [(batch.rows, batch.num_items) for batch in make(coordinator)]
        interrupted = make(coordinator)
        found = []
        for batch in interrupted:
            found.append((batch.rows, batch.num_items))
            if batch.is_last and len(found) >= 4:
                break
            if not batch.is_last:
                with pytest.raises(ValueError, match="is_last"):
                    interrupted.state_dict()
        resumed = make(coordinator)
        resumed.load_state_dict(interrupted.state_dict())
        found += [(batch.rows, batch.num_items) for batch in resumed]
        assert found == expected

    run_ranks(num_ranks, run)


def test_a_microbatch_moves_with_its_attributes() -> None:
    loader = DataLoader(rows(), collate_fn=pad)  # pyright: ignore[reportArgumentType]
    batch = next(iter(online_batches(loader, 64, device="meta")))
    assert batch["input_ids"].device.type == "meta"
    moved = batch.to("meta")
    assert (moved.index, moved.num_items, moved.rows) == (0, batch.num_items, batch.rows)
    averaged = next(iter(online_batches(loader, stream_spec(64, microbatches_per_step=3))))
    mean = online_batches(loader, stream_spec(64, microbatches_per_step=3), accumulates_mean=True)
    assert next(iter(mean)).num_items == pytest.approx(averaged.num_items / 3)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from rows()


def test_an_iterable_dataset_has_no_length() -> None:
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=pad)
    batches = online_batches(loader, 64, lengths=LENGTHS)
    with pytest.raises(TypeError, match="iterable"):
        len(batches)
    assert sum(len(batch.rows) for batch in batches) == len(LENGTHS)
    with pytest.raises(TypeError, match="lengths"):
        len(online_batches(DataLoader(rows()), 64))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("packed", [False, True])
def test_the_interface_of_torchtitan_gives_shifted_labels_and_resumes(packed: bool) -> None:
    samples = rows()
    collate = PackingCollator() if packed else pad

    def make() -> TitanBatches:
        loader = DataLoader(samples, shuffle=True, collate_fn=collate)  # pyright: ignore[reportArgumentType]
        return TitanBatches(online_batches(loader, stream_spec(64, packed=packed)))

    first = make()
    # More than one epoch.
    expected = list(islice(first, 60))
    for inputs, labels in expected:
        following = inputs["input"][:, 1:]
        has_label = labels[:, :-1] != -100
        assert torch.equal(labels[:, :-1][has_label], following[has_label])
        assert (labels[:, -1] == -100).all()
    assert ("positions" in expected[0][0]) == packed
    interrupted = make()
    iterator = iter(interrupted)
    for _ in range(17):
        next(iterator)
    resumed = make()
    resumed.load_state_dict({})
    resumed.load_state_dict(interrupted.state_dict())
    for (inputs, labels), (inputs2, labels2) in zip(expected[17:], resumed, strict=False):
        assert torch.equal(inputs["input"], inputs2["input"])
        assert torch.equal(labels, labels2)
    with pytest.raises(ValueError, match="as many ranks"):
        resumed.load_state_dict({"dp_rank_0": "{}", "world_size": 2})


class Stream(IterableDataset[Any]):
    """Rows of tensors, with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        for number, row in enumerate(rows()[self.position :], self.position):
            self.position += 1
            # Tensors, arrays, lists, and a number of NumPy.
            values = row if number % 2 else {name: np.asarray(row[name]) for name in row}
            yield {**values, "metadata": {number: [np.float32(0.1 * number), "text"]}}
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("make", [rows, Stream])
def test_a_position_in_a_file_continues_exactly(make: Any, tmp_path: Path) -> None:
    def batches() -> OnlineBatches:
        return online_batches(DataLoader(make(), collate_fn=collate), 48)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        tensors = [{k: torch.as_tensor(s[k]) for k in ("input_ids", "labels")} for s in samples]
        return {**pad(tensors), "metadata": [sample.get("metadata") for sample in samples]}

    def content(batch: Any) -> Any:
        return batch.rows, batch["input_ids"].tolist(), batch["metadata"]

    expected = [content(batch) for batch in batches()]
    for num_done in range(1, len(expected)):
        interrupted = batches()
        iterator = iter(interrupted)
        for _ in range(num_done):
            next(iterator)
        interrupted.save(tmp_path)
        resumed = batches()
        resumed.load(tmp_path)
        rest = [content(batch) for batch in resumed]
        assert rest == expected[num_done:]


def test_the_length_of_each_epoch_of_a_warmup_is_known() -> None:
    spec = stream_spec(64, warmup_steps=20, warmup_init_tokens=30)
    loader = DataLoader(rows(), shuffle=True, collate_fn=pad)  # pyright: ignore[reportArgumentType]
    batches = online_batches(loader, spec, lengths=LENGTHS)
    known = []
    for _ in range(3):
        known.append(len(batches))
        assert known[-1] == len(list(batches))
    assert known[0] > known[2]


def test_the_indices_of_a_sampler_do_not_depend_on_the_state_of_numpy() -> None:
    class Shuffled(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(np.random.permutation(41).tolist())

    def epochs(seed: int) -> list[list[tuple[int, ...]]]:
        # A process of each rank has other random numbers.
        np.random.seed(seed)
        batches = online_batches(DataLoader(rows(), sampler=Shuffled(), collate_fn=pad), 64)  # pyright: ignore[reportArgumentType]
        return [[batch.rows for batch in batches] for _ in range(2)]

    assert epochs(1) == epochs(2)
    assert epochs(1)[0] != epochs(1)[1]


def test_an_iteration_that_was_left_within_a_step_has_no_effect_on_the_next_one() -> None:
    def make() -> OnlineBatches:
        loader = DataLoader(rows(), shuffle=True, collate_fn=pad)  # pyright: ignore[reportArgumentType]
        return online_batches(loader, stream_spec(48, microbatches_per_step=2))

    batches = make()
    next(iter(batches))
    again = iter(batches)
    begin = batches.state_dict()
    assert [batch.rows for batch in again] == [batch.rows for batch in make()]
    resumed = make()
    resumed.load_state_dict(begin)
    assert [batch.rows for batch in resumed] == [batch.rows for batch in make()]


@pytest.mark.parametrize("name", ["labels", "targets"])
def test_a_dummy_has_no_gradient_whatever_its_labels_and_its_collator(name: str) -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        # The collator modifies its samples.
        return {
            "input_ids": torch.stack([sample.pop("input_ids")[0] for sample in samples]),
            name: torch.stack([sample.pop("value") for sample in samples]),
        }

    def sample(number: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((9,), number), "value": torch.tensor(float(number))}

    class Values(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return sample(index)

    weight = torch.ones((), requires_grad=True)
    batches = online_batches(
        DataLoader(Values(), collate_fn=collate),
        stream_spec(9, microbatches_per_step=4),
        num_trained_of=lambda sample: 1,
        loss_scaling="approx",
    )
    gradients = []
    for batch in batches:
        loss = ((weight * batch["input_ids"] - 2 * batch[name]) ** 2).sum()
        (loss / batch.num_items).backward()
        if batch.is_last:
            assert weight.grad is not None
            gradients.append((batch.step.num_rows, float(weight.grad)))
            weight.grad = None
    assert [num_rows for num_rows, _ in gradients] == [4, 1]
    # The derivative of (w i - 2 i)^2 at w = 1 is -2 i^2.
    sums = [num_rows * gradient for num_rows, gradient in gradients]
    assert sum(sums) == pytest.approx(-2 * (1 + 4 + 9 + 16))


def test_a_dataloader_of_accelerate_fetches_as_many_rows_at_a_time() -> None:
    from accelerate.data_loader import prepare_data_loader

    fetched: list[int] = []

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return len(LENGTHS)

        def __getitem__(self, index: int) -> Any:
            return rows()[index]

        def __getitems__(self, indices: list[int]) -> Any:
            fetched.append(len(indices))
            return [rows()[index] for index in indices]

    loader = prepare_data_loader(DataLoader(Rows(), batch_size=8, collate_fn=pad))
    list(online_batches(loader, 64, seed_rows=False))
    assert fetched == [8] * 5 + [1]


# Counts of samples


@pytest.mark.parametrize("name", ["online", "drop_in"])
def test_samples_of_one_row_in_two_dimensions_count_their_tokens(name: str) -> None:
    samples = [{key: value[None] for key, value in row.items()} for row in rows()]

    def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return pad([{key: value[0] for key, value in row.items()} for row in batch])

    if name == "online":
        spec = stream_spec(64)
        steps = OnlineBatchLoader(samples, spec, collate_fn=collate)
        batches = [batch for step in steps for batch in step.microbatches]
    else:
        batches = list(online_batches(DataLoader(samples, collate_fn=collate), 64))  # pyright: ignore[reportArgumentType]
    assert all(batch["input_ids"].numel() <= 64 for batch in batches)
    wrong = [{"input_ids": torch.ones(2, 5)}]
    with pytest.raises(ValueError, match=r"input_ids of a sample has the shape \[2, 5\]"):
        list(OnlineBatchLoader(wrong, stream_spec(64), collate_fn=list))


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("has_labels", [False, True])
def test_masked_tokens_that_the_collator_removes_do_not_count(
    is_left: bool, has_labels: bool
) -> None:
    samples = []
    for row in rows():
        padding = (40 - len(row["input_ids"]), 0) if is_left else (0, 40 - len(row["input_ids"]))
        ones = torch.ones_like(row["input_ids"])
        labels = row["labels"] if has_labels else row["input_ids"]
        samples.append(
            {
                "input_ids": F.pad(row["input_ids"], padding),
                "attention_mask": F.pad(ones, padding),
                # Without masked labels the padding has labels, which the collator removes.
                "labels": F.pad(labels, padding, value=-100 if has_labels else 0),
            }
        )
    collate = PackingCollator()
    for scaling in ("approx", "exact"):
        loader = OnlineBatchLoader(
            samples, stream_spec(64, packed=True), collate_fn=collate, loss_scaling=scaling
        )
        for step in loader:
            real = sum(LENGTHS[row] for row in step.rows[0])
            assert step.microbatches[0]["input_ids"].shape[1] == real <= 64
            assert step.metrics["packing/utilization"] == pytest.approx(real / 64)
            labels = step.microbatches[0]["labels"]
            assert step.num_trained == int((labels != -100).sum())


def test_labels_of_classification_and_missing_labels_count() -> None:
    def trained(samples: list[dict[str, Any]]) -> int:
        loader = OnlineBatchLoader(samples, stream_spec(64), collate_fn=list)
        return sum(step.num_trained for step in loader)

    ids = [1, 2, 3, 4]
    assert trained([{"input_ids": ids, "labels": 3}] * 2) == 2
    assert trained([{"input_ids": ids, "labels": torch.tensor(3)}] * 2) == 2
    assert trained([{"input_ids": ids, "labels": [0]}] * 2) == 2
    assert trained([{"input_ids": ids, "labels": None}] * 2) == 6
    assert trained([{"input_ids": ids, "labels": [[-100, 5, -100, 7]]}]) == 2
    assert trained([{"input_ids": ids, "labels": [5, 6, -100]}]) == 2


def test_a_step_without_loss_is_a_warning_and_has_a_finite_divisor() -> None:
    samples = [{"input_ids": torch.ones(4).long(), "labels": torch.full((4,), -100)}]
    batches = online_batches(DataLoader(samples, collate_fn=pad), 64)  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match="no token with loss"):
        batch = next(iter(batches))
    assert (batch.loss_scale, batch.num_items) == (0.0, 1.0)


def test_rows_without_tokens_are_refused_or_dropped_and_counted() -> None:
    samples = rows([3, 0, 5, 0, 4])
    with pytest.raises(ValueError, match="length of row 1 is 0"):
        list(OnlineBatchLoader(samples, stream_spec(64), collate_fn=list, shuffle=False))
    loader = OnlineBatchLoader(samples, stream_spec(64), collate_fn=list, empty_rows="drop")
    steps = list(loader)
    assert sorted(row for step in steps for rows in step.rows for row in rows) == [0, 2, 4]
    assert sum(step.metrics["packing/num_dropped"] for step in steps) == 2


def test_metadata_is_an_error_dropped_or_kept() -> None:
    samples = [{**row, "id": f"row {number}"} for number, row in enumerate(rows()[:3])]
    with pytest.raises(ValueError, match=r"unknown columns id.*metadata"):
        PackingCollator()(samples)
    assert "id" not in PackingCollator(metadata="drop")(samples)
    assert PackingCollator(metadata="list")(samples)["id"] == ["row 0", "row 1", "row 2"]


def test_messages_name_the_argument() -> None:
    with pytest.raises(ValueError, match="max_tokens = 8"):
        list(online_batches(DataLoader(rows(), collate_fn=pad), 8))  # pyright: ignore[reportArgumentType]


def test_a_collator_that_fails_on_one_rank_stops_all() -> None:
    def run(coordinator: Coordinator) -> str:
        def collate(samples: list[Any]) -> Any:
            if coordinator.rank == 1:
                raise KeyError("column")
            return pad(samples)

        loader = DataLoader(rows(), collate_fn=collate)  # pyright: ignore[reportArgumentType]
        try:
            list(online_batches(loader, 64, coordinator=coordinator))
        except (KeyError, AlignmentError) as error:
            return type(error).__name__
        return "no error"

    assert run_ranks(2, run) == ["AlignmentError", "KeyError"]


# Ranks whose rows have other lengths


@pytest.mark.parametrize("seed", range(3))
def test_ranks_with_shorter_rows_take_part_in_every_step(seed: int) -> None:
    generator = random.Random(seed)
    shards = [
        [generator.randint(900, 1100) for _ in range(300)],
        [generator.randint(80, 120) for _ in range(300)],
    ]
    lengths = [length for pair in zip(*shards, strict=True) for length in pair]
    spec = StreamSpec(plan=PlanSpec(layout="padded", max_tokens=8192))

    def run(coordinator: Coordinator) -> list[int]:
        samples = [{"input_ids": range(length)} for length in lengths]
        loader = OnlineBatchLoader(
            samples, spec, collate_fn=len, coordinator=coordinator, shuffle=False, seed_rows=False
        )
        return [sum(map(len, step.rows)) for step in loader]

    steps = run_ranks(2, run)
    assert [sum(counts) for counts in steps] == [300, 300]
    num_empty = sum(count == 0 for count in steps[1])
    assert num_empty <= 0.05 * len(steps[1])
    # The rank with the long rows decides how many steps there are; it is not slowed down.
    alone = OnlineBatchLoader(
        [{"input_ids": range(length)} for length in shards[0]],
        spec,
        collate_fn=len,
        shuffle=False,
        seed_rows=False,
    )
    assert len(steps[0]) <= len(list(alone)) + 1
