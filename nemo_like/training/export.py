"""The Hugging Face model that a run writes at its end."""

from __future__ import annotations

import shutil
from pathlib import Path

from nemo_like.files import remove_link, reporting_write_errors
from nemo_like.progress import Progress
from nemo_like.run_directory import RunDirectory
from nemo_like.training.workers import RunWorkers


def export_model(
    directory: RunDirectory,
    workers: RunWorkers,
    progress: Progress,
) -> Path:
    """Write the Hugging Face model and return its directory. Raises WriteError."""
    export = directory.hf
    # Written under another name first, so that `hf` never has an incomplete model.
    unfinished = export.with_name("hf.unfinished")
    with reporting_write_errors(export, "the exported model"):
        # A link would direct the removal to the files it refers to.
        remove_link(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        with progress.phase("exporting"), workers.policy_onloaded():
            workers.policy.export_hf(unfinished)
        shutil.rmtree(export, ignore_errors=True)
        unfinished.rename(export)
    return export
