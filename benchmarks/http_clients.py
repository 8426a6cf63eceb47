"""Load clients that others wrote, each in an environment of its own, against `dgraph serve`: that they work, and what
they say.

    python -m venv A && A/bin/pip install aiperf
    python -m venv G && G/bin/pip install guidellm
    python -m benchmarks.http_clients --aiperf A/bin/aiperf --guidellm G/bin/guidellm

Both send streaming chats of random words whose responses have a fixed length, so that the text means nothing and only
counts and times do. Either can be left out. A client that fails ends the run with its last lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import Cell, Report

TOKENIZER = Path(__file__).parents[1] / "models" / "tiny_sdar"
COLUMNS = ("client", "requests", "errors", "req/s", "output tok/s", "first token ms, p50", "request ms, p50", "p99")
LAST = 2000
"""Characters of a failed client's output that are shown."""


@contextmanager
def served(model: str, recipe: str, more: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The address of a server of its own, and what it calls the model."""
    command = [sys.executable, "-m", "dgraph", "serve", model, "-r", recipe, "--port", "0", "--no-access-log", *more]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"serves (\S+) at (http://\S+)", line):
                yield found[2], found[1]
                break
        else:
            raise RuntimeError(f"the server ended with {server.wait()} before it was ready.")
    finally:
        server.terminate()
        server.wait()


def run(program: Path, verb: str, options: Mapping[str, object], *flags: str) -> None:
    """Run a client to its end."""
    command = [str(program), verb, *(str(part) for option in options.items() for part in option), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    if done.returncode:
        raise RuntimeError(f"{program.name} failed:\n{done.stdout[-LAST:]}\n{done.stderr[-LAST:]}")


def aiperf(program: Path, url: str, model: str, args: argparse.Namespace, folder: Path) -> list[Cell]:
    """One load by aiperf."""
    options = {
        "--model": model,
        "--url": url,
        "--endpoint-type": "chat",
        "--tokenizer": TOKENIZER,
        "--isl": args.prompt,
        "--osl": args.tokens,
        "--extra-inputs": "ignore_eos:true",
        "--request-count": args.requests,
        "--concurrency": args.clients,
        "--artifact-dir": folder,
        "--ui": "none",
    }
    run(program, "profile", options, "--streaming", "--use-server-token-count")
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    errors = sum(each["count"] for each in found.get("error_summary") or ())
    of = {name: found[name] for name in ("time_to_first_token", "request_latency")}
    rate, speed = found["request_throughput"]["avg"], found["output_token_throughput"]["avg"]
    count = found["request_count"]["avg"]
    latency = of["request_latency"]
    return ["aiperf", int(count), errors, rate, speed, of["time_to_first_token"]["p50"], latency["p50"], latency["p99"]]


def guidellm(program: Path, url: str, model: str, args: argparse.Namespace, folder: Path) -> list[Cell]:
    """One load by guidellm."""
    out = folder / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={url},model={model}",
        "--profile": f"kind=concurrent,streams={args.clients}",
        "--constraint": f"kind=max_requests,count={args.requests}",
        "--tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
        "--data": f"kind=synthetic_text,prompt_tokens={args.prompt},output_tokens={args.tokens}",
        "--output": f"kind=json,path={out}",
    }
    run(program, "run", options, "--disable-console")
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    metrics = benchmark["metrics"]

    def of(name: str) -> dict[str, Any]:
        found: dict[str, Any] = metrics[name]["successful"]
        return found

    totals = metrics["request_totals"]
    latency, first = of("request_latency")["percentiles"], of("time_to_first_token_ms")["percentiles"]
    rate, speed = of("requests_per_second")["mean"], of("output_tokens_per_second")["mean"]
    times = (first["p50"], 1e3 * latency["p50"], 1e3 * latency["p99"])
    return ["guidellm", totals["successful"], totals["errored"], rate, speed, *times]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, help="the program")
    parser.add_argument("--guidellm", type=Path, help="the program")
    parser.add_argument("--model", default="tiny_sdar")
    parser.add_argument("--recipe", default="focus")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--serve", nargs="*", default=[], help="more for `dgraph serve`")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    clients = {aiperf: args.aiperf, guidellm: args.guidellm}
    if not any(clients.values()):
        parser.error("say where a client is: --aiperf, --guidellm, or both.")
    report, rows = Report(f"Load clients on {args.model} under {args.recipe}"), []
    with served(args.model, args.recipe, args.serve) as (url, model), tempfile.TemporaryDirectory() as folder:
        for client, program in clients.items():
            if program is not None:
                place = Path(folder) / client.__name__
                place.mkdir()
                rows.append(client(program, url, model, args, place))
    note = f"{args.clients} at a time, {args.prompt} prompt tokens and {args.tokens} new ones."
    report.table("Chats that stream", COLUMNS, rows, note)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
