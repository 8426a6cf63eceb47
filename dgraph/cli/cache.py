"""`dgraph cache`: the artifact cache, in which compiled code is stored for later processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dgraph.cli import cache_change
from dgraph.cli import options as given
from dgraph.cli.cache_args import SHOWN, Folder, Name, Names, open_cache
from dgraph.cli.cache_args import chosen as named
from dgraph.cli.output import OUT, print_json, print_listing, print_table, print_text, status
from dgraph.cli.units import ago, date, size_text

if TYPE_CHECKING:
    from dgraph.cache.upkeep import Entry

T = TypeVar("T")
LINES = 12
"""Lines of one difference that `why` shows."""


def ls(cache: Folder = None, json: given.Json = False) -> None:
    """List artifacts, the most recently used first.

    \b
    dgraph cache ls
    """
    from dgraph.cache.upkeep import entries

    store = open_cache(cache)
    found = entries(store)
    if json:
        total = sum(e.size for e in found)
        facts = {"path": str(store.root), "size": total, "limit": store.limit}
        print_json({**facts, "artifacts": [_facts(e) for e in found]})
    elif not found:
        print_text(f"{store.root} is empty")
    else:
        rows = [(_name(e), size_text(e.size), ago(e.used), *_where(e), e.what) for e in found]
        print_table(("artifact", "size", "used", "torch", "device", "what"), rows)


def show(
    name: Name,
    full: Annotated[bool, typer.Option("--full", help="Show every setting of Inductor.")] = False,
    cache: Folder = None,
    json: given.Json = False,
) -> None:
    """Show what an artifact depends on, and its files.

    \b
    dgraph cache show 3f9c
    """
    from dgraph.cache.key import SETTINGS, Key
    from dgraph.cache.upkeep import entry

    found = entry(open_cache(cache), name)
    if json:
        kind = found.key.inputs.get("kind")
        chosen = {"choices": _choices(found)} if kind == "tuning" else {}
        compiled = {"kernels": _kernels(found)} if kind == "kernels" else {}
        print_json({**_facts(found), "key": dict(found.key.inputs), **chosen, **compiled})
        return
    for title, text in (
        ("artifact", found.digest),
        ("folder", str(found.folder)),
        ("created", date(found.created)),
        ("used", date(found.used)),
        ("files", ", ".join(f"{file} ({size_text(size)})" for file, size in _files(found).items())),
    ):
        OUT.print(f"{title:<9} {text}")
    inputs = dict(found.key.inputs)
    if SETTINGS in inputs and not full:
        inputs[SETTINGS] = f"{len(inputs[SETTINGS].splitlines())}, see --full"
    print_text(f"\n{Key(inputs).text}")
    if inputs.get("kind") == "tuning":
        _print_choices(_choices(found))
    elif inputs.get("kind") == "kernels":
        rows = [(name, str(len(sizes)), size_text(sum(sizes))) for name, sizes in sorted(_kernels(found).items())]
        print_table(("kernel", "specialisations", "code"), rows)


def why(
    before: Name,
    after: Name,
    full: Annotated[bool, typer.Option("--full", help="Show every line of long differences.")] = False,
    cache: Folder = None,
    json: given.Json = False,
) -> None:
    """Say why two artifacts are not the same one: what of all that they depend on differs.

    \b
    dgraph cache why 3f9c 77ab
    """
    from dgraph.cache.key import differences
    from dgraph.cache.upkeep import entry

    store = open_cache(cache)
    a, b = entry(store, before), entry(store, after)
    found = differences(a.key, b.key)
    if json:
        print_json(
            {"before": a.digest, "after": b.digest, "differ": [{"input": d.name, "lines": d.lines} for d in found]}
        )
        return
    lines = [f"{len(found)} of {len({**a.key.inputs, **b.key.inputs})} inputs differ"]
    for difference in found:
        shown = difference.lines if full else difference.lines[:LINES]
        more = len(difference.lines) - len(shown)
        lines += ["", f"@@ {difference.name}", *shown, *([f"... {more} more lines, see --full"] if more else [])]
    print_listing("\n".join(lines) + "\n")


def verify(names: Names = None, cache: Folder = None, json: given.Json = False) -> None:
    """Check every byte of artifacts; a damaged one is set aside. Exit code 1 if there was one.

    \b
    dgraph cache verify
    """
    from dgraph.cache.upkeep import check

    store = open_cache(cache)
    chosen = named(store, names)
    with status("checking") as tell:
        results = []
        for i, found in enumerate(chosen):
            tell(f"checking {i + 1} of {len(chosen)}")
            results.append((found, check(store, found)))
    damaged = [(e, reason) for e, reason in results if reason]
    if json:
        facts = [{"artifact": e.digest, "reason": reason} for e, reason in damaged]
        print_json({"ok": not damaged, "checked": len(results), "damaged": facts})
    else:
        for e, reason in damaged:
            OUT.print(f"{e.digest[:SHOWN]}  damaged, set aside: {reason}")
        OUT.print(f"{len(results) - len(damaged)} of {len(results)} artifacts are intact")
    if damaged:
        raise typer.Exit(1)


def path(json: given.Json = False) -> None:
    """Print the folder of the user's cache. DGRAPH_CACHE changes it.

    \b
    dgraph cache path
    """
    from dgraph.cache.place import default_folder

    folder = default_folder()
    if json:
        print_json({"path": str(folder), "exists": folder.exists()})
    else:
        print_text(str(folder))


app = typer.Typer(help="List, check, export and import compiled artifacts.", no_args_is_help=True)
app.command("ls")(ls)
app.command("show")(show)
app.command("why")(why)
app.command("verify")(verify)
app.command("gc")(cache_change.gc)
app.command("rm")(cache_change.rm)
app.command("export")(cache_change.export)
app.command("import")(cache_change.import_)
app.command("path")(path)


def _facts(found: Entry) -> dict[str, Any]:
    torch, device = _where(found)
    facts = {
        "artifact": found.digest,
        "what": found.what,
        "torch": torch,
        "device": device,
        "folder": str(found.folder),
    }
    times = {"created": found.created, "used": found.used}
    return {**facts, "size": found.size, **times, "damaged": found.damaged, "files": _files(found)}


def _choices(found: Entry) -> list[dict[str, Any]]:
    """Choices in an entry of kind "tuning", as `dgraph.ops.tuning.Choice.to_json` wrote them.

    Raises:
        CacheError: the entry is damaged.
    """
    import json

    from dgraph.lowering.tuning import FILE

    return _content(found, FILE, lambda content: json.loads(content)["choices"])


def _kernels(found: Entry) -> dict[str, list[int]]:
    """Kernels in an entry of kind "kernels": by name, the bytes of code of each specialisation.

    Raises:
        CacheError: the entry is damaged.
    """
    from dgraph.lowering.kernels import FILE, names_of

    return _content(found, FILE, names_of)


def _content(found: Entry, file: str, read: Callable[[bytes], T]) -> T:
    from dgraph.cache import artifact
    from dgraph.errors import CacheError

    try:
        return read(artifact.read(found.folder, found.digest).files[file])
    except (artifact.Damaged, OSError, KeyError, ValueError) as error:
        raise CacheError(f"artifact {found.digest[:SHOWN]} is damaged: {error}; run dgraph cache verify.") from None


def _print_choices(choices: list[dict[str, Any]]) -> None:
    """Print the tiling of each shape, its time and the default's; then the tilings that could not be timed, and why."""
    from dgraph.ops.tuning import text_of

    def micro(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.1f}"

    rows = []
    for choice in choices:
        took, default = choice["seconds"], choice["default_seconds"]
        gain = f"{default / took:.2f}" if took and default else "-"
        rows.append(
            (
                text_of(choice["shape"]),
                micro(took),
                micro(default),
                gain,
                str(choice["tried"]),
                text_of(choice["tiling"]),
            )
        )
    print_table(("shape", "us", "default us", "gain", "timed", "tiling"), rows)
    failed = dict.fromkeys(
        f"not timed: {tiling}: {reason}" for choice in choices for tiling, reason in choice["failed"]
    )
    if failed:
        print_text("\n" + "\n".join(failed))


def _files(found: Entry) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in sorted(found.folder.iterdir())}


def _where(found: Entry) -> tuple[str, str]:
    inputs = found.key.inputs
    # A compiled kernel does not depend on torch.
    torch, device = inputs.get("torch", "-" if inputs else "?").split(" ")[0], inputs.get("device", "?")
    return torch, inputs.get("device name", device).partition(",")[0]


def _name(found: Entry) -> str:
    return found.digest[:SHOWN] + (" damaged" if found.damaged else "")
