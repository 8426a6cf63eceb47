"""Self-contained pages: what they take along, what they let run, and colours that can be told apart."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dgraph.viewer import FILES, Run, Step, Token, page, page_of
from tests.viewer.made import made

ROOT = Path(__file__).parents[2]
LOOK = (FILES / "look.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"(--[\w-]+): (#\w{6});", part)) for part in LOOK.split("@media (prefers-color-scheme: dark)")
)


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_as_plain_values_has_all_that_it_is_made_of() -> None:
    run = made()
    found = json.loads(json.dumps(run.to_json()))
    assert found["version"] == 1
    assert set(found) == {"version", *(field.name for field in fields(Run))}
    assert set(found["steps"][0]) == {field.name for field in fields(Step)}
    assert set(found["tokens"][0]) == {field.name for field in fields(Token)}
    assert None in found["steps"][0]["tokens"]
    assert found["steps"][0]["token_ids"][found["steps"][0]["tokens"].index(None)] == -1


# -- one file ------------------------------------------------------------------------------------------------------


def test_the_page_of_runs_brings_its_scripts_once_and_nothing_to_load() -> None:
    found = page_of([made()])
    (script,) = re.findall(r'<script type="module">(.*?)</script>', found, flags=re.DOTALL)
    assert not re.search(r"^(import|export)\b", script, flags=re.MULTILINE)
    for name in ("Film", "Canvas", "Strip", "Viewer"):
        assert len(re.findall(rf"^class {name} ", script, flags=re.MULTILINE)) == 1
    names = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", script, flags=re.MULTILINE)
    assert len(names) == len(set(names)), "modules that are joined have no name in common"
    assert not re.search(r"\b(src|href)=", found)
    assert "http" not in found.replace("http-equiv", "")


def test_the_policy_of_a_page_names_its_own_style_and_script_alone() -> None:
    found = page_of([made()])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', found)
    (style,) = re.findall(r"<style>(.*?)</style>", found, flags=re.DOTALL)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', found, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert policy == f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'"


def test_no_text_ends_the_data_of_a_page() -> None:
    told = "</script><script>alert(1)</script><!-- \u2028 &amp;"
    found = page("a <b>", "", styles=("look.css",), data={"runs": {"told": told}})
    (data,) = re.findall(r'<script type="application/json" id="runs">(.*?)</script>', found, flags=re.DOTALL)
    assert json.loads(data) == {"told": told}
    assert "<" not in data
    assert "<title>a &lt;b&gt;</title>" in found
    assert "script-src" not in found


def test_the_files_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["dgraph.viewer.files"]
    installed = {path for glob in globs for path in FILES.glob(glob)}
    assert set(FILES.rglob("*")) <= installed
    assert {"index.html", "app.js", "viewer.js", "look.css"} <= {p.name for p in installed}


def test_the_scripts_put_text_in_as_text() -> None:
    for script in FILES.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", script.read_text("utf-8")
        )
    index = (FILES / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=\"app.js\"></script>)", index)


# -- colours -------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """As WCAG 2.2 defines it, of `#rrggbb`."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(colour: str, share: float, ground: str) -> str:
    parts = ((int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(scheme: dict[str, str]) -> None:
    texts = ("ink", "faint", "strong", "wrong", "added", "removed", "cut", *(f"rows-{i}" for i in range(5)))
    for ground in ("paper", "raised"):
        for text in texts:
            assert contrast(scheme[f"--{text}"], scheme[f"--{ground}"]) >= 4.5, (text, ground)
    assert contrast(scheme["--on-strong"], scheme["--strong"]) >= 4.5


def test_tokens_can_be_read_in_every_shade() -> None:
    share = re.search(
        r"color-mix\(in srgb, var\(--shade, transparent\) (\d+)%", (FILES / "viewer.css").read_text("utf-8")
    )
    assert share is not None
    for i in range(8):
        assert contrast(LIGHT["--ink"], LIGHT[f"--step-{i}"]) >= 4.5
        ground = mixed(DARK[f"--step-{i}"], int(share[1]) / 100, DARK["--raised"])
        assert contrast(DARK[f"--step-{i}"], ground) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_shades_follow_one_another_in_lightness_too(scheme: dict[str, str]) -> None:
    """So that who sees no hues, or prints the page in grey, can tell early from late."""
    found = [luminance(scheme[f"--step-{i}"]) for i in range(8)]
    assert found == sorted(found, reverse=found[0] > found[-1])
    assert max(found) / min(found) > 2.5
