"""When a response is right: how an answer is found in a text, and what it must be equal to.

An answer stands after the last '####'. A response without one is searched from its end, so that a model which was never
taught the mark can be right, too; only `exact` insists on it, and `says` does not care where an answer stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

MARKER = "####"
"""What stands before the final answer, where an answer shows its steps (as in GSM8K)."""
TOLERANCE = Fraction(1, 200)
"""How far a number may be from an answer that is no whole number: two decimals are enough."""

# A sign is one only where no number stands before it: "10-3" and "10 - 3" have no sign, "= -3" and "-$3" have one.
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
    """What follows the last '####' where the answer has one, the whole text otherwise.

    White space around both is left out. A text without the '####' that the answer has is wrong.
    """
    _, marker, final = answer.rpartition(MARKER)
    _, found, got = text.rpartition(MARKER) if marker else ("", "", text)
    return found == marker and got.strip() == final.strip()


def number(answer: str, text: str) -> bool:
    """The first number after the last '####', or else the last number of the text, is that of the answer.

    Units, currency signs and commas between thousands count for nothing; 3/4, 1 3/4 and \\frac{3}{4} are fractions. A
    whole number must be met, another to two decimals.
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
    """The letter of a choice: the last "(B)" after the '####' or of the text, or else its last capital by itself."""
    _, final = _final(text)
    found = _OPTION.findall(final) or _LONE_OPTION.findall(final)
    return bool(found) and found[-1] == answer.strip("() \n")


def verdict(answer: str, text: str) -> bool:
    """Yes, no, true or false: the last of these words after the '####' or of the text, in whatever case."""
    found = _VERDICT.findall(_final(text)[1])
    return bool(found) and found[-1].lower() == answer.strip().lower()


def words(answer: str, text: str) -> bool:
    """The same words in the same order after the '####', or else on the last line (after its last colon).

    Commas and white space between them, case, and a full stop at the end count for nothing.
    """
    marked, final = _final(text)
    if not marked:
        final = (final.strip().splitlines() or [""])[-1].rpartition(":")[2]
    return _words(final) == _words(answer)


def says(answer: str, text: str) -> bool:
    """The answer, or one of several between which stands a '|', is somewhere in the text: as whole words, in whatever
    case. That it may be denied there counts for nothing.
    """
    return any(re.search(rf"(?<!\w){re.escape(a.strip())}(?!\w)", text, re.IGNORECASE) for a in answer.split("|"))


def _final(text: str) -> tuple[bool, str]:
    """Whether a text has a '####', and what follows the last one; the whole text without."""
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
"""By name: (answer, text of the response) -> whether it is right."""
