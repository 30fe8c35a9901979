"""Any config can be written as YAML and read back, and nothing is guessed about a value's type."""

from __future__ import annotations

import dataclasses
import math
import string
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args, get_origin

import yaml
from annotated_types import Gt, Lt
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import job_schema
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.build import build_config, resolve_interpolations
from nemo_like.config.constraints import Rule
from nemo_like.config.keys import (
    field_constraints,
    field_types,
    is_open_section,
    is_section,
    without_none,
)
from nemo_like.config.load import compose_files, to_yaml
from nemo_like.config.plain import to_dict
from nemo_like.config.rollout import RewardFunctionConfig
from nemo_like.config.schema import RunConfig

NAMES = st.text(string.ascii_letters + string.digits + "_-", max_size=8).map(
    lambda text: f"f{text}"
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        [
            "1e-5",
            "007",
            "no",
            "null",
            "~",
            "",
            " a ",
            "a: b",
            "# a",
            "2024-01-01",
            "${a}",
            r"\${a}",
            r"\\${",
            "\\",
            "???x",
            "a\nb\n",
        ]
    ),
).filter(lambda text: text != "???")

ANY_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a text", "two\nlines", "-", "a: b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


SAMPLES: dict[Any, list[Any]] = {
    str: ["a", "my_package.function", "Q: {prompt}", "1-02:03:04", "run-1", "1e-5"],
    tuple[str, ...]: [(), ("a", "b"), ("prev_logprobs",)],
    tuple[float, ...]: [(0.0, 1.0), (0.25, 0.5)],
}
"""Values of which the rules of the schema accept at least one."""


def values(annotation: Any, constraints: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Any legal value of a type that stands in the schema."""
    inner, may_be_null = without_none(annotation)
    if inner is Any:
        return ANY_VALUES
    if may_be_null:
        return st.none() | values(inner, constraints)
    if is_section(inner):
        rules = field_constraints(inner)
        types = field_types(inner)
        return st.builds(inner, **{name: values(types[name], rules[name]) for name in types})
    if is_open_section(inner):
        return st.dictionaries(NAMES, values(get_args(inner)[1]), max_size=2)
    for rule in constraints:
        if isinstance(rule, Rule):
            samples = SAMPLES[inner]
            return st.sampled_from([sample for sample in samples if rule.accepts(sample)])
    if get_origin(inner) is tuple:
        item = get_args(inner)[0]
        return st.lists(st.integers(0, 9) if item is int else values(item), max_size=3).map(tuple)
    if get_origin(inner) is Literal:
        return st.sampled_from(get_args(inner))
    if inner is int or inner is float:
        low, high = -(10**12), 10**12
        for bound in constraints:
            low = getattr(bound, "ge", low)
            high = getattr(bound, "le", high)
            # Far enough above an exclusive bound for integers and floats.
            low = cast(float, bound.gt) + 1e-3 if isinstance(bound, Gt) else low
            high = cast(float, bound.lt) - 1e-3 if isinstance(bound, Lt) else high
        if inner is int:
            return st.integers(math.ceil(low), math.floor(high))
        return st.floats(low, high)
    return st.booleans() if inner is bool else TEXTS


def read_back(text: str, config_class: type, kind: str) -> Any:
    """What the text of a config file builds, without the checks between keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        composition = compose_files(job_schema(kind), path, ())
    plain = resolve_interpolations(composition.tree, composition.locate)
    config, problems = build_config(config_class, plain)
    assert problems == []
    return config


@settings(max_examples=15, deadline=None)
@given(values(GrpoRunConfig))
def test_a_grpo_config_survives_yaml(config: GrpoRunConfig) -> None:
    assert read_back(to_yaml(config), GrpoRunConfig, "grpo") == config


@settings(max_examples=10, deadline=None)
@given(values(SftRunConfig))
def test_an_sft_config_survives_yaml_written_from_its_dict(config: SftRunConfig) -> None:
    assert (
        read_back(yaml.safe_dump(to_dict(config), sort_keys=False), SftRunConfig, "sft") == config
    )


@settings(max_examples=15, deadline=None)
@given(values(SftRunConfig))
def test_to_dict_holds_only_what_yaml_and_json_know(config: SftRunConfig) -> None:
    def check(value: Any) -> None:
        assert value is None or type(value) in (dict, list, str, int, float, bool)
        for inner in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            check(inner)

    plain = to_dict(config)
    check(plain)
    assert list(plain) == [field.name for field in dataclasses.fields(config)]


def test_numbers_in_quotes_are_numbers() -> None:
    @dataclasses.dataclass(frozen=True)
    class Section:
        __pydantic_config__: ClassVar = RunConfig.__pydantic_config__
        count: int = 0
        share: float = 0.0
        flag: bool = False

    def built(**plain: Any) -> Section | str:
        config, problems = build_config(Section, plain)
        return config if config is not None else problems[0].text

    assert built(count="12", share="1e-3") == Section(12, 0.001, False)
    assert built(share=2, count=4.0) == Section(4, 2.0, False)
    assert built(count="1.5") == "count is '1.5'; it must be an integer"
    assert built(count="") == "count is ''; it must be an integer"
    assert built(share="1e999") == "share is '1e999'; it must be a finite number"
    assert built(flag="maybe") == "flag is 'maybe'; it must be true or false"


def test_the_values_of_an_open_section_are_built_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Section:
        functions: dict[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)

    config, problems = build_config(Section, {"functions": {"a": {"path": "m.f", "weight": 2}}})
    assert problems == [] and config == Section({"a": RewardFunctionConfig(path="m.f", weight=2.0)})
    _, problems = build_config(Section, {"functions": ["m.f"]})
    assert problems[0].text == "functions is ['m.f']; it must be a mapping from names to sections"
