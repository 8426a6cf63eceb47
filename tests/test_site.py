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
from dgraph.runtime.loop.step_inputs import STEP_INPUTS
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


def installed(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_the_site_builds_and_has_every_name(tmp_path: Path) -> None:
    """One test, so that the site is built once: every warning of mkdocs is an error, the reference has every part of
    the code, and the images of raw HTML, which mkdocs does not check, are there."""
    if lacking := [name for name in NEEDED if not installed(name)]:
        pytest.skip(f"needs {', '.join(lacking)}: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    commands = [f"dgraph {name}" for name in COMMANDS]
    own_ops = [name for name in OPS if "::" not in name]  # ops of other tests have a namespace
    for page, level, names in (
        ("recipes", 2, RECIPES),
        ("policies", 3, POLICIES),
        ("passes", 2, PASSES),
        ("ops", 2, own_ops),
        ("cli", 2, commands),
    ):
        text = (tmp_path / "reference" / f"{page}.html").read_text(encoding="utf-8")
        assert set(names) <= set(re.findall(rf"<h{level} id=\"[^\"]*\">(.*?)<a", text)), page

    inputs = (tmp_path / "reference" / "step-inputs.html").read_text(encoding="utf-8")
    assert STEP_INPUTS.keys() <= set(re.findall(r"<td><code>(\w+)</code></td>", inputs))

    assert "Commands of MaskKV" in (tmp_path / "papers.html").read_text(encoding="utf-8")

    images = [
        (page, target)
        for page in tmp_path.rglob("*.html")
        for target in re.findall(r"<img[^>]* src=\"([^\"]+)\"", page.read_text(encoding="utf-8"))
    ]
    assert images
    assert [each for each in images if "://" not in each[1] and not (each[0].parent / each[1]).exists()] == []


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


def test_every_variable_of_the_environment_has_a_row() -> None:
    files = [
        file
        for folder in ("benchmarks", "dgraph", "models", "tests", "training")
        for file in (ROOT / folder).rglob("*.py")
    ]
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
