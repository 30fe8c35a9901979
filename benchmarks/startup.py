"""CPU seconds of commands that start nothing: `--help`, `validate`, and what importing their
libraries costs.

    python -m nemo_like.demo --prepare-only    # writes runs/demo, which the first config reads
    python benchmarks/startup.py --config examples/configs/demo_sft.yaml

User and system time of fresh processes, the least of `--repeats`; other load on the machine
lengthens CPU time too, so the rows are measured in turns and the ratio to `import torch` is given.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", nargs="+", default=[], help="configs to validate")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    program = [sys.executable, "-m", "nemo_like"]
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "import torch, ray, transformers": [
            sys.executable,
            "-c",
            "import torch, ray, transformers.modeling_utils",
        ],
        "nemo-like --help": [*program, "--help"],
        "nemo-like sft --help": [*program, "sft", "--help"],
    }
    commands |= {
        f"nemo-like validate {path}": [*program, "validate", "--config", path]
        for path in arguments.config
    }
    min_seconds = dict.fromkeys(commands, float("inf"))
    for _ in range(arguments.repeats):
        for name, command in commands.items():
            min_seconds[name] = min(min_seconds[name], cpu_seconds(command))
    print(f"{'command':<60} {'CPU s':>7} {'ratio':>6}")
    for name, seconds in min_seconds.items():
        print(f"{name:<60} {seconds:7.2f} {seconds / min_seconds['import torch']:6.2f}")


def cpu_seconds(command: Sequence[str]) -> float:
    """User and system time of the command and its children; RuntimeError with its output if it
    fails.
    """
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


if __name__ == "__main__":
    main()
