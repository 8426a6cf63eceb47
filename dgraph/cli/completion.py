"""Names that the Tab key completes, from the index of declarations: no torch is imported for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dgraph.cli.listing import listed

_NAMES = {"recipes": "recipe", "policies": "policy", "models": "model"}
"""Kinds of entries, and the field that has the name of one."""


def completing(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """A function that completes names of a kind; models are also folders with a config.json.

    Args:
        kind: "recipes", "policies" or "models".

    Returns:
        Takes what was typed; gives names and their summaries.
    """

    def complete(incomplete: str) -> list[tuple[str, str]]:
        entries = [entry for entry in listed(kind) if entry.get("kind") != "family"]
        found = [(entry[_NAMES[kind]], entry["summary"]) for entry in entries]
        more = _folders(incomplete) if kind == "models" else []
        return [(name, summary) for name, summary in found if name.startswith(incomplete)] + more

    return complete


def _folders(incomplete: str) -> list[tuple[str, str]]:
    """Folders that begin as a text does: a checkpoint as it is, another one with a slash, to go on from."""
    head, slash, tail = incomplete.rpartition("/")
    try:
        inner = sorted(p for p in Path(head + slash or ".").expanduser().iterdir() if p.is_dir())
    except OSError:
        return []
    found = []
    for path in inner:
        if path.name.startswith(tail) and (tail or not path.name.startswith(".")):
            checkpoint = (path / "config.json").is_file()
            found.append((f"{head}{slash}{path.name}{'' if checkpoint else '/'}", "a checkpoint" if checkpoint else ""))
    return found
