"""Seeded generators of the exactly checkable tasks a tiny model is trained on.

The forms are fixed (see the examples in each generator); names, things, words and numbers are drawn at random.
A prompt belongs to the held-out set if and only if the hash of its text says so. Hence training and held-out
prompts are disjoint by construction, whatever seeds draw them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .words import NAMES, THINGS, WORDS

HELD_OUT_ONE_IN = 20
"""One prompt in this many belongs to the held-out set."""
GIVE_UP_AFTER = 50_000
"""Draws without a new held-out prompt after which a task is taken to have no more."""


@dataclass(frozen=True)
class Example:
    """A task's name, the prompt (the user's turn) and the only right answer (the assistant's turn)."""

    task: str
    prompt: str
    answer: str


def is_held_out(prompt: str) -> bool:
    """True if this prompt belongs to the held-out set; a function of its text alone."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def math(rng: random.Random, fewest: int = 2, most: int = 5, largest: int = 20) -> Example:
    """A word problem of `fewest` to `most` sentences after the first, which add or take up to `largest`; the answer
    shows every step.

    Ann has 12 apples. Ann buys 5 more apples. How many apples does Ann have? -> 12 + 5 = 17. #### 17
    """
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    total = rng.randint(2, 30)
    prompt, steps = [f"{name} has {total} {thing}."], []
    for _ in range(rng.randint(fewest, most)):
        choices = ["buys", "finds"]
        if total >= 2:
            choices += ["gives", "loses"]
        if 1 <= total <= 50:
            choices.append("doubles")
        action = rng.choice(choices)
        before = total
        if action == "doubles":
            total *= 2
            prompt.append(f"The number of {thing} doubles.")
            steps.append(f"{before} * 2 = {total}.")
        elif action in ("buys", "finds"):
            count = rng.randint(2, largest)
            total += count
            gain = f"{name} buys {count} more" if action == "buys" else f"Then {name} finds {count}"
            prompt.append(f"{gain} {thing}.")
            steps.append(f"{before} + {count} = {total}.")
        else:
            count = rng.randint(1, min(largest, total - 1))
            total -= count
            recipient = f" to {other}" if action == "gives" else ""
            prompt.append(f"{name} {action} {count} {thing}{recipient}.")
            steps.append(f"{before} - {count} = {total}.")
    prompt.append(f"How many {thing} does {name} have?")
    return Example("math", " ".join(prompt), f"{' '.join(steps)} #### {total}")


def needle(rng: random.Random, fewest: int = 2, most: int = 16, depth: tuple[float, float] = (0, 1)) -> Example:
    """Retrieval of one value among `fewest` to `most` pairs; the one asked for lies within `depth` of their order.

    `river is 123. stone is 456. What is stone?` -> `The value of stone is 456. #### 456`
    """
    keys = rng.sample(WORDS, rng.randint(fewest, most))
    values = [rng.randint(100, 999) for _ in keys]
    chosen = rng.randrange(*(round(end * len(keys)) for end in depth))
    pairs = " ".join(f"{key} is {value}." for key, value in zip(keys, values, strict=True))
    key, value = keys[chosen], values[chosen]
    return Example("needle", f"{pairs} What is {key}?", f"The value of {key} is {value}. #### {value}")


def sort(rng: random.Random, fewest: int = 3, most: int = 6) -> Example:
    """Alphabetical order of `fewest` to `most` words.

    Sort these words: river stone cloud maple -> Sorted: cloud maple river stone #### cloud
    """
    words = rng.sample(WORDS, rng.randint(fewest, most))
    ordered = sorted(words)
    return Example("sort", f"Sort these words: {' '.join(words)}", f"Sorted: {' '.join(ordered)} #### {ordered[0]}")


def follow(rng: random.Random) -> Example:
    """An instruction to follow to the letter, 2 to 9 repetitions.

    Write the word tiger in capitals 3 times separated by dashes. -> TIGER - TIGER - TIGER
    """
    word, times = rng.choice(WORDS), rng.randint(2, 9)
    prompt = f"Write the word {word} in capitals {times} times separated by dashes."
    return Example("follow", prompt, " - ".join([word.upper()] * times))


def trace(rng: random.Random, fewest: int = 1, most: int = 3, largest: int = 9) -> Example:
    """Execution of a three-variable program of `fewest` to `most` assignments after the initial values, whose numbers
    are up to `largest`.

    Run: x = 3; y = 5; z = 2; x = y + 4; z = x - 1; print z -> x = y + 4 = 9; z = x - 1 = 8; z is 8 #### 8
    """
    values = {name: rng.randint(1, largest) for name in "xyz"}
    program = [f"{name} = {value}" for name, value in values.items()]
    steps = []
    target = "x"
    for _ in range(rng.randint(fewest, most)):
        target, source = rng.choice("xyz"), rng.choice("xyz")
        count = rng.randint(1, largest)
        if rng.random() < 0.5 and values[source] >= count:
            statement, result = f"{target} = {source} - {count}", values[source] - count
        else:
            statement, result = f"{target} = {source} + {count}", values[source] + count
        values[target] = result
        program.append(statement)
        steps.append(f"{statement} = {result}")
    result = values[target]
    return Example(
        "trace",
        f"Run: {'; '.join(program)}; print {target}",
        f"{'; '.join(steps)}; {target} is {result} #### {result}",
    )


TASKS: dict[str, Callable[..., Example]] = {
    "math": math,
    "needle": needle,
    "sort": sort,
    "follow": follow,
    "trace": trace,
}


def make(task: str, rng: random.Random, **options: Any) -> Example:
    """Draw a training example of `task` with its generator's options; its prompt is never a held-out one.

    Raises ValueError for an unknown task.
    """
    generator = _generator(task)
    while is_held_out((example := generator(rng, **options)).prompt):
        pass
    return example


def held_out(task: str, count: int, seed: int = 0, **options: Any) -> list[Example]:
    """`count` distinct held-out examples of `task` with its generator's options, the same for the same seed.

    Raises ValueError for an unknown task, or where the task has too few distinct held-out prompts.
    """
    generator = _generator(task)
    rng = random.Random(f"held-out {task} {seed}")
    found: dict[str, Example] = {}
    nothing_new = 0
    while len(found) < count and nothing_new < GIVE_UP_AFTER:
        example = generator(rng, **options)
        if is_held_out(example.prompt) and example.prompt not in found:
            found[example.prompt] = example
            nothing_new = 0
        else:
            nothing_new += 1
    if len(found) == count:
        return list(found.values())
    raise ValueError(
        f"task {task!r} has only {len(found)} distinct held-out prompts, {count} were asked for; ask for fewer"
    )


def matches(example: Example, text: str) -> bool:
    """Exact match: the text after the last '####' where the answer has one, the whole text otherwise.

    Both sides are stripped of surrounding white space; a text without the '####' the answer has does not match.
    """
    _, marker, final = example.answer.rpartition("####")
    if not marker:
        return text.strip() == example.answer.strip()
    _, marker, got = text.rpartition("####")
    return bool(marker) and got.strip() == final.strip()


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Write one JSON object per line with the fields task, prompt and answer."""
    path.write_text("".join(json.dumps(asdict(example)) + "\n" for example in examples))


def read_examples(path: Path) -> list[Example]:
    """The examples of a file made by `write_examples`."""
    return [Example(**json.loads(line)) for line in path.read_text().splitlines()]


def _generator(task: str) -> Callable[..., Example]:
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; expected one of {', '.join(TASKS)}")
    return TASKS[task]
