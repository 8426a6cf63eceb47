"""benchmarks.startup: which arms it takes, before the first of them is timed for minutes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import startup

RUN = {"seconds": dict.fromkeys(startup.PARTS, 1.0), "busy": 2.0, **dict.fromkeys(startup.COUNTS, 3)}


@pytest.mark.parametrize("arms", [["artifact cache"], ["artifact cache", "cold"]])
def test_arms_begin_with_the_one_that_fills_the_caches(
    arms: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "rounds", lambda *_: pytest.fail("nothing is to be timed"))
    monkeypatch.setattr(sys, "argv", ["startup", "--arms", *arms])
    with pytest.raises(SystemExit):
        startup.main()
    assert "--arms begins with 'cold'" in capsys.readouterr().err


def test_a_table_of_some_arms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def rounds(argv: list[str], weights: list[str], arms: list[str], repeat: int) -> dict[str, Any]:
        return {stored: {arm: [RUN] * repeat for arm in arms} for stored in weights}

    monkeypatch.setattr(startup, "rounds", rounds)
    monkeypatch.setattr(sys, "argv", ["startup", "--arms", "cold", "artifact cache", "--weights", "fp8"])
    startup.main()
    assert "fp8" in capsys.readouterr().out
