"""`nemo-like init`: write the example configs into a directory.

The repository keeps them in examples/configs. A wheel contains a copy of that folder inside the
package (`force-include` in pyproject.toml).
"""

from __future__ import annotations

from pathlib import Path

from nemo_like.config.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "example_configs", _PACKAGE.parent / "examples" / "configs")
"""In an installed wheel, and in a checkout of the repository."""


def example_configs() -> list[Path]:
    """Return the example YAML files of this installation, sorted by name."""
    for folder in _FOLDERS:
        files = sorted(folder.glob("*.yaml"))
        if files:
            return files
    raise ConfigError(
        "this installation of nemo_like has no example configs; install it from a wheel or run it"
        " in a checkout of the repository"
    )


def write_examples(directory: Path) -> list[Path]:
    """Copy every example config into `directory`, which is created; return the written files.

    Raises ConfigError, and writes nothing, if a file of one of these names exists. Raises it as
    well if a file cannot be written.
    """
    examples = example_configs()
    targets = [directory / example.name for example in examples]
    # A broken link does not exist, and writing to it would create a file elsewhere.
    existing = [target for target in targets if target.exists() or target.is_symlink()]
    if existing:
        num_others = len(existing) - 1
        subject = f"{existing[0]} exists"
        if num_others:
            subject = f"{existing[0]} and {num_others} more exist"
        raise ConfigError(
            f"{subject} already; nothing was written: choose another directory, or move the"
            " existing files"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for example, target in zip(examples, targets, strict=True):
            # "x" fails instead of overwriting a file that another process created in the meantime.
            with target.open("xb") as file:
                file.write(example.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the example configs cannot be written to {directory}: {error.strerror}"
        ) from error
    return targets
