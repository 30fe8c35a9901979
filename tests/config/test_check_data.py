"""Relations of the keys of training sets, weights and filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.algorithms.registry import load_config
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig

SETS = "data.train_sets={code: c.jsonl}"


def loaded(tmp_path: Path, *overrides: str, kind: Any = "sft") -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text("run_name: a\npolicy: {model_name: m}\ndata: {train_path: t.jsonl}\n")
    return load_config(kind, path, list(overrides))


def test_weights_name_every_set(tmp_path: Path) -> None:
    config = loaded(tmp_path, SETS, "data.train_weights={train: 0.7, code: 0.3}")
    assert config.data.train_weights == {"train": 0.7, "code": 0.3}
    assert loaded(tmp_path, SETS).data.train_weights == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_sets={Code: c.jsonl}"], "has the name 'Code'; use lower-case letters"),
        (["data.train_sets={train: c.jsonl}"], "not 'train', which is data.train_path"),
        (
            [SETS, "data.train_weights={code: 1}"],
            "data.train_weights has code, the training sets are train, code; give each",
        ),
        ([SETS, "data.train_weights={train: 1, code: 0}"], "code is 0.0; it must be a finite"),
        (["data.pass_rate_range=[0.9,0.1]"], "two numbers from 0 to 1, the lower one first"),
        (["data.max_prompt_tokens=5"], "this run has no rollouts; set it to null"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *overrides)
    assert message in str(caught.value)
