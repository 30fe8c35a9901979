"""Functions of the user that a config names by their import path."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from nemo_like.config.errors import ConfigError

_PATH_HINT = "If it is a file of your own, put its directory on PYTHONPATH (on every node)"


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
            f"{key} is {path!r}, but importing {module_name!r} failed with {type(error).__name__}:"
            f" {error}. {_PATH_HINT}"
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
        raise ConfigError(f"{key} is {path!r}, which is no class; {wanted}")
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
            f"{key} is {path!r}, but {module_name!r} cannot be found: {type(error).__name__}:"
            f" {error}. {_PATH_HINT}"
        ) from error
    if spec is None:
        raise ConfigError(
            f"{key} is {path!r}, but there is no module {module_name!r}. {_PATH_HINT}"
        )
