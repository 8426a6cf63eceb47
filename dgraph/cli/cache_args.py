"""Common parts of the commands of `dgraph cache`: arguments, and the cache and artifacts that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dgraph.cache.store import Store
    from dgraph.cache.upkeep import Entry

SHOWN = 12
"""Digits of a name that are shown; any unambiguous beginning is understood."""

Name = Annotated[str, typer.Argument(help="Name of an artifact, or its beginning.", show_default=False)]
Names = Annotated[list[str] | None, typer.Argument(help="Names of artifacts, or their beginnings.", show_default="all")]
Folder = Annotated[
    str | None, typer.Option("--cache", metavar="FOLDER", help="Folder of the cache.", show_default="the user's own")
]


def open_cache(folder: str | None) -> Store:
    """Open the cache in a folder, or the user's own.

    Raises:
        CacheError: the cache cannot be used.
    """
    from dgraph.cache.place import default_folder
    from dgraph.cache.store import Store

    return Store(default_folder() if folder is None else folder)


def chosen(store: Store, names: list[str] | None) -> list[Entry]:
    """The artifacts of these names, or all that are usable.

    Raises:
        UnknownName: no artifact has such a name.
        CacheError: several artifacts have such a name.
    """
    from dgraph.cache.upkeep import entries, entry

    if not names:
        return [e for e in entries(store) if not e.damaged]
    return list({e.digest: e for e in (entry(store, name) for name in names)}.values())
