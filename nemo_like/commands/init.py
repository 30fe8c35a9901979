"""`nemo-like init`: writes a config for a model and a data file, or copies examples and scripts."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.console import say
from nemo_like.run.files import write_text

_PACKAGE = Path(__file__).parents[1]
_ROOTS = (_PACKAGE / "scripts", _PACKAGE.parent)
"""Where `examples` and `ray_jobs` are in a wheel (`force-include` of pyproject.toml), and
in a checkout of the repository.
"""


def run(arguments: argparse.Namespace) -> int:
    """Write the config or the examples; return the exit code. Raises ConfigError."""
    if arguments.scripts is not None:
        return write_scripts(arguments.scripts)
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
    _copy_files({directory / example.name: example for example in examples})
    say(f"wrote {len(configs)} example configs to {directory}; README.md has their variants")
    return 0


def write_scripts(directory: Path) -> int:
    """Copy `ray_jobs` and `examples` into a directory, as `write_examples` does."""
    root = example_configs()[0].parents[2]
    files = [path for name in ("ray_jobs", "examples") for path in (root / name).rglob("*")]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    _copy_files({directory / path.relative_to(root): path for path in files})
    say(f"wrote {len(files)} files to {directory}; ray_jobs/README.md describes the scripts")
    return 0


def _copy_files(sources: dict[Path, Path]) -> None:
    """Copy each source to its target. Raises ConfigError, see `write_examples`."""
    # A broken link does not exist, and writing to it would create a file elsewhere.
    existing = [target for target in sources if target.exists() or target.is_symlink()]
    if existing:
        others = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise ConfigError(
            f"{existing[0]}{others} exists already; nothing was written: choose another directory,"
            " or move the existing files"
        )
    for target, source in sources.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # With the permission to execute.
            shutil.copy(source, target)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror}") from error


def example_configs() -> list[Path]:
    """Return the example YAML files of this installation, sorted by name."""
    for root in _ROOTS:
        files = sorted((root / "examples" / "configs").glob("*.yaml"))
        if files:
            return files
    raise ConfigError(
        "this installation of nemo_like has no example configs; install it from a wheel or run it"
        " in a checkout of the repository"
    )
