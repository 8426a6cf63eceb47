"""The README's code runs as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dgraph import passes, plugins, recipes
from dgraph.engine import policies as schedulers
from dgraph.models import smol
from dgraph.plans import rows
from dgraph.runtime import policies

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "openai" not in code]
"""Those that need no server; the others are run in tests/serve."""


@pytest.mark.parametrize(
    "code", BLOCKS, ids=["start", "in English", "quantised weights", "decoding rules", "serve", "add a pass"]
)
def test_python_blocks_run_and_answer(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    english = "smol_sdar" in code
    if english and (lacking := smol.missing()):
        pytest.skip(f"needs {' and '.join(lacking)}: pip install 'dgraph[smol]'")
    exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "__readme__"})
    assert capsys.readouterr().out.startswith("The capital of France is Paris" if english else "Sorted: ")


def test_the_gate_runs_the_readme_s_test_command() -> None:
    install, test = re.search(r"(pip install -e '\.\[test\]') && \S*(python -m pytest.*)", README).groups()  # type: ignore[union-attr]
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert test in gate
    assert install.removeprefix("pip install") in gate


def test_the_package_s_entry_points_are_those_that_are_read() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
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
    assert set(own) <= set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))


def test_images_are_there_and_light() -> None:
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", README)
    sizes = {name: (ROOT / name).stat().st_size for pair in images for name in filter(None, pair)}
    assert sizes
    assert all(size <= 150_000 for size in sizes.values())


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing
