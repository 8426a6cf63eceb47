"""`dgraph generate --data`: many prompts from a file, answered into another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from dgraph.cli.output import ERR, print_json, print_text
from dgraph.cli.ranks import agreed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dgraph.blueprint import Blueprint
    from dgraph.dataset.answers import Answer
    from dgraph.dataset.lines import Question
    from dgraph.runtime.decoding import Decoding

Tell = Callable[[str], None]


def generate_data(
    blueprint: Blueprint,
    usual: Decoding,
    data: str,
    out: str,
    *,
    ray: bool,
    replicas: int,
    mesh: DeviceMesh | None,
    json: bool,
) -> None:
    """Answer the questions of a file to which the output file has no answer yet.

    Args:
        blueprint: of the engines.
        usual: how a line is answered as far as it does not say.
        data, out: the files; see `dgraph.dataset`.
        ray: in actors on Ray, instead of in this process.
        replicas: actors.
        mesh: ranks over which the model is divided, of which this is the first; the others call `help_generate`.
        json: print counts as JSON.

    Raises:
        InputError: a file that cannot be used; its bad lines are named before anything runs.
        DgraphError: what building an engine raises.
    """
    from dgraph.dataset.answers import Answers
    from dgraph.dataset.lines import read_questions
    from dgraph.families import folder_of

    folder_of(blueprint.model)
    questions, began = read_questions(data, usual), time.monotonic()
    with Answers(out, {question.id for question in questions}) as answers:
        left = [question for question in questions if question.id not in answers.present]
        if agreed(bool(left)):
            with _shown(len(questions), len(answers.present)) as (tell, step):

                def write(answer: Answer) -> None:
                    if answers.add(answer):
                        step()

                if ray:
                    from dgraph.ray.data import answered

                    with closing(answered(left, blueprint, usual, replicas=replicas, tell=tell)) as found:
                        for answer in found:
                            write(answer)
                else:
                    _answer_here(left, blueprint, mesh, tell, write)
        counts = {
            "questions": len(questions),
            "present": len(answers.present),
            "answered": len(answers.done) - len(answers.present),
            "errors": answers.errors,
            "seconds": round(time.monotonic() - began, 3),
        }
    if json:
        print_json(counts)
    else:
        print_text(
            "{answered} of {questions} questions answered in {seconds} s, {errors} of them with an error; "
            "{present} were answered before".format_map(counts)
        )


def help_generate(blueprint: Blueprint, mesh: DeviceMesh | None) -> None:
    """Run the ranks after the first while that one answers questions."""
    if agreed(False):
        (engine,) = blueprint.engines(mesh=mesh).values()
        engine.join()


def _answer_here(
    questions: Sequence[Question],
    blueprint: Blueprint,
    mesh: DeviceMesh | None,
    tell: Tell,
    write: Callable[[Answer], None],
) -> None:
    """Answer questions in this process, and the other ranks of a mesh."""
    import asyncio  # it takes a while to import, which Tab would wait for

    from dgraph.dataset.asking import ask_all

    async def answer() -> None:
        async for each in ask_all(engine, questions):
            write(each)

    (engine,) = blueprint.engines(tell, mesh).values()
    tell("answering")
    with engine:
        asyncio.run(answer())


@contextmanager
def _shown(count: int, done: int) -> Iterator[tuple[Tell, Callable[[], None]]]:
    """Show a bar over all questions while stderr is a terminal.

    Yields:
        A function that shows a text about the work, and one that counts an answer.
    """
    if not ERR.is_terminal:
        yield (lambda what: None), (lambda: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("loading", total=count, completed=done)

        def tell(what: str) -> None:
            bar.update(task, description=what)

        def step() -> None:
            bar.update(task, advance=1, description="answering")

        yield tell, step
