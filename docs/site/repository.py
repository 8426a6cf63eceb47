"""Pages of the site and files of the repository: which becomes which, and how links between them are written."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

RESULTS = "results/index.md"
OUTSIDE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": RESULTS,
}
"""Pages that stand outside docs/, by path, and their places in the site."""

LINK = re.compile(r"(?:(?<=\]\()|(?<=src=\"))[^)\s#\"]+")
CODE = re.compile(r"^(```|~~~).*?^\1", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yaml": "yaml", ".json": "json"}
IMAGES = (".png", ".svg", ".webp")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


class Repository:
    """The files of a repository as a site shows them.

    Args:
        root: its folder.
    """

    def __init__(self, root: Path):
        self.root = root

    @cached_property
    def pages(self) -> dict[str, str]:
        """Paths of the pages outside docs/, by place in the site."""
        results = sorted((self.root / "benchmarks" / "results").glob("*.md"))
        return {uri: path for path, uri in OUTSIDE.items()} | {
            f"results/{page.name}": f"benchmarks/results/{page.name}" for page in results
        }

    def results(self) -> list[str]:
        """Places of the pages of results, by name."""
        return sorted(uri for uri, path in self.pages.items() if path.startswith("benchmarks/results/"))

    def text(self, uri: str) -> str:
        """Text of a page from outside docs/."""
        return (self.root / self.pages[uri]).read_text(encoding="utf-8")

    def path(self, uri: str) -> str:
        """Path in the repository of a page of the site."""
        return self.pages.get(uri, f"docs/{uri}")

    def uri(self, path: str) -> str:
        """Place in the site of a path in the repository."""
        for uri, own in self.pages.items():
            if own == path:
                return uri
        file = self.root / path
        if path.startswith("docs/") and file.is_file() and file.suffix != ".py":
            return path.removeprefix("docs/")
        if file.suffix in IMAGES:
            return f"source/{path}"
        return f"source/{path}/index.md" if file.is_dir() else f"source/{path}.md"

    def resolve(self, uri: str, target: str) -> str | None:
        """Path in the repository that a link of a page leads to; None if it leads elsewhere.

        Raises:
            FileNotFoundError: the repository has no such file.
        """
        if re.match(r"[a-z]+:", target) or uri.startswith("source/"):
            return None
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.path(uri)), target))
        if not (self.root / path).exists():
            raise FileNotFoundError(f"{self.path(uri)} links to {target}, which does not exist.")
        return path

    def relink(self, markdown: str, uri: str) -> str:
        """Text of a page whose links lead to places in the site."""

        def place(found: re.Match[str]) -> str:
            path = self.resolve(uri, found[0])
            return found[0] if path is None else posixpath.relpath(self.uri(path), posixpath.dirname(uri) or ".")

        return "".join(part if is_code else LINK.sub(place, part) for is_code, part in _parts(markdown))

    def source(self, path: str) -> str | bytes:
        """An image as it is; the page of another file, or of a folder: its files with the first line of each."""
        if Path(path).suffix in IMAGES:
            return (self.root / path).read_bytes()
        if (self.root / path).is_dir():
            rows = [f"| `{name}` | {said} |" for name, said in self._contents(path)]
            return "\n".join([f"{UNSEARCHED}# {path}/\n", "| file | |", "|---|---|", *rows, ""])
        language = LANGUAGES.get(Path(path).suffix, "text")
        text = (self.root / path).read_text(encoding="utf-8")
        return f'{UNSEARCHED}# {path}\n\n````{language} linenums="1"\n{text.rstrip()}\n````\n'

    def _contents(self, path: str) -> Iterator[tuple[str, str]]:
        """Names in a folder, and what the first line of their docstrings says."""
        for each in sorted((self.root / path).iterdir()):
            init = each / "__init__.py" if each.is_dir() else each
            if each.name.startswith(("_", ".")):
                continue
            said = ""
            if init.suffix == ".py" and init.exists():
                said = (ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            yield each.name + "/" * each.is_dir(), said.replace("|", "\\|")


def links_of(markdown: str) -> Iterator[str]:
    """Targets of the links and images of a page, without those in code."""
    for is_code, part in _parts(markdown):
        if not is_code:
            yield from LINK.findall(part)


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text of a page in order, divided into what stands in blocks of code and what does not."""
    start = 0
    for block in CODE.finditer(markdown):
        yield False, markdown[start : block.start()]
        yield True, block[0]
        start = block.end()
    yield False, markdown[start:]
