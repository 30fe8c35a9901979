"""The Hugging Face models that a run writes at its end."""

from __future__ import annotations

import shutil
from pathlib import Path

from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import remove_link, reporting_write_errors
from nemo_like.run.progress import Progress
from nemo_like.training.workers import RunWorkers


def export_model(
    directory: RunDirectory, workers: RunWorkers, progress: Progress, *, with_ema: bool
) -> Path:
    """Write the Hugging Face model and return its directory. Raises WriteError.

    With `with_ema` the model with averaged weights is written as well; without it that of an
    earlier start of the run is removed, as it would not belong to the new one.
    """
    _export(directory.hf, workers, progress, ema=False)
    if with_ema:
        _export(directory.hf_ema, workers, progress, ema=True)
    else:
        with reporting_write_errors(directory.hf_ema, "the exported model"):
            # A link would direct the removal to the files it refers to.
            remove_link(directory.hf_ema)
            shutil.rmtree(directory.hf_ema, ignore_errors=True)
    return directory.hf


def _export(export: Path, workers: RunWorkers, progress: Progress, *, ema: bool) -> None:
    # Written under another name first, so that `export` never has an incomplete model.
    unfinished = export.with_name(f"{export.name}.unfinished")
    with reporting_write_errors(export, "the exported model"):
        # A link would direct the removal to the files it refers to.
        remove_link(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        with progress.phase("exporting"), workers.policy_onloaded():
            workers.policy.export_hf(unfinished, ema=ema)
        shutil.rmtree(export, ignore_errors=True)
        unfinished.rename(export)
