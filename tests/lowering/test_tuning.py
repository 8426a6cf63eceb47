"""Tuning with a timer that knows the answers: each shape once, the fastest tiling, kept for later processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.cache import key as keys
from dgraph.cache import sources, upkeep
from dgraph.cache.store import Store
from dgraph.errors import InputError, LoweringError
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.stage import run_in_order
from dgraph.lowering.timing import check_equal
from dgraph.lowering.tuning import FILE, MARGIN, Tuning, shapes_of
from dgraph.ops import OPS
from dgraph.ops.tuning import AttentionShape, LinearShape, LogitsShape, chosen
from dgraph.ranks.groups import group_of
from dgraph.testing import ranks
from tests.cache.stores import flip, folders
from tests.compiled import compiled
from tests.passes.scene import Scene

pytest.importorskip("triton")

CPU = torch.device("cpu")
SHAPE = AttentionShape(512, 64, 32, 8, 128, 128, 4096, "bfloat16", "bfloat16")
OTHER = replace(SHAPE, rows=1024)
OP = "paged_attention"
SIZES = {"b+1": 5, "b": 4, "pages": 100, "page": 8, "P": 6}


class Clock:
    """A timer: the seconds of tiling i of a shape's list, or an exception; and what it was asked."""

    def __init__(self, times: Mapping[int, float | Exception] | None = None):
        self.times, self.asked = dict(times or {}), []  # type: ignore[var-annotated]
        self.places: dict[Any, int] = {}

    def __call__(self, op: str, shape: Any, device: torch.device) -> Callable[[Any], float]:
        place = iter(range(100))

        def seconds(tiling: Any) -> float:
            at = next(place)
            self.asked.append((op, shape, tiling))
            found = self.times.get(at, 1.0 + at)
            if isinstance(found, Exception):
                raise found
            return found

        return seconds

    def tilings(self) -> list[Any]:
        return [tiling for _, _, tiling in self.asked]


def candidates(op: str = OP, shape: Any = SHAPE) -> list[Any]:
    found: list[Any] = OPS[op].tunable.candidates(shape, 4)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def tuned(store: Store | None, clock: Clock, *shapes: Any, op: str = OP) -> Tuning:
    """As a process of its own does it: a fresh store over the same folder."""
    tuning = Tuning(CPU, None if store is None else Store(store.root), timer=clock)
    tuning.tune(op, shapes or [SHAPE])
    return tuning


@pytest.mark.filterwarnings("error::UserWarning")
def test_every_tiling_is_timed_once_and_the_fastest_kept(store: Store) -> None:
    clock = Clock({3: 0.25, 5: 0.5})
    tuning = tuned(store, clock)
    assert clock.tilings() == candidates()
    assert len(clock.asked) > 6
    choice = tuning.found[OP][SHAPE]
    assert (choice.tiling, choice.seconds, choice.default_seconds) == (candidates()[3], 0.25, 1.0)
    assert (choice.tried, choice.failed) == (len(candidates()), ())
    assert tuning.timed == [(OP, SHAPE)]
    with tuning.choices.in_use():
        assert chosen(OP, SHAPE) == candidates()[3]
    tuning.tune(OP, [SHAPE])
    assert len(clock.asked) == len(candidates())


def test_ranks_take_what_rank_0_has_timed(tmp_path: Path) -> None:
    clocks = Clock({3: 0.25}), Clock({5: 0.25})

    def function(rank: int) -> list[Any]:
        own = Store(tmp_path / str(rank))  # on machines of their own, of which the second one knows another choice
        if rank:
            tuned(own, clocks[1], OTHER)
        tuning = Tuning(CPU, own, timer=clocks[rank], ranks=group_of("tp"))
        tuning._load(OP, tuning._key(OP))
        tuning.agree()
        tuning.tune(OP, [SHAPE])
        with tuning.choices.in_use():
            return [chosen(OP, SHAPE), chosen(OP, OTHER)]

    assert ranks(2, function) == [[candidates()[3], None]] * 2
    assert {shape for _, shape, _ in clocks[1].asked} == {OTHER}


@pytest.mark.parametrize("stored", [0, 1])
def test_a_rank_without_a_store_takes_part(tmp_path: Path, stored: int) -> None:
    """Its own could not be used, say; without rank 0's nothing is timed."""
    clock = Clock({3: 0.25})

    def function(rank: int) -> Any:
        store = Store(tmp_path) if rank == stored else None
        tuning = Tuning(CPU, store, timer=clock, ranks=group_of("tp"))
        with tuning.opened():
            if tuning.is_open:
                tuning.tune(OP, [SHAPE])
        with tuning.choices.in_use():
            return chosen(OP, SHAPE)

    assert ranks(2, function) == [None if stored else candidates()[3]] * 2


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_second_process_times_nothing(store: Store) -> None:
    first = tuned(store, Clock({3: 0.25}), SHAPE, OTHER)
    clock = Clock()
    second = tuned(store, clock, OTHER, SHAPE)
    assert clock.asked == second.timed == []
    assert second.found == first.found
    third = replace(SHAPE, rows=2048)
    assert tuned(store, clock, SHAPE, third).timed == [(OP, third)]
    assert len(clock.asked) == len(candidates(shape=third))
    assert set(tuned(store, clock).found[OP]) == {SHAPE, OTHER, third}, "one entry holds all shapes of an op"
    assert len(folders(store)) == 1


def test_a_tiling_must_be_clearly_faster_than_the_default(store: Store) -> None:
    assert tuned(store, Clock({1: MARGIN + 0.01})).found[OP][SHAPE].tiling == candidates()[0]
    assert tuned(store, Clock({1: MARGIN - 0.01}), OTHER).found[OP][OTHER].tiling == candidates(shape=OTHER)[1]


@pytest.mark.parametrize("changed", ["kernel", "tuner", "device"])
def test_another_kernel_or_device_is_timed_anew(store: Store, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    tuned(store, Clock())
    hashed, environment = sources.hash_of, keys.environment
    edited = {"kernel": "paged_attention.py", "tuner": "timing.py"}.get(changed)
    monkeypatch.setattr(sources, "hash_of", lambda path: "0" * 64 if path.name == edited else hashed(path))
    if changed == "device":
        monkeypatch.setattr(keys, "environment", lambda device: environment(device) | {"device name": "another"})
    clock = Clock({1: 0.5})
    assert tuned(store, clock).timed == [(OP, SHAPE)]
    assert len(folders(store)) == 2
    a, b = upkeep.entries(store)
    (found,) = keys.differences(a.key, b.key)
    assert {"kernel": "source dgraph/ops/attention/triton/paged_attention.py", "device": "device name"}.get(
        changed, "source dgraph/lowering/timing.py"
    ) == found.name


def test_what_a_device_is_called_is_in_the_key_and_its_number_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    first, second = (keys.tuning_key(OP, torch.device("cuda", i), []) for i in (0, 1))
    assert first.text == second.text
    assert first.inputs["device name"] == "NVIDIA H200, 132 multiprocessors"
    assert first.inputs["capability"] == "9.0"
    assert {"torch", "triton", "op"} <= set(first.inputs)
    assert keys.tuning_key("lm_head", torch.device("cuda", 0), []).digest != first.digest


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_tiling_that_fails_is_left_out_with_its_reason(store: Store) -> None:
    clock = Clock({1: RuntimeError("out of resource: shared memory\nmore"), 2: 0.5, 3: LoweringError("it is wrong")})
    choice = tuned(store, clock).found[OP][SHAPE]
    assert choice.tiling == candidates()[2]
    assert choice.tried == len(candidates()) - 2
    assert [reason for _, reason in choice.failed] == ["out of resource: shared memory", "it is wrong"]
    assert f"splits={candidates()[1].splits}" in choice.failed[0][0]
    assert tuned(store, Clock()).found[OP][SHAPE] == choice


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_default_that_fails_gives_way(store: Store) -> None:
    choice = tuned(store, Clock({0: RuntimeError("no")})).found[OP][SHAPE]
    assert (choice.tiling, choice.default_seconds) == (candidates()[1], None)


def test_where_every_tiling_fails_the_default_is_used_and_nothing_kept(store: Store) -> None:
    failing = Clock(dict.fromkeys(range(20), RuntimeError("no device")))
    with pytest.warns(
        UserWarning, match="no tiling of paged_attention for rows=512 .* can be timed.*no device"
    ) as told:
        choice = tuned(store, failing).found[OP][SHAPE]
    assert len(told) == 1
    assert (choice.tiling, choice.seconds, choice.tried) == (candidates()[0], None, 0)
    assert folders(store) == []
    assert tuned(store, Clock()).timed == [(OP, SHAPE)], "a later process tries again"


def test_values_that_do_not_fit_are_no_error(store: Store) -> None:
    def timer(op: str, shape: Any, device: torch.device) -> Callable[[Any], float]:
        raise torch.OutOfMemoryError("out of memory")

    tuning = Tuning(CPU, store, timer=timer)
    with pytest.warns(UserWarning, match="out of memory"):
        tuning.tune(OP, [SHAPE])
    assert tuning.found[OP][SHAPE].tiling == candidates()[0]


@pytest.mark.parametrize("file", [FILE, "key.txt", "manifest"])
def test_a_flipped_byte_is_one_line_and_timed_anew(store: Store, file: str) -> None:
    tuned(store, Clock({1: 0.5}))
    (digest,) = folders(store)
    flip(store.entries / digest / file, 40)
    with pytest.warns(UserWarning, match="is set aside and rebuilt") as told:
        tuning = tuned(store, Clock({2: 0.5}))
    assert len(told) == 1
    assert tuning.found[OP][SHAPE].tiling == candidates()[2]
    assert tuned(store, Clock()).timed == []


@pytest.mark.parametrize("content", ["{}", "[]", "no", '{"choices": [{"shape": 1}]}', '{"choices": 3}'])
def test_an_entry_that_says_something_else_is_rebuilt(store: Store, content: str) -> None:
    key = Tuning(CPU, store)._key(OP)
    assert store.put(key, {FILE: content.encode()})
    with pytest.warns(UserWarning, match=r"set aside and rebuilt: it does not load"):
        assert tuned(store, Clock()).timed == [(OP, SHAPE)]
    assert tuned(store, Clock()).timed == []


def test_what_was_timed_before_an_interruption_is_kept(store: Store) -> None:
    clock = Clock()

    def timer(op: str, shape: Any, device: torch.device) -> Callable[[Any], float]:
        return interrupted if shape == OTHER else clock(op, shape, device)

    broken = Tuning(CPU, store, timer=timer)
    with pytest.raises(KeyboardInterrupt):
        broken.tune(OP, [SHAPE, OTHER])
    assert tuned(store, Clock(), SHAPE, OTHER).timed == [(OP, OTHER)]


def interrupted(tiling: Any) -> float:
    raise KeyboardInterrupt


def test_without_a_store_nothing_is_timed() -> None:
    clock = Clock()
    tuning = tuned(None, clock)
    with tuning.opened():
        assert not tuning.is_open
    assert (clock.asked, len(tuning.choices)) == ([], 0)


# -- shapes of programs ------------------------------------------------------------------------------------------


def test_shapes_of_a_step(focus: dict[str, Graph]) -> None:
    found = shapes_of(focus["step"], SIZES, 24)
    spec = focus["step"].spec
    heads = spec.heads, spec.kv_heads, spec.head_dim
    assert found[OP] == [AttentionShape(24, 4, *heads, 8, 64, "float32", "float32")], "all layers, both stages: once"
    assert found["lm_head"] == [LogitsShape(4, spec.vocab, "float32"), LogitsShape(5, spec.vocab, "float32")]


def test_shapes_of_counted_rows(captured: Graph) -> None:
    recipe = dgraph.recipe("focus", captured.spec, count="device")
    graph = dgraph.rewrite(captured, recipe)["step"].graph
    found = shapes_of(graph, SIZES, 64)["rows_linear"]
    assert found
    assert all(isinstance(shape, LinearShape) and shape.rows == 64 for shape in found)
    assert {(s.d_in, s.d_out) for s in found} >= {(captured.spec.hidden, captured.spec.hidden)}  # type: ignore[union-attr]


def test_a_program_is_tuned_only_while_tuning_is_open(store: Store, focus: dict[str, Graph], step: Scene) -> None:
    clock, told = Clock({1: 0.5}), list[str]()
    tuning = Tuning(CPU, store, told.append, clock)
    program = LoweredProgram(focus["step"], RegionCompiler("eager"), Buckets.of([32]), tuning=tuning)
    program(step.copy().inputs, 32)
    assert clock.asked == []
    with tuning.opened():
        program(step.copy().inputs, 32)
        timed = len(clock.asked)
        program(step.copy().inputs, 32)
    assert {op for op, _ in tuning.timed} == {OP, "lm_head"}
    assert len(clock.asked) == timed > 0
    assert any("timing tilings of paged_attention for rows=32 sequences=" in line for line in told)
    later = Tuning(CPU, Store(store.root), timer=clock)
    LoweredProgram(focus["step"], RegionCompiler("eager"), Buckets.of([32]), tuning=later)
    assert later.found == tuning.found, "a program takes the choices when it is lowered"
    assert len(later.choices) == len(tuning.timed) > 0


def test_kernels_of_a_program_find_its_choices(store: Store, focus: dict[str, Graph], step: Scene) -> None:
    tuning, seen = Tuning(CPU, store, timer=Clock({1: 0.5})), list[Any]()

    def runner(stage: Any) -> Any:
        def run(slots: Any, rows: int) -> Any:
            with stage.tuned():
                seen.extend(chosen(op, shape) for op, shape in tuning.timed)
            return run_in_order(stage)(slots)(rows)

        return lambda slots: partial(run, slots)

    program = LoweredProgram(focus["step"], RegionCompiler("eager"), Buckets.of([32]), runner, tuning)
    with tuning.opened():
        program(step.copy().inputs, 32)
    with_choices = [tuning.found[op][shape].tiling for op, shape in tuning.timed]
    assert seen == with_choices * len(program.stages)
    assert chosen(*tuning.timed[0]) is None


def test_a_warm_up_opens_tuning(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled("tiny_sdar", "dense")
    assert program.tuning is None, "a CPU runs the references, which have no tilings"
    program.tuning = tuning = Tuning(CPU, store, timer=Clock())
    seen: list[bool] = []

    def warm_up(*args: Any) -> int:
        seen.append(tuning.is_open)
        if len(seen) > 1:
            raise InputError("refused")
        return 3

    monkeypatch.setattr(program._session, "warm_up", warm_up)
    assert program.warm_up(4) == 3
    with pytest.raises(InputError):
        program.warm_up(4)
    assert seen == [True, True]
    assert not tuning.is_open


def test_results_of_two_tilings_must_agree() -> None:
    x = torch.linspace(-1, 1, 100)
    check_equal([x + 1e-5, torch.arange(4)], [x, torch.arange(4)])
    check_equal([(x * 1.01).bfloat16()], [x.bfloat16()])
    for found, wanted in (
        (x * 1.01, x),
        (torch.full_like(x, torch.nan), x),
        ((x * 1.1).bfloat16(), x.bfloat16()),
        (torch.arange(4), torch.tensor([0, 1, 2, 4])),
    ):
        with pytest.raises(LoweringError, match="away from that of the default tiling"):
            check_equal([found], [wanted])


def test_an_entry_reads_well(store: Store) -> None:
    tuned(store, Clock())
    (entry,) = upkeep.entries(store)
    assert entry.what == "tuning: paged_attention"
    data = json.loads((entry.folder / FILE).read_text())
    assert data["op"] == OP
    assert data["choices"][0]["shape"]["rows"] == 512
