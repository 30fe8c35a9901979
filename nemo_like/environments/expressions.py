r"""Equality of expressions by math-verify, and of units by pint.

It runs in the child process of `math.AnswerComparer`: neither library bounds its time and memory.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import pint
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from nemo_like.environments.answers import split_unit

_CONFIG = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True,
        # It would remove any unit, also "m" in "2m"; units are compared here.
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="all",
    )
)
_SYMBOLS = str.maketrans({"π": r"\pi ", "∞": r"\infty ", "\u222a": r"\cup "})
_REPLACEMENTS = (
    (re.compile(r"(?<!\\)%"), r"\\%"),
    (re.compile(r"(?:√|\\?\bsqrt) *\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?:√|(?<!\\)\bsqrt) *(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    # A mixed number; math-verify reads only those with \frac.
    (re.compile(r"(?<![\d.,/^_{])(\d+) +(\d+) ?/ ?(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),
)
_TEMPERATURE = re.compile(r"(?:°|deg(?:ree)?s?)? ?(c|f)(?:elsius|ahrenheit)?", re.IGNORECASE)

_units = pint.UnitRegistry()
_units.define("@alias week = wk")


def expressions_equal(gold: str, predicted: str) -> bool:
    """Return True if two normalized answers are equal: their units, if both have one, and values.

    Units are equal if they are names of the same unit; nothing is converted.
    """
    gold_value, gold_unit = split_unit(gold)
    predicted_value, predicted_unit = split_unit(predicted)
    if gold_unit and predicted_unit and not _units_equal(gold_unit, predicted_unit):
        return False
    if _values_equal(gold_value, predicted_value):
        return True
    if gold_unit == "%" and not predicted_unit:
        return _values_equal(rf"\frac{{{_latex(gold_value)}}}{{100}}", predicted_value)
    if predicted_unit == "%" and not gold_unit:
        return _values_equal(gold_value, rf"\frac{{{_latex(predicted_value)}}}{{100}}")
    # "5 m" may also be 5 times m.
    unit = gold_unit or predicted_unit
    is_missing = bool(gold_unit) != bool(predicted_unit)
    return is_missing and unit.isalpha() and _values_equal(gold, predicted)


def _values_equal(gold: str, predicted: str) -> bool:
    # The limits of the libraries are off (0): they use the real-time timer, which counts waiting
    # time as well, and interrupt less than the limits of `math`.
    return bool(verify(_parsed(gold), _parsed(predicted), timeout_seconds=0))


def _parsed(text: str) -> list[Any]:
    # Without "first_match", a part of an answer that cannot be parsed would count as the answer.
    return parse(
        f"\\boxed{{{_latex(text)}}}", [_CONFIG], extraction_mode="first_match", parsing_timeout=0
    )


def _latex(text: str) -> str:
    """Return LaTeX of a text that may have Unicode symbols and plain names of functions."""
    text = text.translate(_SYMBOLS)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text


def _units_equal(first: str, second: str) -> bool:
    first_size = _size(first)
    second_size = _size(second)
    if first_size is None or second_size is None:
        return _singular(first) == _singular(second)
    is_same_kind = first_size.units == second_size.units
    return is_same_kind and math.isclose(first_size.magnitude, second_size.magnitude)


@lru_cache(maxsize=1024)
def _size(unit: str) -> Any:
    """Return one of the unit in root units; None for a text that pint does not know."""
    match = _TEMPERATURE.fullmatch(unit)
    if match is not None:
        unit = f"deg{match[1].upper()}"
    unit = unit.replace("sq.", "sq ").replace("cu ", "cubic ").replace("{", "").replace("}", "")
    # The case of prefixes counts (MW and mW), but "KM" is not known.
    for name in (unit, unit.lower()):
        try:
            return _units.Quantity(1.0, _units.parse_units(name)).to_root_units()
        except (pint.PintError, ValueError):
            continue
    return None


def _singular(unit: str) -> list[str]:
    # Short names such as "gas" are left as they are; from 4 letters on an s is a plural.
    names = unit.lower().replace("/", " per ").split()
    return [name if len(name) < 4 else name.removesuffix("s") for name in names]
