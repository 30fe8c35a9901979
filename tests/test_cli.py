"""The command line: what a user sees for each kind of wrong input, always one message and exit code
2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.cli import main
from tests.recipe import Recipe


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and what was written to stderr."""
    code = main(arguments)
    return code, capsys.readouterr().err


@pytest.fixture
def files(recipe: Recipe) -> dict[str, str]:
    """Paths of a good SFT and a good GRPO config."""
    recipe.sft()
    recipe.grpo()
    return {"sft": str(recipe.folder / "sft.yaml"), "grpo": str(recipe.folder / "grpo.yaml")}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.optimiser.lr=1", ("policy.optimiser", "policy.optimizer")),
        ("policy.dynamic_batching.enabled=true", ("sequence_packing", "dynamic_batching")),
        ("policy.train_global_batch_size=many", ("policy.train_global_batch_size", "many")),
        ("policy.sequence_packing.algorithm=best_fit", ("best_fit_decreasing", "best_fit")),
        ("data.train_path=nowhere.jsonl", ("data.train_path", "nowhere.jsonl")),
        ("policy.model_name=nowhere", ("policy.model_name", "nowhere")),
    ],
)
def test_a_wrong_value_is_one_message(files, capsys, override: str, words: tuple[str, ...]):
    code, message = run(capsys, "sft", "--config", files["sft"], override)
    assert code == 2
    assert message.startswith("error: ") and "Traceback" not in message
    for word in words:
        assert word in message


def test_a_broken_line_names_file_line_and_column(files, capsys, tmp_path: Path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1+1", "completion": "2"}\n{"prompt": "1+1", "completion": \n')
    code, message = run(capsys, "sft", "--config", files["sft"], f"data.train_path={broken}")
    assert code == 2 and "broken.jsonl:2" in message and "JSON" in message


def test_an_empty_data_set_is_one_message(files, capsys, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    code, message = run(capsys, "grpo", "--config", files["grpo"], f"data.train_path={empty}")
    assert code == 2 and "empty.jsonl has no rows" in message


def test_a_reward_function_that_raises_shows_the_sample(files, capsys):
    code, message = run(
        capsys,
        "grpo",
        "--config",
        files["grpo"],
        "reward.functions.digits.path=tests.algorithms.rewards.broken",
    )
    assert code == 2
    for word in (
        "tests.algorithms.rewards.broken",
        "KeyError",
        "prompt:",
        "completion:",
        "answer:",
    ):
        assert word in message


def test_a_missing_reward_function_is_found_before_anything_starts(files, capsys):
    code, message = run(
        capsys,
        "grpo",
        "--config",
        files["grpo"],
        "reward.functions.digits.path=tests.nowhere.reward",
    )
    assert code == 2 and "reward.functions.digits.path" in message


def test_a_missing_config_file(capsys):
    code, message = run(capsys, "sft", "--config", "nowhere.yaml")
    assert code == 2 and "nowhere.yaml" in message


def test_a_bad_held_out_row_is_found_before_the_first_step(files, recipe: Recipe, capsys):
    held_out = recipe.folder / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "1+1", "completion": "2" * 200}))
    code, message = run(
        capsys,
        "sft",
        "--config",
        files["sft"],
        f"data.validation_path={held_out}",
        "sft.val_at_start=false",
    )
    assert code == 2 and "held_out.jsonl:1" in message
    assert not (recipe.folder / "sft").exists()
    assert main(["validate", "--config", files["sft"], f"data.validation_path={held_out}"]) == 2


def test_a_model_without_weights_is_found_before_anything_starts(
    files, recipe: Recipe, capsys, tmp_path: Path
):
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for path in (recipe.demo / "model").iterdir():
        if path.suffix != ".safetensors":
            (hollow / path.name).write_bytes(path.read_bytes())
    code, message = run(capsys, "grpo", "--config", files["grpo"], f"policy.model_name={hollow}")
    assert code == 2 and "without *.safetensors weights" in message


def test_validate_finishes_without_ray_and_shows_the_mask(files, capsys):
    assert main(["validate", "--config", files["sft"]]) == 0
    shown = capsys.readouterr().out
    assert "⟦" in shown and "####" in shown


def test_a_good_run_from_the_command_line(files, recipe: Recipe, capsys):
    assert (
        main(["sft", "--config", files["sft"], "sft.max_num_steps=1", "sft.val_at_start=false"])
        == 0
    )
    lines = (recipe.folder / "sft" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_control_characters_of_a_value_do_not_reach_the_terminal(files, capsys):
    code, message = run(
        capsys, "sft", "--config", files["sft"], "data.train_path='\x1b[31m\u202e.jsonl'"
    )
    assert code == 2
    assert "\x1b" not in message and "\u202e" not in message
    assert "\\x1b[31m\\u202e.jsonl" in message


def test_a_bug_is_one_message_with_the_place_of_the_traceback(files, capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division of \x1b[31mnothing")

    monkeypatch.setattr("yaml.compose", fail)
    code, message = run(capsys, "validate", "--config", files["sft"])
    assert code == 1
    assert message.startswith(
        "error: ZeroDivisionError: division of \\x1b[31mnothing. The traceback is in "
    )
    assert len(message.splitlines()) == 1 and "Traceback" not in message
    path = Path(message.rpartition(" is in ")[2].strip())
    assert "ZeroDivisionError" in path.read_text()
    path.unlink()


@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo", "rm", "distill"])
def test_a_token_that_the_model_does_not_have_is_found_before_anything_starts(
    kind: str, recipe: Recipe, capsys
):
    model = recipe.folder / "model"
    shutil.copytree(recipe.demo / "model", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["+"] = 900
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = [f"policy.model_name={model}"]
    if kind == "distill":
        options.append(f"distill.teacher={model}")
    getattr(recipe, kind)(*options)
    code, message = run(capsys, kind, "--config", str(recipe.folder / f"{kind}.yaml"), *options)
    assert code == 2
    assert re.search(r"\S+\.jsonl:\d+\b", message)
    assert "the tokenizer makes token 900 ('+')" in message


def test_a_removed_working_directory_is_one_message(files, capsys, monkeypatch, tmp_path: Path):
    directory = tmp_path / "removed"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    code, message = run(capsys, "validate", "--config", files["sft"])
    assert code == 2
    assert message.startswith("error: the working directory was removed")
    assert len(message.splitlines()) == 1


def test_a_reader_that_ends_early_gets_no_message() -> None:
    """As with `nemo-like config all | head`, where `head` ends before the output does."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "nemo_like", "config", "all"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_result_that_cannot_be_written_is_one_message() -> None:
    command = [sys.executable, "-m", "nemo_like", "config", "sft", "seed"]
    # With a buffer, as is the default, Python writes the text again when it exits.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=kept
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and len(done.stderr.splitlines()) == 1
    Path(done.stderr.rpartition(" is in ")[2].strip()).unlink()


def test_the_traceback_of_a_failed_run_goes_to_its_log(files, recipe: Recipe, capsys):
    model = recipe.folder / "damaged"
    model.mkdir()
    for path in (recipe.demo / "model").iterdir():
        data = path.read_bytes()
        (model / path.name).write_bytes(
            data[: len(data) // 2] if path.suffix == ".safetensors" else data
        )
    code, message = run(capsys, "sft", "--config", files["sft"], f"policy.model_name={model}")
    assert code in (1, 2)
    assert "Traceback" not in message and len(message.splitlines()) == 1
    assert "safetensors" in message
