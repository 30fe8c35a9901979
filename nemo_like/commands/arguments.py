"""Arguments that several commands share: a config, or what a start without one needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_like.algorithms.registry import ALGORITHMS

_TRAINING = """examples:
  nemo-like {kind} --model models/SmolLM2-135M-Instruct --data {data}
  nemo-like {kind} --model models/SmolLM2-135M-Instruct --data {data} \\
      {kind}.max_num_steps=20 policy.optimizer.lr=1e-5
  nemo-like {kind} --config {kind}.yaml
  nemo-like {kind} --config runs/NAME/config.yaml resume=true   continue a run

see also:
  nemo-like config {kind}                        every key
  nemo-like init --kind {kind} --model DIR --data FILE   write the settings to a file
  nemo-like validate --config FILE             check a config in seconds
"""
_TRAINING_DATA = {
    "sft": "chat.jsonl",
    "grpo": "problems.jsonl --reward my_rewards.score",
    "dpo": "pairs.jsonl",
    "rm": "pairs.jsonl",
    "distill": "chat.jsonl --teacher DIR",
}


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add overrides of keys."""
    text = "keys to set (a.b=1), add (+a.b=1) or put back (~a.b)"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--config` and overrides."""
    text = "a YAML file; `nemo-like init` writes one"
    parser.add_argument("--config", required=required, type=Path, metavar="FILE", help=text)
    add_overrides(parser)


def add_kind(parser: argparse.ArgumentParser) -> None:
    """Add the job of a config."""
    text = "the job of the config; default: detected from its keys"
    parser.add_argument("--kind", choices=tuple(ALGORITHMS), help=text)


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add what can replace a config."""
    text = "without --config: a model directory, a name on the hub, or a run with its model"
    parser.add_argument("--model", metavar="DIR", help=text)
    text = "without --config: the training file, whose format is detected"
    parser.add_argument("--data", metavar="FILE", help=text)
    text = "grpo: import path of a reward function; default: compares with the answers of the data"
    parser.add_argument("--reward", metavar="PACKAGE.FUNCTION", help=text)
    parser.add_argument("--teacher", metavar="DIR", help="distill: the model to learn from")


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add a config, or what replaces it."""
    add_config(parser, required=False)
    add_start(parser)


def add_validate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like validate`."""
    add_training(parser)
    add_kind(parser)


def add_init(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like init`."""
    text = "a directory for the example configs; with --model and --data keys to set"
    parser.add_argument("overrides", nargs="*", metavar="DIR | KEY=VALUE", help=text)
    add_start(parser)
    add_kind(parser)
    text = "the config to write; default KIND.yaml"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like plan`."""
    text = "a run's YAML; without it the keys are those of SFT of a 7B model on one GPU"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)
    add_start(parser)
    add_kind(parser)
    source = parser.add_mutually_exclusive_group()
    text = "row lengths instead of the rows of data.train_path: integers, a CSV or a JSONL file"
    source.add_argument("--lengths", type=Path, metavar="FILE", help=text)
    text = "metrics.jsonl of a past run, whose lengths and config are used"
    source.add_argument("--metrics", type=Path, metavar="FILE", help=text)
    text = "columns of a CSV or fields of a JSONL file of --lengths; several are added up"
    parser.add_argument("--column", metavar="NAME[,NAME]", help=text)
    text = "column of --lengths: rows with an equal value begin with the same tokens"
    parser.add_argument("--group", metavar="NAME", help=text)
    text = "column of --lengths: how many tokens at its start a row has in common with its group"
    parser.add_argument("--prefix", metavar="NAME", help=text)
    text = "rows to plan; default 65,536, and 16 steps of rows of text"
    parser.add_argument("--limit", type=positive_integer, metavar="N", help=text)
    text = "memory of one GPU (GiB): recommends a token budget"
    parser.add_argument("--memory-gb", type=_positive_size, metavar="N", help=text)
    text = "JSON to FILE; with - to the output, instead of the table"
    parser.add_argument("--json", metavar="FILE", help=text)
    text = "one self-contained page with charts"
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)
    add_overrides(parser)


def _positive_size(text: str) -> float:
    """Parse a size in GiB."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Written so that NaN and infinity are refused as well.
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GiB above 0")
    return value


def positive_integer(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like demo`."""
    text = "seed of the data, the model and both runs"
    parser.add_argument("--seed", type=int, default=0, help=text)
    text = "only build the model and the data in runs/demo"
    parser.add_argument("--prepare-only", action="store_true", help=text)


def training_examples(kind: str) -> str:
    """Return the end of the help of a job."""
    return _TRAINING.format(kind=kind, data=_TRAINING_DATA[kind])
