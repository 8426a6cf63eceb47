"""Calculations to be done, like those that solutions of word problems note as <<48/2=24>>, with other numbers.

A small model that has learnt from solutions alone knows the calculation more often than its result. One that has learnt
calculations alone does them better than those in a solution. So these are three kinds of documents. Some calculations,
each with its result; steps in words from a first number on; and sentences of solutions, whose results are to be filled
in. Where solutions keep their notes, most calculations are written as notes are: learning calculations then helps with
solutions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from .renumber import NOTE, NUMERAL, WHOLE_NOTE, calculated, value_of, without_notes

KEPT = frozenset(map(Fraction, (7, 12, 24, 30, 52, 60, 100, 365)))
"""Numbers that mostly stay: days, months, hours, shares."""
STAYS, STAYS_KEPT, ROUND = 0.15, 0.7, 0.5
"""Chances: that a number stays, that one of `KEPT` does, and that another is as round as the one it replaces."""
DRAWS = 40
"""Sets of numbers that are tried for one calculation at most."""
LINES, STEPS = (4, 8), (2, 5)
"""Fewest and most calculations of a document, and steps of one in words."""
SENTENCES = (2, 5)
"""Fewest and most sentences of a document."""
AS_NOTES = 0.7
"""Chance that a calculation is written as notes are, where solutions keep theirs."""
SHARES = {"listed": 0.35, "in words": 0.15, "sentences": 0.5}
"""Shares of the kinds of documents."""
BLANK = "__"
LARGEST = 100_000
"""No result is larger."""
TIMES, OVER = ("*", "*", "x", "x", "×"), ("/", "/", "/", "÷")
"""Signs of products and of quotients."""
ASKED = ("Calculate:", "Work out each of these:", "What is the result of each?", "Do these calculations one by one:")
BEGIN = ("Start with {}.", "Take the number {}.", "You have {}.", "There are {}.")
DO = {
    "+": ("Add {}.", "{} more come.", "You get {} more."),
    "-": ("Subtract {}.", "Take away {}.", "{} of them go.", "Give away {}."),
    "*": ("Multiply by {}.", "Make it {} times as many."),
    "/": ("Divide by {}.", "Split it into {} equal parts and keep one."),
    "%": ("Take {}% of it.",),
}
FILL = ("Fill in the results:", "What goes into the gaps?", "Copy these lines with their results:")
LAST = ("What is left?", "What do you have now?", "What is the result?", "How many are there in the end?")


def expressions(solutions: Iterable[str]) -> list[str]:
    """The calculations that solutions note, without those that cannot be followed."""
    found = []
    for expression, result in (note for solution in solutions for note in NOTE.findall(solution)):
        try:
            right = calculated(expression) == value_of(result)
        except (ValueError, ZeroDivisionError):
            continue
        if right and len(NUMERAL.findall(expression)) > 1:
            found.append(expression.replace(" ", ""))
    return found


def sentences(solutions: Iterable[str]) -> list[str]:
    """The lines of solutions, notes included, that note one calculation, have no other numbers than it, and say its
    result once.
    """
    found = []
    for line in (line.strip() for solution in solutions for line in solution.splitlines()):
        notes = NOTE.findall(line)
        if len(notes) != 1 or len(expressions([line])) != 1:
            continue
        operands, result = set(map(value_of, NUMERAL.findall(notes[0][0]))), value_of(notes[0][1])
        said = list(map(value_of, NUMERAL.findall(without_notes(line))))
        if result not in operands and said.count(result) == 1 and {*said} == {*operands, result}:
            found.append(line)
    return found


def documents(
    known: Sequence[str], lines: Sequence[str], numbers: Iterable[int], ask: str, notes: bool = False
) -> Iterator[tuple[str, str]]:
    """A (question, answer) for each of some numbers, which depends on it alone.

    Args:
        known: as `expressions` gives them, one at least.
        lines: as `sentences` gives them; without any there are documents of the other kinds.
        ask: text that is added to a question in words, whose answer ends with "#### RESULT".
        notes: True if answers note each calculation, as solutions do.
    """
    for number in numbers:
        rng = random.Random(f"calculations {number}")
        (kind,) = rng.choices([*SHARES], [*SHARES.values()])
        made = _filled_in(lines, rng, notes) if kind == "sentences" and lines else None
        if kind == "in words":
            question, answer = _in_words(rng, notes)
            made = f"{question}\n{ask}", answer
        yield made or _listed(known, rng, notes)


def redrawn(expression: str, rng: random.Random) -> tuple[str, Fraction] | None:
    """An expression with other numbers, and its value: above zero, of two decimals at most, and whole where it was.
    None where none was found.
    """
    before = calculated(expression)
    whole = before.denominator == 1
    operands = re.fullmatch(rf"({NUMERAL.pattern})/({NUMERAL.pattern})", expression)
    for _ in range(DRAWS):
        if operands and whole and operands[2].isdigit():  # few pairs divide by chance
            divisor = Fraction(_another(operands[2], rng))
            quotient = max(1, round(before * Fraction(rng.randint(30, 300), 100)))
            made = f"{text_of(divisor * quotient)}/{text_of(divisor)}"
        else:
            made = NUMERAL.sub(lambda match: _another(match[0].replace(",", ""), rng), expression)
        try:
            value = calculated(made)
        except (ValueError, ZeroDivisionError):
            continue
        if 0 < value <= LARGEST and (100 * value).denominator == 1 and (not whole or value.denominator == 1):
            return made, value
    return None


def text_of(value: Fraction, money: bool = False) -> str:
    """A number of two decimals at most as it is written; an amount of money has none or both."""
    if value.denominator == 1:
        return str(value)
    text = f"{float(value):.2f}"
    return text if money else text.rstrip("0")


def note_of(expression: str, value: Fraction) -> str:
    """A calculation as a solution notes it."""
    return f"<<{expression}={text_of(value)}>>"


def _another(numeral: str, rng: random.Random) -> str:
    """A number of about the size, and of as many decimals."""
    value = Fraction(numeral)
    if not value or rng.random() < (STAYS_KEPT if value in KEPT else STAYS):
        return numeral
    decimals = len(numeral.partition(".")[2])
    units = int(value * 10**decimals)
    step = next(s for s in (1000, 500, 100, 50, 25, 10, 5, 1) if units % s == 0 and units >= s)
    step = step if rng.random() < ROUND else 1
    drawn = step * rng.randint(max(1, units // (3 * step)), max(2, 3 * units // step))
    return f"{drawn / 10**decimals:.{decimals}f}"


def _listed(known: Sequence[str], rng: random.Random, notes: bool) -> tuple[str, str]:
    """Some calculations, and each with its result."""
    space, times, over = rng.choice(("", " ", " ")), rng.choice(TIMES), rng.choice(OVER)
    as_notes = notes and rng.random() < AS_NOTES
    if as_notes:
        space, times, over = "", "*", "/"
    asked, done = [], []
    for _ in range(rng.randint(*LINES)):
        made = redrawn(rng.choice(known), rng)
        if made is None:
            continue
        money = not as_notes and rng.random() < 0.25 and "%" not in made[0]
        dollar = "$" if money else ""
        sides = re.sub(r"[-+*/]", lambda match: f"{space}{match[0]}{space}", made[0])
        sides = dollar + sides.replace("*", times).replace("/", over)
        asked.append(sides)
        done.append(f"{sides}{space}={space}{dollar}{text_of(made[1], money)}")
    return "\n".join([rng.choice(ASKED), *asked]), "\n".join(done)


def _filled_in(lines: Sequence[str], rng: random.Random, notes: bool) -> tuple[str, str] | None:
    """Some sentences without their results, and with them; None if no drawn sentence can be changed."""
    made = [_changed(rng.choice(lines), rng, notes) for _ in range(rng.randint(*SENTENCES))]
    found = [each for each in made if each is not None]
    if not found:
        return None
    gaps, whole = zip(*found, strict=True)
    return "\n".join([rng.choice(FILL), *gaps]), "\n".join(whole)


def _changed(line: str, rng: random.Random, notes: bool) -> tuple[str, str] | None:
    """A sentence with other numbers, without and with its result; None where one number would become two."""
    ((expression, result),) = NOTE.findall(line)
    made = redrawn(expression.replace(" ", ""), rng)
    if made is None:
        return None
    changes: dict[Fraction, str] = {}
    for before, after in zip(NUMERAL.findall(expression), NUMERAL.findall(made[0]), strict=True):
        if changes.setdefault(value_of(before), after) != after:
            return None
    changes[value_of(result)] = text_of(made[1], money=re.search(r"\$\s*<<", line) is not None)
    gap = {**changes, value_of(result): BLANK}
    note = note_of(made[0], made[1]) if notes else ""

    def rewritten(numbers: Mapping[Fraction, str], between: str = "") -> str:
        parts = (NUMERAL.sub(lambda match: numbers[value_of(match[0])], part) for part in WHOLE_NOTE.split(line))
        return between.join(parts)

    return rewritten(gap), rewritten(changes, note)


def _in_words(rng: random.Random, notes: bool) -> tuple[str, str]:
    """Steps from a first number on, and the result of each."""
    value = Fraction(rng.choice((rng.randint(2, 20), rng.randint(10, 120), 10 * rng.randint(2, 90))))
    space, times, over = rng.choice(("", " ", " ")), rng.choice(TIMES), rng.choice(OVER)
    said, done = [rng.choice(BEGIN).format(value)], []
    for _ in range(rng.randint(*STEPS)):
        sign, other, after = _step(value, rng)
        said.append(rng.choice(DO[sign]).format(other))
        shown = {"*": times, "/": over, "%": times}.get(sign, sign)
        right = f"{other}/100" if sign == "%" else str(other)
        note = note_of(f"{value}{'*' if sign == '%' else sign}{right}", after) if notes else ""
        done.append(f"{value}{space}{shown}{space}{right}{space}={space}{note}{after}")
        value = after
    return " ".join([*said, rng.choice(LAST)]), "\n".join([*done, f"#### {value}"])


def _step(value: Fraction, rng: random.Random) -> tuple[str, int, Fraction]:
    """Draw a step from a whole number: the sign, the other number, and the whole number that comes of it."""
    whole = int(value)
    divisors = [d for d in range(2, 13) if whole % d == 0 and whole > d]
    shares = [p for p in (5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 80, 90) if whole * p % 100 == 0]
    signs = ["+"] + ["-"] * (whole > 2) + ["*"] * (whole <= 500) + ["/"] * bool(divisors) + ["%"] * bool(shares)
    sign = rng.choice(signs)
    if sign == "+":
        other = rng.randint(1, max(10, 2 * whole))
        return sign, other, value + other
    if sign == "-":
        other = rng.randint(1, whole - 1)
        return sign, other, value - other
    if sign == "*":
        other = rng.randint(2, 12)
        return sign, other, value * other
    other = rng.choice(divisors if sign == "/" else shares)
    return sign, other, value / other if sign == "/" else value * other / 100
