"""`dgraph calibrate`: the importance of a model's layers, kept beside the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.output import ERR, print_json, print_table, print_text, status
from dgraph.errors import InputError
from dgraph.types.texts import read_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from dgraph.plans.calibration import Calibration

OWN_SEEDS = 1_000_000
"""Added to a seed, so that no `dgraph eval --seed` draws the prompts of a calibration."""
WIDTH = 40
"""Characters of the longest bar."""


def calibrate(
    model: given.Model,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='A JSONL file of {"prompt": ...}, instead of prompts of the model\'s own tasks. An embedded model '
            "that reads English takes those of the bundled tasks."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Largest number of prompts.")] = 60,
    tokens: Annotated[
        int | None,
        typer.Option(help="Masks after each prompt.", show_default="its tasks' or 128; a block, if it is block-causal"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="calibration.json beside the model")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the tasks' prompts; `dgraph eval --seed` uses others.")] = 0,
    dtype: given.Dtype = None,
    device: given.Device = None,
    fact: given.Facts = None,
    json: given.Json = False,
) -> None:
    """Measure how much each layer changes the hidden states that it is given, and write that beside the model.

    Recipe maskkv divides what it keeps among layers by it. The importance of a layer is 1 - the mean cosine of the
    hidden states before and after it. The mean is over all positions of a prompt and a masked response. The column
    "attention" is the mean cosine before and after the layer's attention, by which layers=squeeze divides.

    \b
    dgraph calibrate tiny_llada --out calibration.json
    dgraph eval tiny_llada -r maskkv -o pairs=16 --calibration calibration.json
    dgraph calibrate ./LLaDA-8B-Instruct --prompts longbench.jsonl --tokens 256 --device cuda
    """
    import dgraph
    from dgraph.families import embedded, folder_of

    for name, value in (("--count", count), ("--tokens", tokens)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    known, facts = embedded().get(model), given.facts(fact)
    path = _writable(folder_of(model), out)
    texts = prompts_of(model, count, seed) if prompts is None else read_prompts(prompts)[:count]
    with status("loading"):
        found = dgraph.load(model, given.torch_dtype(dtype), given.torch_device(device), **facts)
    if tokens is None and known is not None and known.exam is not None and found.spec.attention == "bidirectional":
        tokens = known.exam.new_tokens
    with _progress(len(texts)) as tell:
        measured = dgraph.calibrate(
            found, texts, max_new_tokens=tokens, seed=seed if prompts is None else None, progress=tell
        )
    measured.write(path)
    if json:
        print_json({"model": found.name, "file": str(path), **measured.to_json()})
    else:
        print_table(("layer", "importance", "spread", "attention", ""), _rows(measured))
        print_text(f"\n{measured.prompts} prompts, {measured.max_new_tokens} masks after each; written to {path}")


def _writable(folder: Path, out: Path | None) -> Path:
    """The path to write to.

    Raises:
        InputError: the path cannot be written.
    """
    from dgraph.plans.calibration import FILE

    path = folder / FILE if out is None else out
    if out is not None and (out.is_dir() or not out.resolve().parent.is_dir()):
        reason = "it is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise InputError(f"--out {out} cannot be written: {reason}; give a file.")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        advice = "give a file in another" if out is not None else "give --out FILE"
        raise InputError(f"{path} cannot be written: the folder is read-only for you; {advice}.")
    return path


def prompts_of(model: str, count: int, seed: int) -> list[str]:
    """Prompts for an embedded model, of its tasks in turn, without those of its default evaluation.

    A model without tasks of its own reads English: its prompts are those of the tasks that dgraph brings along. They
    are drawn at random, and `dgraph eval --task` may ask them, too; a calibration reads no answer.

    Raises:
        InputError: no embedded model, or too few prompts.
    """
    from dgraph.evaluate.questions import Question, drawn, stored
    from dgraph.evaluate.tasks import TASKS, questions_of
    from dgraph.families import embedded

    known = embedded().get(model)
    if known is None:
        raise InputError(f"{model} comes with no tasks to draw prompts from; give --prompts FILE.jsonl.")

    def fresh(task: str, most: int) -> list[Question]:
        if known.exam is None:
            return questions_of(task, most, OWN_SEEDS + seed)
        return drawn(model, [task], most, OWN_SEEDS + seed)

    names = tuple(TASKS) if known.exam is None else known.exam.names
    each = -(-count // len(names))
    by_task = []
    for task in names:
        taken = {question.prompt for question in stored(model) if question.task == task}
        asked = dict.fromkeys(q.prompt for q in fresh(task, each + len(taken)))
        by_task.append([prompt for prompt in asked if prompt not in taken][:each])
    found = [prompt for turn in zip_longest(*by_task) for prompt in turn if prompt is not None]
    return found[:count]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a JSONL file.

    Raises:
        InputError: the file cannot be read, or a line has no prompt.
    """
    from dgraph.evaluate.questions import parse_questions

    return [question.prompt for question in parse_questions(read_text(file, f"--prompts {file}"), str(file))]


def _rows(measured: Calibration) -> list[tuple[str, ...]]:
    most = max(measured.importance) or 1.0
    columns = zip_longest(measured.importance, measured.spread, measured.similarity)
    return [
        (str(layer), *("" if x is None else f"{x:.4f}" for x in numbers), "#" * round(WIDTH * numbers[0] / most))
        for layer, numbers in enumerate(columns)
    ]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar over the prompts, while stderr is a terminal."""
    if not ERR.is_terminal:
        yield lambda done, count: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("capturing", total=total)
        yield lambda done, count: bar.update(task, completed=done, description="prompts")
