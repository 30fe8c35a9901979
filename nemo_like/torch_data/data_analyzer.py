"""Numbers of all samples of a data set, such as a difficulty, computed once and in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nemo_like.integer_math import check_integer
from nemo_like.torch_data.curriculum import file_write_ordered, sample_sort


@dataclass(eq=False)
class DataAnalyzer:
    """Computes metrics of all samples on all ranks, and writes them and their order to files.

    For each metric NAME two files in `save_path`, for `numpy.load(path, mmap_mode="r")`:

    * `NAME_sample_to_metric.npy`, float64 [N]: the metric of each sample, a difficulty for
      `curriculum_order` and `CurriculumSampler`;
    * `NAME_metric_to_sample.npy`, float64 [N, 2]: the metric and the index of each sample, by
      increasing metric, then by index. Samples of a range are found with `numpy.searchsorted`.

    Every rank reads a contiguous share of the samples with DataLoader workers. The files are the
    same for any number of ranks and workers. Raises ValueError unless there are equally many names
    and functions.
    """

    dataset: Any
    """A map-style data set with `len()`."""
    metric_names: Sequence[str]
    metric_functions: Sequence[Callable[[Any], float]]
    """A function of a sample for each name."""
    save_path: str | Path
    _: KW_ONLY
    num_workers: int = 0
    """Worker processes of this rank."""
    batch_size: int = 256
    """Samples that a worker reads at a time."""
    comm_group: dist.ProcessGroup | None = None
    """The process group; None is the default group, or this process alone without one."""
    device: torch.device | str = "cpu"
    """A device that the backend of the group supports."""

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)
        if len(self.metric_names) != len(self.metric_functions) or not self.metric_names:
            raise ValueError(
                f"{len(self.metric_names)} metric_names have {len(self.metric_functions)}"
                " metric_functions: give one function for each name"
            )

    def run_map_reduce(self) -> None:
        """Compute the metrics and write the files. Collective over `comm_group`.

        Raises ValueError on every rank for a metric that is NaN, and what the data set and the
        functions raise on their rank.
        """
        group = self.comm_group or (dist.group.WORLD if dist.is_initialized() else None)
        rank, num_ranks = (group.rank(), group.size()) if group else (0, 1)
        num_samples = len(self.dataset)
        start, stop = (num_samples * share // num_ranks for share in (rank, rank + 1))
        loader = DataLoader(
            range(start, stop),  # type: ignore[arg-type]
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=partial(_metrics, self.dataset, self.metric_functions),
        )
        # [n, metrics]
        values = torch.cat([torch.empty((0, len(self.metric_names)), dtype=torch.float64), *loader])
        values = values.to(self.device)
        samples = torch.arange(start, stop, dtype=torch.float64, device=self.device)
        directory = Path(self.save_path)
        if rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
        for name, column in zip(self.metric_names, values.T, strict=True):
            keys = sample_sort(torch.stack([column, samples], dim=1), group)
            file_write_ordered(column, directory / f"{name}_sample_to_metric.npy", group)
            file_write_ordered(keys, directory / f"{name}_metric_to_sample.npy", group)


def _metrics(
    dataset: Any, functions: Sequence[Callable[[Any], float]], indices: Sequence[int]
) -> torch.Tensor:
    """Return the metrics of samples, float64 [n, metrics]."""
    samples = [dataset[index] for index in indices]
    values = [[float(function(sample)) for function in functions] for sample in samples]
    return torch.tensor(values, dtype=torch.float64)
