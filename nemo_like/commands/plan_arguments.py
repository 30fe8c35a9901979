"""Command-line flags of `nemo-like plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """examples:
  nemo-like plan --lengths conv.csv --column ContextTokens,GeneratedTokens --model 7b --dp 8
  nemo-like plan --lengths lengths.txt --model 7b --dp 8 --memory-gb 80
  nemo-like plan --lengths lengths.txt --max-tokens 16384 --dp 64 --html plan.html
  nemo-like plan --data train.jsonl --tokenizer models/SmolLM2-135M-Instruct --model 135m --dp 2
  nemo-like plan --config demo_grpo.yaml policy.sequence_packing.train_mb_tokens=4096
  nemo-like plan --metrics runs/demo_grpo/metrics.jsonl
"""
MAX_ROWS = 65_536
"""Rows that are planned without --limit."""
NUM_STEPS = 16
"""Steps whose rows are tokenized without --limit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `nemo-like plan`.

    A flag takes precedence over the config of --config and --metrics.
    """
    _add_source(parser)
    _add_rows(parser.add_argument_group("rows"))
    _add_model(parser.add_argument_group("model and cluster"))
    _add_batches(parser.add_argument_group("batches"))
    _add_rates(parser.add_argument_group("rates of one device, for the GRPO step"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE, or instead of the table"
    )
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="one self-contained page with charts"
    )


def _add_source(parser: argparse.ArgumentParser) -> None:
    # The group only gives a heading to the help; the flags exclude each other in the inner one.
    group = parser.add_argument_group("source of the row lengths, one of")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="integers, a CSV with --column or a JSONL with --field",
    )
    source.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="rows of text in the formats of SFT; with --tokenizer",
    )
    source.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a run's YAML: its data, tokenizer, model and cluster",
    )
    source.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="metrics.jsonl of a past run, whose lengths are used",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="keys to set, with --config"
    )


def _add_rows(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--column", metavar="NAME[,NAME]", help="columns of a CSV; several are added up"
    )
    group.add_argument(
        "--field", metavar="NAME", help="field of a JSONL: a number, or a list whose items count"
    )
    group.add_argument(
        "--tokenizer", metavar="DIR", help="directory of the tokenizer for the rows of text"
    )
    group.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help=f"rows to plan; default {MAX_ROWS:,}, of text {NUM_STEPS} steps",
    )
    group.add_argument(
        "--in-order",
        action="store_true",
        help="batches of consecutive rows instead of shuffled ones",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the shuffle; default 0")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", metavar="DIR|SIZE", help="directory with config.json, or a size such as 7b"
    )
    for axis, name in (
        ("dp", "data-parallel size"),
        ("tp", "tensor-parallel size"),
        ("cp", "context-parallel size"),
        ("pp", "number of pipeline stages"),
    ):
        group.add_argument(f"--{axis}", type=_positive, metavar="N", help=f"{name}; default 1")
    # The default of these flags is None, which stands for "not given": the config's value is kept.
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=None,
        help="shard LayerNorm and residual activations over the tensor-parallel group",
    )
    group.add_argument(
        "--engine", choices=("dtensor", "megatron"), help="default dtensor, with --pp megatron"
    )
    group.add_argument(
        "--precision", choices=("bfloat16", "float32"), help="compute type; default bfloat16"
    )
    group.add_argument(
        "--activation-checkpointing",
        nargs="?",
        const="full",
        choices=("none", "selective", "full"),
        help="recompute activations in the backward pass; without a value full",
    )
    group.add_argument(
        "--memory-gb",
        type=_size,
        metavar="N",
        help="memory of one GPU (GiB): recommends a token budget",
    )


def _add_batches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size", type=_positive, metavar="N", help="rows per optimizer step; default 512"
    )
    group.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="N",
        help="max tokens per microbatch; default: as many as fit into memory",
    )
    group.add_argument(
        "--micro-batch-size",
        type=_positive,
        metavar="N",
        help="rows per microbatch without packing and dynamic batching",
    )
    group.add_argument(
        "--balance",
        choices=("flops", "tokens"),
        help="work that is balanced over data-parallel ranks; default flops",
    )
    group.add_argument(
        "--sync",
        choices=("microbatch", "step"),
        help="where data-parallel ranks synchronize; default: as the engine does",
    )
    group.add_argument(
        "--oversize",
        choices=("error", "truncate", "drop", "singleton"),
        help="treatment of rows above the max tokens; default error",
    )


def _add_rates(group: argparse._ArgumentGroup) -> None:
    for flag, meaning in (
        ("--tflops", "TFLOP/s that training and prompts achieve"),
        ("--memory-gb-per-s", "GB/s of device memory that decoding achieves"),
        ("--link-gb-per-s", "GB/s at which new weights reach the generator"),
    ):
        group.add_argument(flag, type=_rate, metavar="N", help=meaning)


def _rate(text: str) -> float:
    """Parse a rate above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Written so that NaN and infinity are refused as well.
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate above 0")
    return value


def _size(text: str) -> float:
    """Parse a size in GiB."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Written so that NaN and infinity are refused as well.
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GiB above 0")
    return value


def _positive(text: str) -> int:
    """Parse an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
