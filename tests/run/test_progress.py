"""What is printed, on a real pseudo-terminal and into a plain log."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable

import pytest

from nemo_like.run.progress import Phase, Progress, Sample, sample_text

SAMPLE = Sample((("2+2=", False), ("4", True)), reward=1.0, notes={"answer": "4"})


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own wishes about terminals are not under test."""
    for name in (
        "NO_COLOR",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "COLUMNS",
        "LINES",
        "COLORTERM",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test changes."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def on_terminal(show: Callable[[Progress], None]) -> str:
    """Everything `show` puts on a terminal."""
    reader, writer = os.openpty()
    chunks: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(reader, 65536):
                chunks.append(chunk)
        except OSError:  # Linux ends a closed pseudo-terminal with EIO
            return

    thread = threading.Thread(target=drain)
    thread.start()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        show(Progress(stream))
    thread.join(timeout=10)
    os.close(reader)
    return b"".join(chunks).decode()


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_quick_steps_are_left_out_except_the_last_and_those_that_must_be_shown() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval_s=3600)
    with progress.phase("grpo", 6, unit="steps"):
        for step in range(1, 7):
            progress.show_step(f"step {step}", always=step == 3)
    assert stream.getvalue().splitlines() == ["step 1", "step 3", "step 6"]
    stream.truncate(0)
    with pytest.raises(KeyError), progress.phase("grpo", 6, unit="steps"):
        progress.show_step("the step before the error")
        raise KeyError
    assert "the step before the error" in stream.getvalue()


def test_verbose_shows_every_step() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval_s=3600, verbose=True)
    with progress.phase("grpo", 3, unit="steps"):
        for step in range(1, 4):
            progress.show_step(f"step {step}")
    assert stream.getvalue().splitlines() == ["step 1", "step 2", "step 3"]


def test_slow_steps_are_all_shown_in_a_log_with_the_time_left(now: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval_s=20)
    with progress.phase("grpo", 3, unit="steps") as phase:
        for step in range(1, 4):
            now[0] += 30
            phase.advance()
            progress.show_step(f"step {step}\nvalidation")
    lines = ["step 1  1:00 left", "step 2  0:30 left", "step 3"]
    assert stream.getvalue() == "".join(f"{line}\nvalidation\n" for line in lines)


def test_a_log_with_recent_lines_gets_no_states_of_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    stream = io.StringIO()
    progress = Progress(stream, interval_s=0.01)
    with progress.phase("grpo", 3, unit="steps"):
        progress.print_line("a line")
        threading.Event().wait(0.1)
    assert stream.getvalue() == "a line\n"


def test_sample_text_makes_the_mask_visible() -> None:
    assert sample_text(SAMPLE, "sample 1/1") == "--- sample 1/1 | reward 1.000, answer 4\n2+2=⟦4⟧"


def test_a_heading_with_many_values_has_them_on_separate_lines() -> None:
    notes = {f"number {index}": "12345" for index in range(8)}
    assert sample_text(Sample((("a", True),), reward=0.5, notes=notes), "prompt 3, 1/2") == (
        "--- prompt 3, 1/2\n"
        "    reward 0.500, number 0 12345, number 1 12345, number 2 12345,\n"
        "    number 3 12345, number 4 12345, number 5 12345, number 6 12345,\n"
        "    number 7 12345\n"
        "⟦a⟧"
    )


def test_eta_is_pace_times_what_is_left(now: list[float]) -> None:
    phase = Phase("train", 100, "rows")
    assert phase.eta_s() is None
    now[0] += 5
    phase.advance(20)
    assert phase.eta_s() == pytest.approx(80 * 5 / 20)
    # The time of an unfinished item does not count for the pace: 20 s were left 3 s ago.
    now[0] += 3
    assert phase.eta_s() == pytest.approx(17)
    now[0] += 30
    assert phase.eta_s() == 0.0
    phase.advance(80)
    assert phase.eta_s() is None and phase.status() == "100/100 rows, 0:38"


def test_the_line_of_a_step_and_the_states_of_phases_have_the_same_time_left(
    now: list[float],
) -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval_s=20)
    with progress.phase("sft", 6, unit="steps") as phase:
        now[0] += 100
        phase.advance()
        progress.show_step("step 1/6")
        now[0] += 90
        assert phase.status() == "1/6 steps, 3:10, 6:50 left"
    assert stream.getvalue() == "step 1/6  8:20 left\n"


def test_what_was_done_before_a_resume_does_not_count_for_the_pace(now: list[float]) -> None:
    phase = Phase("grpo", 100, "steps", done=90)
    assert phase.eta_s() is None and phase.status() == "90/100 steps, 0:00"
    now[0] += 4
    phase.advance(5)
    assert phase.eta_s() == pytest.approx(5 * 4 / 5)


def test_a_phase_of_unequal_items_shows_no_time_left() -> None:
    phase = Phase("starting workers", 3, "groups", has_eta=False)
    phase.advance()
    assert phase.eta_s() is None and phase.status() == "1/3 groups, 0:00"


def test_a_phase_without_a_total_shows_its_time() -> None:
    phase = Phase("exporting", None, "files")
    assert phase.status() == "0:00"
    phase.advance(2)
    assert phase.status() == "2 files, 0:00"


def test_advance_counts_every_call_from_every_thread() -> None:
    phase = Phase("generate", None, "rows")
    threads = [
        threading.Thread(target=lambda: [phase.advance() for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert phase.done == 2000


def test_a_log_gets_a_line_now_and_then_even_if_nothing_moves() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval_s=0.02)
    with (
        progress.phase("grpo", 10, unit="steps"),
        progress.phase("starting workers", 2, unit="workers"),
    ):
        begin = time.monotonic()
        while stream.getvalue().count("\n") < 2:
            assert time.monotonic() - begin < 60, "no line, though nothing moves"
            time.sleep(0.01)
        lines = stream.getvalue().splitlines()
        assert len(lines) <= 2 + (time.monotonic() - begin) / 0.02
    assert re.fullmatch(
        r"grpo: 0/10 steps, 0:\d\d \| starting workers: 0/2 workers, 0:\d\d", lines[0]
    )


def test_a_short_phase_leaves_a_log_alone() -> None:
    stream = io.StringIO()
    with Progress(stream, interval_s=5.0).phase("plan", 1) as phase:
        phase.advance()
    assert stream.getvalue() == ""


def test_a_phase_that_raises_is_gone_and_its_thread_too() -> None:
    progress = Progress(io.StringIO(), interval_s=0.01)
    with pytest.raises(KeyError), progress.phase("train", 4):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
    with progress.phase("train", 4) as phase:
        assert phase.done == 0


def test_long_lines_are_not_wrapped_in_a_log() -> None:
    stream = io.StringIO()
    Progress(stream).print_line("x" * 500)
    assert stream.getvalue() == "x" * 500 + "\n"


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    hostile = Sample((("\x1b[2J\x1b]0;title\x07[/bold] [red]\r", True), ("\ud800", False)))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    Progress(stream).show_samples([hostile], "sample")
    stream.seek(0)
    assert "\x1b" not in (text := stream.read())
    assert r"⟦\x1b[2J\x1b]0;title\x07[/bold] [red]\r⟧\ud800" in text
    shown = on_terminal(lambda progress: progress.show_samples([hostile], "sample"))
    assert "\x1b[2J" not in shown and "\x1b]0;" not in shown


def test_a_stream_that_is_not_utf8_still_prints() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream).show_samples([SAMPLE], "sample")
    stream.seek(0)
    assert r"2+2=\u27e64\u27e7" in stream.read()


def test_terminal_shows_bars_lines_above_them_and_leaves_only_the_lines() -> None:
    def show(progress: Progress) -> None:
        with (
            progress.phase("grpo", 3, unit="steps") as steps,
            progress.phase("generate", 64) as rows,
        ):
            rows.advance(16)
            steps.advance(1)
            time.sleep(0.6)  # two refreshes
            progress.show_step("step 1  loss 0.5000", note="loss 0.5000, 1,200 tokens/s")
            time.sleep(0.6)
        progress.print_line("done")

    text = without_styles(on_terminal(show))
    assert re.search(r"grpo +━+.* 1/3 steps, 0:\d\d", text)
    assert re.search(r"grpo +━+.* 1/3 steps, 0:\d+, 0:\d+ left, loss 0.5000, 1,200 tokens/s", text)
    assert re.search(r"generate +━+.* 16/64 rows, 0:\d\d, 0:\d\d left", text)
    # The line of the last step alone, when the bar is gone.
    assert text.endswith("step 1  loss 0.5000\r\ndone\r\n")


@pytest.mark.parametrize("columns", ["80", "40"])
def test_bars_never_wrap(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    def show(progress: Progress) -> None:
        with (
            progress.phase("checking that rows are isolated", 400, unit="checks") as phase,
            progress.phase("grpo", 3, unit="steps"),
        ):
            phase.advance(25)
            progress.show_step("line", note="reward 0.530, 12,345 tokens/s")
            time.sleep(0.3)

    lines = re.split(r"[\r\n]+", without_styles(on_terminal(show)))
    assert any("25/400" in line for line in lines)
    assert max(map(len, lines)) <= int(columns)


def test_a_table_of_samples_shows_text_of_models_as_it_is() -> None:
    hostile = Sample((("\x1b[2J[red]2+2=", False), ("<script>4[/bold]\x07", True)), reward=0.5)
    rows = [hostile, SAMPLE, Sample((("long", False), ("a\nb" + "x" * 4997, True)))]
    stream = io.StringIO()
    Progress(stream).show_table(rows, "validation samples at step 20")
    text = stream.getvalue()
    assert "\x1b" not in text and r"\x1b[2J[red]2+2=" in text and r"<script>4[/bold]\x07" in text
    assert text.splitlines()[0].rstrip() == "validation samples at step 20"
    assert re.search(r"2\+2= *│ 4 +│ 1\.000 +│ answer 4", text)
    assert "a ↵" in text and "(5,000 characters)" in text and len(text) < 9000
    assert max(map(len, text.splitlines())) <= 80
    shown = on_terminal(lambda progress: progress.show_table(rows, "samples"))
    assert "\x1b[2J" not in shown and "\x07" not in shown
    assert max(map(len, without_styles(shown).splitlines())) <= 80
    Progress(stream).show_table([], "nothing")
    assert stream.getvalue() == text


def test_a_terminal_without_cursor_movement_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert on_terminal(lambda progress: progress.show_samples([SAMPLE], "sample")).endswith(
        "2+2=⟦4⟧\r\n"
    )


def test_terminal_samples_are_panels_with_trained_text_in_green() -> None:
    text = on_terminal(lambda progress: progress.show_samples([SAMPLE], "sample"))
    assert "sample 1/1" in text and "reward 1.000, answer 4" in text
    assert re.search(r"\x1b\[[0-9;]*32m4", text)
    assert "⟦" not in text
