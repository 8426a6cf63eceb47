"""The documentation site builds, has every part of the code, and its links lead somewhere; variables are all listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from dgraph.cache.place import LIMIT, parse_size
from dgraph.cli.app import COMMANDS
from dgraph.ops import OPS
from dgraph.passes import PASSES
from dgraph.recipes import RECIPES
from dgraph.runtime.policies import POLICIES

ROOT = Path(__file__).parent.parent
VARIABLES = (ROOT / "docs" / "reference" / "environment-variables.md").read_text(encoding="utf-8")
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


def tool(name: str) -> ModuleType:
    """A module of docs/site, which is no package."""
    spec = util.spec_from_file_location(f"docs_site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := [name for name in NEEDED if not installed(name)]:
        pytest.skip(f"needs {', '.join(lacking)}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def installed(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("page", "level", "names"),
    [
        ("recipes", 2, RECIPES),
        ("policies", 3, POLICIES),
        ("passes", 2, PASSES),
        ("ops", 2, OPS),
        ("cli", 2, [f"dgraph {name}" for name in COMMANDS]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reference_has_every_name(site: Path, page: str, level: int, names: list[str]) -> None:
    text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
    titles = re.findall(rf"<h{level} id=\"[^\"]*\">(.*?)<a", text)
    own = [name for name in names if "::" not in name]  # ops of other tests have a namespace
    assert set(own) <= set(titles)


def test_links_of_html_lead_somewhere(site: Path) -> None:
    """Links that mkdocs does not check: those of raw HTML and of drawings."""
    missing = []
    for page in site.rglob("*.html"):
        for target in re.findall(r"<(?:img|source)[^>]* src=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                missing.append((page.name, target))
    assert missing == []


def test_links_become_places_of_the_site() -> None:
    repository = tool("repository").Repository(ROOT)
    text = "[a](../../README.md) [b](../models.md#files) [c](https://x.org/y) [d](#e) ![f](../page-dark.webp)\n"
    text += "```\n[g](../../pyproject.toml)\n```\n[h](../../benchmarks/RESULTS.md) [i](../../pyproject.toml) "
    text += "[j](../../models)"
    assert repository.relink(text, "guides/serve.md") == (
        "[a](../readme.md) [b](../models.md#files) [c](https://x.org/y) [d](#e) ![f](../page-dark.webp)\n"
        "```\n[g](../../pyproject.toml)\n```\n[h](../results/index.md) [i](../source/pyproject.toml.md) "
        "[j](../source/models/index.md)"
    )
    with pytest.raises(FileNotFoundError, match=r"docs/guides/serve.md links to ../no.md"):
        repository.relink("[k](../no.md)", "guides/serve.md")


def test_an_entry_of_several_names_is_that_of_each() -> None:
    def documented() -> None:
        """Do it.

        Args:
            heads, kv_heads: sizes, of
                most layers.
            scale: a factor: 1 for none.

        Raises:
            InputError: no.
        """

    entries = tool("prose").entries(documented)
    assert entries == {
        "heads": "sizes, of most layers.",
        "kv_heads": "sizes, of most layers.",
        "scale": "a factor: 1 for none.",
    }


def test_every_variable_of_the_environment_has_a_row() -> None:
    files = [file for folder in ("benchmarks", "dgraph", "models", "tests", "training") for file in (ROOT / folder).rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    own = {name for text in texts.values() for name in re.findall(r"\bDGRAPH_[A-Z_]*[A-Z]\b", text)}
    read = re.compile(r"os\.environ(?:\.get\(|\[)\"([A-Z]\w+)\"(?!\] =)")
    others = {name for file, text in texts.items() if ROOT / "dgraph" in file.parents for name in read.findall(text)}
    rows = re.findall(r"^\| (`.*?) \|", VARIABLES, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for name in listed if name.startswith("DGRAPH_")} == own
    assert others <= listed


def test_the_limit_of_the_cache_is_the_one_that_is_told() -> None:
    (size,) = re.findall(r"`DGRAPH_CACHE_SIZE` \| (\w+) \|", VARIABLES)
    assert parse_size(size, "DGRAPH_CACHE_SIZE") == LIMIT
