"""The final answer of a text: marked, announced, or the last number. No symbolic mathematics.

Every function here takes time linear in the length of the text and accepts any text, also one with
lone surrogates.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest

from nemo_like.environments.quantities import LATEX_TEXT, NUMBER, as_quantity, bare, normalize

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


@dataclass(frozen=True, slots=True)
class _Mark:
    """A marked answer: characters [start, end), the answer itself [content_start, content_end)."""

    start: int
    end: int
    content_start: int
    content_end: int


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


def last_number(text: str) -> str | None:
    """Return the last number of the text, or None.

    Examples: "so 1,200 of 3 kg" gives "3"; "5-42" gives "42"; "x = -7" gives "-7".
    """
    return _last_number(normalize(text))


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
