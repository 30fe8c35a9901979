"""Where a text states its final answer, and which number an answer stands for. No symbolic
mathematics, no timeouts.

Every function here takes time linear in the length of the text and accepts any text, also one with
lone surrogates.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import zip_longest

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

# A minus directly behind a word, a digit or a closing bracket is a range or a subtraction, not a
# sign.
_SIGN = r"(?:(?<![\w)\]}%])-\$?|\$ ?-|\$)?"
# The groups of three are not possessive: if they were, a match that fails at the end would be tried
# from each group again.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?|(?<!\d)\.\d++"
_POWER = r"(?:[eE][-+]?\d{1,9}(?!\w)| ?(?:\u00d7|x|\*|\\times|\\cdot) ?10 ?\^ ?(?:\{ ?[-+]?\d{1,9} ?\}|[-+]?\d{1,9}(?!\d)))"
_FRACTION = r"\\[dt]?frac ?\{ ?-?\d++ ?\}\{ ?\d++ ?\}"
_COMPOUND = r"\d++(?:/\d++){2,}|\d++(?:-\d++){2,}|\d++(?::\d++)+"
"""Dates, times and ratios: one token, which is no number."""
_NUMBER = re.compile(rf"{_SIGN}(?:{_FRACTION}|{_COMPOUND}|(?:{_DIGITS})(?:{_POWER}|/\d++)?)")
_PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\$? ?(?P<inner>[-+]?)(?P<digits>{_DIGITS})(?P<power>{_POWER})?(?P<unit>.*)",
    re.S,
)
_POWER_OF_TEN = re.compile(r"[-+]?\d+(?=\D*$)")

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.S)
_TAG_TOKEN = re.compile(r"</?answer>", re.I)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_ANNOUNCEMENT = re.compile(
    r"\banswer[ \t]{0,4}[*_]{0,3}[ \t]{0,4}"
    r"(?:(?:to|for|of)\b[^\n.:=]{0,80}?\b(?=is\b|was\b))?"
    r"(?:(?:is|was|are|=|should be|would be|will be|must be)(?![\w=])["
    r" \t]{0,4}:?|:|(?=\n))[*_\s]{0,8}",
    re.I,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|[\n;]")
_ENUMERATION = re.compile(r"\d+(?:[.):]|\.\d+\.?)\s+\S")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
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
_WRAPPED_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ASSIGNMENT = re.compile(r"\\?[A-Za-z]\w{0,20}\s*=\s*(?=[-+$.\d])")
_UNIT = re.compile(
    r"(?P<percent>%|percent)|\^?\{?°[CF]?\}?|\^\{?\\circ\}?|[A-Za-z][A-Za-z]*+(?:["
    r" /.-]++[A-Za-z]++){0,7}(?:\^?[23²³])?"
)
_SHORT_UNITS = frozenset(
    (
        "km",
        "cm",
        "mm",
        "kg",
        "mg",
        "ml",
        "hr",
        "hrs",
        "min",
        "sec",
        "lb",
        "lbs",
        "oz",
        "ft",
        "mph",
        "am",
        "pm",
        "usd",
    )
)
_NO_UNITS = frozenset(("and", "or", "plus", "minus", "times", "divided", "over", "to"))
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAX_SHORT_CHARACTERS = 100
"""A heading or a sentence above this length is not an answer."""
_MAX_ANNOUNCEMENTS = 20
"""Of the texts "answer is", so many are looked at, from the last one backwards."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit. Example: `$1,250.50 per hour` is `Quantity(Decimal("1250.50"), "per
    hour")`.
    """

    value: Decimal
    unit: str


@dataclass(frozen=True, slots=True)
class _Mark:
    """Characters [start, end) of a marked answer; the answer itself is [content_start,
    content_end).
    """

    start: int
    end: int
    content_start: int
    content_end: int


def final_answer(text: str) -> str | None:
    """The answer that a completion gives; None if the text has no answer and no number.

    The first of these that the text has: the last marked answer (see `marked_answer`); what follows
    the last "answer is" or "Answer:"; the last number.
    """
    text = normalize(text)
    return (
        _explicit_answer(text)
        or _announced_answer(text)
        or _closing_answer(text)
        or _last_number(text)
    )


def marked_answer(text: str) -> str | None:
    r"""The last answer in `\boxed{}`, in `<answer></answer>` or after `####`, without the mark;
    None without any.

    `####` also starts a Markdown heading, so it marks an answer only if a number, a formula or a
    single letter follows, or if it opens the last line of the text. Example: `\boxed{42}`, then
    `#### Check`, then `6*7 = 42.` gives `42`.
    """
    text = normalize(text)
    return _explicit_answer(text) or _closing_answer(text)


def num_marked_answers(text: str) -> int:
    """How many answers are marked; a mark around another one, as in `#### \\boxed{4}`, is not
    counted.
    """
    text = normalize(text)
    return len(_explicit_marks(text)) or int(_closing_answer(text) is not None)


def last_number(text: str) -> str | None:
    """The last number of the text. Examples: "so 1,200 of 3 kg" gives "3"; "5-42" gives "42"; "x =
    -7" gives "-7".
    """
    return _last_number(normalize(text))


def normalize(text: str) -> str:
    """The text with one kind of minus sign and of space, without LaTeX escapes and separators
    inside numbers.
    """
    text = _ESCAPED.sub(r"\1", text.translate(_CHARACTERS))
    return _LATEX_SEPARATOR.sub(",", text)


def bare(answer: str) -> str:
    r"""A normalized answer without emphasis, math delimiters, `\text{}` around all of it and
    trailing punctuation.
    """
    for _ in range(8):
        before = answer
        answer = answer.strip().rstrip(".,;:").rstrip()
        for opening, closing in _WRAPPERS:
            if (
                len(answer) > len(opening + closing)
                and answer.startswith(opening)
                and answer.endswith(closing)
            ):
                answer = answer[len(opening) : -len(closing)]
                break
        match = _WRAPPED_TEXT.fullmatch(answer)
        answer = match.group(1) if match else answer
        if answer == before:
            break
    return answer


def as_number(text: str) -> Decimal | None:
    """The exact value of a plain number ("-1,234.50", "$7", "72.", "6.02e23"); None for anything
    else.
    """
    quantity = as_quantity(text)
    return quantity.value if quantity is not None and not quantity.unit else None


def as_quantity(text: str) -> Quantity | None:
    """A number with or without a unit; None for anything else. Examples: "42 apples", "x = 5",
    "50%", "$18 per day".
    """
    text = bare(normalize(text))
    assignment = _ASSIGNMENT.match(text)
    match = _PLAIN_NUMBER.fullmatch(text, assignment.end() if assignment else 0)
    if match is None or (match["sign"] and match["inner"]):
        return None
    power, unit = (
        match["power"],
        _LATEX_TEXT.sub(lambda wrapped: f" {bare(wrapped.group())} ", match["unit"]),
    )
    exponent = int(_power_of_ten(power)) if power else 0
    unit = _unit(unit)
    if unit is None:
        return None
    if unit in _SCALES:
        exponent, unit = exponent + _SCALES[unit], ""
    try:
        value = Decimal(
            f"{match['sign']}{match['inner']}{match['digits'].replace(',', '')}e{exponent}"
        )
    except (InvalidOperation, ValueError):
        return None
    return Quantity(value, unit)


def _power_of_ten(power: str) -> str:
    match = _POWER_OF_TEN.search(power)
    assert match is not None, "the pattern of a power ends in its exponent"
    return match.group()


def _unit(text: str) -> str | None:
    """The unit in what follows a number, lower case and singular; "" for nothing, None for what is
    no unit.
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
    is_apart = text[0].isspace() or not words[0].isalpha()
    if _NO_UNITS & set(names) or (
        names[0].isalpha() and len(names[0]) < 3 and names[0] not in _SHORT_UNITS
    ):
        return None
    if not is_apart and names[0] not in _SHORT_UNITS:
        return None
    return " ".join(name if len(name) < 4 else name.removesuffix("s") for name in names)


def _explicit_answer(text: str) -> str | None:
    marks = _explicit_marks(text)
    return text[marks[-1].content_start : marks[-1].content_end].strip() if marks else None


def _closing_answer(text: str) -> str | None:
    """What follows `####` in the last line that is not blank, whatever it is."""
    line = text.rstrip().rpartition("\n")[2]
    before, hashes, answer = line.rpartition("####")
    if (
        not hashes
        or before.endswith("#")
        or answer.startswith("#")
        or len(answer) > _MAX_SHORT_CHARACTERS
    ):
        return None
    return answer.strip() or None


def _explicit_marks(text: str) -> list[_Mark]:
    """Marks that are not empty, in order; of nested ones the innermost."""
    marks = sorted((*_boxes(text), *_tags(text), *_hash_lines(text)), key=lambda mark: mark.start)
    blank = re.compile(r"\s*")
    full = [mark for mark in marks if _end(blank, text, mark.content_start) < mark.content_end]
    last = len(full) - 1
    return [
        mark
        for index, mark in enumerate(full)
        if index == last or full[index + 1].start >= mark.end
    ]


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match is not None, "the pattern matches the empty text"
    return match.end()


def _boxes(text: str) -> list[_Mark]:
    r"""Every closed `\boxed{}`; one pass, with a stack of the open braces."""
    boxes, opened = [], []
    for token in _BOX_TOKEN.finditer(text):
        word = token.group()
        if word == "}":
            start, content_start, is_box = opened.pop() if opened else (0, 0, False)
            if is_box:
                boxes.append(_Mark(start, token.end(), content_start, token.start()))
        elif word.endswith("{") and word != "\\{":
            opened.append((token.start(), token.end(), word != "{"))
    return boxes


def _tags(text: str) -> list[_Mark]:
    tags, opening = [], None
    for token in _TAG_TOKEN.finditer(text):
        if token.group()[1] != "/":
            opening = token
        elif opening is not None:
            tags.append(_Mark(opening.start(), token.end(), opening.end(), token.start()))
            opening = None
    return tags


def _hash_lines(text: str) -> list[_Mark]:
    """Each `####` whose line goes on like an answer and not like a heading."""
    marks = []
    hashes = list(_HASHES.finditer(text))
    for match, following in zip_longest(hashes, hashes[1:]):
        end = len(text) if following is None else following.start()
        newline = text.find("\n", match.end(), end)
        end = end if newline < 0 else newline
        line = text[match.end() : end]
        if (
            _is_answer(line)
            if len(line) <= _MAX_SHORT_CHARACTERS
            else as_quantity(line) is not None
        ):
            marks.append(_Mark(match.start(), end, match.end(), end))
    return marks


def _is_answer(line: str) -> bool:
    """Whether the rest of a `####` line is an answer: a quantity, a formula, or a single letter."""
    line = bare(line)
    if _ENUMERATION.match(line) and not as_quantity(line):
        return False
    number = _NUMBER.match(line)
    if number is not None and number.end() > 0:
        rest = _LATEX_TEXT.sub("", line[number.end() :]).lstrip()
        # "42 apples" and "5 km" are answers, "2 Check the result" and "1: Setup" are headings.
        word = rest.split(maxsplit=1)[0] if rest else ""
        return not (
            word.startswith(":") or (len(word) > 1 and word[0].isupper() and not word.isupper())
        )
    return bool(line) and not _WORD.search(_COMMAND.sub(" ", _LATEX_TEXT.sub("", line)))


def _announced_answer(text: str) -> str | None:
    """What the last "answer is" or "Answer:" announces."""
    for match in reversed(deque(_ANNOUNCEMENT.finditer(text), maxlen=_MAX_ANNOUNCEMENTS)):
        clause = text[match.end() : match.end() + 4 * _MAX_SHORT_CHARACTERS]
        answer = _answer_in_clause(clause)
        if answer:
            return answer
    return None


def _answer_in_clause(clause: str) -> str | None:
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        formula = clause[len(opening) :].partition(closing)
        if clause.startswith(opening) and formula[1] and formula[0].strip():
            return formula[0].strip()
    end = _SENTENCE_END.search(clause)
    clause = bare(clause[: end.start()] if end else clause)
    words = clause.lower().split()
    if not words or words[0] == "not":
        return None
    number = _NUMBER.match(clause)
    if as_quantity(clause) is not None:
        return clause
    if len(words) <= 3 and (number is None or ":" in number.group()):
        return clause[:_MAX_SHORT_CHARACTERS]
    if number is None:
        return _last_number(clause)
    rest = clause[number.end() :]
    # "5 or 6" and "2x + 3" are not the number they begin with; "42 because 6 * 7 = 42" is.
    goes_on = (
        rest[:1].isalpha() or re.match(r" *(?:and\b|or\b|to\b|[-+*/^=<>\\])", rest) is not None
    )
    return clause[:_MAX_SHORT_CHARACTERS] if goes_on else number.group()


def _last_number(text: str) -> str | None:
    number = None
    for match in _NUMBER.finditer(text):
        number = match.group()
    return number
