"""Rows of a dataset as an actor answers them; without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dgraph.blueprint import Blueprint
from dgraph.errors import InputError, UnknownName
from dgraph.ray import Generate
from tests.engine.test_engine import Served
from tests.serve.live import Alphabet


def column(*values: Any) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_rows_come_back_in_their_order_with_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tokenizer=Alphabet())
    monkeypatch.setattr(Blueprint, "engines", lambda blueprint: {"fake": served.engine})
    actor = Generate("tiny_sdar", "dense", max_new_tokens=4, ignore_eos=True)
    turns = np.array([{"role": "user", "content": "abc"}], dtype=object)
    batch = {
        "name": np.array(["a", "b", "c", "d", "e"]),
        "index": np.arange(5),
        "prompt": column(np.array([1, 2, 3]), None, None, None, "abc"),
        "messages": column(None, turns, None, None, None),
        "line": column(None, None, '{"prompt": [1, 2, 3], "max_new_tokens": 2}', None, None),
        "max_new_tokens": column(None, 8, None, None, float("nan")),
    }

    async def twice() -> list[list[dict[str, Any]]]:
        async def all_of() -> list[dict[str, Any]]:
            return [dict(answers) async for answers in actor(batch)]

        return await asyncio.gather(all_of(), all_of())  # calls of one actor share its engine

    with served.engine:
        first, second = asyncio.run(twice())
    assert first == second
    (found,) = first
    assert found["name"] == ["a", "b", "c", "d", "e"]
    assert found["tokens"] == [4, 8, 2, 0, 4]
    assert found["finish_reason"] == ["length", "length", "length", "error", "length"]
    assert found["error"] == [None, None, None, "a line has either a prompt or messages", None]
    assert all(isinstance(text, str) for text in (*found["text"][:3], found["text"][4]))


def test_what_no_actor_can_be_is_refused_where_it_is_built() -> None:
    with pytest.raises(UnknownName, match="max_tokens"):
        Generate("tiny_sdar", max_tokens=4)
    with pytest.raises(InputError, match="device cannot be set beside a Blueprint"):
        Generate(Blueprint(model="tiny_sdar"), device="cpu")
    with pytest.raises(InputError, match="under one recipe, got 2"):
        Generate(Blueprint(model="tiny_sdar", recipes=("focus", "dense")))
