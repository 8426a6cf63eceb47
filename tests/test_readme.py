"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=["start", "decoding rules", "add a pass"])
def test_python_blocks_run_and_answer(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "__readme__"})
    assert capsys.readouterr().out.startswith("Sorted: ")


def test_the_gate_runs_the_readme_s_test_command() -> None:
    install, test = re.search(r"(pip install -e '\.\[test\]') && \S*(python -m pytest.*)", README).groups()  # type: ignore[union-attr]
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert test in gate
    assert install.removeprefix("pip install") in gate


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing
