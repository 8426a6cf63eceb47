"""Replicas on Ray under load: killed, full, left by a client, coming and going; and the command."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.ray.cluster import WAIT, WORDS, access_log, crowd, processes, stream, wait_for
from tests.ray.conftest import Cluster, Deploy
from tests.serve.asking import SORTED, chat, refused

pytestmark = [pytest.mark.release, pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def replicas(app: str) -> list[int]:
    return processes(f"ray::ServeReplica:{app}:")


def test_a_replica_that_is_killed_fails_its_own_clients_alone(cluster: Cluster, deploy: Deploy) -> None:
    url = deploy("killed", replicas=2, engine={"max_sequences": 4, "max_tokens": 256})
    first, second = replicas("killed")
    killed_at = []

    async def kill(done: int) -> None:
        if done == 60:
            os.kill(first, signal.SIGKILL)
            killed_at.append(time.monotonic())

    streams = asyncio.run(crowd(url, 200, 16, kill))
    failed = [each for each in streams if not each.whole]
    served = {process: access_log(cluster.logs, process) for process in (first, second)}
    assert 0 < len(failed) <= 16
    assert [each for each in failed if each.began > killed_at[0]] == []
    assert all(each.id not in served[second] for each in failed)
    assert served[first]
    assert all(line["finish"] == ["length"] for line in served[second].values() if "finish" in line)
    wait_for(lambda: len(replicas("killed")) == 2)


def test_a_replica_without_room_says_so_and_one_whose_client_left_has_room_again(
    cluster: Cluster, deploy: Deploy
) -> None:
    engine = {"max_sequences": 1, "max_tokens": 1024, "queue": 1}
    url = deploy("small", replicas=1, engine=engine, server={"api_keys": ["key"]})
    (process,) = replicas("small")
    slow = {"threshold": 1.0, "ignore_eos": True, "return_step_map": True}  # a token a step, and told of at once
    long = {"prompt": WORDS, "stream": True, "max_tokens": 1000, **slow}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT) as client:
            refused(await client.post("/v1/completions", json=long), 401)
            client.headers["authorization"] = "Bearer key"
            leaving = client.stream("POST", "/v1/completions", json=long, headers={"x-request-id": "leaves"})
            async with leaving as answer:
                await anext(answer.aiter_text())
                short = {**long, "stream": False, "max_tokens": 4}
                answers = [client.post("/v1/completions", json=short) for _ in range(8)]
                asked = [asyncio.create_task(answer) for answer in answers]
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                while sum(one.done() for one in asked) < 7:
                    await asyncio.sleep(0.01)
            found = [await one for one in asked]
            assert (await client.post("/v1/completions", json=short)).status_code == 200
            return found

    answers = asyncio.run(run())
    wait_for(lambda: "leaves" in access_log(cluster.logs, process))
    line = access_log(cluster.logs, process)["leaves"]
    assert line["status"] == 200
    assert int(str(line["completion_tokens"])) > 0
    # The engine does not wait for who reads slowly: where the long one ends meanwhile, several find room, one by one.
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert refused(answer, 503)["code"] == "busy"
            assert int(answer.headers["retry-after"]) >= 1


def test_replicas_come_and_go_with_the_load_and_no_request_is_dropped(deploy: Deploy) -> None:
    quick = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 1, "metrics_interval_s": 0.5}
    url = deploy(
        "scaled",
        autoscaling={"min_replicas": 1, "max_replicas": 2, **quick},
        engine={"max_sequences": 2, "max_tokens": 512},
    )
    counts = [len(replicas("scaled"))]

    async def run() -> list[bool]:
        whole, clients = list[bool](), 12
        async with httpx.AsyncClient(base_url=url, timeout=WAIT) as client:

            async def ask(number: int) -> None:
                while number < clients:
                    found = await stream(client, f"scaled-{number}-{len(whole)}", tokens=48)
                    whole.append(found.whole)

            async def until(count: int) -> None:
                async with asyncio.timeout(WAIT):
                    while len(replicas("scaled")) != count:
                        await asyncio.sleep(0.2)
                counts.append(count)

            tasks = [asyncio.create_task(ask(number)) for number in range(clients)]
            await until(2)
            await asyncio.sleep(3)  # with both
            clients = 1
            await until(1)
            clients = 0
            await asyncio.gather(*tasks)
        return whole

    whole = asyncio.run(run())
    assert counts == [1, 2, 1]
    assert len(whole) > 20
    assert all(whole)


def test_ranks_of_a_replica_share_its_model_and_one_that_is_lost_ends_it(deploy: Deploy) -> None:
    url = deploy("ranks", replicas=1, tp=2, engine={"max_sequences": 2}, ray_actor_options={"num_cpus": 1})
    (other,) = processes("ray::Rank.follow")
    (first,) = replicas("ranks")
    with httpx.Client(base_url=url, timeout=WAIT) as client:
        assert chat(client).json()["choices"][0]["message"]["content"] == SORTED
        os.kill(other, signal.SIGKILL)
        wait_for(lambda: first not in replicas("ranks") and bool(replicas("ranks")))
        wait_for(lambda: chat(client).status_code == 200)
        assert chat(client).json()["choices"][0]["message"]["content"] == SORTED


def test_from_the_command_to_the_signal() -> None:
    """A cluster of its own; a stream that runs when the signal comes is whole."""
    command = ["serve", "--ray", "--replicas", "1", "--port", "0", "--backend", "eager", "--served-model-name", "mine"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dgraph", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"dgraph serves mine at (http://127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert found is not None
        slow = {"threshold": 1.0, "ignore_eos": True, "return_step_map": True}
        body = {"prompt": WORDS, "stream": True, "max_tokens": 64, **slow}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=WAIT) as answer:
            text = answer.iter_text()
            pieces = [next(text)]
            process.send_signal(signal.SIGTERM)
            pieces += text
        assert "".join(pieces).endswith("data: [DONE]\n\n")
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
