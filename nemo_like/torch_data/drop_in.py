"""Microbatches by token budget from an existing DataLoader, for an existing training loop.

The loop iterates over `online_batches(dataloader, spec)`, divides the sum of the token losses by
`batch.num_items`, and steps the optimizer after a microbatch with `is_last`. docs/library.md has
the changed lines of each trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import (
    Coordinator,
    ProcessGroupCoordinator,
    SingleCoordinator,
)
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.feeds import WorkerOptions
from nemo_like.torch_data.online import OnlineBatchLoader, OnlineStep
from nemo_like.torch_data.packed_batch import IGNORE_INDEX
from nemo_like.torch_data.packed_collate import PackingCollator

Kind = Literal["online", "pool", "token_budget", "dyn_bsz"]

_KINDS: dict[str, tuple[Selection, dict[str, int]]] = {
    "online": ("best_fit", {}),
    "pool": ("prefer_closest", {"window_rows": 32, "window_tokens": 0}),
    "token_budget": ("in_order", {}),
    "dyn_bsz": ("first_fit", {"window_rows": 200}),
}
"""Kind -> its rule, and the defaults that differ from `StreamSpec`."""


def stream_spec(
    max_tokens: int,
    *,
    kind: Kind = "online",
    packed: bool = False,
    microbatches_per_step: int = 1,
    oversize: Literal["error", "drop", "singleton"] = "error",
    **settings: Any,
) -> StreamSpec:
    """Return the settings of `kind` for microbatches of `max_tokens` tokens.

    Rows are padded to the longest of their microbatch, or `packed`. `kind` is a value of
    `data.batching.kind`: `online` (ODB), `pool` (Cosmos-RL), `token_budget` (DeepSpeed) or
    `dyn_bsz` (VeOmni). `settings` are further fields of `StreamSpec`. Raises ValueError for wrong
    values.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind is one of {', '.join(_KINDS)}; got {kind!r}")
    selection, defaults = _KINDS[kind]
    # Every step then has equally many microbatches, as trainers with gradient accumulation expect.
    plan = PlanSpec(
        layout="packed" if packed else "padded",
        max_tokens=max_tokens,
        oversize=oversize,
        microbatch_multiple=microbatches_per_step,
    )
    values = {"selection": selection, **defaults, **settings}
    return StreamSpec(plan=plan, microbatches_per_step=microbatches_per_step, **values)


def spec_of_trainer(spec: StreamSpec | int, owner: str, setting: str, per_step: int) -> StreamSpec:
    """Return `spec`, or the spec of that many tokens, for a trainer that accumulates `per_step`
    microbatches by `setting` of its object `owner`. Raises ValueError for another number.
    """
    if not isinstance(spec, StreamSpec):
        spec = stream_spec(spec, microbatches_per_step=per_step)
    if spec.microbatches_per_step != per_step:
        raise ValueError(
            f"the spec has microbatches_per_step={spec.microbatches_per_step} and the {owner} has"
            f" {setting}={per_step}; make them equal"
        )
    return spec


class OnlineMicrobatch(dict[str, Any]):
    """A microbatch, with its place in the optimizer step as attributes."""

    step: OnlineStep[Any]
    """The step that it belongs to."""
    index: int
    """Number of the microbatch in the step."""
    num_items: float
    """Divisor of the sum of token losses, `num_items_in_batch` of transformers: tokens with loss of
    the step over all ranks / ranks. Infinite for a dummy.
    """
    loss_scale: float
    """Factor of the sum of token losses: 1 / `num_items`, and 0 for a dummy."""

    @classmethod
    def of(cls, step: OnlineStep[Any], index: int) -> OnlineMicrobatch:
        """Return microbatch `index` of `step`. A dummy has no label with loss."""
        batch = step.microbatches[index]
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"the collate_fn returned a {type(batch).__name__}; a microbatch is a mapping of"
                " tensors. Return a mapping, or use OnlineBatchLoader, which takes any object"
            )
        made = cls(batch)
        made.step = step
        made.index = index
        made.loss_scale = step.loss_scale
        # The loss of a step without labels is 0 / 1, not 0 / 0.
        made.num_items = 1 / step.loss_scale if step.loss_scale else 1.0
        if step.is_dummy[index]:
            made.loss_scale = 0.0
            # A label column of another name keeps the labels of the row, which must not train.
            made.num_items = math.inf
            for name in ("labels", "shift_labels"):
                if isinstance(made.get(name), Tensor):
                    made[name] = torch.full_like(made[name], IGNORE_INDEX)
        return made

    @property
    def is_last(self) -> bool:
        """True for the last microbatch of an optimizer step."""
        return self.index == len(self.step.microbatches) - 1

    @property
    def is_dummy(self) -> bool:
        """True without rows: it exists because another rank has a microbatch."""
        return self.step.is_dummy[self.index]

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of its rows: indices of a map-style dataset."""
        return self.step.rows[self.index]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> OnlineMicrobatch:
        """Return the microbatch with its tensors on `device`."""
        moved = type(self)(
            (name, value.to(device, non_blocking=non_blocking) if _is_tensor(value) else value)
            for name, value in self.items()
        )
        vars(moved).update(vars(self))
        return moved


@dataclass
class OnlineBatches:
    """Microbatches of one rank, one epoch per iteration.

    Every step has `microbatches_per_step` of them on every rank; dummies, without a label with
    loss, complete the last ones of an epoch.
    """

    loader: OnlineBatchLoader[Any, Any]
    """The same as steps."""
    lengths: Sequence[int] | None = None
    """Lengths of all rows of the dataset, if `len` shall be known."""
    device: torch.device | str | None = None
    """Device of the tensors; None leaves them where `collate_fn` made them."""
    pin_memory: bool = False
    accumulates_mean: bool = False
    """The training loop divides each loss by the number of microbatches of a step, as Lightning and
    `Accelerator.accumulate` do; `loss_scale` and `num_items` cancel it.
    """

    def __post_init__(self) -> None:
        self._is_mid_step = False

    @property
    def dataset(self) -> Any:
        """The dataset of the DataLoader."""
        return self.loader.dataset

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches of each rank in an optimizer step."""
        return self.loader.spec.microbatches_per_step

    @property
    def epoch(self) -> int:
        """The epoch of the current position."""
        return self.loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`; without effect if it is the epoch of a loaded state."""
        if epoch != self.epoch:
            self._is_mid_step = False
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[OnlineMicrobatch]:
        """Iterate over the microbatches of the epoch, or over the rest after a loaded state."""
        self._is_mid_step = False
        return self._microbatches(iter(self.loader))

    def _microbatches(self, steps: Iterator[OnlineStep[Any]]) -> Iterator[OnlineMicrobatch]:
        for step in steps:
            self._is_mid_step = True
            for index in range(len(step.microbatches)):
                batch = self._placed(OnlineMicrobatch.of(step, index))
                self._is_mid_step = not batch.is_last
                yield batch

    def __len__(self) -> int:
        """Number of microbatches of the present epoch. Raises TypeError without `lengths`."""
        return self.num_steps(self.epoch) * self.microbatches_per_step

    def num_steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of `epoch`; it differs a little between epochs.

        The epoch of all ranks is planned for it, from the lengths alone. Raises TypeError if they
        are not known, or if more than lengths decides what a microbatch has.
        """
        if self.lengths is None:
            raise TypeError(
                "the number of microbatches is not known before they are formed; pass lengths, the"
                " length of every row, or limit the run by steps"
            )
        return self.loader.count_steps(self.lengths, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank after the last step: JSON values, see
        `OnlineBatchLoader`.

        Raises ValueError between the microbatches of a step.
        """
        if self._is_mid_step:
            raise ValueError(
                "the position is between two microbatches of a step; save it after a microbatch"
                " with is_last"
            )
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state` of this rank in the next iteration."""
        self._is_mid_step = False
        self.loader.load_state_dict(state)

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue after the `states` of all ranks of a group of any size, by rank."""
        coordinator = self.loader.coordinator
        if len(states) == coordinator.num_ranks:
            self.load_state_dict(states[coordinator.rank])
        else:
            self._is_mid_step = False
            self.loader.load_global_state(states)

    def save(self, directory: str | Path) -> None:
        """Write the position of this rank to `directory`; every rank calls it.

        The samples of an iterable dataset that wait are part of it: containers of tensors, arrays,
        numbers and texts. Raises TypeError for others.
        """
        path = self._path(directory, self.loader.coordinator.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_to_json(self.state_dict())))

    def load(self, directory: str | Path) -> None:
        """Continue after the positions in `directory`, on any number of ranks.

        Raises ValueError for a missing file.
        """
        states: list[dict[str, Any]] = []
        while not states or len(states) < states[0]["planner"]["num_ranks"]:
            path = self._path(directory, len(states))
            if not path.is_file():
                raise ValueError(f"{path} is missing; save() of every rank writes one such file")
            states.append(json.loads(path.read_text(), object_hook=_from_json))
        self.load_states(states)

    @staticmethod
    def _path(directory: str | Path, rank: int) -> Path:
        return Path(directory) / f"online_batches_{rank}.json"

    def _placed(self, batch: OnlineMicrobatch) -> OnlineMicrobatch:
        if self.accumulates_mean:
            batch.loss_scale *= len(batch.step.microbatches)
            batch.num_items /= len(batch.step.microbatches)
        if self.pin_memory and torch.accelerator.is_available():
            for name, value in batch.items():
                batch[name] = value.pin_memory() if _is_tensor(value) else value
        if self.device is not None:
            batch = batch.to(self.device, non_blocking=self.pin_memory)
        return batch


def online_batches(
    dataloader: DataLoader[Any],
    spec: StreamSpec | int,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    coordinator: Coordinator | None = None,
    lengths: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    accumulates_mean: bool = False,
    **options: Any,
) -> OnlineBatches:
    """Return an iterable of microbatches by token budget over the rows of `dataloader`.

    Its dataset, sampler, workers, `worker_init_fn`, `timeout`, `pin_memory` and `collate_fn` are
    used as they are; its batch size is the number of rows that a worker fetches at a time. Rows are
    dealt to the ranks here, so a `DistributedSampler` is not necessary, and does not repeat rows.

    `spec` comes from `stream_spec`, or is the number of tokens of a microbatch. `coordinator`
    connects the data-parallel ranks; None is all ranks of `torch.distributed` if it is initialized.
    `lengths` of all rows make `len` known. `options` are arguments of `OnlineBatchLoader`; the
    loss is scaled by the labels of the collated microbatches (`loss_scaling="exact"`). Raises
    ValueError for wrong values.
    """
    collate_fn = collate_fn or dataloader.collate_fn
    if not isinstance(spec, StreamSpec):
        spec = stream_spec(spec, packed=isinstance(collate_fn, PackingCollator))
    if isinstance(collate_fn, PackingCollator) and spec.plan.layout != "packed":
        raise ValueError(
            "the collate_fn is a PackingCollator, and the layout of the spec is padded; use"
            " stream_spec(..., packed=True)"
        )
    if spec.plan.microbatch_multiple != spec.microbatches_per_step:
        multiple = spec.microbatches_per_step
        spec = replace(spec, plan=replace(spec.plan, microbatch_multiple=multiple))
    if coordinator is None:
        coordinator = default_coordinator()
    dataset: Any = dataloader.dataset
    loader: OnlineBatchLoader[Any, Any] = OnlineBatchLoader(
        dataset,
        spec,
        collate_fn=collate_fn,
        coordinator=coordinator,
        **{
            "loss_scaling": "exact",
            **_order_options(dataloader),
            **vars(WorkerOptions.of(dataloader)),
            **options,
        },
    )
    return OnlineBatches(
        loader=loader,
        lengths=lengths,
        device=device,
        pin_memory=dataloader.pin_memory,
        accumulates_mean=accumulates_mean,
    )


def default_coordinator() -> Coordinator:
    """Return a coordinator of all ranks of `torch.distributed`, or of one without it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SingleCoordinator()
    device = "cpu"
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    return ProcessGroupCoordinator(device=device)


def _order_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of `OnlineBatchLoader` for the order of the rows of `dataloader`."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {}
    batches: Any = dataloader.batch_sampler
    # accelerate wraps the batch sampler to divide batches over ranks.
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return {"sampler": batches}
    sampler: Any = dataloader.sampler if batches is None else batches.sampler
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if type(sampler) is DistributedSampler:
        return {"shuffle": sampler.shuffle, "seed": sampler.seed}
    is_permutation = isinstance(sampler, RandomSampler) and not sampler.replacement
    if is_permutation and sampler.num_samples == len(dataloader.dataset):  # pyright: ignore[reportArgumentType]
        return {"shuffle": True}
    return {"sampler": sampler}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _to_json(value: Any) -> Any:
    """Return `value` as JSON values: a mapping, with keys of any type, as its items."""
    if isinstance(value, Mapping):
        return {"items": [[name, _to_json(inner)] for name, inner in value.items()]}
    if isinstance(value, list | tuple):
        return list(map(_to_json, value))
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.tolist(), "shape": list(value.shape), "dtype": dtype}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": value.tolist(), "shape": list(value.shape), "dtype": str(value.dtype)}
    return value


def _from_json(value: dict[str, Any]) -> Any:
    """Return what `_to_json` made a JSON object of."""
    if "items" in value:
        return dict(value["items"])
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=dtype).reshape(value["shape"])
    return np.array(value["array"], dtype=value["dtype"]).reshape(value["shape"])
