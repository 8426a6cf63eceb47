"""Former names of modules: each leads to the module itself, with a warning that names it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dgraph.errors import DgraphWarning
from dgraph.moved import MOVED


def test_every_former_name_is_the_present_module() -> None:
    for former, now in MOVED.items():
        module = importlib.import_module(now)
        sys.modules.pop(former, None)
        with pytest.warns(DgraphWarning, match=rf"the module {former} is {now} since version 0\.2"):
            assert importlib.import_module(former) is module
        assert module.__spec__ is not None
        assert module.__spec__.name == module.__name__ == now
        del sys.modules[former]


def test_the_warning_points_at_the_line_that_imports() -> None:
    lines = ("import warnings", "warnings.simplefilter('always')", "from dgraph.shapes import InputSpec")
    code = "\n".join((*lines, "print(InputSpec.__module__)"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "dgraph.types.shapes"
    assert "<string>:3: DgraphWarning: the module dgraph.shapes is dgraph.types.shapes" in done.stderr


def test_a_module_that_never_was_is_not_found() -> None:
    assert find_spec("dgraph.ir") is not None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dgraph\.graphs'"):
        importlib.import_module("dgraph.graphs")


RELEASED = json.loads((Path(__file__).parent / "released" / "names_0_1_0.json").read_text(encoding="utf-8"))
"""Public names of release 0.1, by the module that had them."""


@pytest.mark.filterwarnings("ignore::dgraph.errors.DgraphWarning")
@pytest.mark.parametrize("module", RELEASED)
def test_public_names_of_the_last_release_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in RELEASED[module] if not hasattr(found, name)] == []


def test_a_package_with_the_name_of_a_module_has_its_names() -> None:
    from dgraph.ops import rows
    from dgraph.ops.padded import sequence_of

    with pytest.warns(DgraphWarning, match=r"dgraph\.ops\.rows\.sequence_of is dgraph\.ops\.padded\.sequence_of"):
        assert rows.sequence_of is sequence_of
    with pytest.raises(AttributeError, match=r"'dgraph\.ops\.rows' has no attribute 'sequence_off'"):
        rows.sequence_off  # noqa: B018
