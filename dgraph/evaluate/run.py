"""The run of an evaluation: every arm answers every question that has no result yet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from dgraph.api import CompiledModel, optimize
from dgraph.errors import DgraphError, InputError, warn
from dgraph.evaluate.arms import Arm
from dgraph.evaluate.distributions import Distributions, merged
from dgraph.evaluate.judge import Judge, Judged
from dgraph.evaluate.paired import Paired
from dgraph.evaluate.questions import Question
from dgraph.evaluate.results import Keys, Result, Store
from dgraph.evaluate.salience import Counted, Salience, rows_run
from dgraph.evaluate.scores import Score
from dgraph.families import Model
from dgraph.ir.row_counts import counted_rows
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.request_checks import check_request
from dgraph.runtime.results import Progress


@dataclass(frozen=True)
class State:
    """Progress of an evaluation.

    Attributes:
        arm: label of the arm at work, or the judge's name.
        what: text for the thing that is being done.
        done, total: number of responses (or judgements) so far, and in all.
    """

    arm: str
    what: str
    done: int
    total: int


@dataclass
class Evaluation:
    """Arms, questions and the results so far.

    Decoding is greedy, unless a rule has another sampler. Draws depend on the place in the batch, so batches are always
    the same parts of the questions.

    Attributes:
        model: the model that is evaluated; it has a tokenizer.
        arms: in the order in which they are shown.
        references: by arm, the arm that it is compared with.
        questions: the questions that every arm answers.
        store: results of this run and of earlier ones.
        keys: see `Keys`.
        max_new_tokens, block_length: as for `CompiledModel.generate`.
        max_batch: prompts that are decoded together; results are written after each batch.
        backend, buckets: as for `optimize`.
        judge: model that judges the responses when all are decoded; None for no judgements.
        failed: reasons why arms could not be run to the end, by label.
        stored: loaders of the same model with stored weights, by the name that arms give as their weights.
        distributions: those of the responses that this run decodes, by the label of their arm; None to watch nothing.
    """

    model: Model
    arms: Sequence[Arm]
    references: Mapping[Arm, Arm]
    questions: Sequence[Question]
    store: Store
    keys: Keys
    max_new_tokens: int
    block_length: int | None = None
    max_batch: int = 16
    backend: str = "inductor"
    buckets: str | Sequence[int] | None = None
    judge: Judge | None = None
    failed: dict[str, str] = field(default_factory=dict)
    stored: Mapping[str, Callable[[], Model]] = field(default_factory=dict)
    distributions: dict[str, Distributions] | None = None

    def check(self) -> None:
        """Refuse settings and prompts that cannot be decoded, before anything is compiled.

        Raises:
            InputError: as `CompiledModel.generate` would raise it.
        """
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise InputError(f"{self.model.name} has no tokenizer.json, so it cannot read a prompt; add one.")
        with warnings.catch_warnings(action="ignore"):  # decoding gives the same warnings later
            check_request(
                self.model.spec,
                [tokenizer.encode(q.prompt) for q in self.questions],
                Decoding(max_new_tokens=self.max_new_tokens, block_length=self.block_length),
                self.max_batch,
            )

    def run(self, tell: Callable[[State], None] | None = None) -> None:
        """Decode the missing responses, and then judge them.

        Arms with equal programs run one after the other, so that each program is compiled once. An arm that cannot be
        run is recorded in `failed`, and the others go on.
        """
        total, done = len(self.arms) * len(self.questions), sum(len(self.found(arm)) for arm in self.arms)
        for group in self._by_recipe():
            program: CompiledModel | None = None
            for arm in group:

                def say(what: str, more: int = 0, arm: Arm = arm) -> None:
                    if tell is not None:
                        tell(State(arm.label, what, min(total, done + more), total))  # noqa: B023

                try:
                    for batch in self._missing(arm):
                        if program is None:
                            load = self.stored.get(arm.weights or "")
                            program = optimize(
                                self.model if load is None else load(),
                                arm.built,
                                backend=self.backend,
                                buckets=self.buckets,
                                progress=say,
                                weights=arm.weights if load is None else None,
                            )
                        found = sum(self.store.get(self.keys.of(arm, q.prompt)) is not None for q in batch)
                        self.store.add(*self._decode(program, arm, batch, say))
                        done += len(batch) - found
                except (DgraphError, RuntimeError) as error:  # running out of memory is a result, too
                    if not isinstance(error, DgraphError) and "out of memory" not in str(error):
                        raise
                    self.failed[arm.label] = str(error).partition("\n")[0]
        if self.judge is not None:
            self._read(self.judge, tell)

    def found(self, arm: Arm) -> list[tuple[Question, Result]]:
        """The questions that an arm has answered, with its results."""
        results = ((q, self.store.get(self.keys.of(arm, q.prompt))) for q in self.questions)
        return [(question, result) for question, result in results if result is not None]

    def score(self, arm: Arm, *tasks: str) -> Score:
        """Scores of an arm so far, over the named tasks; without names over all."""
        found = [pair for pair in self.found(arm) if not tasks or pair[0].task in tasks]
        return Score.of(found, self._other(arm), self._judged)

    def paired(self, arm: Arm, *tasks: str) -> Paired | None:
        """Compare an arm so far with its reference, over the named tasks (all without names).

        None for an arm without a reference, and without common results.
        """
        other = self._other(arm)
        if other is None:
            return None
        found = [(q, r, other[q.prompt]) for q, r in self.found(arm) if q.prompt in other]
        return Paired.of([one for one in found if not tasks or one[0].task in tasks], self._judged)

    def _other(self, arm: Arm) -> dict[str, Result] | None:
        """Results of the arm that an arm is compared with, by prompt; None if it has none, or is its own reference."""
        reference = self.references.get(arm)
        if reference is None or reference == arm:
            return None
        return {question.prompt: result for question, result in self.found(reference)}

    def _judged(self, result: Result) -> Judged | None:
        return None if self.judge is None else self.store.judged(self.judge.key(result.prompt, result.text))

    def salience(self, arm: Arm) -> Salience | None:
        """Salient rows of an arm so far; None if its recipe counts none, or an older version wrote its results."""
        return Salience.of(self.store.counted(result.key for _, result in self.found(arm)))

    def rows_run(self, arm: Arm) -> dict[int, float]:
        """Rows that each counting layer ran on per decoded token of an arm so far, by layer; empty if none counts."""
        results = {result.key: result for _, result in self.found(arm)}
        batches = self.store.counted(results)
        keys = {key for counted, _ in batches for key in counted.keys}
        return rows_run(batches, sum(result.decoded for key, result in results.items() if key in keys))

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order of the questions."""
        return list(dict.fromkeys(q.task for q in self.questions))

    def to_json(self) -> dict[str, Any]:
        """The figures of every arm, by task, too."""
        arms = []
        for arm in self.arms:
            reference, salience = self.references.get(arm), self.salience(arm)
            arms.append(
                {
                    "label": arm.label,
                    "recipe": {"recipe": arm.recipe.name, "options": dict(arm.recipe.options)},
                    "rule": arm.rule_json(),
                    **({} if arm.weights is None else {"weights": arm.weights}),
                    "swept": dict(arm.swept),
                    "against": reference.label if reference is not None and reference != arm else None,
                    **self.score(arm).to_json(),
                    "salience": salience and salience.to_json(),
                    "rows_run": self.rows_run(arm),
                    "paired": (paired := self.paired(arm)) and paired.to_json(),
                    "tasks": {
                        task: {
                            **self.score(arm, task).to_json(),
                            "paired": (paired := self.paired(arm, task)) and paired.to_json(),
                        }
                        for task in self.tasks
                    },
                }
            )
        found = {"arms": arms, "comparisons": self.comparisons, "failed": dict(self.failed)}
        return found if self.distributions is None else found | {"distributions": merged(self.distributions)}

    @property
    def comparisons(self) -> int:
        """The number of arms that are compared with another, and so of comparisons from which a reader picks one."""
        return sum(self.references.get(arm) not in (None, arm) for arm in self.arms)

    def _read(self, judge: Judge, tell: Callable[[State], None] | None) -> None:
        """Judge the responses that have no judgement yet; equal responses to a prompt once."""
        pairs = {(r.prompt, r.text): None for arm in self.arms for _, r in self.found(arm)}
        missing = [pair for pair in pairs if self.store.judged(judge.key(*pair)) is None]
        done, left = 0, len(missing)
        for part in judge.read(missing):
            self.store.add_judged(part)
            done += len(part)
            if tell is not None:
                tell(State(judge.model.name, "judged", done, left))
        if done < left:
            warn(
                f"{left - done} response(s) were not judged: with their prompts they are longer than the "
                f"{judge.model.max_positions} positions of {judge.model.name}."
            )

    def _by_recipe(self) -> Iterator[list[Arm]]:
        for same in dict.fromkeys((arm.built, arm.weights) for arm in self.arms):
            yield [arm for arm in self.arms if (arm.built, arm.weights) == same]

    def _missing(self, arm: Arm) -> Iterator[Sequence[Question]]:
        for first in range(0, len(self.questions), self.max_batch):
            batch = self.questions[first : first + self.max_batch]
            if any(self.store.get(self.keys.of(arm, q.prompt)) is None for q in batch):
                yield batch

    def _decode(
        self, program: CompiledModel, arm: Arm, batch: Sequence[Question], say: Callable[[str, int], None]
    ) -> tuple[list[Result], Counted | None]:
        def count(progress: Progress) -> None:
            say(f"{progress.decoded} tokens", progress.finished)

        layers = counted_rows(program.graph())
        watched = self._watched(program, arm)
        with nullcontext() if watched is None else watched.watching(program.programs["step"]):
            result = program.generate(
                [q.prompt for q in batch],
                Decoding(
                    max_new_tokens=self.max_new_tokens,
                    policy=arm.policy,
                    block_length=self.block_length,
                    open_blocks=arm.open_blocks,
                ),
                progress=count,
                observer=None if watched is None else watched.observe,
            )
        assert result.texts is not None
        stats = result.stats
        counts = zip(stats.sequence_steps, stats.sequence_decoded, stats.sequence_rows, strict=True)
        found = []
        for question, text, ids, numbers in zip(batch, result.texts, result.token_ids, counts, strict=True):
            seen = (arm.label, question.task, question.prompt, question.right(text), text, ids)
            found.append(Result(self.keys.of(arm, question.prompt), *seen, *numbers, stats.total / len(batch)))
        return found, Counted.of([result.key for result in found], layers, stats)

    def _watched(self, program: CompiledModel, arm: Arm) -> Distributions | None:
        """The distributions to which an arm's steps are added; None if they are not asked for."""
        if self.distributions is None:
            return None
        spec = program.spec
        fresh = Distributions(spec.layers, self.block_length or spec.block_length, spec.eos_ids)
        return self.distributions.setdefault(arm.label, fresh)
