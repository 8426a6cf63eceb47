"""Make a causal checkpoint a diffusion model, in as many sessions as it takes.

    python -m training.convert base --dialogues 20000 --data gsm8k.jsonl --mask-token "<reponame>" --out OUT
    python -m training.convert ./Qwen3-1.7B --form bidirectional --mask-token "<|MASK|>" --data a.jsonl=2 --out B

A run is continued by the same command: OUT holds the data it wrote itself (dialogues.jsonl), its state (state.pt) and
its course (log.csv, loss.png). After every session OUT holds the model as it then is (model/), for
`dgraph generate OUT/model`. `--minutes` ends a session early. An interrupt loses what came after the last save. Where
nothing is left of a run but the few megabytes that `training.compress` wrote, `--begin` starts a new one with
what it learnt. A file after which "=0.5" is written comes with every other of its documents in a pass, one with "=2"
twice.

On several GPUs of a host the same run goes faster, each on a part of every batch's rows, and goes on with any number:

    torchrun --nproc-per-node 4 -m training.convert base --rows 64 ...
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from dgraph import parallel
from dgraph.errors import DgraphError, InputError
from dgraph.families import DIFFERENCE
from dgraph.ranks.groups import Alone, Group, group_of
from dgraph.ranks.sharding import GROUP

from . import dialogues
from .checkpoint import write_json
from .conversion import Conversion, Settings, documents_of_files, load_base, write_model
from .pairs import read_pairs

STATE, SETTINGS, LOG, PLOT, MODEL = "state.pt", "settings.json", "log.csv", "loss.png", "model"
COLUMNS = ("step", "loss", "held_out", "rate", "seconds")
LOG_EVERY = 20
"""Steps between two lines of the log."""


class Folder:
    """Folder that a run writes and goes on from.

    Args:
        path: made where it is missing.
        described: all that makes the run what it is: base, settings and data.
        writes: True if this process writes it, as one of several does: rank 0.

    Raises:
        InputError: the folder holds a run of other settings or data.
    """

    def __init__(self, path: Path, described: dict[str, Any], writes: bool = True) -> None:
        self.path, self.writes, file = path, writes, path / SETTINGS
        if not writes:
            return
        path.mkdir(parents=True, exist_ok=True)
        described = json.loads(json.dumps(described))
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            if changed := [name for name in {**before, **described} if before.get(name) != described.get(name)]:
                pairs = "; ".join(f"{name} was {before.get(name)}, is {described.get(name)}" for name in changed)
                raise InputError(f"{path} holds a run of other settings ({pairs}); give these, or another --out.")
        write_json(file, described)

    def restore(self, conversion: Conversion) -> None:
        """Go on where the last save was, if there is one; the log is cut there."""
        if (self.path / STATE).is_file():
            device = conversion.trainer.device
            conversion.trainer.restore(torch.load(self.path / STATE, map_location=device, weights_only=True))
        if not self.writes:
            return
        kept = [row for row in self.rows() if int(row["step"]) <= conversion.trainer.done]
        with (self.path / LOG).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)

    def save(self, conversion: Conversion) -> None:
        """Keep the state; an interrupted save leaves the one before."""
        if not self.writes:
            return
        part = self.path / f"{STATE}.part"
        with part.open("wb") as file:
            torch.save(conversion.trainer.state(), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path / STATE)

    def log(self, row: dict[str, Any]) -> None:
        """Add a line of `COLUMNS`."""
        if not self.writes:
            return
        with (self.path / LOG).open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)

    def rows(self) -> list[dict[str, str]]:
        """The lines of the log."""
        path = self.path / LOG
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def plot(self) -> bool:
        """Draw the losses over the steps; False without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        for name, words in (("loss", "training"), ("held_out", "held out")):
            points = [(int(row["step"]), float(row[name])) for row in self.rows() if row[name]]
            if points:
                axes.plot(*zip(*points, strict=True), label=words)
                axes.legend()
        axes.set(xlabel="step", ylabel="loss, nats per token")
        figure.savefig(self.path / PLOT, dpi=120)
        return True


def train(
    conversion: Conversion,
    folder: Folder,
    minutes: float = float("inf"),
    held_out_every: int = 200,
    save_every: float = 300.0,
    workers: int = 0,
    tell: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Train one session: from the last save to the last step, or for `minutes`; save state and model at its end.

    save_every: seconds. tell: gets every line of the log, and one with an empty loss after each step between.
    """
    folder.restore(conversion)
    trainer, saved = conversion.trainer, time.monotonic()
    losses: list[float] = []
    for loss in conversion.steps(time.monotonic() + 60 * minutes, workers):
        losses.append(loss)
        row: dict[str, Any] = {"step": trainer.done, "loss": "", "held_out": ""}
        row |= {"rate": f"{trainer.rate():.3e}", "seconds": round(trainer.seconds, 1)}
        last = conversion.over
        if trainer.done % LOG_EVERY == 0 or last:
            row["loss"] = round(sum(losses) / len(losses), 4)
            losses.clear()
            if trainer.done % held_out_every < LOG_EVERY or last:
                held_out = conversion.held_out_loss()
                row["held_out"] = "" if held_out is None else round(held_out, 4)
            folder.log(row)
        tell(row)
        if time.monotonic() - saved > save_every:
            folder.save(conversion)
            saved = time.monotonic()
    folder.save(conversion)
    if folder.writes:
        write_model(conversion.base, conversion.settings, folder.path / MODEL)


def data_of(text: str) -> tuple[Path, float]:
    """FILE or FILE=TIMES: a file, and how often one of its documents comes in a pass (1).

    Raises:
        InputError: TIMES is no positive number.
    """
    path, equals, times = text.rpartition("=")
    if not equals or Path(text).is_file():
        return Path(text), 1.0
    try:
        value = float(times)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"--data {text}: expected FILE or FILE=TIMES with a number above 0, got {times!r}.")
    return Path(path), value


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    try:
        _run(args)
    except DgraphError as error:
        raise SystemExit(f"error: {error}") from None


def _run(args: argparse.Namespace) -> None:
    began, ranks = time.monotonic(), ranks_of_run(args.device)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    base = load_base(args.base, args.mask_token, args.device, args.begin)
    files = [data_of(text) for text in args.data]
    if args.dialogues:
        args.out.mkdir(parents=True, exist_ok=True)
        files.append((args.out / dialogues.FILE, 1.0))
        prompts = [pair.prompt for pair in read_pairs(args.prompts) if pair.prompt] if args.prompts else None
        until, rows, seed = began + 60 * args.minutes, args.dialogue_rows, args.seed
        with progress("dialogues", args.dialogues, ranks) as tell:
            path, openings = files[-1][0], args.opening
            made = dialogues.write(
                base, path, args.dialogues, prompts, rows, seed, until, tell, ranks, args.temperature, openings
            )
        if made < args.dialogues:
            print(f"{made} of {args.dialogues} dialogues in {files[-1][0]}; the same command goes on.")
            return
    if not files:
        raise InputError("there is nothing to learn from: give --data FILE, --dialogues N, or both.")
    documents = documents_of_files(base, [path for path, _ in files], settings)
    data = {str(path): {"sha256": _digest(path), "times": n} for path, n in files}
    begun = None if args.begin is None else _digest(args.begin / DIFFERENCE)
    described = {"base": args.base, "mask_token": args.mask_token, **asdict(settings), "data": data, "begin": begun}
    folder = Folder(args.out, described, writes=ranks.rank == 0)
    cuda = base.model.device.type == "cuda"
    conversion = Conversion(
        base,
        settings,
        documents,
        dense=not cuda or args.dense,
        compiled=cuda and not args.no_compile,
        autocast=getattr(torch, args.autocast or ("bfloat16" if cuda else "float32")),
        times={number: times for number, (_, times) in enumerate(files)},
        ranks=ranks,
    )
    left = args.minutes - (time.monotonic() - began) / 60
    with progress("steps", settings.steps, ranks) as tell:

        def show(row: dict[str, Any]) -> None:
            words = "".join(f"{name} {row[name]} " for name in ("loss", "held_out") if row[name] != "")
            tell(row["step"], words)

        train(conversion, folder, left, args.held_out_every, args.save_every, args.workers, show)
    if ranks.rank:
        return
    if not folder.plot():
        print("no plot without matplotlib: pip install 'dgraph[bench]'")
    done = f"{conversion.trainer.done} of {settings.steps} steps"
    more = "" if conversion.over else "; the same command goes on"
    print(f"{done}: {args.out / MODEL}{more}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help='a folder of a causal model, or "base": SmolLM2-135M-Instruct')
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, to begin or to go on in")
    parser.add_argument(
        "--data",
        metavar="FILE[=TIMES]",
        action="append",
        default=[],
        help='JSONL of {"prompt", "response"} or {"text"}, and how often a pass has a document of it; may repeat',
    )
    parser.add_argument(
        "--dialogues", type=int, default=0, help="number of further dialogues that the base writes itself"
    )
    parser.add_argument("--prompts", type=Path, help='JSONL whose "prompt"s it answers in these; else it asks itself')
    parser.add_argument("--opening", action="append", default=[], help="how it begins to ask itself, half of the time")
    parser.add_argument("--dialogue-rows", type=int, default=64, help="dialogues written at once")
    parser.add_argument("--temperature", type=float, default=dialogues.TEMPERATURE, help="of the answers in them")
    parser.add_argument("--mask-token", help="a special token that no text has, or a new one")
    parser.add_argument("--begin", type=Path, help="a folder of training.compress, whose weights it begins with")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="the session ends then at the latest")
    parser.add_argument("--held-out-every", type=int, default=200, help="steps between two held-out losses")
    parser.add_argument("--save-every", type=float, default=300.0, help="seconds between two saves")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autocast", choices=["bfloat16", "float32"], help="bfloat16 on a GPU, else float32")
    parser.add_argument("--dense", action="store_true", help="dense masks instead of FlexAttention on a GPU")
    parser.add_argument("--no-compile", action="store_true")
    settings = parser.add_argument_group("what the run is (training.conversion.Settings)")
    for field in fields(Settings):
        name, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, bool):
            settings.add_argument(name, action="store_true")
        else:
            settings.add_argument(name, type=type(default), default=default, help=f"{default} by default")
    return parser.parse_args(argv)


def ranks_of_run(device: str) -> Group:
    """The ranks that torchrun has started, or this process alone."""
    if not parallel.started():
        return Alone()
    parallel.init(device, all_reduce="nccl")
    return group_of(GROUP)


def progress(what: str, total: int, ranks: Group | None = None) -> Any:
    """A progress bar as a context that gives a function (done, words); of several ranks the first one shows it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Any:
        words = TextColumn("{task.fields[words]}")
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), words)
        quiet = ranks is not None and ranks.rank > 0
        with Progress(*columns, console=Console(stderr=True, quiet=quiet)) as bar:
            task = bar.add_task(what, total=total, words="")

            def tell(done: int, words: str = "") -> None:
                bar.update(task, completed=done)
                if words:
                    bar.update(task, words=words)

            yield tell

    return shown()


if __name__ == "__main__":
    main()
