"""Lengths of prompts and responses like those of the data sets by which dLLM-Serve was measured; all are synthetic.

    python -m benchmarks.serving_lengths --out lengths --count 300
    dgraph bench serve --shape llada-8b -r dllm_serve --prompt lengths/burst.jsonl --tokens lengths/burst.jsonl

No registry has LiveBench, BurstGPT or the summarisation comparisons of OpenAI (OSC). Each histogram below stands for
one of them: its bins and shares are ours, and a length is drawn evenly within its bin. Those of BurstGPT follow the 45
lines that its page shows. Those of OSC follow the limits of the data set (posts below 512 tokens, summaries of about
24 to 48). Those of LiveBench follow nothing but the kind of task, programming with a statement.

A file has one request a line, {"prompt": tokens, "tokens": tokens}.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dgraph.bench.arrivals import Lengths, Request


@dataclass(frozen=True)
class Histogram:
    """Lengths by bins.

    Attributes:
        edges: of the bins, ascending, in tokens; a length is from one edge to below the next.
        shares: of the bins, in any unit.
    """

    edges: tuple[int, ...]
    shares: tuple[int, ...]

    def draw(self, count: int, seed: int) -> list[int]:
        """Draw `count` lengths, the same for equal arguments."""
        draw = random.Random(f"{self.edges} {self.shares} {seed}")
        bins = draw.choices(range(len(self.shares)), self.shares, k=count)
        return [draw.randrange(self.edges[at], self.edges[at + 1]) for at in bins]


@dataclass(frozen=True)
class Workload:
    """Histograms of the prompts and of the responses of a data set."""

    prompt: Histogram
    tokens: Histogram

    def requests(self, count: int, seed: int, tokens: str = "", scale: float = 1.0) -> list[Request]:
        """Draw requests that all come at once.

        Args:
            count: their number.
            seed: of the draws; equal arguments give equal requests.
            tokens: lengths of responses instead, as `Lengths` reads them.
            scale: what the lengths of prompts are multiplied by, for a small trial.

        Raises:
            InputError: as `Lengths.draw`.
        """
        prompts = [max(1, round(scale * length)) for length in self.prompt.draw(count, seed)]
        responses = Lengths(tokens, "--tokens").draw(count, seed) if tokens else self.tokens.draw(count, seed)
        return [Request(0.0, *each) for each in zip(prompts, responses, strict=True)]


WORKLOADS = {
    "livebench": Workload(
        Histogram((200, 400, 600, 800, 1200), (25, 35, 25, 15)), Histogram((100, 200, 300, 400, 600), (25, 35, 25, 15))
    ),
    "burst": Workload(
        Histogram((10, 100, 250, 500, 1000, 1600, 2000), (20, 13, 17, 22, 20, 8)),
        Histogram((10, 100, 200, 300, 400, 600, 700), (6, 13, 30, 20, 22, 9)),
    ),
    "osc": Workload(Histogram((100, 200, 300, 400, 512), (20, 35, 30, 15)), Histogram((24, 49), (1,))),
}
"""By name of the data set that each stands for."""


def fixed(prompt: int, tokens: int, count: int) -> list[Request]:
    """Requests of one length."""
    return [Request(0.0, prompt, tokens)] * count


def write(folder: Path, count: int, seed: int) -> list[Path]:
    """Write a file for each workload; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, workload in WORKLOADS.items():
        lines = [
            json.dumps({"prompt": request.prompt, "tokens": request.new}) for request in workload.requests(count, seed)
        ]
        found.append(folder / f"{name}.jsonl")
        found[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--count", type=int, default=300, help="requests of each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    for path in write(args.out, args.count, args.seed):
        print(path)


if __name__ == "__main__":
    main()
