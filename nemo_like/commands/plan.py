"""`nemo-like plan`: padding, balance, step time and memory, predicted from row lengths alone."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.commands.plan_step import StepSetting, check_keys, simulate
from nemo_like.commands.report import write_output
from nemo_like.commands.start import open_config
from nemo_like.config.batching import StreamableDataConfig
from nemo_like.config.errors import ConfigError, raise_problems
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import located_problems, parallel_problems, policy_layout
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
from nemo_like.prediction.memory import GIB, MemoryModel, fitting_checkpointing
from nemo_like.prediction.placement import policy_placement
from nemo_like.prediction.plan_report import (
    BUDGET_MULTIPLE,
    MeasuredTime,
    PlanRequest,
    make_plan,
    measured_time,
)
from nemo_like.prediction.search import (
    KEYS,
    NODE_GPUS,
    Candidate,
    Setting,
    all_settings,
    changed_keys,
    search,
    truncation,
)
from nemo_like.prediction.step_table import step_line, step_record, step_table
from nemo_like.prediction.step_time import StepPrediction
from nemo_like.prediction.table import overrides_text, search_record, show, to_record
from nemo_like.run.progress import Progress
from nemo_like.training.images import open_images
from nemo_like.training.model_files import open_encoder
from nemo_like.training.run_data import RunData, load_training
from nemo_like.training_engines import ENGINES, EngineName

_DEFAULTS = Path(__file__).with_name("plan.yaml")
"""The config without --config."""
_BUDGET_KEY = "policy.sequence_packing.train_mb_tokens"
_ROW_KEYS = (_BUDGET_KEY, "policy.oversize_rows", "policy.max_total_sequence_length")
"""Keys that say what becomes of rows above the budget."""
_OTHER_KEYS = ("policy.engine", "parallel.sequence")
"""Keys of a layout beside those that a search sets."""
_MAX_ROWS = 65_536
"""Rows of a file of lengths that are planned without --limit."""
_NUM_STEPS = 16
"""Steps whose rows are tokenized without --limit."""


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, print or write it, and return the exit code. Raises ConfigError."""
    inputs = _open_inputs(arguments)
    found = [] if arguments.gpus is None else _search(arguments, inputs)
    # The search plans the first rows only.
    request = replace(found[0].request, rows=inputs.rows) if found else inputs.request()
    report = make_plan(request)
    is_packed = inputs.config.policy.sequence_packing.enabled
    if is_packed and report.recommendation and report.recommendation.outcome is None:
        report = replace(report, notes=(*report.notes, _remedy(inputs, request)))
    step = _simulate(arguments, inputs, request) if arguments.simulate else None
    shown = None if step is None else (step_table(step), step_line(step))
    if arguments.html is not None:
        # Imported here: Bokeh and jinja2 are needed for the page only.
        from nemo_like.reports.plan_page import plan_page

        write_output(arguments.html, plan_page(report, found), "--html")
    record = to_record(report) | ({"search": search_record(found)} if found else {})
    if step is not None:
        record["simulation"] = step_record(step)
    text = json.dumps(record, indent=1)
    # JSON on the standard output must not be mixed with the table.
    if arguments.json == "-":
        print(text)
        return 0
    if arguments.json is not None:
        write_output(Path(arguments.json), f"{text}\n", "--json")
    show(report, found, shown)
    for name, path in (("page", arguments.html), ("JSON", arguments.json)):
        if path is not None:
            say(f"{name}: {path}")
    return 0


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """Return the request that the arguments describe. Raises ConfigError for wrong input."""
    return _open_inputs(arguments).request()


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The config that is planned, its rows and its model."""

    config: RunConfig
    rows: RowLengths
    model: ModelSpec
    teachers: tuple[ModelSpec, ...]
    past: PastRun | None
    of_past: tuple[RunConfig, PlanRequest] | None = None
    """Of the past run with its own settings, if they suit."""
    measured: MeasuredTime | None = None
    memory_gib: float | None = None
    notes: tuple[str, ...] = ()

    def request(self) -> PlanRequest:
        """Return the request for the config. Raises ConfigError, LayoutError among them."""
        config = self.config
        policy = config.policy
        layout = policy_layout(config.parallel, config.cluster)
        shared_prefix = shared_prefix_mode(policy, self.model)
        problems = model_problems(layout, policy.engine, self.model)
        raise_problems(located_problems(problems, config.cluster))
        spec = plan_spec(
            policy.in_rows(config.needs.batch.rows_per_example),
            purpose="train",
            parallel_layout=layout,
            model=self.model,
            seed=config.seed,
        )
        max_tokens, budget_name = spec.max_tokens, spec.budget_key
        if max_tokens is None:
            # Without a token budget the largest possible microbatch takes its place.
            max_tokens = (spec.max_rows or 1) * policy.max_total_sequence_length
            budget_name = "policy.train_micro_batch_size x policy.max_total_sequence_length"
        placement = policy_placement(
            policy,
            layout,
            needs_reference=config.needs.reference,
            teachers=self.teachers,
            keeps_teacher_embeddings=config.needs.keeps_teacher_embeddings,
        )
        if policy.activation_checkpointing == "auto" and self.memory_gib is not None:
            peaks = MemoryModel(self.model, placement).checkpointing_peaks(max_tokens)
            mode = fitting_checkpointing(peaks, self.memory_gib * GIB)
            placement = replace(placement, activation_checkpointing=mode)
        return PlanRequest(
            rows=self.rows,
            spec=spec if self.past is None else self.past.spec_of_rows(spec),
            max_tokens=max_tokens,
            model=self.model,
            placement=placement,
            oversize=policy.oversize_rows,
            budget_name=budget_name,
            stream=_stream_spec(config, spec),
            memory_gib=self.memory_gib,
            num_gpus=layout.world_size if config.cluster.gpus_per_node else 0,
            measured=self.measured,
            shared_prefix=shared_prefix,
            logged={} if self.past is None else self.past.compare(spec, shared_prefix),
            notes=(
                *self.notes,
                *_notes(policy.engine, config.parallel.expert, config.needs),
                *self.model.estimate_warnings,
            ),
        )


def _open_inputs(arguments: argparse.Namespace) -> _Inputs:
    """Return what the arguments name. Raises ConfigError for wrong input."""
    _name_run(arguments)
    _check_sources(arguments)
    if arguments.gpus is not None:
        _set_cluster(arguments)
    past = None if arguments.metrics is None else read_run(arguments.metrics)
    is_default = arguments.config is None and past is None
    if arguments.model is None and arguments.data is None:
        arguments.config = arguments.config or (past and past.config) or _DEFAULTS
    config = open_config(arguments, prints=arguments.json != "-")
    rows = _row_lengths(config, past, arguments)
    notes: tuple[str, ...] = ()
    if is_default and arguments.config is not None and arguments.gpus is None:
        notes = _raise_budget(arguments, config, rows)
        config = open_config(arguments, prints=False)
    inputs = _inputs(config, rows, past)
    inputs = replace(inputs, memory_gib=arguments.memory_gb, notes=notes)
    return inputs if past is None else _with_measured_time(inputs, past, arguments)


def _inputs(config: RunConfig, rows: RowLengths, past: PastRun | None) -> _Inputs:
    """Open the models of a config. Raises ConfigError."""
    model = _open_spec("policy.model_name", config.policy.model_name)
    return _Inputs(
        config=config,
        rows=rows,
        model=model.with_output_head(config.needs.head),
        teachers=tuple(_open_spec(*each) for each in config.needs.teachers.items()),
        past=past,
    )


def _with_measured_time(inputs: _Inputs, past: PastRun, arguments: argparse.Namespace) -> _Inputs:
    """Add the training time of a past run, or a note if it does not apply."""
    unchanged = {"config": past.config, "model": None, "data": None, "overrides": []}
    try:
        config = open_config(argparse.Namespace(**(vars(arguments) | unchanged)))
        if bool(config.cluster.gpus_per_node) != bool(inputs.config.cluster.gpus_per_node):
            raise ConfigError("only one of both uses GPUs (cluster.gpus_per_node)")
        request = _inputs(config, past.rows(), None).request()
        measured = measured_time(request, past, config.needs.batch.num_epochs)
    except ConfigError as error:
        note = f"the time of the past run is not used: {error}"
        return replace(inputs, notes=(*inputs.notes, note))
    return replace(inputs, measured=measured, of_past=(config, request))


def _simulate(
    arguments: argparse.Namespace, inputs: _Inputs, request: PlanRequest
) -> StepPrediction:
    """Return the prediction of `--simulate` with the layout of `request`. Raises ConfigError."""
    if inputs.past is None or arguments.lengths is not None:
        raise ConfigError(
            "--simulate uses the times and the lengths of a past run: give its directory, without"
            " --lengths"
        )
    if inputs.of_past is None:
        raise ConfigError(f"--simulate: {inputs.notes[-1]}")
    old, old_request = inputs.of_past
    new = inputs.config
    check_keys(old, new)
    settings = []
    for config, each in ((old, old_request), (new, request)):
        settings.append(StepSetting(config.policy, config.cluster, config.needs, each))
    return simulate(inputs.past, *settings, seed=new.seed)


def _name_run(arguments: argparse.Namespace) -> None:
    """Read the directory of a run, given in place of an override, as the source of `--metrics`."""
    for text in arguments.overrides:
        if "=" not in text and (Path(text) / "plan").is_dir():
            arguments.metrics = Path(text)
            arguments.overrides.remove(text)
            return
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(
                f"{text} is not the directory of a run that has recorded its plans: give the"
                " directory of a run, --config FILE, or key=value"
            )


def _set_cluster(arguments: argparse.Namespace) -> None:
    """Add the cluster of `--gpus` to the overrides. Raises ConfigError without a memory."""
    if arguments.memory_gb is None:
        raise ConfigError("--gpus searches for what fits; give --memory-gb GIB of one GPU as well")
    per_node = min(arguments.gpus, NODE_GPUS)
    if arguments.gpus % per_node:
        raise ConfigError(
            f"--gpus {arguments.gpus}: nodes have {NODE_GPUS} GPUs; give a multiple of"
            f" {NODE_GPUS}, or fewer"
        )
    keys = {
        "cluster.backend": "ray",
        "cluster.num_nodes": arguments.gpus // per_node,
        "cluster.gpus_per_node": per_node,
        "policy.precision": "bfloat16",
    }
    arguments.overrides = [*(f"{key}={value}" for key, value in keys.items()), *arguments.overrides]


def _search(arguments: argparse.Namespace, inputs: _Inputs) -> list[Candidate]:
    """Return the candidates of `--gpus`, the fastest first. Raises ConfigError if none fits."""
    config = inputs.config
    if not config.policy.sequence_packing.enabled:
        raise ConfigError("--gpus searches with policy.sequence_packing.enabled=true; set it")
    given = {text.partition("=")[0].strip("+") for text in arguments.overrides}
    fixed = {key: attrgetter(key)(config) for key in (*KEYS, "policy.engine") if key in given}
    if fixed.get(KEYS[0]) == "auto":
        del fixed[KEYS[0]]
    found = _candidates(inputs, arguments.gpus, fixed)
    current = {key: attrgetter(key)(config) for key in KEYS}
    if not found:
        raise ConfigError(
            f"--gpus {arguments.gpus}: no layout suits {inputs.model.name} and"
            f" policy.train_global_batch_size {config.policy.train_global_batch_size}; raise the"
            " latter, or leave out keys of parallel"
        )
    if not found[0].fits:
        raise ConfigError(
            f"nothing fits into {arguments.memory_gb:g} GiB on {arguments.gpus} GPUs: the least"
            f" peak of the longest row is {found[0].peak_gib:.1f} GiB"
            f" ({overrides_text(found[0])}); {truncation(found, current)}use more GPUs, or"
            " policy.lora.enabled=true"
        )
    return found


def _candidates(inputs: _Inputs, num_gpus: int, fixed: dict[str, Any]) -> list[Candidate]:
    """Return the candidates with the `fixed` keys, the fastest first."""
    config = inputs.config

    def request_of(setting: Setting) -> PlanRequest | None:
        engine = config.policy.engine
        if setting.pipeline > 1 and "policy.engine" not in fixed:
            engine = "megatron"
        policy = replace(
            config.policy, engine=engine, activation_checkpointing=setting.checkpointing
        )
        parallel = replace(
            config.parallel,
            tensor=setting.tensor,
            context=setting.context,
            pipeline=setting.pipeline,
            expert=setting.expert,
            sequence=fixed.get("parallel.sequence", setting.tensor > 1),
        )
        num_ranks = num_gpus // (setting.tensor * setting.context * setting.pipeline)
        is_small = num_ranks > policy.train_global_batch_size
        if is_small or parallel_problems(parallel, config.cluster, engine):
            return None
        candidate = replace(inputs, config=replace(config, policy=policy, parallel=parallel))
        try:
            return candidate.request()
        except ConfigError:
            return None

    has_experts = inputs.model.moe is not None
    return search(all_settings(num_gpus, has_experts=has_experts, fixed=fixed), request_of)


def _remedy(inputs: _Inputs, request: PlanRequest) -> str:
    """Return the fastest checkpointing and context size with which the longest row fits.

    Without any, the length to which rows have to be truncated.
    """
    current = {key: attrgetter(key)(inputs.config) for key in (*KEYS, *_OTHER_KEYS)}
    searched = ("policy.activation_checkpointing", "parallel.context")
    fixed = {key: value for key, value in current.items() if key not in searched}
    found = _candidates(inputs, request.placement.parallel_layout.world_size, fixed)
    text = f"the longest row ({inputs.rows.values.max():,} tokens) does not fit: "
    if found and found[0].fits:
        return f"{text}set {changed_keys(found[0], current)}"
    return f"{text}{truncation(found, current)}use more GPUs, or policy.lora.enabled=true"


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
    """Return the lengths of a file, of a past run, or of the first rows of `data.train_path`."""
    if past is not None and arguments.lengths is None:
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
    rows = algorithm.import_checks().first_lengths(config, data, num_steps, progress)
    num_different = len(data.train) * config.needs.batch.rows_per_example
    if len(rows.values) > num_different and config.needs.rollouts is None:
        rows = replace(rows, source=f"{rows.source} (several epochs of {num_different:,})")
    return rows


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
    raised = round_up(longest, BUDGET_MULTIPLE)
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


def _notes(engine: EngineName, expert: int, needs: RunNeeds) -> tuple[str, ...]:
    """Return what the prediction leaves out."""
    notes = []
    if expert > 1 and not ENGINES[engine].shards_weights:
        notes.append(
            f"parallel.expert is {expert}, but the memory counts every expert"
            " on every worker: it is an upper bound"
        )
    batch = needs.batch
    if batch.rows_per_example > 1:
        notes.append(
            f"the {batch.rows_per_example} rows of a {batch.example} are planned independently;"
            " a run keeps them in one microbatch, with slightly more padding"
        )
    if needs.reward_models:
        names = ", ".join(needs.reward_models)
        notes.append(f"the reward models ({names}) are not part of the predicted memory")
    return tuple(notes)
