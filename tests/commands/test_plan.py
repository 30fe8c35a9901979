"""`nemo-like plan` as a user sees it: every source of lengths, every output, and one message for
each wrong input.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.cli import main
from nemo_like.data.planning.plan import PlanSpec, plan_batch
from tests.recipe import Recipe
from tests.reports.pages import Page, assert_drawn, file_address, in_chromium


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """200 lengths, one per line."""
    path = tmp_path / "lengths.txt"
    values = np.random.default_rng(0).lognormal(5.0, 0.9, 200).clip(1, 2000).astype(int) + 1
    path.write_text("\n".join(map(str, values.tolist())) + "\n\n")
    return path


BUDGET = "policy.sequence_packing.train_mb_tokens"
BATCH_SIZE = "policy.train_global_batch_size"
GPUS = "cluster.gpus_per_node"
MODEL = "policy.model_name"


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What `--json -` prints."""
    assert main(["plan", "--json", "-", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def message(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one message of a command that fails with exit code 2."""
    try:
        code = main(["plan", *map(str, arguments)])
    except SystemExit as stopped:  # argparse's own errors
        code = stopped.code
    text = capsys.readouterr().err
    assert code == 2 and "Traceback" not in text
    return text


def test_the_json_holds_what_the_plans_say(lengths: Path, capsys):
    options = ("data.shuffle=false", f"{BATCH_SIZE}=50", f"{GPUS}=4", f"{BUDGET}=2048")
    record = plan(capsys, "--lengths", lengths, *options, f"{MODEL}=7b")
    values = np.loadtxt(lengths, dtype=np.int64)
    assert record["format"] == 4 and record["rows"]["num_tokens"] == values.sum()
    assert len(record["strategies"]) == 10 and record["chosen"] == "packed/balanced/flops"
    spec = PlanSpec(
        max_tokens=2048,
        num_ranks=4,
        global_batch_size=50,
        algorithm="first_fit_shuffle",
        balance="none",
    )
    shown = record["strategies"]["packed/first_fit_shuffle/none"]
    metrics = plan_batch(values, spec).metrics()
    assert shown["microbatches_per_step"] == metrics["packing/num_microbatches"]
    assert shown["utilization"] == pytest.approx(metrics["packing/utilization"])
    chosen = record["strategies"][record["chosen"]]
    assert (
        chosen["step_time"]
        <= min(strategy["step_time"] for strategy in record["strategies"].values()) * 1.01
    )
    assert chosen["speedup"] >= 1 and chosen["peak_gib"] > 10
    assert record["strategies"][record["baseline"]]["speedup"] == 1


def test_columns_are_added_up_and_fields_counted(tmp_path: Path, capsys):
    table = tmp_path / "requests.csv"
    table.write_text('time,prompt,completion\n"a, b",10,5\nc,20,0\n')
    assert (
        plan(capsys, "--lengths", table, "--column", "prompt,completion")["rows"]["num_tokens"]
        == 35
    )
    rows = tmp_path / "rows.jsonl"
    # The separator of lines that JSON does not escape is part of the text.
    text = '{"input_ids": [1, 2, 3], "n": 7, "text": "a\u2028b"}\n{"input_ids": [1], "n": 8}\n'
    rows.write_text(text, encoding="utf-8")
    assert plan(capsys, "--lengths", rows, "--column", "input_ids")["rows"]["num_tokens"] == 4
    assert plan(capsys, "--lengths", rows, "--column", "n", "--limit", 1)["rows"]["num_tokens"] == 7


def test_a_memory_recommends_a_budget_that_fits(lengths: Path, capsys):
    options = ("--lengths", lengths, f"{MODEL}=1b", f"{GPUS}=2", f"{BATCH_SIZE}=64")
    memory = plan(capsys, *options, "--memory-gb", 24)["memory"]
    assert sum(memory["recommended_bytes"].values()) <= memory["usable_bytes"]
    assert memory["recommended_max_tokens"] % 256 == 0
    larger = plan(capsys, *options, "--memory-gb", 80)["memory"]["recommended_max_tokens"]
    assert larger > memory["recommended_max_tokens"] > 0
    assert "nothing fits" in table(capsys, *options, "--memory-gb", 4)


def table(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_table_fits_a_pipe_of_100_columns(lengths: Path, capsys):
    options = ("--memory-gb", 80, f"{MODEL}=70b", f"{GPUS}=64", f"{BATCH_SIZE}=128")
    shown = table(capsys, "--lengths", lengths, *options)
    assert max(map(len, shown.splitlines())) <= 100 and "…" not in shown
    for word in (
        "balanced by flops",
        "best_fit_decreasing by flops",
        "ranks before microbatches",
        "70.55 B",
        "docs/planner.md",
        "peak",
        "recommended budget",
    ):
        assert word in shown


def test_a_budget_is_recommended_where_it_makes_a_step_faster_only(tmp_path: Path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n" * 64)
    keys = (f"{MODEL}=1b", f"{BATCH_SIZE}=64", f"{BUDGET}=400")
    options = ("--lengths", path, "--memory-gb", 80, *keys)
    # One device moves no weights, so the number of microbatches does not matter.
    alone = table(capsys, *options)
    assert "recommended budget" not in alone and "% speed" not in alone
    # 80 GiB would be enough for more on two devices as well, and fewer microbatches move less.
    two = table(capsys, *options, f"{GPUS}=2", "parallel.reshard=true")
    assert "recommended budget" in two and "% speed" in two


def test_the_page_of_the_planner_shows_what_its_commands_print(tmp_path: Path, capsys, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    section = page.split("An example that needs no data")[1]
    commands = section.split("```bash\n")[1].split("```")[0]
    generate, command = commands.replace("\\\n", "").splitlines()
    shown = section.split("```text\n")[1].split("```")[0].splitlines()
    monkeypatch.chdir(tmp_path)
    generate = generate.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", generate], check=True)
    program, *arguments = shlex.split(command)
    assert program == "nemo-like" and main(arguments) == 0
    printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    # In order; lines in between are left out.
    missing = [line for line in shown if line not in printed]
    assert missing == [] and len(shown) > 8
    # The first page has the same commands.
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Plan without a GPU")[1].replace("\\\n", "")
    first, second = section.split("```bash\n")[1].split("```")[0].splitlines()
    assert shlex.split(first)[1:] == shlex.split(generate)[1:]
    assert shlex.split(second) == shlex.split(command)


@pytest.mark.parametrize("dp", [1, 64, 100])
def test_the_page_is_one_file_that_loads_nothing(dp: int, lengths: Path, tmp_path: Path, capsys):
    file = tmp_path / "plan.html"
    keys = (f"{GPUS}={dp}", f"{BATCH_SIZE}=200", f"{BUDGET}=4096")
    options = ("--memory-gb", 80, "--html", file, *keys)
    assert str(file) in table(capsys, "--lengths", lengths, *options)
    page = Page(file.read_text())
    assert len(page.text) < 2_000_000
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img") and "src" not in attributes
    assert "default-src 'none'" in str(page.elements)
    assert "prefers-color-scheme: dark" in page.text
    # The histogram, four strategies over time, and the memory of the planned and of the
    # recommended budget. One device is too small for any.
    assert len(page.charts) == 1 + 4 + 1
    assert ("the max that fits" in page.shown) == (dp > 1)
    assert "NaN" not in str(page.charts)
    if dp > 1:
        assert_drawn(in_chromium(file_address(file)), len(page.charts))


def test_the_page_escapes_names(tmp_path: Path, capsys):
    path, page = tmp_path / "<b>.txt", tmp_path / "plan.html"
    path.write_text("12\n30\n")
    table(capsys, "--lengths", path, "--html", page)
    assert "&lt;b&gt;.txt" in page.read_text() and "<b>.txt" not in page.read_text()


def test_lengths_need_no_heavy_library(lengths: Path, tmp_path: Path):
    script = (
        "import sys; from nemo_like.cli import main; "
        f"code = main(['plan', '--lengths', {str(lengths)!r}, 'cluster.gpus_per_node=8',"
        f" '--memory-gb', '80', "
        f"'--html', {str(tmp_path / 'plan.html')!r}, '--json', {str(tmp_path / 'plan.json')!r}]); "
        "heavy = {'torch', 'ray', 'vllm', 'megatron', 'transformers'} &"
        " sys.modules.keys(); "
        "print('heavy:', *sorted(heavy)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy:"  # without torch there is no CUDA to initialise


def test_a_config_needs_no_cluster_and_no_device(recipe: Recipe):
    recipe.sft()
    script = (
        "import sys; from nemo_like.cli import main; "
        f"code = main(['plan', '--config', {str(recipe.folder / 'sft.yaml')!r}]); "
        "print('heavy:', *sorted({'ray', 'vllm', 'megatron'} & sys.modules.keys()),"
        " sys.modules['torch'].cuda.is_initialized()); "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: False"


def test_a_config_is_planned_as_its_run_would_be(recipe: Recipe, capsys):
    recipe.sft()
    config = recipe.folder / "sft.yaml"
    record = plan(capsys, "--config", config, "policy.sequence_packing.algorithm=first_fit_shuffle")
    assert record["chosen"] == "configured" and record["setting"]["max_tokens"] == 256
    assert record["rows"]["num_rows"] == 64  # the run's four steps
    assert (
        main(
            [
                "sft",
                "--config",
                str(config),
                "sft.max_num_steps=2",
                "sft.val_at_start=false",
                "sft.val_period=0",
            ]
        )
        == 0
    )
    capsys.readouterr()
    metrics = recipe.folder / "sft" / "metrics.jsonl"
    past = plan(capsys, "--metrics", metrics)
    assert past["rows"]["num_rows"] == 32
    for name, pair in past["logged"].items():
        assert pair["planned"] == pytest.approx(pair["logged"]), name
    assert len(past["logged"]) == 4
    page = recipe.folder / "plan.html"
    assert "from its lengths" in table(capsys, "--metrics", metrics, "--html", page)
    assert "<h2>Metrics of the run</h2>" in page.read_text()
    assert plan(capsys, "--metrics", metrics, f"{BUDGET}=512")["setting"]["max_tokens"] == 512
    recipe.grpo()
    keys = ("cluster.backend=ray", "cluster.workers_per_node=2")
    record = plan(capsys, "--config", recipe.folder / "grpo.yaml", "--limit", 64, *keys)
    assert (
        "completion lengths drawn" in record["rows"]["source"] and record["rows"]["num_rows"] == 64
    )
    assert record["setting"]["parallel"]["dp"] == 2


def test_text_is_counted_in_the_tokenizers_tokens(demo: Path, capsys):
    keys = (
        f"data.train_path={demo / 'sft_train.jsonl'}",
        f"policy.tokenizer_name={demo / 'model'}",
        f"{BATCH_SIZE}=8",
    )
    record = plan(capsys, *keys, "--limit", 40)
    assert record["rows"]["num_rows"] == 40 and 10 < record["rows"]["mean"] < 100
    few = demo / "few.jsonl"
    few.write_text("".join((demo / "sft_train.jsonl").read_text().splitlines(True)[:20]))
    options = (f"data.train_path={few}", *keys[1:], "sft.max_num_epochs=2", "--limit", 40)
    repeated = plan(capsys, *options)["rows"]
    assert repeated["num_rows"] > 20 and "several epochs of 20" in repeated["source"]
    # A file of lengths takes the place of the config's own rows.
    lengths = demo / "lengths.txt"
    lengths.write_text("7\n" * 16)
    assert plan(capsys, *keys, "--lengths", lengths)["rows"]["num_tokens"] == 7 * 16


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, (), ("lengths.txt", "cannot be read")),
        ("", (), ("lengths.txt has no rows",)),
        ("12\n7.5\n", (), ("lengths.txt:2", "'7.5' is not a length")),
        ("12\n0\n", (), ("lengths.txt:2", "'0'")),
        ("12\n-3\n", (), ("lengths.txt:2", "'-3'")),
        ('{"a": 1}\n', (), ("lengths.txt:1", "--column NAME")),
        ("a,b\n1,2\n", (), ("lengths.txt:1", "--column NAME", "a,b")),
        ("a,b\n1,2\n", ("--column", "c"), ("no column 'c'", "a, b")),
        ("a,b\n1,x\n", ("--column", "a,b"), ("lengths.txt:2", "'x'")),
        ("a,b\n1\n", ("--column", "b"), ("lengths.txt:2", "no column 'b'", "a")),
        ('{"a": 1}\n', ("--column", "b"), ("lengths.txt:1", "no column 'b'", "a")),
        ('{"a": 1\n', ("--column", "a"), ("lengths.txt:1", "JSON")),
        (
            "12\n900\n",
            (f"{BUDGET}=512",),
            ("1 of 2 rows", f"{BUDGET} 512", "900", "lengths.txt:2", "policy.oversize_rows"),
        ),
        ("12\n", (f"{MODEL}=13b",), (MODEL, "'13b'", "7b (Qwen2.5-7B)")),
        (
            "12\n",
            ("parallel.tensor=8", f"{GPUS}=8"),
            ("parallel.tensor 8", "28 attention heads", "set parallel.tensor to 4"),
        ),
        (
            "12\n",
            (f"{MODEL}=1b", "policy.engine=megatron", "parallel.pipeline=32", f"{GPUS}=32"),
            ("16 layers", "parallel.pipeline 32"),
        ),
        ("12\n", ("parallel.pipeline=2", f"{GPUS}=2"), ("policy.engine", "parallel.pipeline")),
        ("12\n", ("parallel.sequence=true",), ("parallel.sequence", "parallel.tensor")),
        ("12\n", (f"{BATCH_SIZE}=4", f"{GPUS}=8"), (BATCH_SIZE, "8 data-parallel ranks")),
        ("12\n", (f"{GPUS}=2", "parallel.context=2", f"{BUDGET}=2"), (BUDGET, "4")),
        ("12\n", (f"{GPUS}=-1",), (GPUS,)),
        ("12\n", ("--memory-gb", "-1"), ("--memory-gb",)),
        ("12\n", ("--limit", "0"), ("--limit", "at least 1")),
        ("12\n", ("--html", "nowhere/at/all.html"), ("--html", "cannot be written")),
        ("12\n", ("--dp", "2"), ("unknown argument '--dp'", "KEY=VALUE")),
        ("12\n", ("policy.optimiser.lr=1",), ("policy.optimizer",)),
    ],
)
def test_wrong_input_is_one_message(
    content: str | None, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys
):
    path = tmp_path / "lengths.txt"
    if content is not None:
        path.write_text(content)
    said = message(capsys, "--lengths", path, *arguments)
    for word in words:
        assert word in said


def test_the_default_budget_is_raised_to_the_longest_row(tmp_path: Path, capsys) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n9000\n")
    record = plan(capsys, "--lengths", path)
    # 9,000 rounded up to a multiple of 256.
    note = f"{BUDGET} is 9216 instead of the default 8192: the longest row has 9000 tokens"
    assert any(text.startswith(note) for text in record["notes"])
    assert "is above" in message(capsys, "--lengths", path, f"{BUDGET}=8192").replace("are", "is")
    truncated = plan(capsys, "--lengths", path, "policy.oversize_rows=truncate")
    assert not any(BUDGET in text and "instead" in text for text in truncated["notes"])


def test_a_source_must_be_given_and_must_hold_lengths(tmp_path: Path, demo: Path, capsys):
    assert "--lengths" in message(capsys, f"{GPUS}=2")
    assert "no row lengths" in message(capsys, "--metrics", tmp_path)
    assert "--column is for --lengths" in message(capsys, "--metrics", tmp_path, "--column", "a")
    rows = f"data.train_path={demo / 'sft_train.jsonl'}"
    text = message(capsys, rows, f"policy.tokenizer_name={tmp_path / 'nowhere'}")
    assert "policy.tokenizer_name" in text and "nowhere" in text
    assert "policy.tokenizer_name" in message(capsys, rows)
    rows = f"data.train_path={tmp_path / 'nowhere.jsonl'}"
    text = message(capsys, rows, f"policy.tokenizer_name={demo / 'model'}")
    assert "data.train_path" in text and "nowhere.jsonl" in text


def test_overrides_can_stand_anywhere(lengths: Path, capsys):
    record = plan(capsys, f"{GPUS}=2", "--lengths", lengths, f"{MODEL}=1b", "--limit", 64, "seed=3")
    assert record["setting"]["parallel"]["dp"] == 2 and record["setting"]["seed"] == 3
    assert record["setting"]["model"]["name"] == "Llama-3.2-1B"
    assert record["rows"]["num_rows"] == 64


def test_a_model_config_with_a_missing_key_is_named(lengths: Path, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 64, "vocab_size": 10, "num_hidden_layers": 2}'
    )
    assert "num_attention_heads" in message(capsys, "--lengths", lengths, f"{MODEL}={tmp_path}")


def test_a_wrong_teacher_is_named_by_its_key(demo: Path, tmp_path: Path, capsys):
    config = tmp_path / "distill.yaml"
    config.write_text(
        f"run_name: a\npolicy: {{model_name: {demo / 'model'}}}\n"
        f"data: {{train_path: {demo / 'sft_train.jsonl'}}}\n"
        "distill: {teacher: nowhere/teacher, max_num_steps: 1}\n"
    )
    text = message(capsys, "--config", config, "--limit", 8)
    assert "distill.teacher is 'nowhere/teacher'" in text


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """40 prompts of 100 to 300 tokens, each with 4 completions of 20 to 60."""
    path = tmp_path / "groups.csv"
    rng = np.random.default_rng(0)
    lines = ["prompt,prompt_tokens,tokens"]
    for prompt, length in enumerate(rng.integers(100, 301, 40).tolist()):
        for completion in rng.integers(20, 61, 4).tolist():
            lines.append(f"p{prompt},{length},{length + completion}")
    path.write_text("\n".join(lines))
    return path


SHARED = ("--column", "tokens", "--group", "prompt", "--prefix", "prompt_tokens")


def test_a_file_with_groups_is_planned_with_and_without_shared_prefixes(groups: Path, capsys):
    options = (f"{BATCH_SIZE}=80", f"{GPUS}=2", f"{BUDGET}=4096", f"{MODEL}=7b")
    record = plan(capsys, "--lengths", groups, *SHARED, *options)
    assert record["chosen"] == "shared"
    shared = record["strategies"]["shared"]
    separate = record["strategies"]["packed/balanced/flops"]
    _, prefixes, lengths = np.loadtxt(groups, delimiter=",", skiprows=1, dtype=str).T
    most = 1 - (lengths.astype(int).sum() - prefixes.astype(int).sum() * 3 / 4) / (
        lengths.astype(int).sum()
    )
    # Groups are in one step, and few of them are divided.
    assert 0.9 * most < shared["metrics"]["packing/shared_token_share"] <= most + 1e-9
    assert shared["step_time"] < 0.6 * separate["step_time"]
    assert shared["microbatches_per_step"] < separate["microbatches_per_step"]
    refused = plan(capsys, "--lengths", groups, *SHARED, *options, "policy.shared_prefix=false")
    assert "shared" not in refused["strategies"]
    assert main(["plan", "--lengths", str(groups), *SHARED, *options]) == 0
    assert "shared prefixes:" in capsys.readouterr().out


def test_groups_need_both_columns_and_prefixes_within_the_rows(groups: Path, capsys):
    text = message(capsys, "--lengths", groups, "--column", "tokens", "--group", "prompt")
    assert "--group NAME, --prefix NAME and --column NAME" in text
    wrong = ("--column", "prompt_tokens", "--group", "prompt", "--prefix", "tokens")
    text = message(capsys, "--lengths", groups, *wrong)
    assert "groups.csv:2: the prefix has" in text and "(tokens)" in text
    text = message(capsys, "--lengths", groups, *SHARED[:4], "--prefix", "prompts")
    assert "has no column 'prompts'" in text
