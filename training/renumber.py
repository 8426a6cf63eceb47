"""Word problems with other numbers: the same words, the arithmetic done again.

GSM8K's solutions note every calculation as <<48/2=24>>. From these notes follows what each number of a solution becomes
when numbers of the question change. So one problem gives many, whose answers are right wherever the notes are. The idea
is that of symbolic templates (GSM-Symbolic, arXiv 2410.05229), here without writing any by hand.

A change that cannot be followed is refused:

- a number of the solution that comes neither of the question nor of a note,
- one number that would become two,
- a result that stops being whole or positive,
- an order between numbers of the question that turns round.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

NUMERAL = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+")
NOTE = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
WHOLE_NOTE = re.compile("<<.*?>>")
"""A note with any text in it."""
TOKEN = re.compile(rf"\s*({NUMERAL.pattern}|[-+*/()%])")
UNITS = frozenset(map(Fraction, (1, 2, 4, 7, 12, 24, 30, 31, 52, 60, 100, 365, 1000)))
"""Numbers that stay wherever they stand: weeks, months, dozens, minutes."""
CONSTANTS = UNITS | frozenset(map(Fraction, (3, 5, 10, 20, 25, 50, 75)))
"""Numbers that a solution may use though the question does not say them."""
WORDS = {
    **{"half": 2, "halves": 2, "twice": 2, "double": 2, "third": 3, "thrice": 3, "triple": 3, "three": 3},
    **{"quarter": 4, "four": 4, "fourth": 4, "quadruple": 4, "five": 5, "fifth": 5, "six": 6, "sixth": 6, "seven": 7},
    **{"eight": 8, "eighth": 8, "nine": 9, "ten": 10, "tenth": 10, "eleven": 11, "twelve": 12, "dozen": 12},
    **{"thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19},
    **{"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90},
    **{"hundred": 100, "thousand": 1000},
}
"""Numbers that are written out, in the singular, and what is said with them; they stay."""
BEFORE, AFTER = re.compile(r"[\w/:.]$"), re.compile(r"[\w%/:]|\.\d|\s*(?:%|percent|[ap]\.?m\b|/)")
"""Text beside a number that is part of something else: a fraction, a share, a decimal, an hour, a name."""
SMALLEST = 3
"""Smaller numbers stay: they are in too many words ("both", "another", "a pair")."""
YEARS = range(1900, 2101)
DRAWS = 24
"""Sets of numbers that are tried for one problem at most."""


def renumbered(question: str, answer: str, rng: random.Random, notes: bool = False) -> tuple[str, str] | None:
    """The problem with other numbers; None where none was found that can be followed.

    Args:
        question: text.
        answer: a solution with a note for each calculation; it ends with "#### RESULT".
        rng: draws the numbers.
        notes: True if the solution keeps them.
    """
    if as_it_is(question, answer) is None:
        return None
    try:
        free = _free(question, answer)
        for _ in range(DRAWS if free else 0):
            changes = _drawn(free, rng)
            made = _carried_out(question, answer, changes, notes)
            if made is not None and made[0] != question:
                return made
    except (ValueError, ZeroDivisionError):
        return None
    return None


def without_notes(answer: str) -> str:
    """A solution without its notes."""
    return WHOLE_NOTE.sub("", answer)


def as_it_is(question: str, answer: str) -> tuple[str, str] | None:
    """The problem with its own numbers, written by the same rules; None where its notes cannot be followed."""
    try:
        return _carried_out(question, answer, {value: value for value in _free(question, answer)})
    except (ValueError, ZeroDivisionError):
        return None


def value_of(numeral: str) -> Fraction:
    """The number that is written so."""
    return Fraction(numeral.replace(",", "").strip())


def _words(text: str) -> set[Fraction]:
    """Numbers that are written out."""
    found = re.findall(r"[a-z]+", text.lower())
    return {Fraction(WORDS[w]) for word in found for w in (word, word.removesuffix("s")) if w in WORDS}


def _free(question: str, answer: str) -> list[Fraction]:
    """Numbers of the question that may change, in ascending order."""
    stay = set(UNITS) | _words(question) | {value_of(result) for _, result in NOTE.findall(answer)}
    free = set()
    for match in NUMERAL.finditer(question):
        value, before, after = value_of(match[0]), question[: match.start()], question[match.end() :]
        alone = not BEFORE.search(before) and not AFTER.match(after)
        if alone and value.denominator == 1 and value >= SMALLEST and value not in YEARS:
            free.add(value)
        else:
            stay.add(value)
    used = {value_of(n) for expression, _ in NOTE.findall(answer) for n in NUMERAL.findall(expression)}
    return sorted((free & used) - stay)


def _drawn(free: list[Fraction], rng: random.Random) -> dict[Fraction, Fraction]:
    """Another number for some of them or all, as round as it was and between half and twice of it."""
    some = rng.sample(free, rng.randint(1, len(free)))
    return {value: Fraction(_another(int(value), rng)) if value in some else value for value in free}


def _another(value: int, rng: random.Random) -> int:
    unit = next(unit for unit in (1000, 500, 100, 50, 10, 5, 1) if value % unit == 0 and value >= 2 * unit)
    return unit * rng.randint(max(1, -(-value // (2 * unit))), 2 * value // unit)


def _carried_out(
    question: str, answer: str, changes: Mapping[Fraction, Fraction], notes: bool = False
) -> tuple[str, str] | None:
    """The problem after the changes, or None.

    Raises:
        ValueError, ZeroDivisionError: a note that is no calculation.
    """
    if any(changes[one] >= changes[other] for one, other in pairwise(sorted(changes))):
        return None
    if answer.count("<<") != len(NOTE.findall(answer)):
        return None
    said = {value_of(n) for n in NUMERAL.findall(question)}
    results = {value_of(result) for _, result in NOTE.findall(answer)}
    known = {value: value for value in (CONSTANTS - results) | said | _words(question)} | dict(changes)
    known |= {value / 100: value / 100 for value in said - set(changes)}
    for expression, result in NOTE.findall(answer):
        before, stated = calculated(expression), value_of(result)
        # Some notes round; their results cannot be followed.
        if before != stated or not all(n in known for n in _tokens(expression) if isinstance(n, Fraction)):
            return None
        after = calculated(expression, known)
        if after <= 0 or (before.denominator == 1 and after.denominator > 1) or (100 * after).denominator > 1:
            return None
        if known.setdefault(before, after) != after:
            return None
    plain = without_notes(answer)
    changed = {value for value, new in known.items() if new != value}
    if _words(plain) & changed:
        return None
    if any(value_of(match) not in known for match in NUMERAL.findall(plain)):
        return None
    parts = re.split(f"({WHOLE_NOTE.pattern})", answer) if notes else [plain]
    return _rewritten(question, changes), "".join(_rewritten(part, known, part.startswith("<<")) for part in parts)


def calculated(expression: str, known: Mapping[Fraction, Fraction] = MappingProxyType({})) -> Fraction:
    """The value of an expression when each number is what `known` says, or else itself.

    Raises:
        ValueError, ZeroDivisionError: the text is no expression, or has no value.
    """
    tokens = _tokens(expression)
    value, rest = _sum([known.get(token, token) if isinstance(token, Fraction) else token for token in tokens])
    if rest:
        raise ValueError(expression)
    return value


@lru_cache(maxsize=64)
def _tokens(expression: str) -> tuple[Fraction | str, ...]:
    """The numbers and signs of an expression."""
    found: list[Fraction | str] = []
    at = 0
    while at < len(expression.rstrip()):
        match = TOKEN.match(expression, at)
        if match is None:
            raise ValueError(expression)
        found.append(value_of(match[1]) if NUMERAL.fullmatch(match[1]) else match[1])
        at = match.end()
    return tuple(found)


Tokens = list["Fraction | str"]


def _sum(tokens: Tokens) -> tuple[Fraction, Tokens]:
    value, rest = _product(tokens)
    while rest and rest[0] in ("+", "-"):
        term, after = _product(rest[1:])
        value, rest = (value + term if rest[0] == "+" else value - term), after
    return value, rest


def _product(tokens: Tokens) -> tuple[Fraction, Tokens]:
    value, rest = _factor(tokens)
    while rest and rest[0] in ("*", "/"):
        factor, after = _factor(rest[1:])
        value, rest = (value * factor if rest[0] == "*" else value / factor), after
    return value, rest


def _factor(tokens: Tokens) -> tuple[Fraction, Tokens]:
    if not tokens:
        raise ValueError("an expression ends early")
    first, rest = tokens[0], tokens[1:]
    if first == "-":
        value, rest = _factor(rest)
        return -value, rest
    if first == "(":
        value, rest = _sum(rest)
        if not rest or rest[0] != ")":
            raise ValueError("a bracket is not closed")
        rest = rest[1:]
    elif isinstance(first, Fraction):
        value = first
    else:
        raise ValueError(f"{first} where a number is expected")
    if rest and rest[0] == "%":
        return value / 100, rest[1:]
    return value, rest


def _rewritten(text: str, known: Mapping[Fraction, Fraction], note: bool = False) -> str:
    """A text in which each number is what `known` says, written as it was: with commas, and cents with both digits; in
    a note without either.
    """

    def new(match: re.Match[str]) -> str:
        before = value_of(match[0])
        after = known.get(before, before)
        if after == before:
            return match[0]
        least = next(n for n in range(3) if (10**n * after).denominator == 1)
        decimals = max(least, 2 * (not note and match[0].endswith((".00", ".50", ".25", ".75"))))
        comma = "," if not note and ("," in match[0] or (after >= 10_000 and before < 1000)) else ""
        return f"{float(after):{comma}.{decimals}f}"

    return NUMERAL.sub(new, text)
