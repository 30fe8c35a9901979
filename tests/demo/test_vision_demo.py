"""The data and the model of the demo with images, and its example configs."""

from __future__ import annotations

import gzip
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.commands.init import example_configs
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.demo import vision


class _Finder:
    """Finds the package scikit-learn with these digits alone, as another path entry would."""

    def __init__(self, origin: Path) -> None:
        self.origin = origin

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=str(self.origin)) if name == "sklearn" else None


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """1,797 random images, int64 [N, 65]: values from 0 to 16 and the digit."""
    rng = np.random.default_rng(0)
    table = np.concatenate(
        [rng.integers(0, 17, (1797, 64)), rng.integers(0, 10, (1797, 1))], axis=1
    )
    path = tmp_path / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    path.parent.mkdir(parents=True)
    text = "".join(",".join(f"{value}" for value in row) + "\n" for row in table)
    path.write_bytes(gzip.compress(text.encode()))
    finder = _Finder(tmp_path / "sklearn" / "__init__.py")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    return table


def test_the_demo_writes_rows_with_their_answers_and_a_model(
    tmp_path: Path, digits: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "demo_vision"
    vision.build_vision_demo(folder, 0, num_sft_rows=300, num_grpo_rows=100)
    # Found by their pixels: the order of the images is the demo's own.
    label_of = {(row[:64] * 255 // 16).astype(np.uint8).tobytes(): int(row[64]) for row in digits}
    labels = [
        label_of[np.asarray(Image.open(folder / "images" / f"{number}.png")).tobytes()]
        for number in range(len(digits))
    ]
    used: dict[str, set[int]] = {}
    for name in ("sft_train", "grpo_train", "digits", "sums"):
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            numbers = [int(Path(each).stem) for each in row.get("images", ())]
            prompt = row["messages"][0]["content"]
            own = [labels[number] for number in numbers]
            if prompt.endswith("?"):
                assert row["answer"] == "".join(map(str, own))
            elif numbers:
                assert row["answer"] == str(sum(own))
            used.setdefault(name, set()).update(numbers)
    assert not (used["sft_train"] | used["grpo_train"]) & (used["digits"] | used["sums"])
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    assert 0.5e6 < model.num_parameters() < 1e6
    monkeypatch.chdir(tmp_path)
    configs = {path.stem: path for path in example_configs()}
    sft = load_config(SftRunConfig, configs["demo_vision_sft"])
    assert not validate(sft).problems
    options = ["policy.model_name=runs/demo_vision/model"]
    grpo = load_config(GrpoRunConfig, configs["demo_vision_grpo"], options)
    assert not validate(grpo).problems


def test_without_scikit_learn_the_demo_names_the_package(tmp_path: Path) -> None:
    if "sklearn" in sys.modules:
        pytest.skip("scikit-learn is imported")
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        vision.build_vision_demo(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
