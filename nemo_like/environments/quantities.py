"""Numbers and units in answers: normalization of text, and exact values of numbers.

Every function here takes time linear in the length of the text and accepts any text, also one with
lone surrogates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-",  # minus sign
        "\u2013": "-",  # en dash
        "\ufe63": "-",  # small hyphen-minus
        "\uff0d": "-",  # fullwidth hyphen-minus
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
_ESCAPED = re.compile(r"\\([$%#&])")
_LATEX_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\[,!;:] ?)(?=\d{3})")

# A minus directly after a word, a digit or a closing bracket is a range or a subtraction, not a
# sign.
_SIGN = r"(?:(?<![\w)\]}%])-\$?|\$ ?-|\$)?"
# The groups of three are not possessive: if they were, a match that fails at the end would be tried
# from each group again.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?|(?<!\d)\.\d++"
_EXPONENT = r"[eE][-+]?\d{1,9}(?!\w)"
_TIMES_TEN = r" ?(?:\u00d7|x|\*|\\times|\\cdot) ?10 ?\^ ?"
_POWER = rf"(?:{_EXPONENT}|{_TIMES_TEN}(?:\{{ ?[-+]?\d{{1,9}} ?\}}|[-+]?\d{{1,9}}(?!\d)))"
_FRACTION = r"\\[dt]?frac ?\{ ?-?\d++ ?\}\{ ?\d++ ?\}"
_COMPOUND = r"\d++(?:/\d++){2,}|\d++(?:-\d++){2,}|\d++(?::\d++)+"
"""Dates, times and ratios: one token, which is no number."""
NUMBER = re.compile(rf"{_SIGN}(?:{_FRACTION}|{_COMPOUND}|(?:{_DIGITS})(?:{_POWER}|/\d++)?)")
_PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\$? ?(?P<inner>[-+]?)(?P<digits>{_DIGITS})(?P<power>{_POWER})?(?P<unit>.*)",
    re.DOTALL,
)
_POWER_OF_TEN = re.compile(r"[-+]?\d+(?=\D*$)")
LATEX_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{[^{}]*\}")
_WRAPPED_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("`", "`"),
)
_MAX_NESTED_WRAPPERS = 8
_ASSIGNMENT = re.compile(r"\\?[A-Za-z]\w{0,20}\s*=\s*(?=[-+$.\d])")
_UNIT = re.compile(
    r"(?P<percent>%|percent)|\^?\{?°[CF]?\}?|\^\{?\\circ\}?|"
    r"[A-Za-z][A-Za-z]*+(?:[ /.-]++[A-Za-z]++){0,7}(?:\^?[23²³])?"
)
# fmt: off
_SHORT_UNITS = frozenset((
    "km", "cm", "mm", "kg", "mg", "ml", "hr", "hrs", "min", "sec", "lb", "lbs", "oz", "ft", "mph",
    "am", "pm", "usd",
))
# fmt: on
_NO_UNITS = frozenset(("and", "or", "plus", "minus", "times", "divided", "over", "to"))
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
}
"""Exponent of ten of the words that scale a number."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit.

    Example: `$1,250.50 per hour` is `Quantity(Decimal("1250.50"), "per hour")`.
    """

    value: Decimal
    unit: str


def normalize(text: str) -> str:
    """Unify minus signs and spaces; remove LaTeX escapes, and LaTeX separators inside numbers."""
    text = _ESCAPED.sub(r"\1", text.translate(_CHARACTERS))
    return _LATEX_SEPARATOR.sub(",", text)


def bare(answer: str) -> str:
    r"""Remove emphasis, math delimiters, an enclosing `\text{}` and trailing punctuation.

    `answer` is normalized.
    """
    for _ in range(_MAX_NESTED_WRAPPERS):
        before = answer
        answer = answer.strip().rstrip(".,;:").rstrip()
        for opening, closing in _WRAPPERS:
            is_wrapped = answer.startswith(opening) and answer.endswith(closing)
            if is_wrapped and len(answer) > len(opening + closing):
                answer = answer[len(opening) : -len(closing)]
                break
        match = _WRAPPED_TEXT.fullmatch(answer)
        if match is not None:
            answer = match.group(1)
        if answer == before:
            break
    return answer


def as_number(text: str) -> Decimal | None:
    """Return the exact value of a plain number, else None.

    Plain numbers are, for example, "-1,234.50", "$7", "72." and "6.02e23".
    """
    quantity = as_quantity(text)
    if quantity is None or quantity.unit:
        return None
    return quantity.value


def as_quantity(text: str) -> Quantity | None:
    """Return a number with or without a unit, else None.

    Examples: "42 apples", "x = 5", "50%", "$18 per day".
    """
    text = bare(normalize(text))
    assignment = _ASSIGNMENT.match(text)
    match = _PLAIN_NUMBER.fullmatch(text, assignment.end() if assignment else 0)
    # Two signs, as in "-$-5", are no number.
    if match is None or (match["sign"] and match["inner"]):
        return None
    exponent = _exponent(match["power"]) if match["power"] else 0
    unit = _unit(LATEX_TEXT.sub(lambda wrapped: f" {bare(wrapped.group())} ", match["unit"]))
    if unit is None:
        return None
    if unit in _SCALES:
        exponent += _SCALES[unit]
        unit = ""
    digits = match["digits"].replace(",", "")
    try:
        # Decimal is exact, also for exponents that would overflow a float.
        value = Decimal(f"{match['sign']}{match['inner']}{digits}e{exponent}")
    except (InvalidOperation, ValueError):
        return None
    return Quantity(value, unit)


def _exponent(power: str) -> int:
    match = _POWER_OF_TEN.search(power)
    assert match is not None, "the pattern of a power ends in its exponent"
    return int(match.group())


def _unit(text: str) -> str | None:
    """Return the unit in the text after a number, lower case and singular.

    Returns "" for no text and None for a text that is not a unit.
    """
    words = text.strip().strip("$").strip()
    if not words:
        return ""
    match = _UNIT.fullmatch(words)
    if match is None:
        return None
    if match["percent"]:
        return "%"
    names = words.lower().split()
    first = names[0]
    if _NO_UNITS & set(names):
        return None
    if first not in _SHORT_UNITS:
        # "2x" and "3 ab" are terms of a formula, "5 km" is a quantity.
        is_attached = words[0].isalpha() and not text[0].isspace()
        is_short = first.isalpha() and len(first) < 3
        if is_attached or is_short:
            return None
    # Short names such as "gas" are left as they are; from 4 letters on an s is a plural.
    singular = [name if len(name) < 4 else name.removesuffix("s") for name in names]
    return " ".join(singular)
