"""Reward functions of the command line: included ones by name, import paths, and Python files."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_like.config.errors import ConfigError, shown_path

INCLUDED = {
    "answer": "nemo_like.environments.math.answer_reward",
    "format": "nemo_like.environments.math.format_reward",
    "code": "nemo_like.environments.code.code_reward",
    "code_share": "nemo_like.environments.code.code_share_reward",
}
"""Import paths of the included functions."""


def reward_functions(given: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return `reward.functions` of `--reward NAME | MODULE.FUNCTION | FILE.py:FUNCTION`.

    The directory of a file is added to the import path of this process and of those that it
    starts. Raises ConfigError for an unknown name, a missing file, and two functions of one name.
    """
    functions: dict[str, dict[str, str]] = {}
    for text in given:
        if ":" in text:
            path = _file_function(text)
        elif "." in text:
            path = text
        elif text in INCLUDED:
            path = INCLUDED[text]
        else:
            raise ConfigError(
                f"--reward is {text!r}; the included functions are {', '.join(INCLUDED)}. Others"
                " are named MODULE.FUNCTION, or FILE.py:FUNCTION"
            )
        name = text if text in INCLUDED else path.rpartition(".")[2]
        if name in functions:
            raise ConfigError(f"--reward has two functions with the name {name!r}; rename one")
        functions[name] = {"path": path}
    return functions


def named_models(given: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return `reward.models` of `--reward-model [NAME=]DIR`. Raises ConfigError for equal names."""
    models: dict[str, dict[str, str]] = {}
    for text in given:
        name, separator, directory = text.partition("=")
        if not separator or not name.isidentifier():
            name = "reward_model"
            directory = text
        if name in models:
            raise ConfigError(
                f"--reward-model has the name {name!r} twice; write NAME=DIR with different names"
            )
        models[name] = {"model_name": directory}
    return models


def _file_function(text: str) -> str:
    """Return the import path of a function in a file. Raises ConfigError."""
    name, _, function = text.rpartition(":")
    file = Path(name).expanduser().absolute()
    if file.suffix != ".py" or not function.isidentifier() or not file.stem.isidentifier():
        raise ConfigError(
            f"--reward is {text!r}; write FILE.py:FUNCTION, with a file name that can be imported,"
            " e.g. my_rewards.py:brevity"
        )
    if not file.is_file():
        raise ConfigError(f"--reward is {text!r}, but there is no file {shown_path(file)}")
    folder = str(file.parent)
    # Reward functions with a timeout run in a child process, which reads PYTHONPATH.
    if folder not in sys.path:
        sys.path.insert(0, folder)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # The directory may have been listed before the file was written.
    importlib.invalidate_caches()
    found = importlib.util.find_spec(file.stem)
    origin = None if found is None else found.origin
    if origin is None or Path(origin).resolve() != file.resolve():
        raise ConfigError(
            f"--reward is {text!r}, but Python imports {file.stem!r} from {origin or 'elsewhere'};"
            " rename the file"
        )
    return f"{file.stem}.{function}"
