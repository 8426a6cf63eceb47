"""Bundles: a step that was recorded gives the same again, and a file says no more than it should."""

from __future__ import annotations

import json
import shlex
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.bundles import FOLDER, Bundle, commanded
from dgraph.bundles.recorder import in_use
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import FormatError, InputError, UnknownName
from dgraph.lowering.executor import LoweredProgram
from dgraph.runtime.loop.batch import Batch
from dgraph.testing import models
from dgraph.testing.models import prompts
from dgraph.types.shapes import InputSpec
from tests.amounts import first_cases

TEXT = "Sort these words: river stone cloud maple"


@pytest.fixture(scope="module")
def tiny() -> CompiledModel:
    return dgraph.optimize("tiny_sdar", "focus", backend="eager")


@pytest.fixture(scope="module")
def stored(tiny: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a step that ended, with its weights."""
    file = tmp_path_factory.mktemp("bundles") / "step.zip"
    dgraph.bundle(tiny, file, TEXT, step=1, threshold=1.0, weights=True)
    return file


@pytest.fixture
def broken_program(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the call of a program with a number, counted from now on, raise."""

    def break_at(number: int) -> None:
        run, calls = LoweredProgram._on, iter(range(1_000))

        def broken(self: LoweredProgram, *args: Any) -> Any:
            if next(calls) == number:
                raise RuntimeError("a kernel is broken")
            return run(self, *args)

        monkeypatch.setattr(LoweredProgram, "_on", broken)

    return break_at


@pytest.fixture
def broken_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the decode loop raise after the second step of a batch."""
    take = Batch._launched

    def broken(self: Batch, *args: Any) -> None:
        take(self, *args)
        if self._steps == 2:
            raise ValueError("the loop is broken")

    monkeypatch.setattr(Batch, "_launched", broken)


def of_the_model(found: dgraph.Replay) -> list[str]:
    """Notes about weights and graphs; tests before this one may have changed the number of threads."""
    return [note for note in found.notes if "weights" in note or "graph" in note]


def facts_of(file: Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as members:
        found: dict[str, Any] = json.loads(members.read("bundle.json"))
    return found


@first_cases(
    4,
    "family, recipe, settings, phase, variant",
    [
        ("llada", "maskkv", {}, "select", ""),
        ("sdar", "dyllm+focus", {"temperature": 0.7, "seed": 3}, "step", ""),
        ("llada", "dense", {"sampler": dgraph.Sampler(cfg_scale=1.0)}, "step", "logits"),
        ("sdar", "dllm_serve", {}, "step", ""),
        ("dream", "dllm_cache", {}, "step", ""),
        ("nemotron", "dense", {}, "step", ""),
        ("llada", "sparse_dllm+dyllm", {}, "step", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.* divides pairs")
def test_a_step_gives_the_same_again(
    family: str, recipe: str, settings: dict[str, Any], phase: str, variant: str, tmp_path: Path
) -> None:
    (one,) = models(None, family)
    optimized, file = one.optimized(recipe), tmp_path / "step.zip"
    number = 0 if phase == "select" else 2
    ids = prompts(one)[:2]
    made = dgraph.bundle(optimized, file, input_ids=ids, step=number, max_new_tokens=12, **settings)
    assert (made.facts["step"]["phase"], made.facts["step"]["number"]) == (phase, number)
    assert made.facts["step"]["variant"] == variant
    assert made.error is None
    found = dgraph.replay(file, one.model)
    assert found.same, str(found)
    assert of_the_model(found) == []
    assert {result for _, result in found.outputs.values()} == {"equal"}
    assert list(found.outputs) == list(optimized.program(phase, variant).graph.outputs)


def test_with_weights_the_recorded_graph_runs(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.bundling.optimize", lambda *args, **how: pytest.fail("a model was compiled"))
    found = dgraph.replay(stored)
    assert found.same
    assert of_the_model(found) == []
    assert "step 1 of tiny_sdar under focus" in str(found)
    assert found.to_json()["outputs"]["token"]["result"] == "equal"


def test_other_weights_are_told(tmp_path: Path) -> None:
    one, other = models(None, "sdar")[0], models(None, "sdar", seed=1)[0]
    ids = prompts(one)[:1]
    dgraph.bundle(one.optimized("dense"), tmp_path / "step.zip", input_ids=ids, step=0, max_new_tokens=4)
    found = dgraph.replay(tmp_path / "step.zip", other.model)
    assert not found.same
    assert of_the_model(found) == ["the weights are not those that were recorded"]
    assert "elements differ" in found.outputs["confidence"][1]
    with pytest.raises(FormatError, match=r"does not have the weights of .*sdar.*give the model"):
        dgraph.replay(tmp_path / "step.zip")


def test_another_graph_and_another_version_are_told(stored: Path, tmp_path: Path) -> None:
    found = Bundle.read(stored)
    found.facts["environment"]["torch"] = "1.0"  # type: ignore[index]
    calls = [node for node in found.graph["nodes"] if "op" in node]
    calls[0]["name"] = "renamed"
    found.write(tmp_path / "other.zip")
    notes = dgraph.replay(tmp_path / "other.zip", "tiny_sdar").notes
    assert any(note.startswith("torch is") and note.endswith("and was 1.0") for note in notes)
    assert "the passes of today make another graph than the recorded one" in notes


def test_an_exception_of_a_program_comes_again(
    tiny: CompiledModel, broken_program: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken.zip"
    broken_program(1)
    made = dgraph.bundle(tiny, file, TEXT, threshold=1.0, step=9)
    assert made.facts["step"]["number"] == 1
    assert made.error is not None
    assert (made.error["type"], made.error["message"]) == ("builtins.RuntimeError", "a kernel is broken")
    assert made.outputs is None
    frames = made.error["frames"]
    assert any(frame.startswith("dgraph/runtime/loop/batch.py:") for frame in frames)
    assert not any(frame.startswith("/") for frame in frames)
    broken_program(0)
    again = dgraph.replay(file)
    assert again.same
    assert isinstance(again.raised, RuntimeError)
    assert "raised    builtins.RuntimeError: a kernel is broken" in str(again)
    monkeypatch.undo()
    mended = dgraph.replay(file)
    assert not mended.same
    assert "raised    nothing" in str(mended)


def test_without_weights_an_exception_is_looked_for_on_random_ones(
    broken_program: Callable[[int], None], tmp_path: Path
) -> None:
    one, file = models(None, "llada")[0], tmp_path / "broken.zip"
    broken_program(0)
    dgraph.bundle(one.optimized("dense"), file, input_ids=prompts(one)[:1], max_new_tokens=4)
    broken_program(0)
    found = dgraph.replay(file)
    assert found.same
    assert of_the_model(found) == ["weights are drawn at random; none are in the bundle, and no model was given"]
    broken_program(99)
    assert not dgraph.replay(file).same


def test_a_prefill_and_a_forward_without_a_prompt(broken_program: Callable[[int], None], tmp_path: Path) -> None:
    """Each is a call of its own, which belongs to a step."""
    one, guided = models(None, "sdar")[0], dgraph.Sampler(cfg_scale=1.0)
    file, optimized = tmp_path / "broken.zip", one.optimized("dense")
    broken_program(0)
    made = dgraph.bundle(optimized, file, input_ids=prompts(one)[2:], max_new_tokens=4)
    assert made.title.startswith("prefill before step 0 of ")
    broken_program(0)
    assert dgraph.replay(file, one.model).same
    broken_program(5)  # a prefill with and without the prompt, a step with and without it, and one more
    made = dgraph.bundle(optimized, file, input_ids=prompts(one)[2:], max_new_tokens=4, steps=4, sampler=guided)
    assert (made.facts["step"]["phase"], made.facts["step"]["number"]) == ("step", 1)
    broken_program(0)
    assert dgraph.replay(file, one.model).same


@pytest.mark.usefixtures("broken_loop")
def test_an_exception_of_the_loop_comes_again(tiny: CompiledModel, tmp_path: Path) -> None:
    file = tmp_path / "loop.zip"
    made = dgraph.bundle(tiny, file, TEXT, threshold=1.0)
    assert made.error is not None
    assert made.error["in"] == "loop"
    assert made.facts["step"]["number"] == 1
    assert made.outputs
    again = dgraph.replay(file)
    assert again.same
    assert str(again.raised) == "the loop is broken"


@pytest.mark.usefixtures("broken_loop")
def test_an_exception_offers_a_bundle(tiny: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "mine.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "mine.py", raising=False)
    with pytest.raises(ValueError, match="the loop is broken") as caught:
        tiny.generate(TEXT, threshold=1.0)
    (note,) = caught.value.__notes__
    assert note == f"A bug report needs the bundle of this step (step, 1): {FOLDER}=. python mine.py"
    with commanded(lambda step: f"the command for {step}"), pytest.raises(ValueError) as caught:  # noqa: PT011
        tiny.generate(TEXT, threshold=1.0)
    assert caught.value.__notes__ == ["A bug report needs the bundle of this step (step, 1): the command for 1"]
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tiny.generate(TEXT, threshold=1.0)
    assert caught.value.__notes__[0].endswith(f"set os.environ['{FOLDER}'] to a folder, and call generate again.")
    with pytest.raises(InputError) as refused:
        tiny.generate("")
    assert not hasattr(refused.value, "__notes__"), "nothing had run"


@pytest.mark.usefixtures("broken_loop")
def test_a_folder_gets_a_bundle_of_each_failure(
    tiny: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "found"))
    for number in range(2):
        with pytest.raises(ValueError, match="the loop is broken") as caught:
            tiny.generate(TEXT, threshold=1.0, stop=["never said"])
        name = f"tiny_sdar-focus-step-1{'-1' if number else ''}.zip"
        file = tmp_path / "found" / name
        assert caught.value.__notes__ == [
            f"The bundle of this step is {file}. Run it again: dgraph replay {shlex.quote(str(file))}"
        ]
        assert dgraph.replay(file).same
        assert "stop" not in facts_of(file)["request"]["decoding"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(FOLDER, str(blocked))
    with pytest.raises(ValueError, match="the loop is broken") as caught:
        tiny.generate(TEXT, threshold=1.0)
    assert caught.value.__notes__[0].startswith(f"No bundle of this step was written to {blocked}: ")


def test_no_text_goes_in_without_asking(tiny: CompiledModel, tmp_path: Path) -> None:
    silent, open_ = tmp_path / "silent.zip", tmp_path / "open.zip"
    for file, text in ((silent, False), (open_, True)):
        dgraph.bundle(tiny, file, TEXT, step=0, stop=["never said"], text=text)
    with zipfile.ZipFile(silent) as members:
        assert set(members.namelist()) == {"bundle.json", "graph.json", "inputs.safetensors", "outputs.safetensors"}
        content = b"".join(members.read(name) for name in members.namelist())
    assert not any(word in content for word in (b"river", b"never said", str(Path.home()).encode(), b"/work/"))
    asked = facts_of(open_)["request"]
    assert (asked["prompts"], asked["decoding"]["stop"]) == (TEXT, ["never said"])


def test_pages_of_earlier_requests_stay_out() -> None:
    cache = InputSpec("k_cache_0", torch.float32, ("pages", "page", 2, 3))
    value = torch.arange(4 * 5 * 6, dtype=torch.float32).view(4, 5, 2, 3)
    table = torch.tensor([[2, -1], [0, -1]], dtype=torch.int32)
    kept = in_use(cache, {"k_cache_0": value, "page_table": table})
    assert torch.equal(kept[[0, 2]], value[[0, 2]])
    assert not kept[[1, 3]].any()
    assert torch.equal(in_use(cache, {"k_cache_0": value}), value)


def test_settings_without_a_form_are_told(tiny: CompiledModel, tmp_path: Path) -> None:
    chosen = dgraph.Decoding(sampler=dgraph.Sampler(processors=(lambda rows: rows.logits,)))
    made = dgraph.bundle(tiny, tmp_path / "step.zip", TEXT, chosen, step=0)
    assert "decoding" not in made.facts["request"]
    assert "processors have no form in JSON" in made.facts["request"]["no decoding"]
    with pytest.raises(FormatError, match="the settings of decoding are not in this bundle: Sampler: processors"):
        dgraph.replay(tmp_path / "step.zip")


def test_bundles_that_cannot_be_made(tiny: CompiledModel, tmp_path: Path) -> None:
    file = tmp_path / "step.zip"
    with pytest.raises(InputError, match=r"takes 1 step, so there is no step 7\."):
        dgraph.bundle(tiny, file, TEXT, step=7)
    with pytest.raises(InputError, match="step must be the number of a step"):
        dgraph.bundle(tiny, file, TEXT, step=-1)
    with pytest.raises(UnknownName, match="temprature"):
        dgraph.bundle(tiny, file, TEXT, temprature=1)
    with pytest.raises(InputError, match="is empty"):
        dgraph.bundle(tiny, file, "")
    with pytest.raises(InputError, match="cannot be written: No such file"):
        dgraph.bundle(tiny, tmp_path / "nowhere" / "step.zip", TEXT)
    assert list(tmp_path.iterdir()) == []
    assert tiny.generate(TEXT).token_ids, "the model is free again"


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("change", [lambda content: content[:-100], lambda content: b"PK" + content[:9], flipped])
def test_a_damaged_bundle_is_refused(stored: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "damaged.zip"
    file.write_bytes(change(stored.read_bytes()))
    with pytest.raises(FormatError, match=r"is no bundle, or a damaged one"):
        dgraph.replay(file)


@first_cases(
    2,
    "change, message",
    [
        (lambda facts: facts.update({"dgraph bundle": 9}), "is of version 9 of its form"),
        (lambda facts: facts.pop("step"), "has no entry 'step'"),
        (lambda facts: facts.pop("dgraph bundle"), "this is no bundle"),
        (lambda facts: facts.update(model=3), "damaged"),
        (lambda facts: facts["compilation"].pop("backend"), "has no entry 'backend'"),
        (lambda facts: facts.update(error={"type": "x"}), "has no entry 'message'"),
        (lambda facts: facts.pop("environment"), "has no entry 'environment'"),
    ],
)
def test_a_bundle_of_another_form_is_refused(
    stored: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    with zipfile.ZipFile(stored) as members, zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        for name in members.namelist():
            content = members.read(name)
            if name == "bundle.json":
                facts = json.loads(content)
                change(facts)
                content = json.dumps(facts).encode()
            other.writestr(name, content)
    with pytest.raises(FormatError, match=message):
        dgraph.replay(tmp_path / "other.zip")
