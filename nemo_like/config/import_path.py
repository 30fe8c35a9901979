"""Functions of the user that a config names by their import path.

A path is `module.function`, or `FILE.py:function` for a file that is in no package. Modules are
searched on `PYTHONPATH` and then in the working directory of the driver.
"""

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
WORKING_DIRECTORY = "NEMO_LIKE_WORKING_DIRECTORY"
"""Variable of a worker: the driver's working directory, which a Ray worker does not have."""
_MAX_FRAMES = 3
"""Lines of the user's code that the text of an exception names."""


def import_function(key: str, path: str, example: str, argument: str) -> Callable[..., Any]:
    """Import `module.function` or `FILE.py:function`. Raises ConfigError that begins with `key`.

    `example` is a legal path and `argument` what the function takes, for the messages.
    """
    file, module_name, attribute = _parts(key, path)
    if not module_name or not attribute or path.endswith(".py"):
        raise ConfigError(
            f"{key} is {path!r}; write module.function, e.g. {example}, or FILE.py:function"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # The import of a user's module can fail in any way.
        raise ConfigError(
            f"{key} is {path!r}, but importing {module_name!r} failed with"
            f" {_import_error_text(error, module_name)}"
        ) from error
    found = module.__file__
    if file is not None and (found is None or not file.samefile(found)):
        raise ConfigError(
            f"{key} is {path!r}, but {module_name!r} is the name of the module"
            f" {found or 'of Python'}; rename the file"
        )
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

    `example` is a legal path, and the class must have `methods`.
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
    _, module_name, _ = _parts(key, path)
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


def _parts(key: str, path: str) -> tuple[Path | None, str, str]:
    """Return the file if `path` names one, the module and the function.

    Both can be empty. The module can be imported from then on if it exists. Raises ConfigError that
    begins with `key` if the file does not exist.
    """
    working_directory = Path(os.environ.get(WORKING_DIRECTORY) or Path.cwd())
    name, separator, attribute = path.rpartition(".py:")
    if not separator:
        _search(working_directory)
        module_name, _, attribute = path.rpartition(".")
        return None, module_name, attribute
    file = working_directory / f"{name}.py"
    if not file.is_file():
        raise ConfigError(f"{key} is {path!r}, but there is no file {shown_path(file)}")
    _search(file.parent)
    return file, file.stem, attribute


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        # The last place: a file of the user must not hide a library.
        sys.path.append(str(folder))


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
            return (
                f"{shown_path(files[0])} exists: write its path as FILE.py:function, or export"
                f" PYTHONPATH={folder} (on every node)"
            )
    return "If it is your own file, put its directory on PYTHONPATH (on every node)"
