"""Functions of the user that a config names by their import path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, error_text, shortened, shown_path

_INSTALLED = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}/",
    "<frozen ",
)
"""Beginnings of the paths of code that is not the user's."""
_MAX_FRAMES = 3
"""Lines of the user's code that the text of an exception names."""


def import_function(key: str, path: str, example: str, argument: str) -> Callable[..., Any]:
    """Import `module.function`. Raises ConfigError that begins with `key`.

    `example` is a legal path and `argument` what the function takes, for the messages.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise ConfigError(f"{key} is {path!r}; write module.function, e.g. {example}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # The import of a user's module can fail in any way.
        raise ConfigError(
            f"{key} is {path!r}, but importing {module_name!r} failed with"
            f" {_import_error_text(error, module_name)}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        # The most likely mistake is a misspelled name, so the existing ones are listed.
        names = []
        for name, value in sorted(vars(module).items()):
            if callable(value) and not name.startswith("_"):
                names.append(name)
        raise ConfigError(
            f"{key} is {path!r}, but {module_name!r} has no {attribute!r}; it has"
            f" {', '.join(names) or 'no functions'}"
        )
    if not callable(function):
        raise ConfigError(
            f"{key} is {path!r}, a {type(function).__name__} that cannot be called; name a function"
            f" of one {argument}"
        )
    return function


def import_class(key: str, path: str, example: str, methods: Sequence[str]) -> type[Any]:
    """Import `module.Class`. Raises ConfigError that begins with `key`.

    `example` is a legal path, and `methods` are those that the class must have.
    """
    imported = import_function(key, path, example, "conversation")
    wanted = f"name a class with the methods {' and '.join(methods)}, e.g. {example}"
    if not isinstance(imported, type):
        raise ConfigError(f"{key} is {path!r}, which is not a class; {wanted}")
    missing = [name for name in methods if not callable(getattr(imported, name, None))]
    if missing:
        raise ConfigError(f"{key} is {path!r}, which has no {' and no '.join(missing)}; {wanted}")
    return imported


def check_module(key: str, path: str) -> None:
    """Check that the module of the import path exists, without importing it.

    Its parent packages are imported. Raises ConfigError that begins with `key`.
    """
    module_name, _, _ = path.rpartition(".")
    try:
        spec = importlib.util.find_spec(module_name)
    except (Exception, SystemExit) as error:
        # The import of a parent package can fail in any way.
        raise ConfigError(
            f"{key} is {path!r}, but {module_name!r} cannot be found:"
            f" {_import_error_text(error, module_name)}"
        ) from error
    if spec is None:
        raise ConfigError(
            f"{key} is {path!r}, but there is no module {module_name!r}. {_path_hint(module_name)}"
        )


def user_error_text(error: BaseException) -> str:
    """Return type, text and lines of an exception that code of the user raised.

    The lines are the last ones outside of installed packages and this one, which the user can
    correct; the last one of all where there is no other. Example: `KeyError: 'a'
    (my_rewards.py:12: answers["a"], called in my_rewards.py:30)`.
    """
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
        code = (error.text or "").strip()
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}: {code})"
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    places = [f"{frame.filename}:{frame.lineno}" for frame in own_frames or frames[-1:]]
    if not places:
        return error_text(error)
    code = (own_frames or frames)[-1].line
    callers = places[-2 : -_MAX_FRAMES - 1 : -1]
    text = f"{places[-1]}: {shortened(code)}" if code else places[-1]
    return f"{error_text(error)} ({', called in '.join([text, *callers])})"


def _import_error_text(error: BaseException, module_name: str) -> str:
    """Return the text of an exception of an import, with a hint if `module_name` was not found."""
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
        return f"{error_text(error)}. {_path_hint(module_name)}"
    return user_error_text(error)


def _path_hint(module_name: str) -> str:
    """Return how a file of the user is found, with its directory if that is nearby."""
    package = module_name.partition(".")[0]
    for pattern in (f"{package}.py", package, f"*/{package}.py", f"*/*/{package}.py"):
        files = sorted(Path.cwd().glob(pattern))
        if files and str(files[0].parent) not in sys.path:
            folder = files[0].parent
            return f"{shown_path(files[0])} exists: export PYTHONPATH={folder} (on every node)"
    return "If it is your own file, put its directory on PYTHONPATH (on every node)"
