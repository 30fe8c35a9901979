"""A run that lost its machine continues from a store, bit for bit."""

from __future__ import annotations

import shutil

import pytest

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.run.checkpoint import CheckpointError
from nemo_like.run.store import Store
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

OPTIONS = (
    "sft.val_at_start=false",
    "data.max_train_rows=200",
    "data.max_validation_rows=8",
    "checkpointing.keep_best=validation/loss",
    "checkpointing.best_mode=min",
)


def without_uploads(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if not name.startswith("upload/")}
        for record in records
    ]


def test_a_resume_without_local_files_continues_bit_for_bit(recipe: Recipe, tmp_path, capsys):
    straight = run_sft(recipe.sft(*OPTIONS))
    expected = read_metrics(straight.directory.path)
    assert straight.export is not None
    weights = (straight.export / "model.safetensors").read_bytes()
    lengths = straight.directory.lengths.read_bytes()

    url = f"file://{tmp_path}/store"
    options = (*OPTIONS, "run_name=copied", f"checkpointing.upload_to={url}")
    copied = run_sft(recipe.sft(*options))
    assert without_uploads(read_metrics(copied.directory.path)) == expected
    assert all(record["upload/num_failed"] == 0 for record in read_metrics(copied.directory.path))
    store = Store(url, "copied")
    assert store.steps() == [4, 2] and store.named("latest") == "step_4"
    assert store.records("hf").keys() == {path.name for path in straight.export.iterdir()}
    assert (tmp_path / "store/copied/hf/model.safetensors").read_bytes() == weights

    # The machine is lost after step 3, while step 4 was not uploaded yet.
    shutil.rmtree(copied.directory.path)
    store.remove("step_4")
    with pytest.raises(ConfigError, match="has checkpoints of another run"):
        run_sft(recipe.sft(*options))
    shutil.rmtree(copied.directory.path)
    capsys.readouterr()
    resumed = run_sft(recipe.sft(*options, "resume=true"))
    output = capsys.readouterr().out
    assert f"downloaded step 2 from {url}/copied" in output
    assert f"resumed from {resumed.directory.path}/checkpoints/step_2" in output
    assert without_uploads(read_metrics(resumed.directory.path)) == expected
    assert resumed.directory.lengths.read_bytes() == lengths
    assert resumed.export is not None
    assert (resumed.export / "model.safetensors").read_bytes() == weights
    assert store.steps() == [4, 2] and store.named("latest") == "step_4"

    # Every upload is damaged: the run does not start again without a word.
    shutil.rmtree(resumed.directory.path)
    for step in (2, 4):
        (tmp_path / f"store/copied/step_{step}/metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl does not have the content"):
        run_sft(recipe.sft(*options, "resume=true"))


def test_a_wrong_url_is_an_error_before_the_workers_start(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"checkpointing\.upload_to: 'bucket' is not a URL"):
        run_sft(recipe.sft("checkpointing.upload_to=bucket"))
