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


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like demo`."""
    text = "seed of the data, the model and both runs"
    parser.add_argument("--seed", type=int, default=0, help=text)
    text = "only build the model and the data in runs/demo"
    parser.add_argument("--prepare-only", action="store_true", help=text)


def training_examples(kind: str) -> str:
    """Return the end of the help of a job."""
    return _TRAINING.format(kind=kind, data=_TRAINING_DATA[kind])
