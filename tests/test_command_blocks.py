"""The command blocks of the first pages run as they are written, one after another, in an empty
directory with the installed package.

Models are replaced by the tiny one of the demo, and runs are made short by keys that are appended.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.algorithms.registry import ALGORITHMS, detect_kind, load_config
from nemo_like.cli import build_parser, main
from tests.forked import Forked
from tests.test_docs import DOCS, ROOT, blocks

PAGES = ("README.md", *(f"docs/{name}.md" for name in ("start", "finetune", "grpo", "agents")))
MODEL = "models/SmolLM2-135M-Instruct"
PLACEHOLDERS = {
    "DIR_OR_NAME": MODEL,
    "MODEL": MODEL,
    "HuggingFaceTB/SmolLM2-135M-Instruct": MODEL,
    "runs/my_run": "runs/sft_rows",
}
"""Words of the pages that a reader replaces."""
SHORT = "data.max_validation_rows=2 policy.parity_check=false logger.num_samples_shown=0"
SHORT_OF = {
    "grpo": "grpo.max_num_steps=1 grpo.num_prompts_per_step=2 grpo.num_generations_per_prompt=4"
    " policy.train_global_batch_size=8 policy.generation.max_new_tokens=8",
    "chat": "policy.generation.max_new_tokens=4",
    "eval": "data.max_validation_rows=2",
}


def commands(page: str, block_number: int | None = None) -> Iterator[str]:
    """The lines of the shell blocks of a page, without comments, joined at backslashes."""
    shell = [block for block in blocks(page) if block.language in ("bash", "sh")]
    for number, block in enumerate(shell):
        if block_number in (None, number):
            for line in block.text.replace("\\\n", " ").splitlines():
                if text := re.sub(r"\s#\s.*$", "", line).strip():
                    yield text


def shortened(text: str) -> list[str]:
    """The words of a command on the tiny model and with few steps."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)]
    if words[0] != "nemo-like":
        return words
    command = words[1]
    if command == "demo":
        return [*words, "--prepare-only"]
    keys = SHORT_OF.get(command, "").split()
    if command in ALGORITHMS or (command == "init" and "--model" in words):
        kind = "sft" if command == "init" else command
        num_steps = 3 if "resume=true" in words else 2
        steps = [] if kind == "grpo" else [f"{kind}.max_num_steps={num_steps}"]
        keys += [*SHORT.split(), *steps]
    return [*words, *keys]


def python_block(page: str, name: str) -> str:
    """The program of a page that defines a function."""
    return next(each.text for each in blocks(page) if f"def {name}" in each.text)


@pytest.fixture(scope="module")
def workspace(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages tell a reader to have."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / MODEL).parent.mkdir()
    (folder / MODEL).symlink_to(demo / "model")
    lines = (demo / "sft_train.jsonl").read_text().splitlines(keepends=True)
    for name in ("chat", "rows"):
        (folder / f"{name}.jsonl").write_text("".join(lines[:60]))
    (folder / "held_out.jsonl").write_text("".join(lines[60:70]))
    questions = (demo / "grpo_train.jsonl").read_text().splitlines(keepends=True)
    (folder / "questions.jsonl").write_text("".join(questions[:20]))
    (folder / "my_rewards.py").write_text(python_block("docs/grpo.md", "short_and_right"))
    (folder / "my_agent.py").write_text(python_block("docs/agents.md", "solve"))
    (folder / "my_package").mkdir()
    reward = "def brief(sample):\n    return -len(sample.completion) / 100\n"
    (folder / "my_package" / "rewards.py").write_text(reward)
    return folder


def run_command(words: list[str], folder: Path) -> int:
    """Run one command in a process of its own, as a console script does."""
    os.chdir(folder)
    # A console script has its own directory on the path, and not the working directory.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(folder))]
    sys.stdin = io.StringIO("1+2=?\n")
    return main(words[1:])


def assert_runs(words: list[str], folder: Path, logs: Path) -> str:
    if words[0] == "python" or ">" in words:
        text = " ".join(word if word == ">" else shlex.quote(word) for word in words)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        text = text.replace("python", shlex.quote(sys.executable), 1)
        done = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        return done.stdout
    ended = Forked(run_command, words, folder, folder=logs)
    code = ended.wait(60)
    assert code == 0, f"{shlex.join(words)}\n{ended.output}\n{ended.errors}"
    return ended.output


def next_commands(output: str) -> list[str]:
    """The commands that a run prints at its end."""
    _, found, rest = output.partition("\nnext: ")
    return [line.strip() for line in rest.splitlines() if "nemo-like" in line] if found else []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("page", "block_number"),
    # The blocks of the first page do not need each other.
    [*(("README.md", number) for number in range(3)), *((page, None) for page in PAGES[1:])],
)
def test_every_command_of_a_page_works(
    page: str, block_number: int | None, workspace: Path, tmp_path: Path
) -> None:
    if "agents" in page:
        pytest.importorskip("openai")
    for name in ("runs", "examples", "ray_jobs"):
        shutil.rmtree(workspace / name, ignore_errors=True)
    done = []
    for text in commands(page, block_number):
        words = shortened(text)
        if words[:2] == ["pip", "install"]:
            continue
        output = assert_runs(words, workspace, tmp_path)
        done.append(text)
        # What a run tells the reader to do next is a command of the page as well.
        for following in next_commands(output) if words[1] in ALGORITHMS else ():
            if not {"DIR", "FILE"} & set(following.split()):
                assert_runs(shortened(following), workspace, tmp_path)
    assert done


@pytest.mark.exhaustive
def test_the_example_of_the_library_page_works(workspace: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for name in ("examples", "ray_jobs"):
        shutil.rmtree(workspace / name, ignore_errors=True)
    copy = ["nemo-like", "init", "--scripts", "."]
    assert_runs(copy, workspace, tmp_path)
    rows = workspace / "rows.jsonl"
    before = rows.read_text()
    rows.write_text('{"text": "1+2=3"}\n' * 8)
    for text in commands("docs/library.md"):
        assert_runs(shortened(text), workspace, tmp_path)
    rows.write_text(before)


@pytest.mark.parametrize(
    "page", [*PAGES, *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]
)
def test_configs_of_commands_load_and_files_exist(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command parses; with an example config its keys have values that are accepted."""
    monkeypatch.chdir(ROOT)
    for text in commands(page):
        words = shlex.split(re.split(r"\s(?:&&|\||;|>|&)(?:\s|$)", text)[0])
        if words[:1] != ["nemo-like"]:
            continue
        try:
            arguments, unknown = build_parser().parse_known_args(words[1:])
        except SystemExit as stop:
            assert stop.code == 0, text
            continue
        assert unknown == [], text
        config = getattr(arguments, "config", None)
        if config is None or config.parts[:1] != ("examples",):
            continue
        kind = words[1] if words[1] in ALGORITHMS else detect_kind(config, arguments.overrides)
        load_config(kind, config, arguments.overrides)


@pytest.mark.exhaustive
def test_a_wheel_is_built_with_the_scripts(tmp_path: Path) -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.split():
        if name.startswith(("nemo_like/", "examples/", "ray_jobs/", "pyproject", "README", "LIC")):
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    build = ["uv", "build", "--wheel", "-o", str(tmp_path / "dist"), str(tmp_path / "source")]
    built = subprocess.run(build, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no package index: {built.stderr[-200:]}")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")
    run = [sys.executable, "-m", "nemo_like", "init", "--scripts", "copied"]
    done = subprocess.run(
        run,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copied" / "ray_jobs" / "submit.sh").is_file()
