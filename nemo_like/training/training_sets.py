"""The training rows of a run: `data.train_path`, mixed with `data.train_sets` by weight."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_like.config.schema import MAIN_SET, RunConfig
from nemo_like.data.datasets import RowSchema
from nemo_like.data.mixture import Mixture
from nemo_like.data.row_columns import check_columns
from nemo_like.data.rows import PassRateFilter, Rows, load_rows
from nemo_like.run.progress import Progress


def load_training(config: RunConfig, schema: RowSchema, progress: Progress) -> Rows:
    """Read the training rows. Raises ConfigError for a missing or empty file, or a bad line."""
    check_columns(config.data.columns)
    sets = {name: load_set(config, schema, name, progress) for name in training_files(config)}
    return mixed_rows(sets, config.data.train_weights)


def training_files(config: RunConfig) -> dict[str, str]:
    """Return the path of each training set by its name."""
    return {MAIN_SET: config.data.train_path, **config.data.train_sets}


def training_name(config: RunConfig) -> str:
    """Return the training rows by name, for messages: the file, or the sets of a mixture."""
    names = list(training_files(config))
    return config.data.train_path if len(names) == 1 else f"the training sets {', '.join(names)}"


def load_set(config: RunConfig, schema: RowSchema, name: str, progress: Progress) -> Rows:
    """Read one training set. Raises ConfigError for a missing or empty file, or a bad line."""
    data = config.data
    key = training_key(name)
    with progress.phase(f"reading {key}") as phase:
        rows = load_rows(
            training_files(config)[name],
            schema,
            max_rows=data.max_train_rows,
            key=key,
            columns=data.columns,
            selection=_selection(config),
            advance=phase.advance,
        )
    if rows.num_left_out:
        progress.print_line(
            f"{key}: data.min_pass_rate and data.max_pass_rate leave out {rows.num_left_out:,}"
            f" rows, {len(rows):,} are left"
        )
    return rows


def describe_mixture(mixture: Mixture) -> str:
    """Describe the shares of the sources.

    Example: `mixture: train 0.7 (0.9 passes per epoch), code 0.3 (2.1 passes per epoch)`.
    """
    total = sum(mixture.weights)
    parts = []
    for name, size, weight in zip(mixture.names, mixture.sizes, mixture.weights, strict=True):
        passes = weight / total * sum(mixture.sizes) / size
        parts.append(f"{name} {weight / total:.4g} ({passes:.3g} passes per epoch)")
    return f"mixture: {', '.join(parts)}"


def _selection(config: RunConfig) -> PassRateFilter | None:
    """Return the filter of the training rows; None if all are kept."""
    data = config.data
    if data.min_pass_rate is None and data.max_pass_rate is None:
        return None
    return PassRateFilter(
        minimum=0.0 if data.min_pass_rate is None else data.min_pass_rate,
        maximum=1.0 if data.max_pass_rate is None else data.max_pass_rate,
    )


def training_key(name: str) -> str:
    """Return the config key of a training set."""
    return "data.train_path" if name == MAIN_SET else f"data.train_sets.{name}"


def mixed_rows(sets: Mapping[str, Rows], weights: Mapping[str, float]) -> Rows:
    """Return the rows of several sets with their mixture; those of a single one unchanged.

    Without `weights` these are the numbers of rows, so each row is visited once per epoch.
    """
    if len(sets) == 1:
        return next(iter(sets.values()))
    sizes = tuple(map(len, sets.values()))
    by_name = weights or dict(zip(sets, map(float, sizes), strict=True))
    mixture = Mixture(names=tuple(sets), sizes=sizes, weights=tuple(by_name[name] for name in sets))
    first, *others = sets.values()
    return first.mixed_with(others, mixture)
