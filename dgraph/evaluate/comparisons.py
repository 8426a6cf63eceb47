"""Comparisons of a response with the right answer: they find the answer in a text, and decide if it is right.

An answer stands after the last '####'. A response without one is searched from its end, so that a model which was never
taught the mark can be right, too. Only `exact` insists on the mark, and `says` finds an answer anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

MARKER = "####"
"""Mark before the final answer of an answer that shows its steps (as in GSM8K)."""
TOLERANCE = Fraction(1, 200)
"""Largest difference of a number from an answer that is no whole number: two decimals are enough."""

# A minus is a sign only if no number stands before it: "10-3" and "10 - 3" have no sign, "= -3" and "-$3" have one.
# Digits are grouped by commas in threes, or not at all; a comma or a full stop after them is punctuation.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)])[-−](?=\S))?[$€£]?\s?(?:(?P<whole>\d+)\s+(?=\d+\s?/\s?\d))?(?P<top>{_DIGITS})"
    rf"(?:\s?/\s?(?P<bottom>\d+(?:\.\d+)?))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_OPTION = re.compile(r"\(([A-Z])\)")
_LONE_OPTION = re.compile(r"(?<!\w)([A-Z])(?!\w)")
_VERDICT = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


def exact(answer: str, text: str) -> bool:
    """True if the final answers are equal: the text after the last '####', or the whole text if the answer has none.

    White space around both is left out. A text without the '####' that the answer has is wrong.
    """
    _, marker, final = answer.rpartition(MARKER)
    _, found, got = text.rpartition(MARKER) if marker else ("", "", text)
    return found == marker and got.strip() == final.strip()


def number(answer: str, text: str) -> bool:
    """True if the first number after the last '####', or else the last number of the text, is that of the answer.

    Units, currency signs and commas between thousands are ignored; 3/4, 1 3/4 and \\frac{3}{4} are fractions. A whole
    number must be equal, any other number to two decimals.
    """
    found = read_number(text)
    expected = read_number(answer)
    if expected is None:
        raise ValueError(f"an answer that is compared as a number must hold one, got {answer!r}")
    if found is None:
        return False
    return abs(found - expected) <= (0 if expected.denominator == 1 else TOLERANCE)


def read_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer, see `number`; None without one."""
    marked, final = _final(text)
    found = [m for m in _NUMBER.finditer(_FRACTION.sub(r"\1/\2", final)) if m["bottom"] is None or float(m["bottom"])]
    if not found:
        return None
    match = found[0 if marked else -1]
    value = Fraction(match["top"].replace(",", ""))
    if match["bottom"]:
        value /= Fraction(match["bottom"])
    value += int(match["whole"] or 0)
    return -value if match["sign"] else value


def option(answer: str, text: str) -> bool:
    """True if the text gives the answer's letter.

    Its letter is the last "(B)" after the '####' or of the text, or else the last capital by itself.
    """
    _, final = _final(text)
    found = _OPTION.findall(final) or _LONE_OPTION.findall(final)
    return bool(found) and found[-1] == answer.strip("() \n")


def verdict(answer: str, text: str) -> bool:
    """True if the text gives the answer's verdict.

    Its verdict is the last "yes", "no", "true" or "false" after the '####' or of the text, in any case.
    """
    found = _VERDICT.findall(_final(text)[1])
    return bool(found) and found[-1].lower() == answer.strip().lower()


def words(answer: str, text: str) -> bool:
    """True if the answer's words stand in the same order after the '####', or else on the last line.

    On the last line they stand after its last colon. Commas and white space between words, case, and a full stop at the
    end are ignored.
    """
    marked, final = _final(text)
    if not marked:
        final = (final.strip().splitlines() or [""])[-1].rpartition(":")[2]
    return _words(final) == _words(answer)


def says(answer: str, text: str) -> bool:
    """True if the answer, or one of several that are separated by '|', is anywhere in the text.

    It is found as whole words, in any case. A text that denies it counts as right, too.
    """
    return any(re.search(rf"(?<!\w){re.escape(a.strip())}(?!\w)", text, re.IGNORECASE) for a in answer.split("|"))


def _final(text: str) -> tuple[bool, str]:
    """True if a text has a '####', with the text after the last one; else False, with the whole text."""
    _, marker, final = text.rpartition(MARKER)
    return bool(marker), final


def _words(text: str) -> list[str]:
    return text.strip().removesuffix(".").replace(",", " ").lower().split()


COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "number": number,
    "option": option,
    "verdict": verdict,
    "words": words,
    "says": says,
}
"""Functions by name: (answer, text of the response) -> True if the response is right."""
