"""What comes with the server: the page's examples, the dashboard, the container, the unit."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dgraph.cli.app import Imported
from dgraph.engine.stats import COUNTS
from dgraph.serve.served_model import ServedModel
from tests.serve.asking import SORTED, chat
from tests.serve.live import Live

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/guides/serve.md"))
ADDRESS = "http://127.0.0.1:8000"


def test_the_readme_s_client_prints_an_answer(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="the page's client is the openai package: pip install openai")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "openai" in code)
    exec(compile(code.replace(ADDRESS, live.url), "serve.md", "exec", dont_inherit=True), {})
    assert capsys.readouterr().out == SORTED


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's example needs curl")
def test_the_readme_s_curl_gets_an_answer(live: Live) -> None:
    (command,) = set(re.findall(r"```sh\n(curl .*?)```", PAGE, flags=re.DOTALL))
    done = subprocess.run(["curl", "-s", *shlex.split(command.replace(ADDRESS, live.url))[1:]], capture_output=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == SORTED


def options_of(command: str) -> list[str]:
    """The long options of a command line."""
    return re.findall(r"--[\w-]+", command)


def test_every_command_line_has_options_that_there_are() -> None:
    known = {name for option in Imported()["serve"].params for name in option.opts}
    unit = (ROOT / "docs" / "dgraph.service").read_text(encoding="utf-8")
    entry = re.findall(r"ENTRYPOINT (\[.*\])", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    commands = [*re.findall(r"dgraph serve .*", PAGE + unit), " ".join(json.loads(entry[0]))]
    assert len(commands) > 4
    for command in commands:
        assert set(options_of(command.partition("#")[0])) <= known, command


def names_of(text: str) -> set[str]:
    """Names of samples, as a query has them."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_dashboard_asks_for_metrics_that_there_are(live: Live, http: httpx.Client) -> None:
    chat(http, max_tokens=8)
    assert live.settled()
    text = http.get("/metrics").text
    board = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for query in asked for name in re.findall(r"\b(?:dgraph|vllm):\w+", query)}
    assert len(names) > 15
    families = {family.name for family in text_string_to_metric_families(text)}
    bare = {name.removesuffix("_total").removesuffix("_bucket") for name in names}
    assert bare <= families, bare - families
    quiet = {"dgraph:admission_rejections_total"}  # nobody was turned away
    assert names - quiet <= names_of(text)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_metrics_say_what_was_served(live: Live, http: httpx.Client) -> None:
    def value(name: str, **labels: str) -> float:
        label = {"model_name": "tiny_llada", "engine": "1", **labels}
        families = text_string_to_metric_families(http.get("/metrics").text)
        return sum(s.value for f in families for s in f.samples if s.name == name and s.labels == label)

    before = {name: value(name) for name in ("dgraph:prompt_tokens_total", "dgraph:generation_tokens_total")}
    asked = {"model": "tiny_llada", "max_tokens": 24, "ignore_eos": True, "n": 2}
    usage = chat(http, **asked).json()["usage"]
    assert live.settled()
    assert value("dgraph:generation_tokens_total") - before["dgraph:generation_tokens_total"] == 48
    assert value("vllm:prompt_tokens_total") - before["dgraph:prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert value("vllm:request_success_total", finished_reason="length") == 2
    assert value("vllm:request_params_n_sum") == 2
    assert value("vllm:e2e_request_latency_seconds_count") == 2
    assert value("dgraph:time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert value("vllm:inter_token_latency_seconds_count") == 48 - 2
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == 0
    assert value("dgraph:steps_total") > 0


def test_what_an_engine_did_before_it_is_served_is_no_client_s(live: Live, http: httpx.Client) -> None:
    """As its warm-up, whose request stood in the counters of a server that nobody had asked anything."""
    chat(http, max_tokens=8)
    assert live.settled()
    engine = next(iter(live.engines.values()))
    later = ServedModel("later", engine)
    whole, mine = engine.stats, later.stats
    assert whole.steps > 0 < sum(whole.finished.values())
    assert {name for name in COUNTS if any(_numbers(getattr(mine, name)))} == set()
    assert (mine.pages, mine.budget_fill) == (whole.pages, whole.budget_fill)
    chat(http, max_tokens=8)
    assert live.settled()
    assert sum(later.stats.finished.values()) == later.stats.admitted == 1
    assert sum(later.stats.rows.values()) > 0


def _numbers(value: object) -> list[int]:
    return list(value.values()) if isinstance(value, Mapping) else [value]  # type: ignore[list-item]


def test_the_container_is_made_of_what_there_is() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", text, flags=re.MULTILINE):
        *sources, target = line.split()
        assert all((ROOT / source).exists() for source in sources), line
        assert target.endswith("/") or target == sources[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    minor = re.findall(r"FROM python:3\.(\d+)", text)
    assert int(minor[0]) >= int(project["requires-python"].rpartition(".")[2])


def test_the_unit_gives_requests_the_time_that_the_server_does() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "docs" / "dgraph.service", encoding="utf-8")
    (timeout,) = re.findall(r"--shutdown-timeout (\d+)", unit["Service"]["ExecStart"])
    assert int(unit["Service"]["TimeoutStopSec"]) > int(timeout)
