"""`migrate`: a config of another tool becomes one of this package, and a list of what did not.

The tables in `config/foreign/` say what becomes of each key. Nothing is left out silently: a key is
carried over, dropped for a reason, or unknown.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.build import build_config, register_arithmetic, resolve_interpolations
from nemo_like.config.check import find_problems
from nemo_like.config.errors import ConfigError, Problem, counted, shown_path
from nemo_like.config.foreign import (
    NO_EFFECT,
    Finding,
    canonical,
    find_foreign,
    guess_job,
    in_table,
    key_paths,
    missing_keys,
    recognized_tool,
    value_at,
)
from nemo_like.config.foreign_report import shown_text
from nemo_like.config.foreign_source import read_source, unread_text
from nemo_like.config.keys import JobSchema, Tool, general, tools, type_at, without_none
from nemo_like.config.load import YamlLoader, merged, nested, schema_defaults
from nemo_like.config.schema import RunConfig

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_SETS = {"data.train_path": "data.train_sets", "data.validation_path": "data.validation_sets"}
_WARMUP = "policy.scheduler.warmup_steps"
_SAMPLING_JOBS = ("grpo", "distill")
_LAYOUT = "policy.generation.vllm."
"""Keys that change no training; a value that is not possible here is dropped."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_DECIDES = re.compile(
    r"policy\.(optimizer|scheduler)\..+|policy\.(train_global_batch_size|max_total_sequence_length|precision)"
    r"|policy\.generation\.(max_new_tokens|temperature)|grpo\.(num_|max_num|advantage\.).+"
    r"|loss_fn\.(?!importance).+|distill\..+|[a-z]+\.max_num_steps"
)
"""Keys that decide the result of a run: a value that is not known must be set by the user."""
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
_NUM_PROCESSES = "num_processes"
_FILE = re.compile(r"(hf://|[/.~]).*|.*\.(jsonl?|parquet|csv|arrow)(\.gz)?", re.DOTALL)


@dataclass
class Migration:
    """A config of this package that was made of another tool's."""

    tool: Tool
    job: JobSchema
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> where its value is from."""
    carried: dict[str, list[str]] = field(default_factory=dict)
    """Key of the tool -> keys here."""
    dropped: list[Finding] = field(default_factory=list)
    unknown: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """Key here -> why the user must set it, if nothing else decides its value."""
    missing_files: list[str] = field(default_factory=list)
    """Files that the config names and that are not found."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong in the result beside missing keys."""

    def tree(self) -> dict[str, Any]:
        """Return the values in nested sections, without those that must be set."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            tree = merged(tree, nested(key, value))
        return tree

    def require(self, key: str, reason: str) -> None:
        """State why the user must set a key, if nothing decides its value and it matters."""
        if type_at(self.job.run_config, key) is not None and _DECIDES.fullmatch(key):
            self.reasons.setdefault(key, reason)

    def put(self, key: str, value: Any, origin: str) -> str:
        """Set a key and return it, or that of a further set; empty if it has another value."""
        value = _fitting(type_at(self.job.run_config, key), value)
        if key in _SETS and isinstance(value, str) and not _FILE.fullmatch(value):
            # The name of a data set of the hub.
            value = f"hf://{value}?split={'train' if key == 'data.train_path' else 'test'}"
        if self.values.get(key, value) != value:
            if key not in _SETS:
                return ""
            key = f"{_SETS[key]}.set{1 + sum(each.startswith(_SETS[key]) for each in self.values)}"
        self.origins[key] = f"{self.origins[key]}, {origin}" if key in self.values else origin
        self.values[key] = value
        return key


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
    file that is no config of a known tool.
    """
    any_job = JobSchema(next(iter(jobs)), jobs)
    source = read_source(any_job, path, text)
    tool = recognized_tool(source.tree, is_fragment=kind is not None)
    name = shown_path(path) if text is None else "the standard input"
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
    if num_processes is not None and any(_NUM_PROCESSES in each for each in _formulas(tool)):
        tree[_NUM_PROCESSES] = num_processes
    # A file that is not found may have other values than the defaults.
    defaults = {} if source.missing_files else dict(_add_defaults(tool, kind, tree))
    result.notes += _notes(result, tree)
    _translate(result, tree, defaults)
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


def _is_on(tree: Mapping[str, Any], key: str) -> bool:
    return canonical(value_at(tree, key)) not in ("null", "false", "0")


def _notes(result: Migration, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs in behavior and concerns the job and the values of the config."""
    for entry in result.tool.advice:
        conditions = {"note": entry} if isinstance(entry, str) else entry
        note = conditions["note"]
        if "when" in conditions and not _is_on(tree, conditions["when"]):
            continue
        if "unless" in conditions and _is_on(tree, conditions["unless"]):
            continue
        # A note that names a key of other jobs only is about them.
        if not any(
            type_at(result.job.run_config, key) is None and type_at(other, key) is not None
            for key in _KEY.findall(note)
            for other in result.job.jobs.values()
        ):
            yield note


def _add_defaults(tool: Tool, kind: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Add the defaults of the tool where it differs from this package; yield values or formulas."""
    for key, value in {**tool.defaults.get("all", {}), **tool.defaults.get(kind, {})}.items():
        if value_at(tree, key) is None:
            number = _computed(value, tree) if _is_formula(value) else value
            if number is not None:
                tree.update(merged(tree, nested(key, number)))
                yield key, value


def _is_formula(value: Any) -> bool:
    return isinstance(value, str) and " " in value


def _computed(formula: str, tree: Mapping[str, Any]) -> float | None:
    """Evaluate a formula from left to right; None if a key of it has no number."""
    total: float | None = None
    apply = operator.add
    for word in formula.split():
        if word in _OPERATORS:
            apply = _OPERATORS[word]
            continue
        value = float(word) if word[0].isdigit() else value_at(tree, word)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        total = value if total is None else apply(total, value)
    # Negative numbers turn a limit off.
    if total is None or total < 0:
        return None
    # Without the rounding errors of a quotient such as 7e-7 / 7e-6.
    return float(f"{total:.12g}")


def _translate(result: Migration, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Carry the keys over that have a place here, and list the others."""
    job, tool = result.job, result.tool
    order = {path: index for index, path in enumerate(tool.entries)}

    def priority(one: Finding) -> tuple[bool, int]:
        # Defaults last: a default replaces no value under an earlier name of its key. Of two keys
        # with one target the first one of the table counts.
        return one.path in defaults, order.get(in_table(one.path), len(order))

    found = sorted(find_foreign(job, tree, tool), key=priority)
    for target, switches in tool.undecided.items():
        for key, reason in switches.items():
            if _is_on(tree, key):
                result.require(target, reason)
    _compute(result, tree, defaults, found)
    computed = {*result.values, *result.reasons}
    for one in found:
        if one.group == "renamed":
            _carry(result, tree, one, defaults, computed)
            continue
        for target in one.targets:
            result.require(target, f"{one.path} is {shown_text(value_at(tree, one.path))}")
        # Formulas may carry some keys of a section.
        keys = list(key_paths({one.path: value_at(tree, one.path)})) or [one.path]
        left = [key for key in keys if key not in defaults and key not in result.carried]
        for path in [one.path] if left == keys else left:
            target = result.unknown if one.group == "unknown" else result.dropped
            target.append(Finding(path, one.group, text=one.text))
    result.dropped = [one for one in result.dropped if one.path not in result.carried]
    covered = tuple(f"{one.path}." for one in found)
    for path in key_paths(tree):
        if not f"{path}.".startswith(covered) and type_at(job.run_config, path) is not None:
            is_default = path in defaults
            origin = f"always in {tool.name}" if is_default else path
            _set(result, "" if is_default else path, [path], [_resolved(tree, path)], origin)
    is_lora = any(key.startswith("policy.lora.") for key in result.values)
    if is_lora and "policy.lora.enabled" not in result.values:
        result.put("policy.lora.enabled", True, "the keys of adapters")


def _compute(
    result: Migration,
    tree: Mapping[str, Any],
    defaults: Mapping[str, Any],
    found: Sequence[Finding],
) -> None:
    """Set the keys whose values follow from formulas, or state why they must be set."""
    # A key is part of a formula also with a value that has no effect by itself, such as 1.
    without_effect = tuple(
        f"{one.path}." for one in found if one.group == "deletable" and one.text != NO_EFFECT
    )
    for target, formulas in result.tool.computed.items():
        if type_at(result.job.run_config, target) is None or target in result.reasons:
            continue
        for formula in [formulas] if isinstance(formulas, str) else formulas:
            words = [word for word in formula.split() if word[0].isalpha()]
            values = {word: value_at(tree, word) for word in words}
            if any(f"{word}.".startswith(without_effect) for word in words):
                continue
            value = _computed(formula, tree)
            if value is not None:
                if target == _WARMUP:
                    # The product of a share and the steps; transformers rounds up.
                    value = math.ceil(round(value, 6))
                result.put(target, value, formula)
                for word in words:
                    if word not in defaults:
                        result.carried.setdefault(word, []).append(target)
                break
            unknown = [word for word in words if values[word] is None]
            if target == _WARMUP and words[0].endswith("ratio") and values[words[0]]:
                result.require(target, f"{values[words[0]]} x the optimizer steps ({words[0]})")
                break
            is_text = any(isinstance(each, str) and "$" in each for each in values.values())
            if (is_text and not unknown) or unknown == [_NUM_PROCESSES]:
                shown = " ".join(str(values.get(word) or word) for word in formula.split())
                option = f"; {_NUM_PROCESSES} is --num-processes" if unknown else ""
                result.require(target, f"{shown} ({formula}){option}")
                break


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


def _carry(
    result: Migration,
    tree: Mapping[str, Any],
    one: Finding,
    defaults: Mapping[str, Any],
    computed: set[str],
) -> None:
    """Carry over one key with a new name or value."""
    value = _resolved(tree, one.path)
    origin = one.path if one.new is None else f"{one.path}: {shown_text(value)}"
    if one.path in defaults:
        default = defaults[one.path]
        origin = f"{one.path} is not set: {default} in {result.tool.name}"
        if _is_formula(default):
            origin = f"{default}, as {one.path} is not set"
    if one.new is not None:
        value = yaml.load(one.new, Loader=YamlLoader)
    for key, further in one.also.items():
        if type_at(result.job.run_config, key) is not None:
            result.put(key, value if further == "*" else further, origin)
    if one.targets[0] in computed:
        if one.path not in result.carried and one.path not in defaults:
            origin = result.origins.get(one.targets[0], result.reasons.get(one.targets[0]))
            text = f"{one.targets[0]} follows from {origin}"
            result.dropped.append(Finding(one.path, "unsupported", text=text))
        return
    if one.text:
        origin += f" ({one.text})"
    targets = one.targets
    values = [value] * len(targets)
    if isinstance(value, Mapping):
        targets = tuple(f"{targets[0]}.{name}" for name in value)
        values = list(value.values())
    elif len(one.targets) > 1 and isinstance(value, list) and len(value) == len(one.targets):
        values = value
    if targets[0] in _SETS and isinstance(value, str) and not _FILE.fullmatch(value):
        values = [_hub_path(result, tree, one.path, targets[0], value)]
        others = [key for key, found in result.carried.items() if targets[0] in found]
        origin = ", ".join([origin, *others])
    _set(result, "" if one.path in defaults else one.path, targets, values, origin)


def _hub_path(result: Migration, tree: Mapping[str, Any], path: str, target: str, name: str) -> str:
    """Return the path of a data set of the hub, with the keys beside that of its name."""
    section = path.rpartition(".")[0]
    query = {"split": "train" if target == "data.train_path" else "test"}
    for part, names in result.tool.hub.items():
        for each in names:
            key = f"{section}.{each}" if section else each
            value = value_at(tree, key)
            if isinstance(value, str) and "$" not in value:
                query[part] = value
                result.carried.setdefault(key, []).append(target)
    return f"hf://{name}?{'&'.join(f'{part}={query[part]}' for part in sorted(query))}"


def _set(
    result: Migration, path: str, targets: Sequence[str], values: Sequence[Any], origin: str
) -> None:
    """Set the new keys of one key, whose own path is empty for a default of the tool."""
    places = list(targets)
    for index, (target, value) in enumerate(zip(targets, values, strict=True)):
        reason = ""
        if not path and target in result.values:
            continue
        if isinstance(value, str) and "$" in value and "${div:" not in value:
            reason = f"its value {shown_text(value)} is not known; set {target}"
            result.require(target, f"{path} is {shown_text(value)}")
        elif target in _SETS and isinstance(value, list):
            for item in value:
                result.put(target, item, origin)
        elif place := result.put(target, value, origin):
            places[index] = place
        elif path:
            reason = f"{target} is {shown_text(result.values[target])} already, of"
            reason += f" {result.origins[target]}"
        if target == "cluster.generation_workers" and result.job.kind not in _SAMPLING_JOBS:
            result.values.pop(target, None)
            reason = f"`nemo-like {result.job.kind}` samples no completions"
        if reason and path:
            result.dropped.append(Finding(path, "unsupported", text=reason))
            return
    if path:
        result.carried.setdefault(path, []).extend(places)


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
    texts = [key for key in result.missing if not _DECIDES.fullmatch(key)]
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
    share = result.values.get(_WARMUP)
    if not isinstance(share, float) or share >= 1:
        return
    num_steps = result.values.get(f"{result.job.kind}.max_num_steps")
    if num_steps is not None:
        result.values[_WARMUP] = math.ceil(round(share * num_steps, 6))
        result.origins[_WARMUP] += f": {share} of {num_steps} steps"
        return
    text = f"{share} is a share of the steps, whose number is not known; set {_WARMUP}"
    result.require(_WARMUP, f"{share} x the optimizer steps")
    _drop_value(result, result.values, Problem((_WARMUP,), text))


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
                num_rows = values.get(batch, 1) * result.job.run_config.rows_per_example
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


def _fitting(annotation: Any, value: Any) -> Any:
    """Return a value in the form of the key's type, where it has the same meaning."""
    inner, _ = without_none(annotation)
    if inner is int and isinstance(value, float) and value == value // 1:
        return int(value)
    if get_origin(inner) is tuple and isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value


def _resolved(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key with its references to other keys replaced, as far as possible."""
    value = value_at(tree, path)
    if "${" not in str(value):
        return value
    register_arithmetic()
    try:
        resolved = OmegaConf.select(OmegaConf.create(dict(tree)), path)
        return OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved
    except (OmegaConfBaseException, ValueError, TypeError):
        return value
