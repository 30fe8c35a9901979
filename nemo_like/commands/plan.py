"""`nemo-like plan`: padding, balance, step time and memory, predicted from row lengths alone."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.commands.report import write_output
from nemo_like.commands.start import open_config
from nemo_like.config.batching import StreamableDataConfig
from nemo_like.config.errors import ConfigError, raise_problems
from nemo_like.config.parallel import located_problems, policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.console import say
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import round_up
from nemo_like.models.layout_check import model_problems
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.models.spec import ModelSpec, load_spec
from nemo_like.policy.batching import plan_spec, shared_prefix_mode, stream_spec
from nemo_like.prediction.lengths import PastRun, RowLengths, read_lengths, read_run
from nemo_like.prediction.placement import policy_placement
from nemo_like.prediction.plan_report import PlanRequest, make_plan
from nemo_like.prediction.table import show, to_record
from nemo_like.run.progress import Progress
from nemo_like.training.images import open_images
from nemo_like.training.model_files import open_encoder
from nemo_like.training.run_data import RunData, load_training
from nemo_like.training_engines import ENGINES

_DEFAULTS = Path(__file__).with_name("plan.yaml")
"""The config without --config."""
_BUDGET_KEY = "policy.sequence_packing.train_mb_tokens"
_ROW_KEYS = (_BUDGET_KEY, "policy.oversize_rows", "policy.max_total_sequence_length")
"""Keys that say what becomes of rows above the budget."""
_BUDGET_MULTIPLE = 256
"""A budget that is raised to the longest row is a multiple of this."""
_MAX_ROWS = 65_536
"""Rows of a file of lengths that are planned without --limit."""
_NUM_STEPS = 16
"""Steps whose rows are tokenized without --limit."""


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, print or write it, and return the exit code. Raises ConfigError."""
    report = make_plan(plan_request(arguments))
    if arguments.html is not None:
        # Imported here: Bokeh and jinja2 are needed for the page only.
        from nemo_like.reports.plan_page import plan_page

        write_output(arguments.html, plan_page(report), "--html")
    # JSON on the standard output must not be mixed with the table.
    if arguments.json == "-":
        print(json.dumps(to_record(report), indent=1))
        return 0
    if arguments.json is not None:
        text = json.dumps(to_record(report), indent=1)
        write_output(Path(arguments.json), f"{text}\n", "--json")
    show(report)
    for name, path in (("page", arguments.html), ("JSON", arguments.json)):
        if path is not None:
            say(f"{name}: {path}")
    return 0


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """Return the request that the arguments describe. Raises ConfigError for wrong input."""
    _check_sources(arguments)
    past = None if arguments.metrics is None else read_run(arguments.metrics)
    is_default = arguments.config is None and past is None
    if arguments.model is None and arguments.data is None:
        arguments.config = arguments.config or (past and past.config) or _DEFAULTS
    config = open_config(arguments, prints=arguments.json != "-")
    rows = _row_lengths(config, past, arguments)
    notes: tuple[str, ...] = ()
    if is_default and arguments.config is not None:
        notes = _raise_budget(arguments, config, rows)
        config = open_config(arguments, prints=False)
    model = _open_spec("policy.model_name", config.policy.model_name)
    model = model.with_output_head(config.needs.head)
    layout = policy_layout(config.parallel, config.cluster)
    shared_prefix = shared_prefix_mode(config.policy, model)
    problems = model_problems(layout, config.policy.engine, model)
    raise_problems(located_problems(problems, config.cluster))
    spec = plan_spec(
        config.policy.in_rows(config.needs.batch.rows_per_example),
        purpose="train",
        parallel_layout=layout,
        model=model,
        seed=config.seed,
    )
    max_tokens, budget_name = spec.max_tokens, spec.budget_key
    if max_tokens is None:
        # Without a token budget the largest possible microbatch takes its place.
        max_tokens = (spec.max_rows or 1) * config.policy.max_total_sequence_length
        budget_name = "policy.train_micro_batch_size x policy.max_total_sequence_length"
    return PlanRequest(
        rows=rows,
        spec=spec if past is None else past.spec_of_rows(spec),
        max_tokens=max_tokens,
        model=model,
        placement=policy_placement(
            config.policy,
            layout,
            needs_reference=config.needs.reference,
            teachers=tuple(_open_spec(*each) for each in config.needs.teachers.items()),
            keeps_teacher_embeddings=config.needs.keeps_teacher_embeddings,
        ),
        oversize=config.policy.oversize_rows,
        budget_name=budget_name,
        stream=_stream_spec(config, spec),
        memory_gib=arguments.memory_gb,
        shared_prefix=shared_prefix,
        logged={} if past is None else past.compare(spec, shared_prefix),
        notes=(*notes, *_notes(config), *model.estimate_warnings),
    )


def _check_sources(arguments: argparse.Namespace) -> None:
    """Raise ConfigError without rows to plan, and for columns without their file."""
    has_train_path = any(text.startswith("data.train_path=") for text in arguments.overrides)
    has_source = arguments.config or arguments.model or arguments.data
    if not (has_source or arguments.lengths or arguments.metrics or has_train_path):
        raise ConfigError(
            "there are no rows to plan: give --config FILE, --model DIR with --data FILE, --lengths"
            " FILE, --metrics FILE, or data.train_path=FILE with policy.tokenizer_name=DIR"
        )
    if arguments.column and not arguments.lengths:
        raise ConfigError("--column is for --lengths; leave it out")
    # Without columns there is nothing that --group and --prefix could name.
    has_both = bool(arguments.group and arguments.prefix and arguments.column)
    if (arguments.group or arguments.prefix) and not has_both:
        raise ConfigError(
            "--group NAME, --prefix NAME and --column NAME of a --lengths file belong together: the"
            " group of a row, the tokens that it has in common with its group, and its length"
        )


def _row_lengths(
    config: RunConfig, past: PastRun | None, arguments: argparse.Namespace
) -> RowLengths:
    """Return the lengths of a past run, of a file, or of the first rows of `data.train_path`."""
    if past is not None:
        return past.rows(arguments.limit)
    if arguments.lengths is not None:
        columns = (arguments.column or "").split(",")
        rows = read_lengths(
            arguments.lengths,
            [name.strip() for name in columns if name.strip()],
            group=arguments.group,
            prefix=arguments.prefix,
            limit=arguments.limit or _MAX_ROWS,
        )
        return replace(rows, is_ordered=not config.data.shuffle)
    # Only in a process of its own: a library user may need torch afterwards.
    if arguments.owns_process:
        import_transformers_without_torch()
    try:
        return first_lengths(config, arguments.limit, _NUM_STEPS)
    except ConfigError as error:
        # The shape of a model can be a size, its tokenizer cannot.
        keys = ("policy.model_name", "policy.tokenizer_name")
        has_hint = any(str(error).startswith(key) for key in keys)
        hint = "; for a plan, set policy.tokenizer_name to the directory of any tokenizer"
        raise ConfigError(f"{error}{hint if has_hint else ''}") from error


def first_lengths(config: RunConfig, num_rows: int | None, num_steps: int) -> RowLengths:
    """Return the row lengths of a run in its order.

    There are about `num_rows` rows, or the rows of `num_steps` steps if it is None. Raises
    ConfigError for files that cannot be read.
    """
    images = open_images(config.policy, config.data)
    encoder = open_encoder(config.policy, config.data, None, images)
    algorithm = ALGORITHMS[config.kind]
    schema, _ = algorithm.import_data().row_schemas(config)
    progress = Progress(sys.stderr)
    data = RunData(encoder, load_training(config.data, schema, progress, images))
    if num_rows is not None:
        num_steps = num_rows // config.needs.batch.num_rows
    return algorithm.import_checks().first_lengths(config, data, num_steps, progress)


def _raise_budget(
    arguments: argparse.Namespace, config: RunConfig, rows: RowLengths
) -> tuple[str, ...]:
    """Add the smallest usual budget to the overrides if the default one is below the longest row.

    Return the note about it. A budget or a treatment of such rows that the user gave is kept.
    """
    longest = int(rows.counts.lengths.max(initial=0))
    budget = config.policy.sequence_packing.train_mb_tokens
    is_given = any(text.partition("=")[0].strip("+") in _ROW_KEYS for text in arguments.overrides)
    if longest <= budget or is_given or not config.policy.sequence_packing.enabled:
        return ()
    raised = round_up(longest, _BUDGET_MULTIPLE)
    arguments.overrides = [*arguments.overrides, f"{_BUDGET_KEY}={raised}"]
    note = (
        f"{_BUDGET_KEY} is {raised} instead of the default {budget}: the longest row has {longest}"
        " tokens; policy.oversize_rows=truncate, drop or singleton plans with the default"
    )
    return (note,)


def _open_spec(key: str, name: str) -> ModelSpec:
    """Return the sizes of a model. Raises ConfigError that names its key."""
    try:
        return load_spec(name, key)
    except ConfigError as error:
        raise ConfigError(
            f"{key} is {name!r}, which is not a directory with a config.json here; give the"
            f" directory of a model, or its size for this plan, such as {key}=7b ({error})"
        ) from error


def _stream_spec(config: RunConfig, spec: PlanSpec) -> StreamSpec | None:
    """Return the settings of the streaming planner of a config; None for fixed batches."""
    data = config.data
    if not isinstance(data, StreamableDataConfig) or not data.batching.is_streaming:
        return None
    return stream_spec(data.batching, spec)


def _notes(config: RunConfig) -> tuple[str, ...]:
    """Return what the prediction leaves out."""
    notes = []
    shards_weights = ENGINES[config.policy.engine].shards_weights
    if config.parallel.expert > 1 and not shards_weights:
        notes.append(
            f"parallel.expert is {config.parallel.expert}, but the memory counts every expert"
            " on every worker: it is an upper bound"
        )
    batch = config.needs.batch
    if batch.rows_per_example > 1:
        notes.append(
            f"the {batch.rows_per_example} rows of a {batch.example} are planned independently;"
            " a run keeps them in one microbatch, with slightly more padding"
        )
    if config.needs.reward_models:
        names = ", ".join(config.needs.reward_models)
        notes.append(f"the reward models ({names}) are not part of the predicted memory")
    return tuple(notes)
