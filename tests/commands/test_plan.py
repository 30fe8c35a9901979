"""`nemo-like plan` as a user sees it: every source of lengths, every output, and one message for
each wrong input.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.cli import main
from nemo_like.data.planning.plan import PlanSpec, plan_batch
from tests.recipe import Recipe


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """200 lengths, one per line."""
    path = tmp_path / "lengths.txt"
    values = np.random.default_rng(0).lognormal(5.0, 0.9, 200).clip(1, 2000).astype(int) + 1
    path.write_text("\n".join(map(str, values.tolist())) + "\n\n")
    return path


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What `--json` prints."""
    assert main(["plan", *map(str, arguments), "--json"]) == 0
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
    record = plan(
        capsys,
        "--lengths",
        lengths,
        "--in-order",
        "--batch-size",
        50,
        "--dp",
        4,
        "--max-tokens",
        2048,
        "--model",
        "7b",
    )
    values = np.loadtxt(lengths, dtype=np.int64)
    assert record["format"] == 2 and record["rows"]["num_tokens"] == values.sum()
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
    assert plan(capsys, "--lengths", rows, "--field", "input_ids")["rows"]["num_tokens"] == 4
    assert plan(capsys, "--lengths", rows, "--field", "n", "--limit", 1)["rows"]["num_tokens"] == 7


def test_a_memory_recommends_a_budget_that_fits(lengths: Path, capsys):
    options = ("--lengths", lengths, "--model", "1b", "--dp", 2, "--batch-size", 64)
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
    shown = table(
        capsys,
        "--lengths",
        lengths,
        "--model",
        "70b",
        "--dp",
        64,
        "--memory-gb",
        80,
        "--batch-size",
        128,
    )
    assert max(map(len, shown.splitlines())) <= 100 and "…" not in shown
    for word in (
        "balanced by flops",
        "best_fit_decreasing by flops",
        "verl",
        "70.55 B",
        "assumptions",
        "peak",
        "recommended budget",
    ):
        assert word in shown


def test_a_budget_is_recommended_where_it_makes_a_step_faster_only(tmp_path: Path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n" * 64)
    options = ("--lengths", path, "--model", "1b", "--batch-size", 64, "--max-tokens", 400)
    # One device moves no weights, so the number of microbatches does not matter.
    alone = table(capsys, *options, "--memory-gb", 80, "--dp", 1)
    assert "recommended budget" not in alone and "% speed" not in alone
    # 80 GiB would be enough for more on two devices as well, and fewer microbatches move less.
    two = table(capsys, *options, "--memory-gb", 80, "--dp", 2, "--sync", "microbatch")
    assert "recommended budget" in two and "% speed" in two


def test_the_readme_shows_what_its_commands_print(tmp_path: Path, capsys, monkeypatch):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Plan without a GPU")[1]
    generate, command = section.split("```bash\n")[1].split("```")[0].splitlines()
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


@pytest.mark.parametrize("dp", [1, 64, 100])
def test_the_page_is_one_file_without_scripts_or_resources(
    dp: int, lengths: Path, tmp_path: Path, capsys
):
    page = tmp_path / "plan.html"
    options = (
        "--model",
        "7b",
        "--dp",
        dp,
        "--batch-size",
        200,
        "--memory-gb",
        80,
        "--max-tokens",
        4096,
    )
    assert str(page) in table(capsys, "--lengths", lengths, *options, "--html", page)
    text = page.read_text()
    assert len(text) < 400_000
    for forbidden in ("<script", "http://", "https://", "url(", "<link", "src=", "nan", "inf "):
        assert forbidden not in text, forbidden
    assert "prefers-color-scheme: dark" in text and text.count("<svg") == 4
    for part in text.split("<svg")[1:]:
        drawing = ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
        assert (
            drawing.find(".//*[@class='real']") is not None
            or "emory" in drawing.attrib["aria-label"]
        )


def test_lengths_need_no_heavy_library(lengths: Path, tmp_path: Path):
    script = (
        "import sys; from nemo_like.cli import main; "
        f"code = main(['plan', '--lengths', {str(lengths)!r}, '--model', '7b', '--dp', '8',"
        f" '--memory-gb', '80', "
        f"'--html', {str(tmp_path / 'plan.html')!r}, '--json', {str(tmp_path / 'plan.json')!r}]); "
        "heavy = {'torch', 'ray', 'vllm', 'megatron', 'transformers', 'hydra'} &"
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
    past = plan(capsys, "--metrics", recipe.folder / "sft" / "metrics.jsonl")
    assert past["rows"]["num_rows"] == 32
    for name, pair in past["logged"].items():
        assert pair["planned"] == pytest.approx(pair["logged"]), name
    assert len(past["logged"]) == 4
    recipe.grpo()
    record = plan(capsys, "--config", recipe.folder / "grpo.yaml", "--limit", 64, "--dp", 2)
    assert (
        "completion lengths drawn" in record["rows"]["source"] and record["rows"]["num_rows"] == 64
    )
    assert record["setting"]["parallel"]["dp"] == 2


def test_a_grpo_step_is_predicted_from_a_config_and_calibrated_by_a_run(recipe: Recipe, capsys):
    config = recipe.folder / "grpo.yaml"
    recipe.grpo()
    guessed = plan(
        capsys,
        "--config",
        config,
        "cluster.backend=ray",
        "cluster.workers_per_node=4",
        "--limit",
        64,
    )["grpo_step"]
    assert "completion lengths drawn" in guessed["source"] and guessed["calibrated_with"] is None
    # The policy's own log-probs and those of the reference: each rollout has two optimizer steps.
    assert guessed["num_logprob_passes"] == 2
    shown = [(split["policy_workers"], split["generation_workers"]) for split in guessed["splits"]]
    assert shown == [(4, 4), (3, 1), (2, 2), (1, 3)] and guessed["configured"] == 0
    assert guessed["splits"][0]["staleness_1_s"] is None
    for split in guessed["splits"][1:]:
        assert split["staleness_1_s"] < split["synchronous_s"]
    replicas = plan(
        capsys,
        "--config",
        config,
        "cluster.backend=ray",
        "cluster.workers_per_node=2",
        "cluster.generation_workers=4",
        "policy.generation.backend=vllm",
        "policy.generation.vllm.tensor_parallel_size=2",
        "--limit",
        64,
    )
    generation = [split["generation_workers"] for split in replicas["grpo_step"]["splits"]]
    # A replica takes two devices; the config has two replicas beside two policy workers.
    assert generation == [6, 2, 4] and replicas["grpo_step"]["configured"] == 2
    assert "continuous batching, up to 256 rows" in " ".join(replicas["assumptions"])
    overrides = ["grpo.max_num_steps=3", "grpo.val_at_start=false", "checkpointing.enabled=false"]
    assert main(["grpo", "--config", str(config), *overrides]) == 0
    capsys.readouterr()
    metrics = recipe.folder / "grpo" / "metrics.jsonl"
    measured = plan(capsys, "--metrics", metrics)["grpo_step"]
    assert "2 steps of the run" in measured["calibrated_with"]
    (split,) = measured["splits"]
    records = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    times = [record["timing/train_s"] for record in records if "timing/train_s" in record]
    assert split["train_s"] == pytest.approx(sum(times[1:]) / 2)
    rates = ("--tflops", 2, "--memory-gb-per-s", 3, "--link-gb-per-s", 4)
    given = plan(capsys, "--metrics", metrics, *rates)
    assert given["grpo_step"]["splits"][0]["train_s"] == pytest.approx(split["train_s"])
    assert "2 TFLOP/s in training and prompts, 3 GB/s" in " ".join(given["assumptions"])
    text = table(capsys, "--metrics", metrics)
    assert "GRPO step, 1 shared as configured" in text and "calibrated with 2 steps" in text
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    page = recipe.folder / "plan.html"
    table(capsys, "--metrics", metrics, "--html", page)
    assert "<h2>GRPO step</h2>" in page.read_text()
    recipe.sft()
    assert plan(capsys, "--config", recipe.folder / "sft.yaml")["grpo_step"] is None


def test_text_is_counted_in_the_tokenizers_tokens(demo: Path, capsys):
    options = (
        "--data",
        demo / "sft_train.jsonl",
        "--tokenizer",
        demo / "model",
        "--batch-size",
        8,
        "--limit",
        40,
    )
    record = plan(capsys, *options)
    assert record["rows"]["num_rows"] == 40 and 10 < record["rows"]["mean"] < 100


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, (), ("there is no file", "lengths.txt")),
        ("", (), ("lengths.txt has no rows",)),
        ("12\n7.5\n", (), ("lengths.txt:2", "'7.5' is not a length")),
        ("12\n0\n", (), ("lengths.txt:2", "'0'")),
        ("12\n-3\n", (), ("lengths.txt:2", "'-3'")),
        ('{"a": 1}\n', (), ("lengths.txt:1", "--field NAME")),
        ("a,b\n1,2\n", (), ("lengths.txt:1", "--column NAME (there are a, b)")),
        ("a,b\n1,2\n", ("--column", "c"), ("no column 'c'", "a, b")),
        ("a,b\n1,x\n", ("--column", "a,b"), ("lengths.txt:2 column b", "'x'")),
        ("a,b\n1\n", ("--column", "b"), ("lengths.txt:2", "1 cells")),
        ('{"a": 1}\n', ("--field", "b"), ("lengths.txt:1", "no field 'b'", "a")),
        ('{"a": 1\n', ("--field", "a"), ("lengths.txt:1", "JSON")),
        ("12\n", ("--column", "a", "--field", "b"), ("--column is for CSV",)),
        (
            "12\n900\n",
            ("--max-tokens", "512"),
            ("1 of 2 rows", "--max-tokens 512", "900", "lengths.txt:2", "--oversize"),
        ),
        ("12\n", ("--model", "13b"), ("unknown model '13b'", "7b (Qwen2.5-7B)")),
        ("12\n", ("--model", "7b", "--tp", "8"), ("tp 8", "28 attention heads", "set tp to 4;")),
        ("12\n", ("--model", "1b", "--pp", "32"), ("16 layers", "pp 32")),
        ("12\n", ("--pp", "2", "--engine", "dtensor"), ("engine dtensor has no pipeline",)),
        ("12\n", ("--sequence-parallel",), ("tp is 1", "or tp to 2 or more")),
        (
            "12\n",
            ("--batch-size", "4", "--dp", "8"),
            ("a batch of 4 rows on 8 data-parallel ranks",),
        ),
        ("12\n", ("--cp", "2", "--max-tokens", "2"), ("--max-tokens is 2", "at least 4")),
        ("12\n", ("--dp", "0"), ("--dp", "at least 1")),
        ("12\n", ("--memory-gb", "-1"), ("--memory-gb",)),
        ("12\n", ("--tflops", "0"), ("--tflops", "not a rate above 0")),
        ("12\n", ("--link-gb-per-s", "5"), ("--link-gb-per-s are for the GRPO step",)),
        ("12\n", ("--tokenizer", "x"), ("--tokenizer is for --data",)),
        ("12\n", ("--html", "nowhere/at/all.html"), ("--html", "cannot be written")),
        ("12\n", ("a.b=1",), ("KEY=VALUE is for --config",)),
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


def test_a_source_must_be_given_and_must_hold_lengths(tmp_path: Path, demo: Path, capsys):
    assert "--lengths" in message(capsys, "--dp", 2)
    assert "no row lengths" in message(capsys, "--metrics", tmp_path)
    assert "--data needs --tokenizer" in message(capsys, "--data", demo / "sft_train.jsonl")
    assert "--tokenizer" in message(
        capsys, "--data", demo / "sft_train.jsonl", "--tokenizer", tmp_path / "nowhere"
    )
    assert "--data" in message(
        capsys, "--data", tmp_path / "nowhere.jsonl", "--tokenizer", demo / "model"
    )


def test_a_model_config_with_a_missing_key_is_named(lengths: Path, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 64, "vocab_size": 10, "num_hidden_layers": 2}'
    )
    assert "num_attention_heads" in message(capsys, "--lengths", lengths, "--model", tmp_path)


def test_a_wrong_teacher_is_named_by_its_key(demo: Path, tmp_path: Path, capsys):
    config = tmp_path / "distill.yaml"
    config.write_text(
        f"run_name: a\npolicy: {{model_name: {demo / 'model'}}}\n"
        f"data: {{train_path: {demo / 'sft_train.jsonl'}}}\n"
        "distill: {teacher: nowhere/teacher, max_num_steps: 1}\n"
    )
    text = message(capsys, "--config", config, "--limit", 8)
    assert "distill.teacher is 'nowhere/teacher'" in text
