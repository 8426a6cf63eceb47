"""benchmarks.engine_steps: how long kernels ran, and where none did; batches are written one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from benchmarks import engine_load, engine_steps
from benchmarks.engine_steps import EngineSteps, GraphTimes, Span, Waits, span_between, span_of, steps_of, waits_between
from dgraph.runtime.decoding import Decoding
from dgraph.testing import models


def test_waits_are_what_no_kernel_covers() -> None:
    apart = [(100.0 * i, 100.0 * i + 60.0, "ab"[i % 2]) for i in range(8)]
    beside = [(20.0, 50.0, "within"), (0.0, 60.0, "alike")]
    assert waits_between(apart[::-1] + beside).short == 0
    at_once = [(start / 4, stop / 4, name) for start, stop, name in apart]
    assert waits_between(at_once[::-1]).short == pytest.approx(7 * 10e-6)
    waits = waits_between(apart)  # the middle half is of kernels 2 to 5
    assert waits.share == pytest.approx(3 * 40 / 360)
    assert waits.between == [("a", "b", 2, 80.0), ("b", "a", 1, 40.0)]


def test_a_device_waits_where_no_graph_covers() -> None:
    span = span_between([(15.0, 20.0), (2.0, 12.0), (3.0, 5.0), (11.0, 13.0), (20.0, 21.0)])
    assert span.seconds == pytest.approx(19e-3)
    assert span.waiting == pytest.approx(2e-3)


class Card:
    """A device that does what is launched in turn, on the host's clock, in milliseconds.

    Attributes:
        now: the clock.
        until: when everything that is launched is done.
        nodes: of the graph that is being recorded: events, and how long a kernel runs.
        event: how long the host takes to launch an event.
    """

    def __init__(self) -> None:
        self.now, self.until = 7.0, 0.0
        self.nodes: list[Event | float] | None = None
        self.event = 0.0

    def synchronize(self) -> None:
        self.now = max(self.now, self.until)

    def wait(self, pause: float) -> None:
        """Let the host wait for the device, and pause."""
        self.synchronize()
        self.now += pause


class Event:
    """Stands for an event on the card."""

    card: ClassVar[Card]

    def __init__(self, enable_timing: bool, external: bool = False):
        assert enable_timing
        self.external, self.at = external, -1.0

    def record(self) -> None:
        assert self.external == (self.card.nodes is not None)
        if self.card.nodes is None:
            self.at = max(self.card.now, self.card.until)
            self.card.now += self.card.event
        else:
            self.card.nodes.append(self)

    def query(self) -> bool:
        assert not self.external, "it looks reached before a replay gets there again"
        return self.at <= self.card.now

    def synchronize(self) -> None:
        self.card.now = max(self.card.now, self.at)

    def elapsed_time(self, other: Event) -> float:
        assert 0 <= self.at <= self.card.now
        assert 0 <= other.at <= self.card.now
        return other.at - self.at


class Graph:
    """Stands for a CUDA graph on the card. A launch takes the host 1 ms; the first kernel begins when it does."""

    card: ClassVar[Card]

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "relaxed"
        self.nodes = self.card.nodes = []

    def capture_end(self) -> None:
        self.card.nodes = None

    def replay(self) -> None:
        card = self.card
        card.until = max(card.now, card.until)
        for node in self.nodes:
            if isinstance(node, Event):
                node.at = card.until
            else:
                card.until += node
        card.now += 1.0


def recorded(kernel: float) -> Graph:
    """A graph of a kernel that runs so long."""
    graph = Graph()
    graph.capture_begin(None, capture_error_mode="relaxed")
    assert graph.card.nodes is not None
    graph.card.nodes.append(kernel)
    graph.capture_end()
    return graph


@dataclass
class Answering:
    """Stands for an engine."""

    run: Callable[[], object]
    stats: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(steps=0))

    def generate(self, prompts: object, decoding: object) -> list[SimpleNamespace]:
        self.run()
        self.stats.steps += 2
        return [SimpleNamespace(token_ids=[1, 2, 3])]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Takes the place of a GPU."""
    made = Card()
    for kind in (Event, Graph):
        monkeypatch.setattr(kind, "card", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    return made


def spanned(graphs: GraphTimes, run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and those of them that the card waits, of an engine that runs this."""
    return astuple(span_of(Answering(run), [[1]], Decoding(), graphs))  # type: ignore[arg-type]


METHODS = ("capture_begin", "capture_end", "replay")


def methods() -> list[object]:
    """What a CUDA graph does at present."""
    return [getattr(torch.cuda.CUDAGraph, name) for name in METHODS]


def test_a_device_waits_between_the_events_of_graphs(card: Card) -> None:
    before, graphs = methods(), GraphTimes()
    with graphs.recording():
        long, short = recorded(10.0), recorded(4.0)

    def run() -> None:
        long.replay()
        card.wait(0.5)
        long.replay()
        short.replay()  # while the other runs
        card.wait(2.0)
        long.replay()
        card.wait(0.25)
        short.replay()

    for _ in range(2):
        assert spanned(graphs, run) == pytest.approx((40.75e-3, 2.75e-3))
    assert methods() == before


def test_steps_launched_ahead_of_the_end_of_the_last_leave_no_wait(card: Card) -> None:
    graphs = GraphTimes()
    with graphs.recording():
        step, other, move = recorded(10.0), recorded(10.0), recorded(4.0)

    def one_graph() -> None:
        for _ in range(3):
            step.replay()
        card.wait(3.0)
        move.replay()

    assert spanned(graphs, one_graph) == pytest.approx((37e-3, 3e-3))

    def in_turns(*steps: Graph) -> None:
        for each in steps:
            each.replay()
            move.replay()
        card.wait(3.0)
        steps[0].replay()

    # The second `move` is launched before the first one has begun.
    for second in (step, other):
        assert spanned(graphs, partial(in_turns, step, second)) == pytest.approx((41e-3, 3e-3))


def test_a_graph_that_is_over_when_its_next_replay_is_launched_is_read_before(card: Card) -> None:
    graphs = GraphTimes()
    with graphs.recording():
        step = recorded(1.0)  # as long as the launch

    def run() -> None:
        for pause in (0.5, 0.0, 0.25):
            step.replay()
            card.wait(pause)
        step.replay()

    assert spanned(graphs, run) == pytest.approx((4.75e-3, 0.75e-3))


def test_a_card_does_not_wait_for_being_measured(card: Card) -> None:
    graphs = GraphTimes()
    with graphs.recording():
        step, move = recorded(10.0), recorded(4.0)
    card.event = 1.5

    def run() -> None:
        for _ in range(3):
            step.replay()
            card.wait(0.5)
            move.replay()
            card.wait(0.25)

    assert spanned(graphs, run) == pytest.approx((44e-3, 2e-3))


def test_a_graph_without_events_is_an_error(card: Card) -> None:
    before, graphs = methods(), GraphTimes()
    graph = recorded(1.0)
    with pytest.raises(RuntimeError, match=r"no events: record it within `GraphTimes\.recording\(\)`"):
        spanned(graphs, lambda: graph.replay())
    assert methods() == before


def test_graphs_do_what_they_did_when_something_is_raised(card: Card) -> None:
    before, graphs = methods(), GraphTimes()

    def fails() -> None:
        assert [now is then for now, then in zip(methods(), before, strict=True)] == [False, False, False]
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"), graphs.recording():
        spanned(graphs, fails)
    assert methods() == before


def test_a_recording_that_fails_is_over(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    with GraphTimes().recording():
        graph = Graph()
        graph.capture_begin(capture_error_mode="relaxed")
        monkeypatch.setattr(Event, "record", lambda event: next(iter(())))
        with pytest.raises(StopIteration):
            graph.capture_end()
    assert card.nodes is None


def test_graphs_of_the_first_answer_are_reported(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(short=0.0, share=0.2, between=[])
    monkeypatch.setattr(engine_steps, "waits_of", lambda *given: waits)
    graphs, known = GraphTimes(), list[Graph]()

    def run() -> None:
        if not known:
            known.append(recorded(10.0))
        known[0].replay()
        card.wait(5.0)
        known[0].replay()

    with graphs.recording():
        *_, found = steps_of(Answering(run), [[1]], Decoding(), graphs, True)  # type: ignore[arg-type]
    assert (found.steps, found.tokens, found.waits) == (2, 3, waits)
    assert found.span is not None
    assert astuple(found.span) == pytest.approx((25e-3, 5e-3))
    assert found.idle == pytest.approx(0.2)


@pytest.mark.parametrize(("parts", "given"), [(("steps", "clients"), True), (("clients",), False)])
def test_graphs_of_a_load_get_events_where_its_steps_are_measured(
    parts: tuple[str, ...], given: bool, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Graph] = []

    def ready(*given: object) -> None:
        made.append(recorded(1.0))
        raise ValueError("enough")

    monkeypatch.setattr(engine_load, "ready", ready)
    with pytest.raises(ValueError, match="enough"):
        engine_load.main(["--shape", "sdar-8b", "--parts", *parts, "--device", "cpu"])
    assert [isinstance(node, Event) for node in made[0].nodes] == ([True, False, True] if given else [False])


def test_the_device_is_idle_between_graphs_and_between_their_kernels() -> None:
    found = EngineSteps(seconds=3.0, steps=10, tokens=40)
    assert found.idle is None
    assert found.cells() == [300, pytest.approx(40 / 3), "-", "-"]
    traced = replace(found, span=Span(2.0, waiting=0.06), waits=Waits(short=0.04, share=0.2, between=[]))
    assert traced.idle == pytest.approx(0.05)
    assert traced.cells()[2:] == [pytest.approx(5), 20]


def test_batches_are_written_until_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny,) = models(None, "sdar")
    monkeypatch.setattr(engine_steps, "random_model", lambda *given, **changes: tiny.model)
    monkeypatch.setattr(torch.cuda, "Event", None)  # a CPU has none
    began, waits_table = time.perf_counter, engine_steps.waits_table

    def over(*given: object) -> None:
        waits_table(*given)
        monkeypatch.setattr(time, "perf_counter", lambda: began() + 1e6)

    monkeypatch.setattr(engine_steps, "waits_table", over)
    small = ("--prompt", "9", "--tokens", "8", "--steps", "8", "--repeat", "1", "--backend", "eager", "--device", "cpu")
    out = tmp_path / "out.json"
    recipe = ("--recipe", "dense", "--batch", "2", "3")
    engine_steps.main([*small, *recipe, "--seconds", "1e5", "--json", str(out)])
    found = json.loads(out.read_text())
    start, steps, notes = found["tables"]
    assert start["columns"] == ["weights", "optimize"]
    assert [row[0] for row in steps["rows"]] == [2]
    assert found["data"]["engine"]["2"]["tokens"] == 2 * 16
    assert notes["rows"] == [["3 sequences: not begun after 100000 s"]]
