"""The page of papers: each of their tables and figures with its command, their result and ours, from docs/papers.json.

`ITEMS` is that file as values. `tables` makes the page's Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prose import table

from dgraph.plans import papers
from dgraph.plans.papers import Paper

FILE = Path(__file__).parents[1] / "papers.json"
HOLDS, FAILS, OPEN = "holds", "fails", "open"
NOT_HERE, NO_EXPERIMENT = "cannot be run here", "no experiment"
VERDICTS = (HOLDS, FAILS, OPEN, NOT_HERE, NO_EXPERIMENT)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure of a paper, or a part of one.

    Attributes:
        item: its number as the paper has it, as "Table 2"; after a comma the part that is meant, as "Table 2, speed".
        subject: subject in a few words.
        verdict: one of `VERDICTS`.
        theirs, ours: what the paper has, and what was measured here; "" for nothing.
        why: reason of a verdict, or its limits.
        records: records of `benchmarks/results/records` that `ours` is from, as "focus/embedded".
        commands: commands that measure it here.
        at: commit at which the commands run, where they do not run today.
        awaits: work that the commands need and that is not there yet; "" once they run.
        elsewhere: commands that measure it where the paper's weights and data are.
    """

    item: str
    subject: str
    verdict: str
    theirs: str = ""
    ours: str = ""
    why: str = ""
    records: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    at: str = ""
    awaits: str = ""
    elsewhere: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Item:
        """An item from its value in the file.

        Raises:
            ValueError: a verdict that is unknown, or without what it is based on.
        """
        fields: dict[str, Any] = {n: tuple(each) if isinstance(each, list) else each for n, each in value.items()}
        made = cls(**fields)
        if made.verdict not in VERDICTS:
            raise ValueError(f"{made.item}: verdict must be one of {VERDICTS}, got {made.verdict!r}.")
        if made.verdict in (HOLDS, FAILS) and not (made.theirs and made.ours and made.commands):
            raise ValueError(f"{made.item}: {made.verdict!r} needs theirs, ours and a command.")
        if made.verdict == OPEN and not made.commands:
            raise ValueError(f"{made.item}: {made.verdict!r} needs the command that would tell.")
        if made.verdict in (FAILS, OPEN, NOT_HERE) and not made.why:
            raise ValueError(f"{made.item}: {made.verdict!r} needs its reason.")
        if bool(made.ours) != bool(made.records):
            raise ValueError(f"{made.item}: a figure of ours names its records, and records are named for a figure.")
        return made


def read(file: Path = FILE) -> dict[str, tuple[Item, ...]]:
    """Items by the name of a paper's method."""
    value = json.loads(file.read_text(encoding="utf-8"))
    return {name: tuple(map(Item.of, items)) for name, items in value.items()}


def paper_of(name: str) -> Paper:
    """The paper of a method, as `dgraph.plans.papers` has it."""
    found = getattr(papers, name.upper().replace("-", "_"))
    assert isinstance(found, Paper)
    return found


def tables() -> str:
    """Counts of verdicts, then the items and commands of each paper."""
    items = read()
    counts = [
        (f"[{name}](#{name.lower()})", *(str(sum(i.verdict == v for i in found)) for v in VERDICTS))
        for name, found in items.items()
    ]
    parts = [table(("paper", *VERDICTS), counts)]
    for name, found in items.items():
        parts += _paper(name, found)
    return "\n\n".join(parts)


def _paper(name: str, items: Sequence[Item]) -> Iterator[str]:
    """The section of a paper."""
    paper = paper_of(name)
    yield f"## {name}"
    yield f"*{paper.title}*, [arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})."
    measured = [item for item in items if item.verdict != NO_EXPERIMENT]
    rows = [(f"{i.item}: {i.subject}", i.theirs, _ours(i), f"**{i.verdict}**{_limits(i)}") for i in measured]
    yield table(("", "theirs", "ours", "verdict"), rows)
    others = ", ".join(f"{i.item} ({i.subject})" for i in items if i.verdict == NO_EXPERIMENT)
    yield f"No experiment: {others}."
    yield f"### Commands of {name}"
    yield "\n".join(["```sh", *_commands((i, i.commands) for i in items), "```"])
    yield f"### {name} with its own weights and data"
    yield "\n".join(["```sh", *_commands((i, i.elsewhere) for i in items), "```"])


def _ours(item: Item) -> str:
    """Our figure, with links to its pages of results."""
    pages = dict.fromkeys(record.partition("/")[0] for record in item.records)
    links = ", ".join(f"[{page.replace('_', ' ')}](results/{page}.md)" for page in pages)
    return f"{item.ours} ({links})" if links else ""


def _limits(item: Item) -> str:
    return f": {item.why}" if item.why else ""


def _commands(given: Iterator[tuple[Item, tuple[str, ...]]]) -> Iterator[str]:
    """Lines of a block: commands below the items that they measure, equal ones once."""
    named: dict[tuple[str, ...], list[str]] = {}
    for item, commands in given:
        if commands:
            note = f" (at {item.at})" if item.at else f" (awaits {item.awaits})" if item.awaits else ""
            named.setdefault(commands, []).append(f"{item.item}{note}")
    for commands, items in named.items():
        yield f"# {'; '.join(items)}"
        yield from commands
