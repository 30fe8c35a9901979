"""Conversion of the flags of `nemo-like plan` into a `PlanRequest`.

Imports that bring transformers in are inside the functions that need them, see `commands.plan`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_like.commands.plan_arguments import MAX_ROWS, NUM_STEPS
from nemo_like.config.errors import ConfigError
from nemo_like.parallel_layout import LayoutError
from nemo_like.prediction.plan_report import PlanRequest

if TYPE_CHECKING:
    from nemo_like.config.schema import RunConfig
    from nemo_like.data.planning.spec import PlanSpec
    from nemo_like.data.streaming.spec import StreamSpec
    from nemo_like.models.spec import ModelSpec
    from nemo_like.prediction.grpo_request import GrpoStepRequest, RolloutLengths
    from nemo_like.prediction.lengths import RowLengths
    from nemo_like.prediction.placement import Placement


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """Return the request that the flags describe. Raises ConfigError for wrong input."""
    from nemo_like.commands.plan_grpo import with_rates

    _check_flags(arguments)
    if arguments.lengths is not None:
        request = _from_lengths(arguments)
    elif arguments.data is not None:
        request = _from_text(arguments)
    elif arguments.config is not None:
        request = _from_config(arguments)
    else:
        request = _from_run(arguments)
    changes = _given(
        batch_size=arguments.batch_size,
        max_tokens=arguments.max_tokens,
        memory_gib=arguments.memory_gb,
        balance=arguments.balance,
        sync=arguments.sync,
        oversize=arguments.oversize,
        micro_batch_size=arguments.micro_batch_size,
        seed=arguments.seed,
    )
    if arguments.balance is not None:
        # The report then describes the schedule with this balance instead of the config's strategy.
        changes["chosen"] = None
    changes["grpo"] = with_rates(
        request.grpo,
        tflops=arguments.tflops,
        memory_gb_per_s=arguments.memory_gb_per_s,
        link_gb_per_s=arguments.link_gb_per_s,
    )
    return replace(request, placement=_placement(arguments, request.placement), **changes)


def _given(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given, whose values are not None."""
    return {name: value for name, value in flags.items() if value is not None}


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that the source of the lengths would silently ignore, and for
    flags that lack another one.
    """
    for flag, value, needs in (
        ("--column", arguments.column, ("lengths",)),
        ("--field", arguments.field, ("lengths",)),
        ("--tokenizer", arguments.tokenizer, ("data", "config")),
        ("KEY=VALUE", arguments.overrides, ("config",)),
    ):
        is_used = any(getattr(arguments, name) is not None for name in needs)
        if value and not is_used:
            sources = " and ".join(f"--{name}" for name in needs)
            raise ConfigError(f"{flag} is for {sources}; leave it out")
    if arguments.column and arguments.field:
        raise ConfigError("--column is for CSV and --field for JSONL; give one of them")
    has_no_config = (arguments.lengths or arguments.data) is not None
    if arguments.memory_gb is not None and arguments.model is None and has_no_config:
        raise ConfigError(
            "--memory-gb needs --model: the memory depends on the model, e.g. --model 7b"
        )
    if arguments.data is not None and arguments.tokenizer is None:
        raise ConfigError("--data needs --tokenizer DIR: lengths are counted in its tokens")


def _from_lengths(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.prediction.lengths import read_lengths

    names = (arguments.column or "").split(",")
    columns = [name.strip() for name in names if name.strip()]
    rows = read_lengths(
        arguments.lengths, columns=columns, field=arguments.field, limit=arguments.limit or MAX_ROWS
    )
    rows = replace(rows, is_ordered=arguments.in_order)
    return PlanRequest(rows=rows, model=_model_spec(arguments))


def _from_text(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.commands.first_step import file_config, first_lengths
    from nemo_like.models.pretrained import import_transformers_without_torch

    # Only in a process of its own: a library user may need torch afterwards.
    if arguments.owns_process:
        import_transformers_without_torch()
    config = file_config(
        str(arguments.data),
        arguments.tokenizer,
        arguments.batch_size or PlanRequest.batch_size,
        arguments.seed or 0,
        shuffle=not arguments.in_order,
    )
    try:
        rows = first_lengths(config, arguments.limit, NUM_STEPS)
    except ConfigError as error:
        # The user gave flags, not keys.
        text = str(error).replace("policy.tokenizer_name", "--tokenizer")
        raise ConfigError(text.replace("data.train_path", "--data")) from error
    return PlanRequest(rows=rows, model=_model_spec(arguments))


def _from_config(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.algorithms.registry import load_any_config
    from nemo_like.commands.first_step import first_lengths
    from nemo_like.commands.plan_grpo import guessed_rollouts
    from nemo_like.models.pretrained import import_transformers_without_torch

    if arguments.owns_process:
        import_transformers_without_torch()
    config = load_any_config(arguments.config, arguments.overrides)
    if arguments.tokenizer is not None:
        config = replace(config, policy=replace(config.policy, tokenizer_name=arguments.tokenizer))
    try:
        rows = first_lengths(config, arguments.limit, NUM_STEPS)
    except ConfigError as error:
        # A shape of the model is known by its size, its tokenizer is not.
        keys = ("policy.model_name", "policy.tokenizer_name")
        has_hint = any(str(error).startswith(key) for key in keys)
        hint = "; or name one for this plan with --tokenizer" if has_hint else ""
        raise ConfigError(f"{error}{hint}") from error
    request = _configured(config, rows, arguments)
    rollouts = guessed_rollouts(rows, config.rows_per_step)
    return replace(request, grpo=_grpo(config, request, rollouts, rows.source))


def _grpo(
    config: RunConfig, request: PlanRequest, rollouts: Sequence[RolloutLengths], source: str
) -> GrpoStepRequest | None:
    """Return the GRPO step of a config; None for other jobs."""
    from nemo_like.commands.plan_grpo import grpo_step_request
    from nemo_like.commands.plan_reward_models import scoring_models

    assert request.model is not None and request.chosen is not None
    return grpo_step_request(
        config,
        rollouts,
        source,
        model=request.model,
        placement=request.placement,
        spec=request.chosen,
        reward_models=scoring_models(config),
    )


def _from_run(arguments: argparse.Namespace) -> PlanRequest:
    from nemo_like.algorithms.registry import load_any_config
    from nemo_like.commands.plan_grpo import comparable_times
    from nemo_like.prediction.past_run import read_run

    past = read_run(arguments.metrics)
    config = load_any_config(past.config)
    rows = past.rows()
    rows = replace(rows, values=rows.values[: arguments.limit])
    request = _configured(config, rows, arguments)
    assert request.chosen is not None
    rollouts, source = past.rollouts()
    measured, note = comparable_times(config, past.measured_times())
    return replace(
        request,
        logged=past.compare(request.chosen),
        grpo=_grpo(config, request, rollouts, source),
        measured=measured,
        notes=(*request.notes, note) if note else request.notes,
    )


def _configured(config: RunConfig, rows: RowLengths, arguments: argparse.Namespace) -> PlanRequest:
    """Return the request for the batches that a run of `config` would form."""
    from nemo_like.commands.plan_reward_models import reward_model_notes
    from nemo_like.config.parallel import policy_layout
    from nemo_like.policy.batching import plan_spec
    from nemo_like.prediction.placement import placement_of

    model = _model_spec(arguments, config.policy.model_name)
    assert model is not None, "a config names a model"
    model = model.with_output_head(config.output_head)
    notes: list[str] = []
    if config.parallel.expert > 1:
        notes.append(
            f"parallel.expert is {config.parallel.expert}, but the memory counts every expert"
            " on every worker: it is an upper bound"
        )
    if config.rows_per_example > 1:
        notes.append(
            f"the {config.rows_per_example} rows of a {config.example} are planned independently;"
            " a run keeps them in one microbatch, with slightly more padding"
        )
    placement = placement_of(config, _teacher_specs(config))
    notes += reward_model_notes(config)
    request = PlanRequest(
        rows=rows,
        model=model,
        placement=placement,
        batch_size=config.policy_in_rows.train_global_batch_size,
        notes=tuple(notes),
    )
    spec = plan_spec(
        config.policy_in_rows,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model,
        seed=config.seed,
    )
    max_tokens, budget_name = spec.max_tokens, spec.budget_key
    if not spec.max_tokens:
        # Without a token budget the largest possible microbatch takes its place.
        max_length = config.policy.max_total_sequence_length
        max_tokens = (spec.max_rows or 1) * max_length
        budget_name = "policy.train_micro_batch_size x policy.max_total_sequence_length"
    return replace(
        request,
        max_tokens=max_tokens,
        balance="tokens" if spec.balance == "tokens" else "flops",
        oversize=spec.oversize,
        budget_name=budget_name,
        oversize_name="policy.oversize_rows",
        sequence_length_round=spec.sequence_length_round,
        micro_batch_size=spec.max_rows,
        seed=config.seed,
        chosen=spec,
        stream=_stream_spec(config, spec),
    )


def _teacher_specs(config: RunConfig) -> list[ModelSpec]:
    """Return the sizes of the teachers. Raises ConfigError that names the key of a wrong one."""
    from nemo_like.models.presets import load_spec

    specs = []
    for key, name in config.teachers_by_key.items():
        try:
            specs.append(load_spec(name, key))
        except ConfigError as error:
            raise ConfigError(
                f"{key} is {name!r}, which is not a directory with a config.json here; give the"
                f" directory of a model, or its size for this plan ({error})"
            ) from error
    return specs


def _stream_spec(config: RunConfig, spec: PlanSpec) -> StreamSpec | None:
    """Return the settings of the streaming planner of a config; None for fixed batches."""
    from nemo_like.config.batching import StreamableDataConfig
    from nemo_like.policy.batching import stream_spec

    data = config.data
    if not isinstance(data, StreamableDataConfig) or not data.batching.is_streaming:
        return None
    return stream_spec(data.batching, spec)


def _placement(arguments: argparse.Namespace, base: Placement) -> Placement:
    """Return `base` with the flags that were given."""
    axes = _given(
        dp=arguments.dp,
        tp=arguments.tp,
        cp=arguments.cp,
        pp=arguments.pp,
        sequence_parallel=arguments.sequence_parallel,
    )
    try:
        parallel_layout = replace(base.parallel_layout, **axes)
    except LayoutError as error:
        raise ConfigError(str(error)) from error
    engine = arguments.engine
    if engine is None and (arguments.pp or 1) > 1:
        engine = "megatron"  # the only engine with pipeline parallelism
    changes = _given(
        engine=engine,
        precision=arguments.precision,
        activation_checkpointing=arguments.activation_checkpointing,
    )
    return replace(base, parallel_layout=parallel_layout, **changes)


def _model_spec(arguments: argparse.Namespace, model_name: str | None = None) -> ModelSpec | None:
    """Return the spec of --model, else of `model_name`; None if there is neither."""
    from nemo_like.models.presets import load_spec

    if arguments.model is not None:
        return load_spec(arguments.model)
    if model_name is None:
        return None
    try:
        return load_spec(model_name, "policy.model_name")
    except ConfigError as error:
        raise ConfigError(
            f"policy.model_name is {model_name!r}, which is not a directory with a config.json"
            " here; name one with --model, or a shape by its size, and if need be --tokenizer"
            f" ({error})"
        ) from error
