"""The final answer of a text, and the number and unit in it. No symbolic mathematics.

The final answer is marked, announced, or the last number. Every function here takes time linear in
the length of the text and accepts any text, also one with lone surrogates.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import zip_longest

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_TAG_TOKEN = re.compile(r"</?answer>", re.IGNORECASE)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_ANNOUNCEMENT = re.compile(
    r"\banswer[ \t]{0,4}[*_]{0,3}[ \t]{0,4}"
    r"(?:(?:to|for|of)\b[^\n.:=]{0,80}?\b(?=is\b|was\b))?"
    r"(?:(?:is|was|are|=|should be|would be|will be|must be)(?![\w=])["
    r" \t]{0,4}:?|:|(?=\n))[*_\s]{0,8}",
    re.IGNORECASE,
)
_FORMULA_DELIMITERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SENTENCE_END = re.compile(r"\.(?=\s|$)|[\n;]")
_CONTINUATION = re.compile(r" *(?:and\b|or\b|to\b|[-+*/^=<>\\])")
_ENUMERATION = re.compile(r"\d+(?:[.):]|\.\d+\.?)\s+\S")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOT_BLANK = re.compile(r"\S")
_MAX_SHORT_CHARACTERS = 100
"""A heading or a sentence above this length is not an answer."""
_MAX_ANNOUNCEMENTS = 20
"""Number of occurrences of "answer is" that are examined, from the last one backwards."""

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-",  # minus sign
        "\u2013": "-",  # en dash
        "\ufe63": "-",  # small hyphen-minus
        "\uff0d": "-",  # fullwidth hyphen-minus
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u2044": "/",  # fraction slash
        "\u2103": "°C",
        "\u2109": "°F",
    }
)
_EXPONENTS = re.compile("[⁻⁰¹²³⁴-⁹]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_ESCAPED = re.compile(r"\\([$%#&])")
_LATEX_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!;:] ?)(?=\d{3})")
_LATEX_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|(?<=[\d}])~(?=\\)")
_DEGREE = re.compile(
    r"\^ ?\{ ?(?:\\circ|°) ?\}|\^ ?(?:\\circ(?![A-Za-z])|°)|\\degrees?(?![A-Za-z])"
)

# A minus directly after a word, a digit or a closing bracket is a range or a subtraction, not a
# sign.
_SIGN = r"(?:(?<![\w)\]}%])-\$?|\$ ?-|\$)?"
# The groups of three are not possessive: if they were, a match that fails at the end would be tried
# from each group again.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?|(?<!\d)\.\d++"
_EXPONENT = r"[eE][-+]?\d{1,9}(?!\w)"
_TIMES_TEN = r" ?(?:\u00d7|x|\*|\\times|\\cdot) ?10 ?\^ ?"
_POWER = rf"(?:{_EXPONENT}|{_TIMES_TEN}(?:\{{ ?[-+]?\d{{1,9}} ?\}}|[-+]?\d{{1,9}}(?!\d)))"
_FRACTION = r"(?:\d++ ?)?\\[dt]?frac ?\{ ?-?\d++ ?\}\{ ?\d++ ?\}|\d++ \d++/\d++"
"""A fraction of two integers, also in a mixed number."""
_COMPOUND = r"\d++(?:/\d++){2,}|\d++(?:-\d++){2,}|\d++(?::\d++)+"
"""Dates, times and ratios: one token, which is not a number."""
NUMBER = re.compile(rf"{_SIGN}(?:{_FRACTION}|{_COMPOUND}|(?:{_DIGITS})(?:{_POWER}|/\d++)?)")
_PLAIN_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<symbol>(?:US)?\$|[€£¥₹])? ?"
    rf"(?P<inner>[-+]?)(?P<digits>{_DIGITS})(?P<power>{_POWER})?(?P<unit>.*)",
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
_UNIT_NAME = r"[A-Za-zµμΩ]++(?: ?\^ ?\{? ?-?\d ?\}?|[23])?"
_UNIT = re.compile(
    r"(?P<percent>%|percent(?:age)?|pct)|°(?: ?[A-Za-z]++)?|"
    rf"(?:/ ?)?{_UNIT_NAME}(?:[ /.*·-]++{_UNIT_NAME}){{0,7}}"
)
_UNIT_START = re.compile(r"(?<=[\d})\]π%])|(?<=\\pi)(?![A-Za-z])")
_LETTERS = re.compile(r"[^\W\d_]+")
# fmt: off
_SHORT_UNITS = frozenset((
    "km", "cm", "mm", "kg", "mg", "ml", "hr", "hrs", "min", "sec", "lb", "lbs", "oz", "ft", "mph",
    "am", "pm", "usd", "in", "yd", "mi", "yr", "wk", "sq", "cu", "hz", "kw", "mw", "pa", "deg",
    "m", "s", "h", "g", "l", "L", "N", "J", "W", "V", "K", "C", "F",
))
"""Units of less than 3 letters, and those that may follow a number without a space."""
_NO_UNITS = frozenset((
    "and", "or", "plus", "minus", "times", "divided", "over", "to", "than", "if", "sqrt", "log",
    "sin", "cos", "tan",
))
_NO_FIRST_WORDS = frozenset((
    "squared", "cubed", "dozen", "half", "halve", "third", "fourth", "fifth", "sixth", "seventh",
    "eighth", "ninth", "tenth", "hundredth", "thousandth", "alpha", "beta", "gamma", "lambda",
    "omega", "theta", "phi", "factorial",
))
"""Words that change the number before them."""
_CURRENCIES = {
    "$": "dollar", "US$": "dollar", "usd": "dollar", "dollar": "dollar",
    "€": "euro", "eur": "euro", "euro": "euro",
    "¥": "yen", "jpy": "yen", "yen": "yen",
    "₹": "rupee", "inr": "rupee", "rupee": "rupee",
    "¢": "cent", "cent": "cent",
    # "20 pounds" may be a weight, so it has no entry.
    "£": "pound", "gbp": "pound",
}
# fmt: on
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Exponent of ten of the words that scale a number."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A marked answer: characters [start, end), the answer itself [content_start, content_end)."""

    start: int
    end: int
    content_start: int
    content_end: int


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit.

    Example: `$1,250.50 per hour` is `Quantity(Decimal("1250.50"), "dollar per hour")`.
    """

    value: Decimal
    unit: str


def final_answer(text: str) -> str | None:
    """Return the answer of a completion; None if the text has no answer and no number.

    The first of these that the text has: the last marked answer (see `marked_answer`); the text
    after the last "answer is" or "Answer:"; the last number.
    """
    text = normalize(text)
    return (
        _explicit_answer(text)
        or _announced_answer(text)
        or _closing_answer(text)
        or _last_number(text)
    )


def marked_answer(text: str) -> str | None:
    r"""Return the last answer in `\boxed{}`, in `<answer></answer>` or after `####`, or None.

    `####` also starts a Markdown heading, so it marks an answer only if a number, a formula or a
    single letter follows, or if it opens the last line of the text. Example: `\boxed{42}`, then
    `#### Check`, then `6*7 = 42.` gives `42`.
    """
    text = normalize(text)
    return _explicit_answer(text) or _closing_answer(text)


def num_marked_answers(text: str) -> int:
    r"""Return the number of marked answers; nested marks, as in `#### \boxed{4}`, count once."""
    text = normalize(text)
    return len(_explicit_marks(text)) or int(_closing_answer(text) is not None)


def _explicit_answer(text: str) -> str | None:
    marks = _explicit_marks(text)
    if not marks:
        return None
    last = marks[-1]
    return text[last.content_start : last.content_end].strip()


def _closing_answer(text: str) -> str | None:
    """Return the text after `####` in the last line that is not blank, or None."""
    line = text.rstrip().rpartition("\n")[2]
    before, hashes, answer = line.rpartition("####")
    has_five_hashes = before.endswith("#") or answer.startswith("#")
    if not hashes or has_five_hashes or len(answer) > _MAX_SHORT_CHARACTERS:
        return None
    return answer.strip() or None


def _explicit_marks(text: str) -> list[_Mark]:
    """Return the marks that are not empty, in order; of nested marks the innermost."""
    marks = [*_boxes(text), *_tags(text), *_hash_lines(text)]
    marks.sort(key=lambda mark: mark.start)
    filled = []
    for mark in marks:
        if _NOT_BLANK.search(text, mark.content_start, mark.content_end):
            filled.append(mark)
    innermost = []
    for mark, following in zip_longest(filled, filled[1:]):
        # In order of their start, a mark around others comes directly before the first of them.
        if following is None or following.start >= mark.end:
            innermost.append(mark)
    return innermost


def _boxes(text: str) -> list[_Mark]:
    r"""Return every closed `\boxed{}`; one pass, with a stack of the open braces."""
    boxes = []
    opened: list[tuple[int, int, bool]] = []
    for token in _BOX_TOKEN.finditer(text):
        word = token.group()
        if word == "}":
            # A closing brace without an opening one is ignored.
            if not opened:
                continue
            start, content_start, is_box = opened.pop()
            if is_box:
                boxes.append(_Mark(start, token.end(), content_start, token.start()))
        elif word.endswith("{") and word != "\\{":
            opened.append((token.start(), token.end(), word != "{"))
    return boxes


def _tags(text: str) -> list[_Mark]:
    """Return every `<answer></answer>`, from the last opening tag before each closing one."""
    tags = []
    opening = None
    for token in _TAG_TOKEN.finditer(text):
        if token.group()[1] != "/":
            opening = token
        elif opening is not None:
            tags.append(_Mark(opening.start(), token.end(), opening.end(), token.start()))
            opening = None
    return tags


def _hash_lines(text: str) -> list[_Mark]:
    """Return each `####` whose line continues like an answer and not like a heading."""
    marks = []
    hashes = list(_HASHES.finditer(text))
    for match, following in zip_longest(hashes, hashes[1:]):
        end = len(text) if following is None else following.start()
        newline = text.find("\n", match.end(), end)
        if newline >= 0:
            end = newline
        line = text[match.end() : end]
        if len(line) <= _MAX_SHORT_CHARACTERS:
            is_answer = _is_answer(line)
        else:
            is_answer = as_quantity(line) is not None
        if is_answer:
            marks.append(_Mark(match.start(), end, match.end(), end))
    return marks


def _is_answer(line: str) -> bool:
    """Return True for a `####` line with a quantity, a formula, or a single letter."""
    line = bare(line)
    if _ENUMERATION.match(line) and not as_quantity(line):
        return False
    number = NUMBER.match(line)
    if number is not None and number.end() > 0:
        rest = LATEX_TEXT.sub("", line[number.end() :]).lstrip()
        # "42 apples" and "5 km" are answers, "2 Check the result" and "1: Setup" are headings.
        word = rest.split(maxsplit=1)[0] if rest else ""
        is_capitalized = len(word) > 1 and word[0].isupper() and not word.isupper()
        return not (word.startswith(":") or is_capitalized)
    # A formula or a single letter has no words, once LaTeX commands are removed.
    without_latex = _COMMAND.sub(" ", LATEX_TEXT.sub("", line))
    return bool(line) and not _WORD.search(without_latex)


def _announced_answer(text: str) -> str | None:
    """Return the text that the last "answer is" or "Answer:" announces, or None."""
    announcements = deque(_ANNOUNCEMENT.finditer(text), maxlen=_MAX_ANNOUNCEMENTS)
    # The last one that announces something: a text may correct its earlier answer.
    for match in reversed(announcements):
        start = match.end()
        clause = text[start : start + 4 * _MAX_SHORT_CHARACTERS]
        answer = _answer_in_clause(clause)
        if answer:
            return answer
    return None


def _answer_in_clause(clause: str) -> str | None:
    """Return the answer at the beginning of a clause: a formula, a quantity, or a few words."""
    for opening, closing in _FORMULA_DELIMITERS:
        if clause.startswith(opening):
            formula, delimiter, _ = clause[len(opening) :].partition(closing)
            if delimiter and formula.strip():
                return formula.strip()
    end = _SENTENCE_END.search(clause)
    clause = bare(clause[: end.start()] if end else clause)
    words = clause.lower().split()
    # "The answer is not 5" announces nothing.
    if not words or words[0] == "not":
        return None
    number = NUMBER.match(clause)
    if as_quantity(clause) is not None:
        return clause
    # A short clause without a number is an answer in words, such as "yes" or "12:30 pm".
    if len(words) <= 3 and (number is None or ":" in number.group()):
        return clause[:_MAX_SHORT_CHARACTERS]
    if number is None:
        return _last_number(clause)
    rest = clause[number.end() :]
    # "5 or 6" and "2x + 3" are not the number they begin with; "42 because 6 * 7 = 42" is.
    if rest[:1].isalpha() or _CONTINUATION.match(rest):
        return clause[:_MAX_SHORT_CHARACTERS]
    return number.group()


def _last_number(text: str) -> str | None:
    number = None
    for match in NUMBER.finditer(text):
        number = match.group()
    return number


def normalize(text: str) -> str:
    """Unify minus signs, spaces, degrees and raised digits; remove LaTeX escapes and separators."""
    text = _VULGAR_FRACTION.sub(lambda match: f" {_compatible(match)}", text)
    text = _EXPONENTS.sub(lambda match: f"^{{{_compatible(match)}}}", text)
    text = _ESCAPED.sub(r"\1", text.translate(_CHARACTERS))
    text = _LATEX_SPACE.sub(" ", _LATEX_SEPARATOR.sub(",", text))
    return _DEGREE.sub("°", text)


def _compatible(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match.group())


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


def as_quantity(text: str) -> Quantity | None:
    """Return a number with or without a unit, else None.

    Examples: "42 apples", "x = 5", "50%", "$18 per day".
    """
    text = bare(normalize(text))
    assignment = _ASSIGNMENT.match(text)
    match = _PLAIN_NUMBER.fullmatch(text, assignment.end() if assignment else 0)
    # Two signs, as in "-$-5", are not a number.
    if match is None or (match["sign"] and match["inner"]):
        return None
    unit = _unit(_unwrapped(match["unit"]))
    if unit is None:
        return None
    exponent = _exponent(match["power"]) if match["power"] else 0
    first, _, rest = unit.partition(" ")
    while first.lower() in _SCALES:
        exponent += _SCALES[first.lower()]
        unit = _with_currency(rest)
        first, _, rest = unit.partition(" ")
    # "$5 dollars" and "$5 km" have the unit that follows, "$5" and "$5 per day" the symbol.
    if match["symbol"] and (not unit or unit.startswith(("per ", "/"))):
        unit = f"{_CURRENCIES[match['symbol']]} {unit}".strip()
    digits = match["digits"].replace(",", "")
    try:
        # Decimal is exact, also for exponents that would overflow a float.
        value = Decimal(f"{match['sign']}{match['inner']}{digits}e{exponent}")
    except (InvalidOperation, ValueError):
        return None
    return Quantity(value, unit)


def split_unit(expression: str) -> tuple[str, str]:
    r"""Return an expression without its unit, and the unit; "" if it has none.

    Example: `2\sqrt{3}\text{ cm}` is `2\sqrt{3}` and `cm`. `expression` is normalized.
    """
    text = _unwrapped(expression)
    for start in _UNIT_START.finditer(text):
        unit = _unit(text[start.end() :])
        if unit and unit.partition(" ")[0].lower() not in _SCALES:
            return text[: start.end()], unit
    return expression, ""


def units_match(first: str, second: str) -> bool:
    """Return True for equal names of units, and if one is missing, also of "dollar per day"."""
    if not first or not second or first == second:
        return True
    short, long = sorted((first, second), key=len)
    if short in _CURRENCIES.values():
        return long.startswith((f"{short} ", f"{short}/"))
    return long.partition(" ")[0] in _CURRENCIES.values() and long.endswith(f" {short}")


def _exponent(power: str) -> int:
    match = _POWER_OF_TEN.search(power)
    assert match is not None, "the pattern of a power ends in its exponent"
    return int(match.group())


def _unwrapped(text: str) -> str:
    r"""Replace `\text{...}` by its content and spaces."""
    return LATEX_TEXT.sub(lambda wrapped: f" {bare(wrapped.group())} ", text)


def _unit(text: str) -> str | None:
    """Return the unit in the text after a number.

    Returns "" for no text and None for a text that is not a unit.
    """
    words = text.strip().strip("$").strip()
    if not words:
        return ""
    if words[0] in _CURRENCIES:
        words = f"{_CURRENCIES[words[0]]} {words[1:].lstrip()}".rstrip()
        text = f" {words}"
    match = _UNIT.fullmatch(words)
    if match is None:
        return None
    if match["percent"]:
        return "%"
    names = _LETTERS.findall(words)
    first = names[0] if names else ""
    first_lower = first.lower()
    if first_lower.removesuffix("s") in _NO_FIRST_WORDS:
        return None
    if not _NO_UNITS.isdisjoint(name.lower() for name in names):
        return None
    # "2x" and "3 ab" are terms of a formula, "5 km" is a quantity.
    is_attached = words[0].isalpha() and not text[0].isspace()
    if words[0].isalpha() and (is_attached or len(first) < 3):
        is_known = first in _SHORT_UNITS or (len(first) > 1 and first_lower in _SHORT_UNITS)
        if not is_known or (is_attached and len(first) == 1):
            return None
    return _with_currency(words)


def _with_currency(unit: str) -> str:
    """Return the unit with the singular name of the currency it starts with, if any."""
    first, space, rest = unit.partition(" ")
    currency = _CURRENCIES.get(first.lower().removesuffix("s"), first)
    return f"{currency}{space}{rest}"
