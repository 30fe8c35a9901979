"""`migrate`: a config of another tool becomes one of this package, and a list of what did not.

The tables in `config/foreign/` say what becomes of each key. Nothing is left out silently: a key is
carried over, dropped for a reason, or unknown.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_like.config.build import build_config, resolve_interpolations
from nemo_like.config.check import find_problems
from nemo_like.config.errors import ConfigError, Problem, counted
from nemo_like.config.foreign import (
    Finding,
    canonical,
    guess_job,
    missing_keys,
    recognized_tool,
    value_at,
)
from nemo_like.config.foreign_source import read_source, source_name, unread_text
from nemo_like.config.keys import JobSchema, Tool, general, tools, type_at
from nemo_like.config.load import merged, schema_defaults
from nemo_like.config.schema import RunConfig
from nemo_like.config.translate import (
    DECIDES,
    NUM_PROCESSES,
    WARMUP,
    Migration,
    add_defaults,
    is_on,
    translate,
)

_LAYOUT = "policy.generation.vllm."
"""Keys that change no training; a value that is not possible here is dropped."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_NEEDED = (
    "policy.optimizer.lr",
    "policy.train_global_batch_size",
    "policy.max_total_sequence_length",
)
_NEEDED_BY_GRPO = (
    *("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
    "policy.generation.max_new_tokens",
)
_MAX_STEPS = 1_000_000
"""A number of steps from here on stands for no limit."""


def migrate(
    jobs: Mapping[str, type[RunConfig]],
    path: Path,
    kind: str | None = None,
    *,
    text: str | None = None,
    num_processes: int | None = None,
) -> Migration:
    """Translate the file `path`, to a config of the job `kind`, which is detected by default.

    `text` is a command in place of the content of the file. `num_processes` is the number of
    processes of the original run, for tools that count rows per process. Raises ConfigError for a
    file that is not a config of a known tool.
    """
    any_job = JobSchema(next(iter(jobs)), jobs)
    source = read_source(any_job, path, text)
    tool = recognized_tool(source.tree, is_fragment=kind is not None)
    name = source_name(path)
    _refuse_unread(name, source.tree)
    if tool is None:
        for file in source.missing_files:
            raise ConfigError(f"{name} names {file}, which is not found; migrate that file")
        known = ", ".join(each.name for each in tools() if each.signs)
        raise ConfigError(f"{name} has the keys of no known tool ({known})")
    kind = kind or source.job or guess_job(source.tree)
    if not kind:
        raise ConfigError(f"the job of {name} is not clear; pass --kind JOB")
    result = Migration(tool, JobSchema(kind, jobs), notes=list(source.notes))
    result.missing_files = source.missing_files
    tree = copy.deepcopy(source.tree)
    num_processes = num_processes or source.num_processes
    if num_processes is not None and any(NUM_PROCESSES in each for each in _formulas(tool)):
        tree[NUM_PROCESSES] = num_processes
    # A file that is not found may have other values than the defaults.
    defaults = {} if source.missing_files else dict(add_defaults(tool, kind, tree))
    result.notes += _notes(result, tree)
    translate(result, tree, defaults)
    _require_length(result, tree, defaults)
    _complete(result, path)
    return result


def _refuse_unread(name: str, tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config of a tool that is known by name only."""
    for tool, signs in general()["unread"].items():
        if sum(value_at(tree, key) is not None for key in signs["signs"]) > 1:
            raise ConfigError(unread_text(name, tool))


def _formulas(tool: Tool) -> Iterator[str]:
    for formulas in tool.computed.values():
        yield from [formulas] if isinstance(formulas, str) else formulas


def _notes(result: Migration, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs in behavior and concerns the job and the values of the config."""
    for entry in result.tool.advice:
        conditions = {"note": entry} if isinstance(entry, str) else entry
        note = conditions["note"]
        if not all(is_on(tree, key) for key in conditions.get("when", ())):
            continue
        if any(is_on(tree, key) for key in conditions.get("unless", ())):
            continue
        # A note that names a key of other jobs only is about them.
        if not any(
            type_at(result.job.run_config, key) is None and type_at(other, key) is not None
            for key in _KEY.findall(note)
            for other in result.job.jobs.values()
        ):
            yield note


def _require_length(
    result: Migration, tree: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Require the number of steps of a run whose length the tool counts in epochs."""
    kind, values = result.job.kind, result.values
    epochs = next((each for each in result.tool.epochs if value_at(tree, each) is not None), None)
    if epochs is None:
        return
    key = f"{kind}.max_num_steps"
    batch = "grpo.num_prompts_per_step" if kind == "grpo" else "policy.train_global_batch_size"
    number = value_at(tree, epochs)
    text = f"{epochs} is {number}: {number} x the rows of the data / {values.get(batch, batch)}"
    steps = values.get(key)
    if kind != "grpo":
        if steps is None and canonical(number).partition(".")[2]:
            result.require(key, text)
        return
    if isinstance(steps, int) and steps < _MAX_STEPS:
        if result.tool.ends_at_smaller and epochs not in defaults:
            result.notes.append(
                f"the original run ends earlier if its epochs are fewer steps: {text}"
            )
        return
    values.pop(key, None)
    result.require(key, text)
    if epochs not in defaults:
        # What the user must set has its value.
        result.dropped = [one for one in result.dropped if one.path != epochs]
        result.carried.setdefault(epochs, []).append(key)


def _complete(result: Migration, path: Path) -> None:
    """Name the run, and find what is missing or wrong; a value that does not fit is dropped."""
    if "run_name" not in result.values:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-.") or "run"
        result.put("run_name", name, "the name of the file")
    _set_warmup(result)
    _set_layout(result)
    _drop_kl(result)
    result.missing = missing_keys(result.job, result.tree())
    result.missing += [key for key in _needed(result) if key not in result.values]
    if "reward.functions" in result.missing:
        index = result.missing.index("reward.functions")
        result.missing[index] = "reward.functions.answer.path"
    texts = [key for key in result.missing if not DECIDES.fullmatch(key)]
    examples = dict.fromkeys(texts, "nemo_like.environments.math.answer_reward")
    values = {**result.values, **examples}
    run_config = result.job.run_config
    problems: list[Problem] = []
    # A dropped value may show the next problem.
    for _ in range(3):
        tree = Migration(result.tool, result.job, values).tree()
        try:
            complete = merged(schema_defaults(run_config), tree)
            plain = resolve_interpolations(complete, lambda path: None)
        except ConfigError as error:
            result.problems = [Problem((), str(error))]
            return
        config, problems = build_config(run_config, plain)
        for problem in problems:
            _drop_value(result, values, problem)
        if config is not None:
            problems = find_problems(config)
            layout = [one for one in problems if one.keys[0].startswith(_LAYOUT)]
            for problem in layout:
                _drop_value(result, values, problem)
            # Of a key that must be set only its default is wrong.
            open_keys = {*result.missing, *result.reasons}
            result.problems = [
                one for one in problems if one not in layout and open_keys.isdisjoint(one.keys)
            ]
            if not layout:
                return
    result.problems = problems


def _needed(result: Migration) -> list[str]:
    """Return the keys that decide the result of the run and must have values."""
    kind = result.job.kind
    needed = list(result.reasons)
    if result.tool.signs:
        needed += [*_NEEDED, *(_NEEDED_BY_GRPO if kind == "grpo" else ())]
        if f"{kind}.max_num_epochs" not in result.values:
            needed.append(f"{kind}.max_num_steps")
        if result.missing_files:
            needed += ["policy.precision", "policy.scheduler.kind"]
    needed = [key for key in dict.fromkeys(needed) if type_at(result.job.run_config, key)]
    reason = "not set in the original"
    if result.missing_files:
        reason = f"it may be in {result.missing_files[0]}"
    for key in needed:
        result.reasons.setdefault(key, reason)
    return needed


def _drop_kl(result: Migration) -> None:
    """Leave out the form of a KL penalty whose weight is 0."""
    penalty = "loss_fn.reference_policy_kl_penalty"
    if result.values.get(penalty) == 0:
        for key in ("loss_fn.reference_policy_kl_in", "loss_fn.reference_policy_kl_type"):
            if key in result.values:
                _drop_value(result, result.values, Problem((key,), f"{penalty} is 0"))
                result.reasons.pop(key, None)


def _set_warmup(result: Migration) -> None:
    """Replace a warm-up that is a share of the steps by its number of steps."""
    share = result.values.get(WARMUP)
    if not isinstance(share, float) or share >= 1:
        return
    num_steps = result.values.get(f"{result.job.kind}.max_num_steps")
    if num_steps is not None:
        result.values[WARMUP] = math.ceil(round(share * num_steps, 6))
        result.origins[WARMUP] += f": {share} of {num_steps} steps"
        return
    text = f"{share} is a share of the steps, whose number is not known; set {WARMUP}"
    result.require(WARMUP, f"{share} x the optimizer steps")
    _drop_value(result, result.values, Problem((WARMUP,), text))


def _set_layout(result: Migration) -> None:
    """Set the token budgets and the engine that the carried keys need."""
    values = result.values
    if values.get("parallel.pipeline", 1) > 1:
        values.setdefault("policy.engine", "megatron")
        result.origins.setdefault("policy.engine", "parallel.pipeline needs it")
    length = values.get("policy.max_total_sequence_length")
    new = "policy.generation.max_new_tokens"
    if isinstance(length, int) and values.get(new, 0) >= length:
        # The generator stops at the total length anyhow.
        values[new] = length - 1
        result.origins[new] += ": up to the total length"
    for section in ("policy.sequence_packing", "policy.dynamic_batching"):
        budgets = (
            ("train_mb_tokens", "policy.train_micro_batch_size"),
            ("logprob_mb_tokens", "policy.logprob_batch_size"),
        )
        for name, batch in budgets:
            key = f"{section}.{name}"
            if values.get(f"{section}.enabled") and length and key not in values:
                num_rows = values.get(batch, 1) * result.job.default_batch.rows_per_example
                result.put(key, num_rows * length, f"{counted(num_rows, 'row')} of {length} tokens")


def _drop_value(result: Migration, values: dict[str, Any], problem: Problem) -> None:
    """Drop a value that is not legal here."""
    key = problem.keys[0].partition("[")[0]
    value = values.pop(key, None)
    if value is not None:
        result.require(key, problem.text)
    result.values.pop(key, None)
    if key in result.tool.computed and value is not None:
        # Its keys may have other uses, in which they are carried over.
        result.notes.append(f"{key} is left out: {problem.text}")
    for path in [old for old, targets in result.carried.items() if key in targets]:
        result.carried[path].remove(key)
        if result.carried[path]:
            continue
        del result.carried[path]
        result.dropped.append(Finding(path, "unsupported", text=problem.text))
