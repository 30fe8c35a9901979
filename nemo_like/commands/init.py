"""`nemo-like init`: writes a config for a model and a data file, or the example configs."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.console import say
from nemo_like.run.files import write_text

_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = (_PACKAGE / "example_configs", _PACKAGE.parent / "examples" / "configs")
"""The example configs in an installed wheel (`force-include` of pyproject.toml), and in a checkout
of the repository."""


def run(arguments: argparse.Namespace) -> int:
    """Write the config or the examples; return the exit code. Raises ConfigError."""
    if arguments.model is None and arguments.data is None:
        if len(arguments.overrides) != 1:
            raise ConfigError(
                "give --model DIR and --data FILE for a config, or one DIR for the example configs"
            )
        return write_examples(Path(arguments.overrides[0]))
    # Imported here: the examples need none of what it imports.
    from nemo_like.commands.start import choose_config, commented_yaml

    chosen = choose_config(arguments, arguments.kind)
    kind = chosen.config.kind
    path = arguments.out or Path(f"{kind}.yaml")
    if path.exists():
        raise ConfigError(
            f"{shown_path(path)} exists already; remove it, or name another with --out"
        )
    write_text(path, commented_yaml(chosen))
    say("\n".join(chosen.lines()))
    say(f"wrote {shown_path(path)}; next: nemo-like validate --config {shown_path(path)}")
    return 0


def write_examples(directory: Path) -> int:
    """Copy the example configs and their README into a directory; return the exit code.

    The directory is created. Raises ConfigError, and writes nothing, if a file of one of these
    names exists. Raises it as well if a file cannot be written.
    """
    configs = example_configs()
    examples = [*configs, configs[0].with_name("README.md")]
    targets = [directory / example.name for example in examples]
    # A broken link does not exist, and writing to it would create a file elsewhere.
    existing = [target for target in targets if target.exists() or target.is_symlink()]
    if existing:
        others = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise ConfigError(
            f"{existing[0]}{others} exists already; nothing was written: choose another directory,"
            " or move the existing files"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for example, target in zip(examples, targets, strict=True):
            shutil.copyfile(example, target)
    except OSError as error:
        raise ConfigError(
            f"the example configs cannot be written to {directory}: {error.strerror}"
        ) from error
    say(f"wrote {len(configs)} example configs to {directory}; README.md has their variants")
    return 0


def example_configs() -> list[Path]:
    """Return the example YAML files of this installation, sorted by name."""
    for folder in _EXAMPLES:
        files = sorted(folder.glob("*.yaml"))
        if files:
            return files
    raise ConfigError(
        "this installation of nemo_like has no example configs; install it from a wheel or run it"
        " in a checkout of the repository"
    )
