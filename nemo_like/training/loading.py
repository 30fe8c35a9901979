"""The loader of a run: its position in a checkpoint, and its metrics."""

from __future__ import annotations

from nemo_like.data.loader import BatchLoader
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.run.checkpoint import Checkpoint, CheckpointError


def load_position(checkpoint: Checkpoint, loader: BatchLoader, *, allow_changed_rows: bool) -> bool:
    """Move the loader to the position of a checkpoint; return True if the rows are the same.

    Raises CheckpointError for a damaged checkpoint, and ConfigError for changed rows unless
    `allow_changed_rows`.
    """
    state = checkpoint.state()
    try:
        return loader.load_state_dict(state.loader, allow_changed_rows=allow_changed_rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} has a damaged position of the data loader: {error!r}"
        ) from error


def loader_metrics(loader: BatchLoader) -> Metrics:
    """Return the metrics of the last batch."""
    metrics: Metrics = {
        "data/epoch": Mean(loader.epoch),
        "data/num_dropped": Sum(loader.num_dropped),
    }
    sources = loader.batch_sources()
    counts = {} if sources is None else sources.num_rows
    for name, num_rows in counts.items():
        metrics[f"data/source_{name}/num_rows"] = Sum(num_rows)
    return metrics
