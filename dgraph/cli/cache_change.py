"""`dgraph cache gc`, `rm`, `export`, `import`: changes of the artifact cache, and its transfer to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.cache_args import Folder, Names, open_cache
from dgraph.cli.cache_args import chosen as named
from dgraph.cli.output import print_json, print_text, status
from dgraph.cli.units import size_text


def gc(
    limit: Annotated[
        str | None, typer.Option(help="Size limit of the cache, as 500M or 4G.", show_default="DGRAPH_CACHE_SIZE or 4G")
    ] = None,
    cache: Folder = None,
    json: given.Json = False,
) -> None:
    """Remove remains of killed processes, damaged artifacts, and the least recently used beyond the limit.

    \b
    dgraph cache gc --limit 1G
    """
    from dgraph.cache.place import parse_size
    from dgraph.cache.upkeep import total

    store = open_cache(cache)
    size = None if limit is None else parse_size(limit, "--limit")
    before = total(store)
    removed = store.trim(size, damaged=True)
    _print_removed([name.partition(".")[0] for name in removed], before - total(store), json)


def rm(
    names: Names = None,
    every: Annotated[bool, typer.Option("--all", help="Remove every artifact.")] = False,
    cache: Folder = None,
    json: given.Json = False,
) -> None:
    """Remove artifacts.

    \b
    dgraph cache rm 3f9c 77ab
    dgraph cache rm --all
    """
    from dgraph.cache.upkeep import total
    from dgraph.errors import InputError

    if bool(names) == every:
        raise InputError("give the artifacts to remove, or --all.")
    store = open_cache(cache)
    before, chosen = total(store), named(store, names)
    removed = [e.digest for e in chosen if store.remove(e.folder)]
    if every:
        store.trim(damaged=True)
    _print_removed(removed, before - total(store), json)


def export(
    file: Annotated[str, typer.Argument(help="The file to write.", show_default=False)],
    names: Names = None,
    cache: Folder = None,
    json: given.Json = False,
) -> None:
    """Write artifacts into one file, with checksums.

    \b
    dgraph cache export kernels.zip
    """
    from dgraph.cache import upkeep

    store = open_cache(cache)
    chosen = named(store, names)
    with status(f"writing {file}"):
        upkeep.export(chosen, Path(file))
    size = Path(file).stat().st_size
    if json:
        print_json({"file": file, "size": size, "artifacts": [e.digest for e in chosen]})
    else:
        print_text(f"{len(chosen)} artifacts, {size_text(size)}, in {file}")


def import_(
    file: Annotated[str, typer.Argument(help="A file that export wrote.", show_default=False)],
    trust: Annotated[bool, typer.Option("--trust", help="Import compiled code from a source that you trust.")] = False,
    cache: Folder = None,
    json: given.Json = False,
) -> None:
    """Take in artifacts that export wrote. One that was made for another torch or device is stored, but not used here.

    \b
    dgraph cache import kernels.zip --trust
    """
    from dgraph.cache import upkeep
    from dgraph.errors import CacheError

    if not trust:
        raise CacheError(f"{file} contains compiled code that dgraph will run. Add --trust if you trust its source.")
    with status(f"reading {file}"):
        taken, present = upkeep.import_(open_cache(cache), Path(file), trust)
    if json:
        print_json({"file": file, "imported": taken, "present": present})
    else:
        print_text(f"{len(taken)} artifacts imported, {len(present)} already in the cache")


def _print_removed(digests: list[str], freed: int, json: bool) -> None:
    if json:
        print_json({"removed": digests, "freed": freed})
    else:
        print_text(f"{len(digests)} removed, {size_text(freed)} freed")
