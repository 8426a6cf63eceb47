"""Saved programs: they start without capture and compile, and one that is damaged or foreign is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.program_folder import ARTIFACTS, MODEL, PROGRAM, is_program
from dgraph.errors import CacheError, CheckpointError, DgraphError, InputError
from dgraph.lowering import inductor
from tests.cli.folders import write_checkpoint

PROMPT = [[5, 9, 17, 33, 21, 40]]
DECODING = dgraph.Decoding(max_new_tokens=12, threshold=0.5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dgraph.CompiledModel:
    store = tmp_path_factory.mktemp("store") / "store"
    return dgraph.optimize(
        checkpoint, "focus", backend="eager", buckets=[8, 16], facts={"block_length": 4}, artifacts=store
    )


@pytest.fixture(scope="module")
def kept(made: dgraph.CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "program"
    said = made.save(folder, DECODING, weights=True)
    assert (said.folder, said.artifacts, said.weights) == (folder, 1, True)
    assert said.size == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return folder


@pytest.fixture
def saved(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "program"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the captures and compilations from now on, in a process that has compiled nothing."""
    found: list[str] = []

    def counted(of: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(of, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(of, name, count)

    counted(torch.export, "export")
    counted(inductor, "compile_region")
    monkeypatch.setattr(inductor, "_COMPILED", {})
    return found


def opened(folder: Path, store: Path, **how: Any) -> dgraph.CompiledModel:
    return dgraph.open(folder, trust=True, artifacts=store, **how)


def test_a_program_starts_elsewhere_without_capture(
    made: dgraph.CompiledModel, saved: Path, tmp_path: Path, calls: list[str]
) -> None:
    wanted = made.generate(input_ids=PROMPT, decoding=DECODING).token_ids
    program = opened(saved, tmp_path / "store")
    assert calls == []
    assert (program.recipe, program.spec, program.decoding) == (made.recipe, made.spec, DECODING)
    assert program.programs["step"].buckets == made.programs["step"].buckets
    assert program.model.source == str(saved / MODEL)
    assert program.generate(input_ids=PROMPT).token_ids == wanted
    assert program.generate(input_ids=PROMPT, max_new_tokens=4).token_ids == [wanted[0][:4]]
    assert opened(saved, tmp_path / "store").recipe == made.recipe  # what is there already is no fault
    assert program.save(tmp_path / "again").artifacts == 1


@pytest.mark.release
def test_a_compiled_program_starts_elsewhere_without_compile(
    checkpoint: Path, tmp_path: Path, calls: list[str]
) -> None:
    first = dgraph.optimize(checkpoint, "focus", artifacts=tmp_path / "first")
    wanted = first.generate(input_ids=PROMPT, decoding=DECODING).token_ids
    assert set(calls) == {"export", "compile_region"}
    said = first.save(tmp_path / "program", DECODING)
    assert said.artifacts == 1 + len(first.compiler.compiled)
    calls.clear()
    inductor._COMPILED.clear()
    program = opened(said.folder, tmp_path / "second")
    assert program.generate(input_ids=PROMPT).token_ids == wanted
    assert (calls, program.compiler.compiled) == ([], [])
    assert program.compiler.loaded == first.compiler.compiled


def test_weights_may_lie_elsewhere(made: dgraph.CompiledModel, checkpoint: Path, tmp_path: Path) -> None:
    folder = made.save(tmp_path / "program").folder
    assert not (folder / MODEL).exists()
    assert opened(folder, tmp_path / "store").model.source == str(checkpoint)
    program = json.loads((folder / PROGRAM).read_text())
    rewrite(folder, {**program, "source": str(tmp_path / "gone")})
    with pytest.raises(CheckpointError, match="gone is not a checkpoint folder"):
        opened(folder, tmp_path / "store")
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    assert opened(folder, tmp_path / "store", model=moved).model.source == str(moved)
    other = write_checkpoint(tmp_path / "other", rope_theta=77.0)
    with pytest.raises(CacheError, match=r"config\.json is not the file that the program was saved with"):
        opened(folder, tmp_path / "store", model=other)


def rewrite(folder: Path, said: dict[str, Any]) -> None:
    """Another program.json with a checksum that is right."""
    said = {name: value for name, value in said.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    (folder / PROGRAM).write_text(json.dumps({**said, "sha256": digest}))


@pytest.mark.parametrize("name", [PROGRAM, ARTIFACTS, f"{MODEL}/model.safetensors", f"{MODEL}/tokenizer.json"])
def test_a_flipped_byte_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(CacheError, match=f"{name}.* damaged"):
        opened(saved, tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "2.3.0 git abc"), ("device", "cuda:0"), ("dgraph", "0.1.0 sources 0")]
)
def test_a_foreign_program_is_refused_with_what_differs(name: str, value: str, saved: Path, tmp_path: Path) -> None:
    said = json.loads((saved / PROGRAM).read_text())
    here = said["machine"][name]
    rewrite(saved, {**said, "machine": {**said["machine"], name: value}})
    with pytest.raises(CacheError) as caught:
        opened(saved, tmp_path / "store")
    assert f"({name}: {value}, here {here})" in str(caught.value)


def test_another_version_of_the_form_or_a_lost_file_is_refused(saved: Path, tmp_path: Path) -> None:
    said = json.loads((saved / PROGRAM).read_text())
    rewrite(saved, {**said, "dgraph program": 2})
    with pytest.raises(CacheError, match="is of version 2, and this dgraph opens version 1"):
        opened(saved, tmp_path / "store")
    rewrite(saved, {name: value for name, value in said.items() if name != "recipe"})
    with pytest.raises(CacheError, match="is damaged: it has no entry 'recipe'"):
        opened(saved, tmp_path / "store")
    rewrite(saved, said)
    (saved / ARTIFACTS).unlink()
    with pytest.raises(CacheError, match=r"artifacts\.zip, which this program needs, cannot be read"):
        opened(saved, tmp_path / "store")
    (saved / PROGRAM).unlink()
    assert not is_program(saved)
    with pytest.raises(InputError, match="is no saved program"):
        opened(saved, tmp_path / "store")


def test_nothing_is_opened_without_trust(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="Pass trust=True"):
        dgraph.open(saved, artifacts=tmp_path / "store")
    assert not list((tmp_path / "store" / "entries").iterdir())


def test_what_cannot_be_opened_again_is_not_saved(
    made: dgraph.CompiledModel, model: dgraph.Model, checkpoint: Path, tmp_path: Path
) -> None:
    def refusal(program: dgraph.CompiledModel, folder: Path, kind: type[DgraphError] = InputError) -> str:
        with pytest.raises(kind) as caught:
            program.save(folder)
        return str(caught.value)

    assert "exists already" in refusal(made, tmp_path)
    given = dgraph.optimize(model, "dense", backend="eager", artifacts=tmp_path / "store")
    assert "was given as an object" in refusal(given, tmp_path / "a")
    alone = dgraph.optimize(checkpoint, "dense", backend="eager", artifacts=False)
    assert "has no artifacts to save" in refusal(alone, tmp_path / "a")
    assert "No such file or directory" in refusal(made, tmp_path / "nowhere" / "a")
    assert not (tmp_path / "a").exists()


def test_a_tokenizer_that_was_given_is_given_again(checkpoint: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"backend": "eager", "artifacts": tmp_path / "store"}
    folder = dgraph.optimize(checkpoint, "dense", tokenizer=checkpoint, **how).save(tmp_path / "program").folder
    with pytest.raises(InputError, match="give tokenizer="):
        opened(folder, tmp_path / "store")
    assert opened(folder, tmp_path / "store", tokenizer=checkpoint).model.tokenizer is not None


def test_a_graph_that_programs_of_a_process_share_is_saved_with_each(checkpoint: Path, tmp_path: Path) -> None:
    model = dgraph.load(checkpoint, opened=True)
    how: dict[str, Any] = {"backend": "eager", "artifacts": tmp_path / "store", "weights": "int8"}
    first, second = (dgraph.optimize(model, recipe, **how) for recipe in ("focus", "dense"))
    assert first.captured is second.captured
    assert second.save(tmp_path / "program").artifacts == 1


def test_a_program_whose_artifacts_left_the_cache_is_not_saved(checkpoint: Path, tmp_path: Path) -> None:
    made = dgraph.optimize(checkpoint, "dense", backend="eager", artifacts=tmp_path / "store")
    assert made.origin is not None
    assert made.origin.store is not None
    made.origin.store.used["0" * 64] = None
    with pytest.raises(CacheError, match="1 artifact of the program left the artifact cache"):
        made.save(tmp_path / "program")
    assert not (tmp_path / "program").exists()


def test_quantised_weights_are_quantised_again(checkpoint: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"backend": "eager", "artifacts": tmp_path / "store"}
    made = dgraph.optimize(checkpoint, "dense", weights="int8", **how)
    program = opened(made.save(tmp_path / "program").folder, tmp_path / "other")
    assert program.captured.history == made.captured.history != ()
    answers = [one.generate(input_ids=PROMPT, decoding=DECODING).token_ids for one in (made, program)]
    assert answers[0] == answers[1]
