"""The arguments of the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_like.algorithms.registry import ALGORITHMS

FAULT_KINDS = ("kill", "stop", "delay", "full_disk")
"""Faults of `nemo-like chaos`."""
FAULT_TARGETS = (
    *("driver", "policy", "generation", "environment", "reward", "reward_model"),
    *("raylet", "head"),
)
"""Processes of a run: the driver, groups of workers, a node of Ray, and Ray's GCS."""

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

OPTIONS_OF_JOBS = {
    "reward": ("grpo", "reward.functions.NAME.path"),
    "teacher": ("distill", "distill.teacher"),
}
"""The job of each option that only one job has, and its key."""


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


def add_start(parser: argparse.ArgumentParser, kind: str | None = None) -> None:
    """Add what can replace a config; options of other jobs than `kind` are not in the help."""
    text = "without --config: a model directory, a name on the hub, or a run with its model"
    parser.add_argument("--model", metavar="DIR", help=text)
    text = "without --config: the training file, whose format is detected"
    parser.add_argument("--data", metavar="FILE", help=text)
    text = (
        "grpo: a reward function, package.module.function or FILE.py:function; default: compares"
        " with the answers of the data"
    )
    _add_option_of_job(parser, "reward", "FUNCTION", text, kind)
    _add_option_of_job(parser, "teacher", "DIR", "distill: the model to learn from", kind)


def _add_option_of_job(
    parser: argparse.ArgumentParser, name: str, metavar: str, text: str, kind: str | None
) -> None:
    owner, _ = OPTIONS_OF_JOBS[name]
    shown = text if kind in (None, owner) else argparse.SUPPRESS
    parser.add_argument(f"--{name}", metavar=metavar, help=shown)


def add_training(parser: argparse.ArgumentParser, kind: str | None = None) -> None:
    """Add a config of the job `kind`, or what replaces it."""
    add_config(parser, required=False)
    add_start(parser, kind)


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
    text = "copy ray_jobs/ and examples/ into a directory, and nothing else"
    parser.add_argument("--scripts", type=Path, metavar="DIR", help=text)
    text = "the config to write; default KIND.yaml"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like plan`."""
    text = "a run's YAML; without it the keys are for SFT of a 7B model on one GPU"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)
    add_start(parser)
    add_kind(parser)
    text = "row lengths instead of the rows of data.train_path: integers, a CSV or a JSONL file"
    parser.add_argument("--lengths", type=Path, metavar="FILE", help=text)
    text = (
        "metrics.jsonl of a past run, or RUN, its directory: its config and measured training time"
        " are used, and its lengths without --lengths"
    )
    parser.add_argument("--metrics", type=Path, metavar="FILE", help=text)
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
    text = (
        "search for activation checkpointing, layout and token budget for N GPUs, in nodes of 8,"
        " with --memory-gb; keys that are set are kept"
    )
    parser.add_argument("--gpus", type=positive_integer, metavar="N", help=text)
    text = (
        "predict the time of a step, phase by phase, with KEY=VALUE or --gpus, from the measured"
        " phases of RUN"
    )
    parser.add_argument("--simulate", action="store_true", help=text)
    text = "JSON to FILE; with - to the output, instead of the table"
    parser.add_argument("--json", metavar="FILE", help=text)
    text = "one self-contained page with charts"
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)
    add_overrides(parser)


def _add_any_config(parser: argparse.ArgumentParser) -> None:
    """Add a config and its job."""
    add_config(parser)
    add_kind(parser)


def add_topic(topic: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return the function that adds the arguments of a command with one topic."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("topic", choices=(topic,), metavar=topic)
        _add_any_config(parser)

    return add


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like check`."""
    parser.add_argument("topic", choices=("parity",), metavar="parity")
    add_config(parser, required=False)
    add_kind(parser)
    text = "a model type of transformers, e.g. llama: all layouts are checked; may be repeated"
    parser.add_argument("--model", action="append", metavar="TYPE", help=text)
    text = "a layout or a feature to check with --model, e.g. LoRA; may be repeated; default: all"
    parser.add_argument("--column", action="append", default=[], metavar="NAME", help=text)


def add_reference(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like config`."""
    kinds = (*ALGORITHMS, "all")
    text = f"{', '.join(kinds)}: the keys of a job, or all"
    parser.add_argument("kind", choices=kinds, metavar="JOB", help=text)
    text = "a key or section, e.g. policy.optimizer; default: every key"
    parser.add_argument("key", nargs="?", default="", metavar="KEY", help=text)
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the config of a command that samples answers."""
    text = "a model directory or name, or the directory of a run, as with --config"
    parser.add_argument("--model", metavar="DIR", help=text)
    text = (
        "a config, or the directory of a run, whose exported model is used; default: one for"
        " policy.model_name=DIR on a GPU, or on the CPU without one"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)
    add_overrides(parser)
    add_kind(parser)


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like generate`."""
    add_model(parser)
    text = "completions per prompt; default 1"
    parser.add_argument("--num-samples", type=positive_integer, default=1, metavar="N", help=text)
    text = (
        "a JSON-lines file, one object per prompt, written while the command runs; default: the"
        " standard output, at the end"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    _add_resume(parser)
    text = "also write the token ids of the completions"
    parser.add_argument("--token-ids", action="store_true", help=text)


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like eval`."""
    add_model(parser)
    text = "compute loss, perplexity and token accuracy of SFT rows instead of sampling answers"
    parser.add_argument("--perplexity", action="store_true", help=text)
    text = "directory of results.json and answers.jsonl, which is written while the command runs"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    _add_resume(parser)
    text = "print the results as JSON instead of a table"
    parser.add_argument("--json", action="store_true", help=text)


def _add_resume(parser: argparse.ArgumentParser) -> None:
    text = "keep the finished prompts of --out and continue with the others"
    parser.add_argument("--resume", action="store_true", help=text)


def _add_step(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("source", type=Path, metavar="RUN", help="the directory of a GRPO run")
    text = "the step, counted from 1" + ("" if required else "; default: the last one")
    parser.add_argument("--step", required=required, type=int, metavar="N", help=text)


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like show`."""
    _add_step(parser, required=False)
    text = "rows to print, counted from 0 after sorting, e.g. 0-3,8; default 0-9"
    parser.add_argument("--rows", default="0-9", metavar="ROWS", help=text)
    text = (
        "largest first; `difference` is the max log-prob difference of a token between generator"
        " and training engine; default: in the order of the batch"
    )
    parser.add_argument("--sort", choices=("reward", "length", "difference"), help=text)
    text = "decode the recorded token ids: special tokens and every trained span are visible"
    parser.add_argument("--tokens", action="store_true", help=text)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like report`."""
    text = "run directories; several are compared"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=text)
    text = "the page; default: report.html in the directory of the run"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "serve the page on 127.0.0.1 and update it while the run goes on; writes no file"
    parser.add_argument("--serve", action="store_true", help=text)
    text = "port of --serve; default 0, a free one"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=text)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like doctor`."""
    text = "the directory of a run, also of a live one"
    parser.add_argument("source", nargs="?", type=Path, metavar="RUN", help=text)
    text = "write what is found, with config, metrics and logs of the run, for a bug report"
    parser.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_chaos(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like chaos`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file of a run")
    add_overrides(parser)
    add_kind(parser)
    text = "faults to inject; a run has about one every two steps, and as many runs as needed start"
    parser.add_argument("--kills", type=positive_integer, default=10, metavar="N", help=text)
    text = "seed of the order and the times of the faults; default 0"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    text = f"{', '.join(FAULT_KINDS)}; default: all"
    parser.add_argument("--kinds", type=_one_of(FAULT_KINDS), metavar="NAME[,NAME]", help=text)
    text = f"{', '.join(FAULT_TARGETS)}; default: those that the run has"
    parser.add_argument("--targets", type=_one_of(FAULT_TARGETS), metavar="NAME[,NAME]", help=text)
    text = "max seconds from a fault to the next step, and of the end of a run; default 600"
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help=text)


def _one_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of names with commas."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := [name for name in given if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(names)}")
        return given

    return parse


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like replay`."""
    _add_step(parser)
    add_overrides(parser)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like export`."""
    text = "a run directory (its latest checkpoint) or a step folder"
    parser.add_argument("source", type=Path, metavar="RUN", help=text)
    text = "the step of a run directory to export, or `best` (checkpointing.keep_best)"
    parser.add_argument("--step", metavar="N", help=text)
    text = "export the averaged weights (policy.ema)"
    parser.add_argument("--ema", action="store_true", help=text)
    text = "write the adapter alone, in the format of PEFT, and not the merged model"
    parser.add_argument("--adapter", action="store_true", help=text)
    add_overrides(parser)
    _add_target(parser)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like convert`."""
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    _add_target(parser)


def add_migrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `nemo-like migrate`."""
    text = (
        "a YAML or TOML config of another tool, or a file with its shell script or command; - reads"
        " the command from the standard input"
    )
    parser.add_argument("source", type=Path, metavar="OLD", help=text)
    text = "the new YAML file; default: the standard output"
    parser.add_argument("--out", type=Path, metavar="NEW", help=text)
    text = "processes of the original run, for tools that count rows per process"
    parser.add_argument("--num-processes", type=int, metavar="N", help=text)
    add_kind(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")


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
    text = "train a vision-language model on handwritten digits of scikit-learn"
    parser.add_argument("--vision", action="store_true", help=text)
    text = "only build the model and the data in runs/demo, or runs/demo_vision"
    parser.add_argument("--prepare-only", action="store_true", help=text)


def training_examples(kind: str) -> str:
    """Return the end of the help of a job."""
    return _TRAINING.format(kind=kind, data=_TRAINING_DATA[kind])
