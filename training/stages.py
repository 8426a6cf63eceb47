"""A conversion from the base to published folders: a file that describes it, and a command for each stage.

    python -m training.stages smol.json dialogues --out OUT --minutes 9      the base writes them itself
    python -m training.stages smol.json train     --out OUT --minutes 9 --model smol_sdar
    python -m training.stages smol.json compress  --out OUT                  OUT/NAME/small: what is published
    python -m training.stages smol.json evaluate  --out OUT                  tasks, and dialogues under a judge

Each command goes on where it was stopped, on another machine, too, that has OUT; finished parts are left as they are.
The first two use several GPUs of a host under `torchrun --nproc-per-node N -m training.stages ...`.
`training/smol.json` is such a file; the problems it names are found from where the command runs. OUT holds:

    dialogues.jsonl    as the base wrote them: the first ones are asked in the evaluation and never trained on
    questions.jsonl, training.jsonl, NAME.jsonl    made of it, of each task's problems in the form they are asked in, of
                       these with other numbers, and of their calculations
    MODEL/             a run of `training.convert`, small/, and evaluation.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from dgraph import parallel
from dgraph.errors import DgraphError, InputError
from dgraph.evaluate.questions import read_questions
from dgraph.evaluate.tasks import TASKS, questions_of
from dgraph.families import DIFFERENCE

from . import calculations, convert, dialogues
from .compress import REPORT, compress
from .conversion import Settings, load_base
from .dialogues import TEMPERATURE
from .pairs import Pair, read_pairs
from .rename import renamed
from .renumber import renumbered, without_notes

T = TypeVar("T")
U = TypeVar("U")

STAGES = ("dialogues", "train", "compress", "evaluate")
MANY = 10_000
"""Trials with other numbers, or documents, from which on it pays to start processes."""
CHUNK = 500
"""Documents that a process makes at a time."""
TRAINING, QUESTIONS, EVALUATION, SMALL = "training.jsonl", "questions.jsonl", "evaluation.jsonl", "small"


@dataclass(frozen=True)
class Plan:
    """Plan of a conversion, as its file says it.

    Attributes:
        base: as `convert` takes it.
        models: models made of it: `Settings` by name of the model.
        mask_token: mask token of the base; None for the tokenizer's own.
        dialogues: number of dialogues that it writes.
        dialogue_rows: number of them at once.
        temperature: temperature of its answers.
        seed: seed of the dialogues.
        asked: number of them, from the first on, that are asked in the evaluation and not trained on.
        prompts: JSONL whose prompts are answered; None: the base asks itself.
        openings: beginnings of its questions in every other batch then, in turns.
        problems: by a task of `dgraph.evaluate.tasks`, a file of lines {"question", "answer"} (GSM8K's training split).
        variants: by a task, how many times each of its problems is tried with other numbers (see `renumber`). These
            problems are data of their own, TASK_renumbered.
        calculations: by a task, how many documents of calculations like those that its solutions note (see
            `calculations`), data of its own, too, TASK_calculations.
        notes: True keeps the notes of calculations in solutions, <<48/2=24>>, and notes calculations so, too.
        names: True gives people other names, too, where numbers are others (see `rename`).
        without: JSONL of questions (see `read_questions`) that are not trained on, though the base may write them, too;
            nor are those of the tasks.
        times: by "dialogues", a task, TASK_renumbered or TASK_calculations, how often one comes in a pass; once where
            it is not said.
        begin: by model, a folder that `compress` wrote, which a new run of it begins with.
        means: by a name of its own, models whose weights are averaged and published as that one (see `compress`): such
            as begin with the same weights.
        megabytes: size of a difference in megabytes, at most.
        judge: reads the dialogues, as `dgraph eval --judge` takes it.
        tasks: by a task, how many problems are asked.
        new_tokens: tokens of an answer, at most.
        recipe, threshold, backend: settings of the decoding.

    Raises:
        InputError: a value that nothing can be made of.
    """

    base: str
    models: Mapping[str, Mapping[str, Any]]
    mask_token: str | None = None
    dialogues: int = 40_000
    dialogue_rows: int = 1536
    temperature: float = TEMPERATURE
    seed: int = 0
    asked: int = 128
    prompts: str | None = None
    openings: Sequence[str] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, int] = field(default_factory=dict)
    calculations: Mapping[str, int] = field(default_factory=dict)
    notes: bool = False
    names: bool = False
    without: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    begin: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)
    megabytes: float = 10.0
    judge: str = "base"
    tasks: Mapping[str, int] = field(default_factory=dict)
    new_tokens: int = 256
    recipe: str = "dense"
    threshold: float = 0.9
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError('models must name at least one, as {"NAME": {"form": "block_causal"}}.')
        for name, settings in self.models.items():
            known = [each.name for each in fields(Settings)]
            if unknown := [key for key in settings if key not in known]:
                raise InputError(f"{unknown[0]} of {name} is no setting; known: {', '.join(known)}.")
            Settings(**settings)
        for what, found, known in (
            ("problems", self.problems, list(TASKS)),
            ("tasks", self.tasks, list(TASKS)),
            ("variants", self.variants, list(self.problems)),
            ("calculations", self.calculations, list(self.problems)),
            ("times", self.times, ["dialogues", *self.learnt]),
            ("begin", self.begin, list(self.models)),
            *((f"the mean {name}", names, list(self.models)) for name, names in self.means.items()),
        ):
            if other := [key for key in found if key not in known]:
                raise InputError(f"{what} names {other[0]!r}, expected one of {', '.join(known)}.")
        for name, names in self.means.items():
            if name in self.models or not names:
                raise InputError(f"a mean has a name of its own and one model at least, got {name!r} of {list(names)}.")
        if not 0 <= self.asked < self.dialogues:
            raise InputError(f"asked must be fewer than the {self.dialogues} dialogues, got {self.asked}.")

    @property
    def learnt(self) -> list[str]:
        """Names of the training data beside dialogues: tasks, and data made of them."""
        more = [*map(renumbered_name, self.variants), *map(calculations_name, self.calculations)]
        return [*self.problems, *more]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan of a JSON file.

        Raises:
            InputError: no such file, no JSON object, or entries that are unknown, missing or wrong.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}.") from None
        known = [each.name for each in fields(cls)]
        if not isinstance(value, dict) or (other := [key for key in value if key not in known]):
            got = f"{other[0]!r}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise InputError(f"{path}: expected an object of {', '.join(known)}, got {got}.")
        try:
            return cls(**value)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except TypeError as error:
            raise InputError(f"{path}: base and models are needed ({error}).") from None


@dataclass(frozen=True)
class Work:
    """A plan where it is carried out.

    Attributes:
        plan: plan to carry out.
        out: the folder.
        device: device of all stages.
        minutes: after which a session of writing or training ends.
    """

    plan: Plan
    out: Path
    device: str
    minutes: float = float("inf")

    def dialogues(self) -> None:
        """Write dialogues, and from them and the problems the evaluation questions and the training data."""
        plan, path = self.plan, self.out / dialogues.FILE
        self.out.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + 60 * self.minutes
        prompts = None if plan.prompts is None else [p.prompt for p in read_pairs(Path(plan.prompts)) if p.prompt]
        ranks = convert.ranks_of_run(self.device)
        base, rows = load_base(plan.base, plan.mask_token, self.device), plan.dialogue_rows
        with convert.progress("dialogues", plan.dialogues, ranks) as tell:
            done = dialogues.write(
                base,
                path,
                plan.dialogues,
                prompts,
                rows,
                plan.seed,
                until,
                tell,
                ranks,
                plan.temperature,
                plan.openings,
            )
        if ranks.rank:
            return
        if done < plan.dialogues:
            print(f"{done} of {plan.dialogues} dialogues; the same command goes on.")
            return
        apart = {question.prompt for name in TASKS for question in questions_of(name)}
        apart |= set() if plan.without is None else {question.prompt for question in read_questions(plan.without)}
        written = read_pairs(path)[: plan.dialogues]
        asked = ({"task": "dialogue", "prompt": pair.prompt} for pair in written[: plan.asked])
        _write(self.out / QUESTIONS, list(asked))
        _write(self.out / TRAINING, [pair._asdict() for pair in written[plan.asked :] if pair.prompt not in apart])
        for task, file in plan.problems.items():
            found = problems(Path(file))
            _write(self.out / f"{task}.jsonl", [pair._asdict() for pair in pairs_of(found, task, plan.notes)])
            if times := plan.variants.get(task):
                more = list(variants(found, times, plan.notes, plan.names))
                pairs = pairs_of(more, task, plan.notes)
                _write(self.out / f"{renumbered_name(task)}.jsonl", [pair._asdict() for pair in pairs])
                print(f"{len(found)} problems of {task}, {len(more)} with other numbers")
            if many := plan.calculations.get(task):
                made = calculations_of(found, task, many, plan.notes)
                _write(self.out / f"{calculations_name(task)}.jsonl", list(made))
        print(f"{done} dialogues, {plan.asked} of them to be asked: {self.out / TRAINING}")

    def train(self, name: str) -> None:
        """Go on with the run of a model."""
        plan = self.plan
        files = {"dialogues": self.out / TRAINING, **{data: self.out / f"{data}.jsonl" for data in plan.learnt}}
        if missing := [str(file) for file in files.values() if not file.is_file()]:
            raise InputError(f"{missing[0]} is not there yet; run the stage dialogues to its end first.")
        argv = [plan.base, "--out", str(self.out / name), "--device", self.device, "--minutes", str(self.minutes)]
        argv += ["--mask-token", plan.mask_token] if plan.mask_token is not None else []
        argv += ["--begin", plan.begin[name]] if name in plan.begin else []
        for key, file in files.items():
            argv += ["--data", f"{file}={plan.times.get(key, 1.0)}"]
        for key, value in plan.models[name].items():
            if value is not False:
                argv += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
        convert.main(argv)

    def compress(self, name: str) -> None:
        """Make the difference of a model or of a mean, and what it loses."""
        small, parts = self.out / name / SMALL, self.plan.means.get(name, ())
        mean = [self.out / part / SMALL for part in parts]
        made_of = mean or [self.out / name / convert.MODEL]
        if missing := [folder for folder in made_of if not folder.is_dir()]:
            before = f"compress --model {missing[0].parent.name}" if mean else "train"
            raise InputError(f"{missing[0]} is not there yet; run the stage {before} first.")
        if (small / REPORT).is_file() and (small / REPORT).stat().st_mtime > max(map(_changed, made_of)):
            print(f"{small} is there already.")
            return
        run = self.out / (parts[0] if parts else name)
        print(json.dumps(compress(run, small, self.plan.megabytes, device=self.device, mean=mean)))

    def evaluate(self, name: str) -> None:
        """Ask the small folder of a model the tasks' problems and the dialogues' prompts; both go on where they were.

        Raises:
            InputError: no such folder yet, or an evaluation that failed.
        """
        plan, small = self.plan, self.out / name / SMALL
        if not (small / DIFFERENCE).is_file():
            raise InputError(f"{small} is not there yet; run the stage compress first.")
        common = [str(small), "--recipe", plan.recipe, "--threshold", str(plan.threshold), "--against", "none"]
        common += ["--max-new-tokens", str(plan.new_tokens), "--device", self.device, "--json"]
        common += ["--backend", plan.backend]
        common += ["--max-batch", "64", "--out", str(self.out / name / EVALUATION), "--judge", plan.judge]
        asked = [["--task", task, "--count", str(count)] for task, count in plan.tasks.items()]
        asked += [["--data", str(self.out / QUESTIONS)]] if plan.asked else []
        for more in asked:
            command = [sys.executable, "-m", "dgraph", "eval", *common, *more]
            made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if made.returncode:
                raise InputError(f"the evaluation of {name} ended with {made.returncode}; the same command goes on.")
            (arm,) = json.loads(made.stdout)["arms"]
            print(json.dumps({"model": name, "asked": more[1], **arm}), flush=True)


def renumbered_name(task: str) -> str:
    """Name of a task's problems with other numbers."""
    return f"{task}_renumbered"


def calculations_name(task: str) -> str:
    """Name of the documents of a task's calculations."""
    return f"{task}_calculations"


def problems(path: Path) -> list[tuple[str, str]]:
    """The (question, answer) of lines {"question", "answer"}.

    Raises:
        InputError: a file that cannot be read, or a line that is not of this form.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            found.append((value["question"] + "", value["answer"] + ""))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f'{path}, line {number}: expected {{"question": TEXT, "answer": TEXT}}, got {line[:60]!r}.'
            ) from None
    return found


def pairs_of(found: Sequence[tuple[str, str]], task: str, notes: bool) -> list[Pair]:
    """Problems as pairs, asked as `dgraph eval` asks, with or without their notes <<...>>."""
    ask = TASKS[task].ask
    return [Pair(f"{question}\n{ask}", answer if notes else without_notes(answer)) for question, answer in found]


def variants(
    found: Sequence[tuple[str, str]], times: int, notes: bool = False, names: bool = False
) -> Iterator[tuple[str, str]]:
    """Problems with other numbers, none of them twice: each is tried `times` times; most cannot be followed. The
    same on any number of processors. notes, names: as a plan says.
    """
    numbered = [(number, *problem, times, notes, names) for number, problem in enumerate(found)]
    yield from _together(_variants_of, numbered, processes=len(found) * times >= MANY)


def calculations_of(
    found: Sequence[tuple[str, str]], task: str, count: int, notes: bool = False
) -> Iterator[dict[str, Any]]:
    """Make `count` documents of calculations like those of some problems. The same on any number of processors. notes:
    as a plan says.

    Raises:
        InputError: their solutions note none.
    """
    solutions = [answer for _, answer in found]
    known, lines = calculations.expressions(solutions), calculations.sentences(solutions)
    if not known:
        raise InputError(f"the {len(found)} solutions of {task} note no calculation as <<48/2=24>>.")
    parts = [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
    make = partial(_documents_of, known, lines, TASKS[task].ask, notes)
    for question, answer in _together(make, parts, processes=count >= MANY):
        yield Pair(question, answer)._asdict()


def _documents_of(
    known: Sequence[str], lines: Sequence[str], ask: str, notes: bool, numbers: Sequence[int]
) -> list[tuple[str, str]]:
    return list(calculations.documents(known, lines, numbers, ask, notes))


def _together(make: Callable[[T], Iterable[U]], items: Iterable[T], processes: bool) -> Iterator[U]:
    """Yield the products of each item in order, made in as many processes as there are processors, or here."""
    if not processes:
        yield from chain.from_iterable(map(make, items))
        return
    with multiprocessing.get_context("spawn").Pool() as pool:  # a fork of a process that uses a GPU may hang
        yield from chain.from_iterable(pool.imap(make, items, chunksize=8))


def _variants_of(problem: tuple[int, str, str, int, bool, bool]) -> list[tuple[str, str]]:
    number, question, answer, times, notes, names = problem
    drawn = (renumbered(question, answer, random.Random(f"numbers {number} {k}"), notes) for k in range(times))
    found = dict.fromkeys(made for made in drawn if made is not None)
    rng = random.Random(f"names {number}")
    return [renamed(*made, rng) for made in found] if names else list(found)


def _changed(folder: Path) -> float:
    """Time at which the newest file of a folder was written."""
    return max(file.stat().st_mtime for file in folder.iterdir())


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file, which appears whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    part.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path, help="a JSON file of training.stages.Plan")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--model", action="append", help="only this one of the plan; may repeat")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="a session ends then at the latest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    try:
        if parallel.started() and args.stage not in STAGES[:2]:
            raise InputError(f"the stage {args.stage} runs in one process; start it without torchrun.")
        plan = Plan.read(args.plan)
        work = Work(plan, args.out, args.device, args.minutes)
        known = [*plan.models, *(plan.means if args.stage != "train" else ())]
        names = args.model or known
        if other := [name for name in names if name not in known]:
            raise InputError(f"{args.plan} has no model {other[0]!r}; it has {', '.join(known)}.")
        if args.stage == "dialogues":
            work.dialogues()
        else:
            for name in names:
                getattr(work, args.stage)(name)
    except DgraphError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
