"""Requests, and streams as lists of chunks."""

from __future__ import annotations

import json
from typing import Any

import httpx

WORDS = "Sort these words: river stone cloud maple"
SORTED = "Sorted: cloud maple river stone #### cloud"


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must be whole and end as streams do."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def chat(http: httpx.Client, content: str = WORDS, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields})


def complete(http: httpx.Client, prompt: Any = WORDS, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, **fields})


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a request that was refused."""
    assert response.status_code == status, response.text
    found = response.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert "/work" not in response.text
    return dict(found["error"])
