"""Pages of results from records: one JSON file a table, with the command that measured it.

    python -m benchmarks.records    # write benchmarks/results/*.md and the table of RESULTS.md
    python -m benchmarks.records --add parallel/sums --json collectives.json --table 0 --commit 4c9faea

`results/records/PAGE/NAME.json` is a record, `results/records/pages.json` the title and order of each page, and
`results/records/headlines.json` the first table of RESULTS.md, whose rows name the records that their figures are from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_of, text_of

RESULTS = Path(__file__).parent / "results"
RECORDS = RESULTS / "records"
SUMMARY = Path(__file__).parent / "RESULTS.md"
NOTE = "<!-- written by benchmarks/records.py -->"
BEGIN, END = "<!-- headlines -->", "<!-- end of headlines -->"
NOT_RECORDED = "not recorded"
HEADLINE = ("method", "model and setting", "speed-up", "quality", "page")


@dataclass(frozen=True)
class Record:
    """A measured table and its setting.

    Attributes:
        title: subject of the table, its heading on the page.
        command: commands that measured it, or `NOT_RECORDED`.
        command_at: commit at which the commands run, where they do not run today; else empty.
        commit: commit that was measured. "COMMIT (table added)" names the one that added the table, where the
            measured one was not noted.
        hardware, versions, date: the machine, the libraries, and the day as YYYY-MM-DD.
        columns, rows: names of the columns, and cells as text.
        note: at most two sentences.
    """

    title: str
    command: tuple[str, ...]
    command_at: str
    commit: str
    hardware: str
    versions: str
    date: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    @classmethod
    def of(cls, value: dict[str, Any]) -> Record:
        """A record from the value of its file.

        Raises:
            ValueError: a field is missing, unknown, empty or of the wrong form, or a row lacks cells.
        """
        names = {field.name for field in fields(cls)}
        if value.keys() != names:
            raise ValueError(f"fields missing: {sorted(names - value.keys())}; unknown: {sorted(value.keys() - names)}")
        made = cls(
            **value
            | {name: tuple(value[name]) for name in ("command", "columns")}
            | {"rows": tuple(map(tuple, value["rows"]))}
        )
        empty = [name for name in names - {"note", "command_at"} if not value[name]]
        if empty:
            raise ValueError(f"empty fields: {sorted(empty)}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", made.date):
            raise ValueError(f"date: expected YYYY-MM-DD, got {made.date!r}")
        if len(re.findall(r"[.!?](?:\s|$)", made.note)) > 2:
            raise ValueError(f"note: at most two sentences, got {made.note!r}")
        ragged = [row for row in made.rows if len(row) != len(made.columns)]
        if ragged:
            raise ValueError(f"expected {len(made.columns)} cells a row, got {ragged[0]}")
        return made

    @property
    def setting(self) -> tuple[str, ...]:
        """Hardware, versions, date and commit."""
        return self.hardware, self.versions, self.date, f"commit {self.commit}"

    def dumped(self) -> str:
        """Text of its file: a field a line, a row a line."""
        value = asdict(self)
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value.pop("rows"))
        note = value.pop("note")
        lines = [f" {json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in value.items()]
        lines += [f' "rows": [\n  {rows}\n ]', f' "note": {json.dumps(note, ensure_ascii=False)}']
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def lines(self, before: Record | None) -> Iterator[str]:
        """Lines of its part of a page, without the setting that it shares with the record before it."""
        at = f" at {self.command_at}" if self.command_at else ""
        commands = " ".join(c if c == NOT_RECORDED else f"`{c}`{at}" for c in self.command)
        asked = (self.command, self.command_at)
        same = before is not None and self.command != (NOT_RECORDED,) and asked == (before.command, before.command_at)
        yield from (f"## {self.title}", "", "Command as above." if same else f"Command: {commands}.")
        others = self.setting if before is None else [s for s in self.setting if s not in before.setting]
        if others:
            yield f"{'' if before is None else 'Else as above: '}{'; '.join(others)}."
        yield from ("", *markdown_of(self.columns, self.rows), "")
        if self.note:
            yield from (self.note, "")


@dataclass(frozen=True)
class Page:
    """A page of results: its title, one line about it, and the names of its records in order."""

    title: str
    about: str
    records: tuple[str, ...]


def pages() -> dict[str, Page]:
    """Every page, by the name of its file."""
    value = json.loads((RECORDS / "pages.json").read_text("utf-8"))
    return {name: Page(each["title"], each["about"], tuple(each["records"])) for name, each in value.items()}


def record_of(name: str) -> Record:
    """The record of PAGE/NAME.

    Raises:
        ValueError: its file is no record.
    """
    path = RECORDS / f"{name}.json"
    try:
        return Record.of(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def page_of(name: str, page: Page) -> str:
    """Text of a page."""
    lines = [NOTE, f"# {page.title}", "", *([page.about, ""] if page.about else [])]
    before = None
    for each in page.records:
        record = record_of(f"{name}/{each}")
        lines += record.lines(before)
        before = record
    return "\n".join(lines)


def headlines() -> list[dict[str, Any]]:
    """Rows of the first table of RESULTS.md: four cells, and the names of the records that they are from."""
    return list(json.loads((RECORDS / "headlines.json").read_text("utf-8")))


def summary() -> str:
    """Text of RESULTS.md with its first table written anew."""
    rows = []
    for each in headlines():
        names = dict.fromkeys(name.partition("/")[0] for name in each["records"])
        links = (f"[{name.replace('_', ' ')}](results/{name}.md)" for name in names)
        rows.append([*each["cells"], ", ".join(links)])
    text = SUMMARY.read_text("utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    return head + "\n".join([BEGIN, *markdown_of(HEADLINE, rows, left=True), tail])


def written() -> dict[Path, str]:
    """Every file that records make, and its text."""
    return {RESULTS / f"{name}.md": page_of(name, page) for name, page in pages().items()} | {SUMMARY: summary()}


def add(name: str, file: Path, table: int, commit: str) -> None:
    """Write a record of a table that a script wrote with --json, and list it on its page."""
    report = json.loads(file.read_text("utf-8"))
    hardware, versions, date, command = report["setting"].split("; ", 3)
    found = report["tables"][table]
    record = Record.of(
        {
            "title": found["title"],
            "command": [command.strip("`")],
            "command_at": "",
            "commit": commit,
            "hardware": hardware,
            "versions": versions,
            "date": date,
            "columns": found["columns"],
            "rows": [list(map(text_of, row)) for row in found["rows"]],
            "note": found["note"],
        }
    )
    page, _, short = name.partition("/")
    (RECORDS / page).mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(record.dumped(), encoding="utf-8")
    index = json.loads((RECORDS / "pages.json").read_text("utf-8"))
    listed = index.setdefault(page, {"title": page, "about": "", "records": []})["records"]
    if short not in listed:
        listed.append(short)
    (RECORDS / "pages.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write every page; with --add, a new record first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", metavar="PAGE/NAME", help="a new record, of a table of --json")
    parser.add_argument("--json", type=Path, help="file that a script wrote with its own --json")
    parser.add_argument("--table", type=int, default=0, help="place of the table in the file")
    parser.add_argument("--commit", help="commit that was measured")
    given = parser.parse_args(arguments)
    if given.add:
        if given.json is None or not given.commit:
            parser.error("--add needs --json FILE and --commit COMMIT")
        add(given.add, given.json, given.table, given.commit)
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
