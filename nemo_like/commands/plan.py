"""`nemo-like plan`: padding, balance, step time and memory, predicted from row lengths alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import printable

EPILOG = """examples:
  nemo-like plan --config demo_grpo.yaml policy.sequence_packing.train_mb_tokens=4096
  nemo-like plan --lengths lengths.txt --memory-gb 80 policy.model_name=7b cluster.gpus_per_node=8
  nemo-like plan --lengths conv.csv --column ContextTokens,GeneratedTokens --html plan.html
  nemo-like plan data.train_path=train.jsonl policy.tokenizer_name=models/SmolLM2-135M-Instruct
  nemo-like plan --metrics runs/demo_grpo/metrics.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like plan`."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a run's YAML; without it the keys are those of SFT of a 7B model on one GPU",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="row lengths instead of the rows of data.train_path: integers, a CSV or a JSONL file",
    )
    source.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="metrics.jsonl of a past run, whose lengths and config are used",
    )
    parser.add_argument(
        "--column",
        metavar="NAME[,NAME]",
        help="columns of a CSV or fields of a JSONL file of --lengths; several are added up",
    )
    parser.add_argument(
        "--limit",
        type=_positive_integer,
        metavar="N",
        help="rows to plan; default 65,536, and 16 steps of rows of text",
    )
    parser.add_argument(
        "--memory-gb",
        type=_positive_size,
        metavar="N",
        help="memory of one GPU (GiB): recommends a token budget",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="JSON to FILE; with - to the output, instead of the table"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="one self-contained page with charts"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys to set")


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, print or write it, and return the exit code. Raises ConfigError for wrong
    input.
    """
    # Other commands do not need these modules, and the page only with --html.
    from nemo_like.commands.plan_request import plan_request
    from nemo_like.prediction.plan_report import make_plan
    from nemo_like.reports.record import to_record
    from nemo_like.reports.text import show

    report = make_plan(plan_request(arguments))
    if arguments.html is not None:
        from nemo_like.reports.page import plan_page

        _write(arguments.html, plan_page(report), "--html")
    # JSON on the standard output must not be mixed with the table.
    if arguments.json == "-":
        print(json.dumps(to_record(report), indent=1))
        return 0
    if arguments.json is not None:
        text = json.dumps(to_record(report), indent=1)
        _write(Path(arguments.json), f"{text}\n", "--json")
    show(report)
    for name, path in (("page", arguments.html), ("JSON", arguments.json)):
        if path is not None:
            print(printable(f"{name}: {path}"))
    return 0


def _write(path: Path, text: str, flag: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {str(path)!r} cannot be written: {error.strerror}") from error


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


def _positive_integer(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
