"""The report of runs: what it shows of the files of a run, and that texts stay texts."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.cli import main
from nemo_like.commands.report import write_at_end
from nemo_like.config.errors import printable
from nemo_like.reports.run_charts import specification
from nemo_like.reports.run_report import report_page
from nemo_like.run.directory import locked
from nemo_like.run.files import write_json_lines
from tests.reports.pages import Page, assert_drawn, file_address, in_chromium
from tests.reports.run_directory import config_of, write_run

HOSTILE = (
    "</script><script>document.title='hit'</script><img src=x onerror=\"document.title='hit'\">"
    "' onmouseover=alert(1) {{ 7*7 }} \x1b[31mred\x1b[0m \u202e $$x$$ <!--"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"), texts=("What is 2+2?", "It is 4 ≈ vier."))


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(report_page([run]))


def test_a_page_has_every_chart_and_loads_nothing(page: Page) -> None:
    titles = {chart["title"] for group in specification()["groups"] for chart in group["charts"]}
    # What a GRPO run does not log.
    titles -= {"accuracy", "margin", "divergence"}
    titles -= {"reward of each validation set"}
    missing = {title for title in titles if f"<b>{title}</b>" not in page.text}
    assert missing == set()
    for title in ("seconds of each step", "time line of single steps", "tokens per row, all steps"):
        assert f"<b>{title}</b>" in page.text
    # And the ranks of the first step.
    assert len(page.charts) == len(titles) + 4
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img") and "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in str(page.elements)


def test_a_chart_has_the_values_of_the_metrics(run: Path) -> None:
    record = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert record[3]["reward/mean"] is None
    shown = Page(report_page([run])).shown
    # The last value that is a number is that of step 3.
    assert f"{record[2]['reward/mean']:.4g}" in shown
    assert "from 0.5356 at step 1" in shown and "in 4 steps" in shown
    assert "finished" in shown and "torch 2." in shown and "max_num_steps: 4" in shown


def test_rollouts_are_shown_by_step_with_marked_tokens(page: Page) -> None:
    steps = [attributes["id"] for tag, attributes in page.elements if tag == "details"]
    assert {"step-1", "step-4"} <= set(steps)
    marks = [
        attributes for tag, attributes in page.elements if tag == "i" and "title" in attributes
    ]
    assert marks[0]["title"] == "advantage 1, log-prob difference 0.0084"
    assert "--c:var(--good);--a:1.0" in str(marks[0]["style"]) and "--d:1.0" in str(marks)
    # The tokens of one character are one mark, and the prompt has none.
    marked = [page.words[i] for i in range(len(page.words))]
    assert "≈" in marked and "What is 2+2?" in page.shown
    assert len(marks) == 2 * 6 * len("It is 4 ≈ vier.")


def test_conversations_have_roles_and_runs_without_tokens_say_why(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "open"}, {"role": "assistant", "content": "opened"}]
    path = write_run(tmp_path, num_steps=0, token_steps=(), messages=messages)
    shown = Page(report_page([path])).shown
    assert "assistant" in shown and "opened" in shown
    assert "token ids of no step are recorded (logger.keep_rollout_tokens)" in shown
    run_with_tokens = write_run(tmp_path, "other", num_steps=0)
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    assert "cannot be loaded" in Page(report_page([run_with_tokens])).shown


def test_a_run_without_results_has_no_empty_sections(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.mkdir()
    (path / "config.yaml").write_text("sft: {max_num_steps: 3}\n")
    page = Page(report_page([path]))
    assert page.charts == {}
    assert re.findall("<h2>(.*?)</h2>", page.text) == ["Config"]
    assert re.findall('href="#(.*?)"', page.text) == ["config"]
    assert main(["report", str(tmp_path)]) == 2


def test_a_run_of_sft_has_the_sections_that_it_logs(tmp_path: Path) -> None:
    path = tmp_path / "sft"
    path.mkdir()
    (path / "config.yaml").write_text("sft: {max_num_steps: 2}\n")
    metrics = {"policy/loss": 2.5, "packing/utilization": 0.75, "packing/efficiency": 1.0}
    lines = [json.dumps({"step": step, **metrics}) for step in (1, 2)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = Page(report_page([path]))
    sections = ["Learning", "Packing and balance of ranks", "Config"]
    assert re.findall("<h2>(.*?)</h2>", page.text) == sections
    assert "Not logged" not in page.shown
    # The name of the console, and the same quantity.
    assert "<dt>packed</dt><dd>75.0%" in page.text and "packing efficiency" not in page.text


def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_run(tmp_path, "first")
    second = write_run(tmp_path, "second", num_steps=6, config=config_of(tmp_path, seed=7))
    assert main(["report", str(first), str(second)]) == 2
    assert "--out" in capsys.readouterr().err
    out = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert "first loss" in page.shown and "second loss" in page.shown
    rows = page.text.split("Keys whose values differ.")[1].split("<tr>")
    assert [row for row in rows if "<td>seed</td><td>0</td><td>7</td>" in row]
    assert "max_num_steps" not in page.text.split("Keys whose values differ.")[1]
    assert main(["report", str(first), str(first), "--out", str(out)]) == 2
    assert "equal names" in capsys.readouterr().err


def test_state_and_warnings_come_from_log_and_health_rules(tmp_path: Path) -> None:
    path = write_run(tmp_path, num_steps=0)
    log = path / "logs" / "driver.log"
    finished = log.read_text()
    begun = finished.rpartition("\n2")[0]
    warning = "\n2026-11-24 12:00:00,000 WARNING nemo_like.x: two\nlines"
    ended = "\n2026-11-24 12:00:01,000 INFO nemo_like.x: ended by WorkerFailure: rank 3 is gone\n"
    finding = {
        "step": 3,
        "rule": "entropy",
        "message": "it fell",
        "key": "loss_fn.a",
        "level": "stop",
    }
    write_json_lines(path / "health.jsonl", [finding])
    log.write_text(begun + warning + ended)
    shown = Page(report_page([path])).shown
    assert "failed" in shown and "rank 3 is gone" in shown and "two\nlines" in shown
    assert "it fell" in shown and "step 3, health rule entropy" in shown and "loss_fn.a" in shown
    log.write_text(begun + warning)
    assert "its process was killed" in Page(report_page([path])).shown
    with locked(path):
        assert "running" in Page(report_page([path])).shown


@settings(max_examples=12)
@given(text=st.text(max_size=40))
def test_any_text_is_shown_as_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("texts")
    pages = []
    for name, value in (("safe", "x"), ("hostile", HOSTILE + text)):
        # Without steps there are no charts, which take most of the time.
        config = config_of(folder, note=value)
        messages = [{"role": value, "content": value}]
        path = write_run(
            *(folder, name),
            num_steps=0,
            texts=(value, value),
            token_steps=(),
            messages=messages,
            config=config,
        )
        finding = {"step": 3, "rule": value, "message": value, "key": value, "level": "warn"}
        write_json_lines(path / "health.jsonl", [finding])
        pages.append(Page(report_page([path])))
    safe, hostile = pages
    assert hostile.kinds == safe.kinds
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in safe.elements]
    assert hostile.shown.count(printable(HOSTILE + text)) >= 3
    assert printable(hostile.text.replace("\r", "")) == hostile.text


def test_a_long_run_fits_into_five_megabytes(tmp_path: Path) -> None:
    texts = ("Explain <it>. " * 40, "Because & so on, " * 200)
    path = write_run(tmp_path, num_steps=1000, texts=texts, token_steps=range(993, 1001))
    page = report_page([path])
    assert len(page.encode()) <= 5_000_000
    assert "in 1,000 steps" in page


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, num_steps=0)
    write_at_end(path)
    assert "report: " in capsys.readouterr().out and (path / "report.html").is_file()
    (path / "report.html").unlink()
    (path / "report.html").mkdir()
    with caplog.at_level(logging.WARNING):
        write_at_end(path)
    assert "the report of the run is not written" in caplog.text
    (path / "metrics.jsonl").write_text("no json\n{}\n")
    write_at_end(path)
    assert "metrics.jsonl:1: not valid JSON" in caplog.text


def test_a_browser_draws_every_chart_and_runs_no_text(tmp_path: Path) -> None:
    path = write_run(tmp_path, texts=(HOSTILE, HOSTILE), config=config_of(tmp_path, note=HOSTILE))
    page = Page(report_page([path]))
    file = tmp_path / "report.html"
    file.write_text(page.text)
    dom = in_chromium(file_address(file))
    assert_drawn(dom, len(page.charts))
    assert "<title>run</title>" in dom and "<img" not in dom
