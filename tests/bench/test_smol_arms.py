"""The arms of the tables of converted models: each names what there is, and they are run in order and in time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.smol_arms import ARMS, Asking, main
from dgraph import cli

SCRIPT = """
import sys, time
what, out = sys.argv[1], sys.argv[-1]
open(out, "a").write(what)
print("said", what)
time.sleep(60 if what == "long" else 0)
sys.exit(3 if what == "wrong" else 0)
"""


@pytest.mark.parametrize("model", ARMS)
def test_every_arm_names_recipes_rules_and_tasks_that_there_are(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `dgraph eval` looks at before the device."""
    for name, options in ARMS[model].items():
        monkeypatch.setattr(sys, "argv", ["dgraph", "eval", model, "--device", "nowhere", *options.split()])
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().err.startswith("error: device 'nowhere' cannot be used"), name


def test_what_fails_and_what_is_left_is_named(tmp_path: Path) -> None:
    over: list[tuple[str, int]] = []
    asking = Asking(
        [sys.executable, "-c", SCRIPT], tmp_path, [{}], tell=lambda name, status: over.append((name, status))
    )
    asking.run({"b": "fine", "a": "wrong", "c": "last"})
    assert over == [("b", 0), ("a", 3), ("c", 0)], "in their order"
    assert (asking.failed, asking.late) == (["a"], [])
    assert (tmp_path / "a.jsonl").read_text() == "wrong"
    assert (tmp_path / "c.log").read_text() == "said last\n"


def test_what_there_is_no_time_for_is_ended_or_not_begun(tmp_path: Path) -> None:
    began = time.monotonic()
    asking = Asking([sys.executable, "-c", SCRIPT], tmp_path, [{}], until=began + 3)
    asking.run({"first": "long", "second": "fine"})
    assert time.monotonic() - began < 30
    assert (asking.failed, asking.late) == ([], ["first", "second"])
    assert not (tmp_path / "second.jsonl").exists()


def test_an_unknown_arm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["smol_sdar", "--out", str(tmp_path / "out"), "--only", "nothing"])
    assert "nothing is none of facts, facts-sequential" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
