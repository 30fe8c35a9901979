"""`logs/driver.log`: what is logged is there, and a write that fails is raised by `check`, not by
logging.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from nemo_like.run.files import WriteError
from nemo_like.run.tracking import run_log

logger = logging.getLogger("nemo_like.test_run_log")


def test_records_are_appended_and_the_handler_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    # Without pytest's own handlers: pytest-xdist cannot send a captured lone surrogate.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        for text in ("first", "a lone surrogate \ud83d"):
            with run_log(path) as log:
                logger.warning("%s", text)
                log.check()
        logger.warning("after the run")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split("test_run_log: ")[1] for line in lines] == [
        "first",
        r"a lone surrogate \ud83d",
    ]


def test_the_exception_that_ends_a_run_is_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nemo_like")
    with pytest.raises(KeyError), run_log(tmp_path / "driver.log"):
        raise KeyError("the reason")
    assert "KeyError: 'the reason'" in (tmp_path / "driver.log").read_text()


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full"
)
def test_a_full_disk_is_raised_by_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "driver.log").symlink_to("/dev/full")
    with run_log(tmp_path / "driver.log") as log:
        log.check()
        logger.warning("lost")
        logger.warning("lost as well")
        with pytest.raises(WriteError, match=r"driver\.log cannot be written: No space left"):
            log.check()
    assert "Traceback" not in capsys.readouterr().err


def test_a_removed_log_is_raised_by_check(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with run_log(tmp_path / "logs" / "driver.log") as log:
        logger.warning("kept")
        shutil.rmtree(tmp_path / "logs")
        with pytest.raises(WriteError, match="logs was removed or replaced"):
            log.check()
