"""Row lengths of the first steps of a config, read with its own data, tokenizer and loader."""

from __future__ import annotations

import sys

from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.config.schema import RunConfig
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress
from nemo_like.training.dataset import RunData
from nemo_like.training.model_files import open_encoder
from nemo_like.training.training_sets import load_training


def first_lengths(config: RunConfig, num_rows: int | None, num_steps: int) -> RowLengths:
    """Return the row lengths of a run in its order.

    The rows are those of about `num_rows` rows, or of `num_steps` steps if it is None. Raises
    ConfigError for files that cannot be read.
    """
    encoder = open_encoder(config, None)
    algorithm = ALGORITHMS[config.kind].import_data()
    progress = Progress(sys.stderr)
    data = RunData(encoder, load_training(config, algorithm.ROW_SCHEMA, progress))
    if num_rows is not None:
        num_steps = num_rows // config.rows_per_step
    return algorithm.first_lengths(config, data, num_steps, progress)
