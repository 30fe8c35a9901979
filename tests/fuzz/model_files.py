"""Seeded random mutations of the files of a model directory other than its weights: tokenizer,
template, configuration.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.commands.validate import validate
from nemo_like.config.batching import StreamableDataConfig as DataConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import PolicyConfig
from nemo_like.demo.task import build_model, build_tokenizer

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    "",
    "x" * 50,
    "\ud800",
    [],
    {},
    [1],
    {"a": 1},
)
_ROWS = (
    '{"messages": [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]}\n'
    * 40
)


def model_case(seed: int, folder: Path) -> Callable[[], None]:
    """Write a model directory with one mutated file for `seed`; the action validates a run with
    it.
    """
    rng = random.Random(seed)
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(_model(folder), model)
    names = sorted(path.name for path in model.iterdir() if path.suffix in (".json", ".jinja"))
    _mutate(rng, model / rng.choice(names))
    rows = folder / "rows.jsonl"
    rows.write_text(_ROWS)
    config = SftRunConfig(
        run_name="x",
        output_dir=str(folder / "out"),
        policy=PolicyConfig(model_name=str(model)),
        data=DataConfig(train_path=str(rows)),
    )

    def act() -> None:
        problems = validate(config).problems
        if problems:
            raise ConfigError(problems[0])

    return act


@cache
def _model(folder: Path) -> Path:
    path = folder / "original"
    build_tokenizer().save_pretrained(path)
    build_model(0).save_pretrained(path)
    return path


def _mutate(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    choice = rng.randrange(8)
    if choice == 0:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif choice == 1:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 5, 50))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
    elif choice == 2:
        path.write_bytes(rng.choice((b"", rng.randbytes(200))))
    elif choice == 3:
        path.unlink()
    elif path.suffix == ".json":
        text = json.dumps(_mutate_value(rng, json.loads(data)), ensure_ascii=rng.random() < 0.5)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _mutate_value(rng: random.Random, value: Any) -> Any:
    """The JSON value with one part removed or replaced."""
    parts: list[tuple[Any, Any]] = []

    def collect(container: Any) -> None:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in list(keys)[:50]:
            parts.append((container, key))
            if isinstance(container[key], dict | list):
                collect(container[key])

    collect(value)
    container, key = rng.choice(parts)
    if rng.random() < 0.3:
        del container[key]
    else:
        container[key] = rng.choice(VALUES)
    return value
