"""Result files of the commands that sample answers."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_like.commands.answer_files import AnswerFile


def test_a_resume_with_fewer_rows_keeps_the_finished_ones(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    first = AnswerFile(path, {"seed": 0}, resume=False)
    for row in (2, 0, 1):
        first.add({"row": row, "digest": str(row)})
    first.close()
    second = AnswerFile(path, {"seed": 0}, resume=True)
    assert [record["row"] for record in second.finish([("", 0)])] == [0]
    rows = [json.loads(line)["row"] for line in path.read_bytes().splitlines()]
    assert rows == [0, 1, 2]
