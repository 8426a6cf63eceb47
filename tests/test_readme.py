"""The code of the README and of the pages of docs runs as it stands there, and their links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dgraph import passes, plugins, recipes
from dgraph.engine.scheduling import schedulers
from dgraph.models import smol
from dgraph.plans import rows
from dgraph.runtime import policies

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in sorted(PAGES)}
PARTS = "docs/guides/write-a-pass.md"
BLOCKS = [
    pytest.param(code, id=f"{name} {place}")
    for name, text in TEXTS.items()
    if name
    not in ("docs/write_a_method.md", PARTS)  # a method whole, which tests/test_methods.py runs; parts of passes
    for place, code in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    if "openai" not in code  # tests/serve runs those that need a server
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_blocks_run_and_answer(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    english = "smol_sdar" in code
    if english and (lacking := smol.missing()):
        pytest.skip(f"needs {' and '.join(lacking)}: pip install 'dgraph[smol]'")
    exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "__readme__"})
    assert capsys.readouterr().out.startswith("The capital of France is Paris" if english else "Sorted: ")


def test_patterns_of_the_guide_meet_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    first, *parts = re.findall(r"```python\n(.*?)```", TEXTS[PARTS], flags=re.DOTALL)
    exec(compile(first, PARTS, "exec", dont_inherit=True), {"__name__": "__guide__"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [str(n), f"model.layers.{n}.mlp.gate_proj.weight"] for n in range(12)
    ]
    assert len(parts) == 2
    for part in parts:  # of a pass, whose graph and report they name
        compile(part, PARTS, "exec", dont_inherit=True)


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.encode()) <= 10_000


def test_the_gate_runs_the_readme_s_test_command() -> None:
    install, test = re.search(r"(pip install -e '\.\[test\]') && \S*(python -m pytest.*)", README).groups()  # type: ignore[union-attr]
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert test in gate
    assert install.removeprefix("pip install") in gate


def test_the_package_s_entry_points_are_those_that_are_read() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TEXTS["docs/guides/packages.md"], flags=re.DOTALL)
    groups = tomllib.loads(block)["project"]["entry-points"]
    assert set(groups) == {
        recipes.GROUP,
        policies.GROUP,
        passes.GROUP,
        rows.GROUP,
        plugins.OPS,
        schedulers.GROUP,
    }


def test_every_pass_has_a_row() -> None:
    own = [name for name in passes.PASSES if passes.PASSES[name].__module__.startswith("dgraph.")]
    assert set(own) <= set(re.findall(r"^\| `(\w+)` \|", TEXTS["docs/guides/recipes.md"], flags=re.MULTILINE))


@pytest.mark.parametrize("name", TEXTS)
def test_images_are_there_and_light(name: str) -> None:
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", TEXTS[name])
    sizes = [(ROOT / name).parent.joinpath(image).stat().st_size for pair in images for image in filter(None, pair)]
    assert all(size <= 150_000 for size in sizes)


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[name])
    folder = (ROOT / name).parent
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []
