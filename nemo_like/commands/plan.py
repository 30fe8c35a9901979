"""`nemo-like plan`: what batching is worth, from row lengths alone, before a GPU is rented. Flags
in, a report out.

A file of lengths needs neither torch nor transformers; only rows that must be tokenised bring them
in.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.config.text import printable

if TYPE_CHECKING:
    from nemo_like.config.schema import RunConfig
    from nemo_like.models.spec import ModelSpec
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.prediction.memory import Placement
    from nemo_like.prediction.plan_report import PlanRequest

EPILOG = """examples:
  nemo-like plan --lengths conv.csv --column ContextTokens,GeneratedTokens --model 7b --dp 8 --memory-gb 80
  nemo-like plan --lengths lengths.txt --max-tokens 16384 --dp 64 --html plan.html
  nemo-like plan --data train.jsonl --tokenizer models/SmolLM2-135M-Instruct --model 135m --dp 2
  nemo-like plan --config examples/configs/demo_grpo.yaml policy.sequence_packing.train_mb_tokens=4096
  nemo-like plan --metrics runs/demo_grpo/metrics.jsonl
"""
MOST_ROWS = 65_536
"""Rows planned without --limit."""
NUM_STEPS = 16
"""Steps whose rows are tokenised without --limit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `nemo-like plan`. A flag that is given wins over the config of --config and
    --metrics.
    """
    source = parser.add_argument_group(
        "where the lengths come from, one of"
    ).add_mutually_exclusive_group(required=True)
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
        help="rows of text, as SFT takes them; with --tokenizer",
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
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--column", metavar="NAME[,NAME]", help="columns of a CSV; several are added up"
    )
    rows.add_argument(
        "--field", metavar="NAME", help="field of a JSONL: a number, or a list whose items count"
    )
    rows.add_argument(
        "--tokenizer", metavar="DIR", help="directory of the tokenizer for the rows of text"
    )
    rows.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help=f"rows to plan; default {MOST_ROWS:,}, of text {NUM_STEPS} steps",
    )
    rows.add_argument(
        "--in-order",
        action="store_true",
        help="batches of consecutive rows instead of shuffled ones",
    )
    rows.add_argument("--seed", type=int, metavar="N", help="of the shuffle; default 0")
    model = parser.add_argument_group("model and cluster")
    model.add_argument(
        "--model", metavar="DIR|SIZE", help="directory with config.json, or a size such as 7b"
    )
    for axis, text in (("dp", "data"), ("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        model.add_argument(
            f"--{axis}", type=_positive, metavar="N", help=f"{text}-parallel ranks; default 1"
        )
    model.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=None,
        help="share norms and residuals over tp",
    )
    model.add_argument(
        "--engine", choices=("dtensor", "megatron"), help="default dtensor, with --pp megatron"
    )
    model.add_argument(
        "--precision", choices=("bfloat16", "float32"), help="compute type; default bfloat16"
    )
    model.add_argument(
        "--activation-checkpointing",
        action="store_true",
        default=None,
        help="recompute layers in the backward",
    )
    model.add_argument(
        "--memory-gb",
        type=_size,
        metavar="N",
        help="memory of one GPU (GiB): recommends a token budget",
    )
    batch = parser.add_argument_group("batches")
    batch.add_argument(
        "--batch-size", type=_positive, metavar="N", help="rows per optimizer step; default 512"
    )
    batch.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="N",
        help="token budget of a microbatch; default: what fits",
    )
    batch.add_argument(
        "--micro-batch-size",
        type=_positive,
        metavar="N",
        help="rows of a plainly padded microbatch",
    )
    batch.add_argument(
        "--balance", choices=("flops", "tokens"), help="what ranks are balanced by; default flops"
    )
    batch.add_argument(
        "--sync",
        choices=("microbatch", "step"),
        help="where ranks wait; default: as the engine does",
    )
    batch.add_argument(
        "--oversize",
        choices=("error", "truncate", "drop", "singleton"),
        help="rows above the budget; default error",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE, or instead of the table"
    )
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="one self-contained page with pictures"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the plan and show it. Raises ConfigError for wrong input."""
    from nemo_like.prediction.plan_report import make_plan
    from nemo_like.reports.plan_page import plan_page
    from nemo_like.reports.record import to_record
    from nemo_like.reports.terminal import show

    report = make_plan(_request(arguments))
    if arguments.html is not None:
        _write(arguments.html, plan_page(report), "--html")
    if arguments.json == "-":
        print(json.dumps(to_record(report), indent=1))
        return 0
    if arguments.json is not None:
        _write(Path(arguments.json), json.dumps(to_record(report), indent=1) + "\n", "--json")
    show(report)
    for flag, path in (("page", arguments.html), ("JSON", arguments.json)):
        if path is not None:
            print(printable(f"{flag}: {path}"))
    return 0


def _request(arguments: argparse.Namespace) -> PlanRequest:
    _check_flags(arguments)
    if arguments.lengths is not None:
        request = _from_lengths(arguments)
    elif arguments.data is not None:
        request = _from_text(arguments)
    elif arguments.config is not None:
        request = _from_config(arguments)
    else:
        request = _from_run(arguments)
    given = {
        "batch_size": arguments.batch_size,
        "max_tokens": arguments.max_tokens,
        "memory_gib": arguments.memory_gb,
        "balance": arguments.balance,
        "sync": arguments.sync,
        "oversize": arguments.oversize,
        "micro_batch_size": arguments.micro_batch_size,
        "seed": arguments.seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.balance is not None:
        given["chosen"] = (
            None  # the schedule by this balance is what is looked at, not the config's own way
        )
    return replace(request, placement=_placement(arguments, request.placement), **given)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Flags that the source of the lengths has no use for would be ignored in silence."""
    from nemo_like.config.errors import ConfigError

    for flag, value, needs in (
        ("--column", arguments.column, ("lengths",)),
        ("--field", arguments.field, ("lengths",)),
        ("--tokenizer", arguments.tokenizer, ("data", "config")),
        ("KEY=VALUE", arguments.overrides, ("config",)),
    ):
        if value and not any(getattr(arguments, name) is not None for name in needs):
            raise ConfigError(
                f"{flag} is for {' and '.join(f'--{name}' for name in needs)}; leave it out"
            )
    if arguments.column and arguments.field:
        raise ConfigError("--column is for CSV and --field for JSONL; give one of them")
    if (
        arguments.memory_gb is not None
        and arguments.model is None
        and (arguments.lengths or arguments.data) is not None
    ):
        raise ConfigError(
            "--memory-gb needs --model: what fits depends on the model, e.g. --model 7b"
        )
    if arguments.data is not None and arguments.tokenizer is None:
        raise ConfigError("--data needs --tokenizer DIR: lengths are counted in its tokens")


def _from_lengths(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.prediction.lengths import read_lengths
    from nemo_like.prediction.plan_report import PlanRequest

    columns = [name.strip() for name in (arguments.column or "").split(",") if name.strip()]
    rows = read_lengths(
        arguments.lengths,
        columns=columns,
        field=arguments.field,
        limit=arguments.limit or MOST_ROWS,
    )
    return PlanRequest(
        rows=replace(rows, is_ordered=arguments.in_order), model=_model_spec(arguments)
    )


def _from_text(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.commands.first_step import file_config, first_lengths
    from nemo_like.config.errors import ConfigError
    from nemo_like.models.pretrained import import_transformers_without_torch
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.prediction.plan_report import PlanRequest

    if arguments.owns_process:
        import_transformers_without_torch()
    batch_size, seed = arguments.batch_size or PlanRequest.batch_size, arguments.seed or 0
    config = file_config(
        str(arguments.data), arguments.tokenizer, batch_size, seed, shuffle=not arguments.in_order
    )
    try:
        lengths, source = first_lengths(config, arguments.limit, NUM_STEPS)
    except ConfigError as error:
        text = (
            str(error)
            .replace("policy.tokenizer_name", "--tokenizer")
            .replace("data.train_path", "--data")
        )
        raise ConfigError(text) from error
    return PlanRequest(
        rows=RowLengths(lengths, source, is_ordered=True), model=_model_spec(arguments)
    )


def _from_config(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.commands.first_step import first_lengths
    from nemo_like.config.errors import ConfigError
    from nemo_like.config.load import detect_kind, load_config
    from nemo_like.models.pretrained import import_transformers_without_torch
    from nemo_like.prediction.lengths import RowLengths

    if arguments.owns_process:
        import_transformers_without_torch()
    config = load_config(
        detect_kind(arguments.config, arguments.overrides), arguments.config, arguments.overrides
    )
    if arguments.tokenizer is not None:
        config = replace(config, policy=replace(config.policy, tokenizer_name=arguments.tokenizer))
    try:
        lengths, source = first_lengths(config, arguments.limit, NUM_STEPS)
    except ConfigError as error:
        hint = (
            "; or name one for this plan with --tokenizer" if "no tokenizer" in str(error) else ""
        )
        raise ConfigError(f"{error}{hint}") from error
    return _configured(config, RowLengths(lengths, source, is_ordered=True), arguments)


def _from_run(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.config.load import detect_kind, load_config
    from nemo_like.prediction.past_run import read_run

    past = read_run(arguments.metrics)
    config = load_config(detect_kind(past.config), past.config)
    rows = past.rows()
    request = _configured(config, replace(rows, values=rows.values[: arguments.limit]), arguments)
    assert request.chosen is not None
    return replace(request, logged=past.compare(request.chosen))


def _configured(config: RunConfig, rows: RowLengths, arguments: argparse.Namespace) -> PlanRequest:
    """A request as a config's own run would plan it."""
    from nemo_like.data.planning.cost import CostModel
    from nemo_like.policy.batching import plan_spec, policy_topology
    from nemo_like.prediction.plan_report import PlanRequest, sync_of

    spec, placement = _model_spec(arguments, config.policy.model_name), placement_of(config)
    assert spec is not None, "a config names a model"
    experts = config.parallel.expert
    note = f"parallel.expert is {experts}, but the memory counts every expert on every worker: it is an upper bound"
    request = PlanRequest(
        rows=rows,
        model=spec,
        placement=placement,
        batch_size=config.policy.train_global_batch_size,
        notes=(note,) if experts > 1 else (),
    )
    spec = plan_spec(
        config.policy,
        purpose="train",
        topology=policy_topology(config),
        cost=CostModel.from_spec(spec),
        sequence_parallel=config.parallel.sequence,
        sync=sync_of(request),
        seed=config.seed,
    )
    longest_rows = spec.max_rows and spec.max_rows * config.policy.max_total_sequence_length
    return replace(
        request,
        max_tokens=spec.max_tokens or longest_rows,
        balance="tokens" if spec.balance == "tokens" else "flops",
        oversize=spec.oversize,
        budget_name=spec.budget_key
        if spec.max_tokens
        else "policy.train_micro_batch_size x policy.max_total_sequence_length",
        oversize_name="policy.oversize_rows",
        sequence_length_round=spec.sequence_length_round,
        micro_batch_size=spec.max_rows,
        seed=config.seed,
        chosen=spec,
    )


def placement_of(config: RunConfig) -> Placement:
    """How a config spreads its model."""
    from nemo_like.config.schema import GrpoRunConfig
    from nemo_like.policy.batching import policy_topology
    from nemo_like.prediction.memory import CPU_GIB, Placement

    policy = config.policy
    return Placement(
        topology=policy_topology(config),
        sequence_parallel=config.parallel.sequence,
        precision=policy.precision,
        activation_checkpointing=policy.activation_checkpointing,
        engine=policy.engine,
        chunk_size=policy.logprob_chunk_size,
        has_reference=isinstance(config, GrpoRunConfig)
        and config.loss_fn.reference_policy_kl_penalty > 0,
        device_gib=Placement.device_gib if config.cluster.gpus_per_node else CPU_GIB,
    )


def _placement(arguments: argparse.Namespace, base: Placement) -> Placement:
    """`base` with the flags that are given."""
    degrees = {axis: getattr(arguments, axis) for axis in ("dp", "tp", "cp", "pp")}
    topology = replace(
        base.topology, **{axis: degree for axis, degree in degrees.items() if degree is not None}
    )
    given = {
        "sequence_parallel": arguments.sequence_parallel,
        "engine": arguments.engine or ("megatron" if (arguments.pp or 1) > 1 else None),
        "precision": arguments.precision,
        "activation_checkpointing": arguments.activation_checkpointing,
        "device_gib": arguments.memory_gb,
    }
    return replace(
        base,
        topology=topology,
        **{name: value for name, value in given.items() if value is not None},
    )


def _model_spec(arguments: argparse.Namespace, model_name: str | None = None) -> ModelSpec | None:
    from nemo_like.config.errors import ConfigError
    from nemo_like.models.presets import load_spec

    if arguments.model is not None:
        return load_spec(arguments.model)
    if model_name is None:
        return None
    try:
        return load_spec(model_name)
    except ConfigError as error:
        raise ConfigError(
            f"policy.model_name is {model_name!r}, which is not a directory with a config.json"
            f" here; name one with --model, or a"
            f" shape by its size, and if need be --tokenizer ({error})"
        ) from error


def _write(path: Path, text: str, flag: str) -> None:
    from nemo_like.config.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {str(path)!r} cannot be written: {error.strerror}") from error


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GiB above 0")
    return value


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
