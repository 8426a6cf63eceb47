"""Open text: documentation and functions from installed Python packages that carry a free licence.

Each passage is one function, one docstring or one paragraph group. The package's own metadata must name only
licences of `ALLOWED`; vendored copies (which carry their own terms) and tests are left out. Every package that gave
text is recorded with version, licence and bytes, for the model card.

    python -m training.corpus OUT      writes OUT/corpus.jsonl.gz and OUT/sources.json
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import importlib.metadata
import json
import random
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ALLOWED = frozenset(
    ["0BSD", "APACHE-2.0", "BSD-2-CLAUSE", "BSD-3-CLAUSE", "BSD", "BSL-1.0", "CC0-1.0", "ISC", "MIT", "PSF-2.0", "ZLIB"]
)
"""Licences a package may name, in upper case; BSD stands for one that does not say which clause count."""

CLASSIFIERS = {
    "Apache Software License": "APACHE-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
FREE_TEXT = {"apache 2.0 license": "APACHE-2.0", "apache-2.0": "APACHE-2.0", "bsd": "BSD", "mit": "MIT"}

SKIPPED_FOLDERS = frozenset(
    [
        "_vendor",
        "_vendored",
        "vendored",
        "extern",
        "third_party",
        "site-packages",
        "test",
        "tests",
        "testing",
        "idlelib",
        "lib2to3",
    ]
)
"""Folders left out: vendored code, which carries its own terms, and tests."""
SHORTEST, LONGEST = 160, 1800
"""Characters in a passage."""

HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Source:
    """A package that gave text: its name, version, licence as its metadata states it, and bytes taken."""

    package: str
    version: str
    licence: str
    bytes: int
    passages: int


def is_held_out(text: str) -> bool:
    """True if this passage belongs to the held-out set; a function of its text alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def free_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The licence of a package if every one its metadata names is allowed, else None."""
    expression, written = ((metadata.get_all(field) or [""])[0] for field in ("License-Expression", "License"))
    if expression:
        terms = re.split(r"\s+(?:AND|OR)\s+|[()]", expression.upper().replace(" WITH LLVM-EXCEPTION", ""))
        return expression if all(term.strip() in ALLOWED for term in terms if term.strip()) else None
    if known := FREE_TEXT.get(written.strip().lower()):
        return known
    names = [c.rpartition("::")[2].strip() for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    found = [CLASSIFIERS.get(name) for name in names]
    return " AND ".join(sorted({f for f in found if f})) if found and all(found) else None


def package_files() -> Iterator[tuple[str, str, str, list[Path]]]:
    """Yield (package, version, licence, text files) of the standard library and of every freely licensed package."""
    library = Path(sysconfig.get_paths()["stdlib"])
    version = ".".join(map(str, sys.version_info[:3]))
    yield (
        "python",
        version,
        "PSF-2.0",
        [p for p in sorted(library.rglob("*.py")) if _wanted(p.relative_to(library))],
    )
    for distribution in sorted(importlib.metadata.distributions(), key=lambda d: (d.metadata["Name"] or "").lower()):
        licence = free_licence(distribution.metadata)
        if licence is None or distribution.metadata["Name"] == "dgraph":
            continue
        files = [Path(str(f.locate())) for f in distribution.files or [] if _wanted(Path(str(f)))]
        yield (
            distribution.metadata["Name"],
            distribution.version,
            licence,
            sorted(f for f in files if f.is_file()),
        )


def passages(path: Path) -> Iterator[str]:
    """Yield the passages of one file: functions and docstrings of Python code, paragraph groups of other text."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    found = _python_passages(text) if path.suffix == ".py" else _paragraphs(text)
    for passage in found:
        passage = "\n".join(line.rstrip() for line in passage.strip("\n").splitlines())
        if passage.isascii() and passage.count("\n") >= 2 and len(passage) >= SHORTEST:
            yield passage


def collect(limit_per_package: int, limit: int, seed: int = 0) -> tuple[list[tuple[str, str]], list[Source]]:
    """Gather (package, passage) pairs without duplicates, shuffled, and the record of what went in.

    At most `limit_per_package` characters are taken from one package and `limit` in all, the passages of a
    package chosen at random by `seed`.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    rows: list[tuple[str, str]] = []
    versions: dict[str, tuple[str, str]] = {}
    for package, version, licence, files in package_files():
        versions[package] = (version, licence)
        found = []
        for passage in (p for path in files for p in passages(path)):
            if passage not in seen:
                seen.add(passage)
                found.append(passage)
        rng.shuffle(found)
        rows += [(package, passage) for passage in _take(found, limit_per_package)]
    rng.shuffle(rows)
    kept = set(_take((passage for _, passage in rows), limit))
    rows = [row for row in rows if row[1] in kept]
    sources = []
    for package, (version, licence) in versions.items():
        texts = [passage for name, passage in rows if name == package]
        if texts:
            sources.append(Source(package, version, licence, sum(map(len, texts)), len(texts)))
    return rows, sources


def write(folder: Path, rows: list[tuple[str, str]], sources: list[Source]) -> None:
    """Write corpus.jsonl.gz ({"package", "text"} per line) and sources.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(folder / "corpus.jsonl.gz", "wb", mtime=0) as file:
        for package, text in rows:
            file.write((json.dumps({"package": package, "text": text}) + "\n").encode())
    (folder / "sources.json").write_text(json.dumps([asdict(s) for s in sources], indent=1) + "\n")


def read(folder: Path, package: str | None = None) -> tuple[list[str], list[str]]:
    """Training and held-out passages of a folder made by `write`, of one package if it is named."""
    with gzip.open(folder / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["text"] for row in rows if package in (None, row["package"])]
    return [t for t in texts if not is_held_out(t)], [t for t in texts if is_held_out(t)]


def _wanted(path: Path) -> bool:
    if path.suffix not in {".py", ".md", ".rst", ".txt"} or SKIPPED_FOLDERS & set(path.parts):
        return False
    return not any(part.endswith((".dist-info", ".egg-info")) or part.startswith("plat-") for part in path.parts)


def _take(texts: Iterable[str], limit: int) -> Iterator[str]:
    total = 0
    for text in texts:
        total += len(text)
        if total > limit:
            return
        yield text


def _python_passages(text: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source) <= LONGEST:
                yield source
            elif docstring := ast.get_docstring(node):
                yield from _paragraphs(docstring)
        elif isinstance(node, ast.Module | ast.ClassDef) and (docstring := ast.get_docstring(node)):
            yield from _paragraphs(docstring)


def _paragraphs(text: str) -> Iterator[str]:
    """Groups of paragraphs of at most LONGEST characters; a longer paragraph is dropped."""
    group = ""
    for paragraph in re.split(r"\n\s*\n", text):
        joined = f"{group}\n\n{paragraph}" if group else paragraph
        if len(joined) <= LONGEST:
            group = joined
        else:
            yield group
            group = paragraph if len(paragraph) <= LONGEST else ""
    yield group


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-per-package", type=int, default=6_000_000, help="characters taken from one package")
    parser.add_argument("--limit", type=int, default=48_000_000, help="characters in all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows, sources = collect(args.limit_per_package, args.limit, args.seed)
    write(args.out, rows, sources)
    print(f"{len(rows)} passages, {sum(s.bytes for s in sources)} characters, {len(sources)} packages")


if __name__ == "__main__":
    main()
