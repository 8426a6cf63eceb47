"""A cluster of this machine, its processes, and clients that note how each of their requests went."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

WORDS = "Sort these words: river stone cloud maple"
WAIT = 300.0
"""Seconds after which a test gives up. Beside other work Ray took more than two minutes to start two actors."""


def processes(title: str) -> list[int]:
    """Ids of the processes below this one that Ray gave a title which begins so."""
    parents, found = {}, []
    for folder in Path("/proc").iterdir():
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_text().startswith(title):
                found.append(int(folder.name))
        except (ValueError, OSError):
            continue
    return [each for each in found if _is_below(each, os.getpid(), parents)]


def _is_below(process: int, top: int, parents: dict[int, int]) -> bool:
    while process > 1 and process != top:
        process = parents.get(process, 0)
    return process == top


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.1)


def access_log(folder: Path, process: int) -> dict[str, dict[str, object]]:
    """What a replica logged of each request, by the id of it."""
    lines = [line for path in folder.glob(f"worker-*-{process}.err") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines if line.startswith('{"time": ')]
    return {line["request_id"]: line for line in found}


@dataclass
class Stream:
    """How a request went.

    Attributes:
        id: of it, which the server was told.
        began: on the monotonic clock.
        whole: whether all of the answer came.
        why: what else happened.
    """

    id: str
    began: float
    whole: bool = False
    why: str = ""


async def stream(client: httpx.AsyncClient, id: str, tokens: int = 24) -> Stream:
    """Ask for a stream."""
    found = Stream(id, time.monotonic())
    body = {"prompt": WORDS, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": id}) as answer:
            text = (await answer.aread()).decode()
        found.whole = answer.status_code == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text
        found.why = "" if found.whole else f"{answer.status_code} {text[-200:]}"
    except httpx.HTTPError as error:
        found.why = repr(error)
    return found


async def crowd(url: str, count: int, clients: int, after: Callable[[int], Awaitable[None]]) -> list[Stream]:
    """So many streams, of so many clients at a time; `after` is told how many have ended."""
    numbers, found = iter(range(count)), list[Stream]()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT, limits=limits) as client:

        async def ask() -> None:
            for number in numbers:
                found.append(await stream(client, f"stream-{number}"))
                await after(len(found))

        await asyncio.gather(*(ask() for _ in range(clients)))
    return found
