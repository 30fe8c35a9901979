"""Translates the keys of a config of another tool, by the table of the tool, to keys here."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.build import register_arithmetic
from nemo_like.config.errors import Problem
from nemo_like.config.foreign import (
    NO_EFFECT,
    Finding,
    canonical,
    find_foreign,
    in_table,
    key_paths,
    value_at,
)
from nemo_like.config.foreign_report import shown_text
from nemo_like.config.keys import JobSchema, Tool, type_at, without_none
from nemo_like.config.load import YamlLoader, merged, nested

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_SETS = {"data.train_path": "data.train_sets", "data.validation_path": "data.validation_sets"}
WARMUP = "policy.scheduler.warmup_steps"
_SAMPLING_JOBS = ("grpo", "distill")
DECIDES = re.compile(
    r"policy\.(optimizer|scheduler)\..+|policy\.(train_global_batch_size|max_total_sequence_length|precision)"
    r"|policy\.generation\.(max_new_tokens|temperature)|grpo\.(num_|max_num|advantage\.).+"
    r"|loss_fn\.(?!importance).+|distill\..+|[a-z]+\.max_num_steps"
)
"""Keys that decide the result of a run: a value that is not known must be set by the user."""
NUM_PROCESSES = "num_processes"
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
        if type_at(self.job.run_config, key) is not None and DECIDES.fullmatch(key):
            self.reasons.setdefault(key, reason)

    def put(self, key: str, value: Any, origin: str) -> str:
        """Set a key and return it, or its key in a further set; empty if it has another value."""
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


def is_on(tree: Mapping[str, Any], key: str) -> bool:
    """Return False for a key that is not set, or off."""
    return canonical(value_at(tree, key)) not in ("null", "false", "0")


def add_defaults(tool: Tool, kind: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
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


def translate(result: Migration, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
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
            if is_on(tree, key):
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
                if target == WARMUP:
                    # The product of a share and the steps; transformers rounds up.
                    value = math.ceil(round(value, 6))
                result.put(target, value, formula)
                for word in words:
                    if word not in defaults:
                        result.carried.setdefault(word, []).append(target)
                break
            unknown = [word for word in words if values[word] is None]
            if target == WARMUP and words[0].endswith("ratio") and values[words[0]]:
                result.require(target, f"{values[words[0]]} x the optimizer steps ({words[0]})")
                break
            is_text = any(isinstance(each, str) and "$" in each for each in values.values())
            if (is_text and not unknown) or unknown == [NUM_PROCESSES]:
                shown = " ".join(str(values.get(word) or word) for word in formula.split())
                option = f"; {NUM_PROCESSES} is --num-processes" if unknown else ""
                result.require(target, f"{shown} ({formula}){option}")
                break


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
    """Return the path of a data set of the hub; set the keys beside its name as well."""
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
        if isinstance(value, str) and "$" in value:
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
