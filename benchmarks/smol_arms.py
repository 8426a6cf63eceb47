"""Ask a converted model about every recipe, threshold, rule and option of benchmarks/results/smol.md.

    python -m benchmarks.smol_arms smol_sdar --out OUT --device cuda --each 5

Each arm or row of arms is a `dgraph eval` of its own, several at once on each GPU, the most important first. What one
finds is in OUT/NAME.jsonl, what it says in OUT/NAME.log; a run that was cut goes on by the same command, as they do.
`dgraph eval --against dense` compares arms of one file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SDAR = "--max-batch 330 --against none"
SOME = f"{SDAR} --max-new-tokens 320 --task gsm8k --seed 1 --limit 660"
ALL = f"{SDAR} --max-new-tokens 320"
RECIPES = ("dense", "focus", "dllm_serve", "dyllm", "sparse_dllm", "dllm_serve+focus")
AT = "--threshold 0.9"
FACTS = "--task facts --max-new-tokens 32 --max-batch 128 --against none"

CANVAS = "--max-new-tokens 128 --max-batch 128 --buckets 128,256,512,1024 --against none --threshold 0.9"
CANVAS_RECIPES = (
    *("dense", "fast_dllm", "dllm_cache", "dkv_cache", "focus", "dllm_serve", "sparse_dllm", "maskkv:pairs=32"),
    *("dyllm", "fast_dllm:cache=prefix", "vicinity", "dllm_serve+focus", "maskkv:pairs=16", "maskkv:pairs=64"),
    *("maskkv+fast_dllm:pairs=32", "dllm_serve+fast_dllm"),
)

ARMS: dict[str, dict[str, str]] = {
    "smol_sdar": {
        "facts": f"{FACTS} {AT} -r dense -r focus",
        "facts-sequential": f"{FACTS} --policy sequential -r dense",
        **{f"gsm8k-{r}": f"{ALL} --task gsm8k {AT} -r {r}" for r in RECIPES},
        "gsm8k-sequential": f"{ALL} --task gsm8k --policy sequential -r dense",
        "gsm8k-surest": f"{ALL} --task gsm8k --policy fixed_steps:steps=32 -r dense",
        **{f"dialogue-{r}": f"{SDAR} --max-new-tokens 256 --task dialogue {AT} -r {r} --judge base" for r in RECIPES},
        **{f"sums-{r}": f"{ALL} --task svamp --task mawps {AT} -r {r}" for r in RECIPES},
        **{f"lower-{r}": f"{ALL} --task gsm8k --threshold 0.7 -r {r}" for r in RECIPES},
        **{f"thresholds-{r}": f"{SOME} --sweep threshold=0.8,0.95 -r {r}" for r in ("dense", "focus")},
        **{f"bbh-{r}": f"{ALL} --task bbh {AT} -r {r}" for r in ("dense", "focus")},
        "keep": f"{SOME} {AT} -r focus:ablation=keep=4 -r focus:ablation=keep=4+select=random"
        " -r focus:ablation=keep=4+select=bottom"
        " -r focus:ablation=keep=2 -r focus:ablation=keep=8",
        "keep-signals": f"{SOME} {AT} -r focus:ablation=keep=4+signal=importance -r focus:ablation=keep=4+after=2"
        " -r focus:ablation=keep=4+signal=importance+after=2 -r focus:ablation=keep=8+after=2"
        " -r focus:ablation=keep=8+signal=importance+after=2",
        "tau": f"{SOME} {AT} -r dyllm:tau=0.95 -r dyllm:tau=0.98 -r dyllm:tau=0.995 -r dyllm:tau=0.9",
        "ratio-sparse_dllm": f"{SOME} {AT} -r sparse_dllm:ratio=0.75 -r sparse_dllm:ratio=0.25"
        " -r sparse_dllm:ratio=0.9",
        "ratio-dllm_serve": f"{SOME} {AT} -r dllm_serve:ratio=0.25 -r dllm_serve:ratio=0.75 -r dllm_serve:ratio=0.9",
        "alpha": f"{SOME} {AT} -r focus:alpha=1.2 -r focus:alpha=1.0 -r focus:alpha=1.8 -r focus:alpha=2.5",
        "signals": f"{SOME} {AT} -r focus:ablation=after=2 -r focus:ablation=signal=importance"
        " -r focus:ablation=signal=importance+after=2",
        "parts": f"{SOME} {AT} -r dense:block_cache=dc+ -r dense:block_cache=dc -r focus:block_cache=off"
        " -r focus:ablation=after=4 -r focus:ablation=signal_pool=1",
        "rules": f"{SOME} --policy llada2.0 --policy factor --policy entropy_bounded -r dense",
        "rules-focus": f"{SOME} --policy llada2.0 --policy factor --policy entropy_bounded --policy sub_blocks"
        " -r focus",
        "rules-parts": f"{SOME} --policy dynamic_threshold --policy sub_blocks --policy hierarchical -r dense",
        "rules-others": f"{SOME} --policy fast_dllm_v2 --policy relative_threshold --policy jetengine_dynamic"
        " --policy hierarchical_remask -r dense",
        "rules-steps": f"{SOME} --policy dinfer_factor --policy fixed_steps:steps=16"
        " --policy dream_entropy:steps=16,top_k=0 --policy joint_threshold -r dense",
        "sums-lower": f"{ALL} --task svamp --task mawps --threshold 0.7 -r dense -r focus",
    },
    "smol_llada": {
        "facts": f"{FACTS} {AT} -r dense -r fast_dllm",
        **{
            name: f"{CANVAS} --task gsm8k --task dialogue --limit 330 -r {name} --judge base" for name in CANVAS_RECIPES
        },
    },
}
"""By model and name, the most important first: options of `dgraph eval`."""


@dataclass
class Asking:
    """Commands that are run in their order, as many at once as there are places.

    Attributes:
        command: the beginning of each.
        out: the folder of what they find and say.
        places: the environment of each place where one runs.
        until: `time.monotonic()` when none is begun any more, and what runs is ended.
        tell: is given the name of each that is over, and its exit status.
        failed: names of those whose status was not 0.
        late: names of those that time was over for: not begun, or ended.
    """

    command: Sequence[str]
    out: Path
    places: Sequence[dict[str, str]]
    until: float = float("inf")
    tell: Callable[[str, int], None] = lambda name, status: None
    failed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    def run(self, arms: dict[str, str]) -> None:
        """All of them, or as many as there is time for."""
        self.out.mkdir(parents=True, exist_ok=True)
        waiting = deque(arms.items())
        threads = [threading.Thread(target=self._work, args=(place, waiting)) for place in self.places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.late += [name for name, _ in waiting]

    def _work(self, place: dict[str, str], waiting: deque[tuple[str, str]]) -> None:
        while time.monotonic() < self.until:
            try:
                name, options = waiting.popleft()
            except IndexError:
                return
            with (self.out / f"{name}.log").open("a") as log:
                argv = [*self.command, *options.split(), "--out", str(self.out / f"{name}.jsonl")]
                process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **place})
                try:
                    left = self.until - time.monotonic()
                    status = process.wait(None if left == float("inf") else max(left, 0))
                except subprocess.TimeoutExpired:
                    process.terminate()
                    status = process.wait()
                    self.late.append(name)
                else:
                    if status:
                        self.failed.append(name)
            self.tell(name, status)


def places(device: str, each: int) -> list[dict[str, str]]:
    """The environment of each place: so many for every GPU that can be seen, or one on a CPU."""
    if device != "cuda":
        return [{}]
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": name, "OMP_NUM_THREADS": "2"} for name in names] * each


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, run, say what is missing."""
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=ARMS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--each", type=int, default=5, help="at once on each GPU")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which the rest is left")
    parser.add_argument("--only", action="append", help="this one alone; may repeat")
    args = parser.parse_args(argv)
    arms = ARMS[args.model]
    if unknown := [name for name in args.only or () if name not in arms]:
        parser.error(f"{unknown[0]} is none of {', '.join(arms)}")
    chosen = {name: options for name, options in arms.items() if not args.only or name in args.only}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(args.model, total=len(chosen))

        def tell(name: str, status: int) -> None:
            bar.update(task, advance=1, description=name if status == 0 else f"{name} failed")

        command = [sys.executable, "-m", "dgraph", "eval", args.model, "--device", args.device]
        until = time.monotonic() + 60 * args.minutes
        asking = Asking(command, args.out, places(args.device, args.each), until, tell)
        asking.run(chosen)
    why = {"failed, as their .log says": asking.failed, "not over in the time": asking.late}
    if said := [f"{what}: {', '.join(names)}" for what, names in why.items() if names]:
        raise SystemExit(f"{'; '.join(said)}. The same command goes on.")


if __name__ == "__main__":
    main()
