"""Load: lengths of prompts and responses, when requests arrive, and traces of both."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgraph.errors import InputError


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts or responses, as an option gives them.

    Attributes:
        text: "1024", "uniform:128-1024", "lognormal:MEDIAN,SIGMA" (natural logarithm), or a file with a number or an
            object {"prompt": number} per line.
        option: the option that the text was given for, named in messages; without the dashes also the name in such an
            object.
    """

    text: str
    option: str = "--prompt"

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """Draw `count` lengths, the same for equal arguments.

        Raises:
            InputError: a text that says no lengths, a file that cannot be read.
        """
        kind, colon, rest = self.text.partition(":")
        draw = random.Random(f"{self.text} {seed}")
        if self.text.isdecimal():
            lengths = [int(self.text)] * count
        elif colon and kind == "uniform":
            low, high = self._numbers(rest, "-")
            if low > high:
                raise InputError(f"{self.option} uniform:LOW-HIGH needs LOW <= HIGH, got {self.text!r}.")
            lengths = [draw.randint(int(low), int(high)) for _ in range(count)]
        elif colon and kind == "lognormal":
            median, sigma = self._numbers(rest, ",")
            if not median > 0 or not math.isfinite(median * sigma):
                raise InputError(f"{self.option} lognormal:MEDIAN,SIGMA needs a positive median, got {self.text!r}.")
            lengths = [max(1, round(median * math.exp(draw.gauss(0, sigma)))) for _ in range(count)]
        else:
            lengths = self._file(count)
        if min(lengths) < 1:
            raise InputError(f"{self.option}: a length is at least 1 token, got {min(lengths)} from {self.text!r}.")
        return lengths

    def _numbers(self, text: str, between: str) -> tuple[float, float]:
        try:
            first, second = map(float, text.split(between))
        except ValueError:
            raise InputError(
                f"{self.option} takes a number of tokens, uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA or a JSONL file, "
                f"got {self.text!r}."
            ) from None
        return first, second

    def _file(self, count: int) -> list[int]:
        path, name = Path(self.text), self.option.removeprefix("--")
        if not path.is_file():
            self._numbers("", "-")
        try:
            values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            found = [value[name] if isinstance(value, dict) else value for value in values]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f'{self.option} {path}: a line is a number or {{"{name}": number}}; {error!r}.') from None
        if not found or not all(type(n) is int for n in found):
            raise InputError(f"{self.option} {path} has no whole numbers, one length per line.")
        return [found[i % len(found)] for i in range(count)]


@dataclass(frozen=True)
class Request:
    """A line of a trace.

    Attributes:
        arrival: seconds from the start.
        prompt, new: tokens.
        priority: higher goes first.
    """

    arrival: float
    prompt: int
    new: int
    priority: int = 0


def arrivals(text: str, rate: float, count: int, seed: int = 0) -> list[float]:
    """Draw times of arrival, in seconds from the start, ascending; the same for equal arguments.

    Args:
        text: "poisson"; "gamma:CV", intervals with that coefficient of variation (1 is Poisson, above 1 comes in
            bursts); "constant".
        rate: requests per second, on average.

    Raises:
        InputError: another text, or a rate that is not positive.
    """
    if not rate > 0 or not math.isfinite(rate):
        raise InputError(f"the rate must be a positive number of requests per second, got {rate}.")
    draw = random.Random(f"arrivals {seed}")
    kind, _, rest = text.partition(":")
    if kind == "gamma":
        try:
            variation = float(rest)
        except ValueError:
            variation = 0.0
        if not variation > 0:
            raise InputError(f"arrivals gamma:CV needs a positive number, got {text!r}.")
        shape = 1 / variation**2
        interval: Callable[[], float] = lambda: draw.gammavariate(shape, 1 / (shape * rate))  # noqa: E731
    elif text == "poisson":
        interval = lambda: draw.expovariate(rate)  # noqa: E731
    elif text == "constant":
        interval = lambda: 1 / rate  # noqa: E731
    else:
        raise InputError(f"arrivals are poisson, gamma:CV or constant, got {text!r}.")
    now, found = 0.0, []
    for _ in range(count):
        now += interval()
        found.append(now)
    return found


def drawn(times: Sequence[float], prompt: Lengths, new: Lengths, seed: int = 0) -> list[Request]:
    """Draw a trace of requests that come at these times, with lengths drawn independently of each other.

    Raises:
        InputError: as `Lengths.draw`.
    """
    prompts, news = prompt.draw(len(times), seed), new.draw(len(times), seed + 1)
    return [Request(*line) for line in zip(times, prompts, news, strict=True)]


_BURST = ("Timestamp", "Request tokens", "Response tokens")


def read_trace(path: str | Path) -> list[Request]:
    """A trace by order of arrival: JSON lines {"arrival": s, "prompt": tokens, "new": tokens}, "priority" if wanted, or
    a CSV file with the columns of BurstGPT (Timestamp, Request tokens, Response tokens).

    Raises:
        InputError: a file that cannot be read, or says something else.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                lines = [{name: float(row[name]) for name in _BURST} for row in csv.DictReader(file)]
                found = [Request(row[_BURST[0]], int(row[_BURST[1]]), int(row[_BURST[2]])) for row in lines]
            else:
                found = [Request(**json.loads(line)) for line in file if line.strip()]
        good = all(_good(request) for request in found)
    except OSError as error:
        raise InputError(f"trace {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'trace {path}: a line is {{"arrival": seconds, "prompt": tokens, "new": tokens}}, or a row of a CSV file '
            f"with the columns {', '.join(_BURST)}; {error!r}."
        ) from None
    if not found or not good:
        raise InputError(
            f"trace {path}: every request has at least 1 token of prompt and 1 new one, and none has none."
        )
    return sorted(found, key=lambda request: request.arrival)


def _good(request: Request) -> bool:
    whole = all(type(n) is int for n in (request.prompt, request.new, request.priority))
    return whole and request.prompt > 0 and request.new > 0 and math.isfinite(request.arrival)
