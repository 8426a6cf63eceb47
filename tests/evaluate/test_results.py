"""The results file: what is written is found again, whatever happened to it; keys tell what matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dgraph.api import load
from dgraph.errors import InputError
from dgraph.evaluate.arms import Choice, expand
from dgraph.evaluate.results import Keys, Result, Store, fingerprint
from tests.cli.folders import weights, write_checkpoint
from tests.runtime.fake import fake_spec

ONE = Result("k1", "dense", "sums", "1 + 1", True, "2\u2028", [5, 6], 2, 8, 24, 0.5)
TWO = replace(ONE, key="k2", prompt="1 + 2", right=None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Store(tmp_path / "results.jsonl").add([ONE, TWO])
    return tmp_path / "results.jsonl"


def test_what_was_written_is_found_again(file: Path) -> None:
    store = Store(file)
    assert (store.get("k1"), store.get("k2"), store.get("k3"), len(store)) == (ONE, TWO, None, 2)


def test_without_a_file_results_stay_in_memory() -> None:
    store = Store()
    store.add([ONE])
    assert store.get("k1") == ONE


@pytest.mark.parametrize("damage", ["{", "[]", '{"key": "k3"}', "null", "\x00\x00"])
def test_a_damaged_line_is_left_out_with_a_warning(file: Path, damage: str) -> None:
    lines = file.read_text(encoding="utf-8").split("\n")
    file.write_text("\n".join([lines[0], damage, *lines[1:]]), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"1 damaged line\(s\) left out \(2\)"):
        assert len(Store(file)) == 2


def test_an_entry_of_another_type_is_damage(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8").replace('"steps": 2', '"steps": "2"', 1), encoding="utf-8")
    with pytest.warns(UserWarning, match="damaged"):
        assert Store(file).get("k1") is None


def test_a_torn_last_line_does_not_spoil_the_next(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    with pytest.warns(UserWarning, match="damaged"):
        store = Store(file)
    store.add([TWO])
    with pytest.warns(UserWarning, match="damaged"):
        assert Store(file).get("k2") == TWO


def test_a_first_line_that_was_torn_is_no_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"key": "k')
    with pytest.warns(UserWarning, match="damaged"):
        assert len(Store(tmp_path / "r.jsonl")) == 0


def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(InputError, match="holds no results of an evaluation"):
        Store(file)
    assert file.read_text() == '{"prompt": "a", "answer": "b"}\n'


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Store(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        Store(tmp_path / "no" / "file.jsonl").add([ONE])


def test_keys_tell_apart_what_changes_a_response() -> None:
    arms, _ = expand(fake_spec(8), [Choice("dense"), Choice("focus")], [Choice("")], {"threshold": [0.8, 0.9]})
    keys = Keys("w", {"max_new_tokens": 8})
    found = [keys.of(arm, prompt) for arm in arms for prompt in ("a", "b")]
    found += [Keys("v", {"max_new_tokens": 8}).of(arms[0], "a"), Keys("w", {"max_new_tokens": 9}).of(arms[0], "a")]
    assert len(set(found)) == len(found) == 10
    assert Keys("w", {"max_new_tokens": 8}).of(arms[0], "a") == found[0]


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_fingerprint_is_of_all_that_says_what_a_response_is(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    model, found = load(folder), set()
    for text in ('{"eos_token_id": 1}', '{"eos_token_id": 2}'):
        (folder / name).write_text(text)
        found.add(fingerprint(model, str(folder)))
    (folder / "README.md").write_text("what it is")
    found.add(fingerprint(model, str(folder)))
    assert len(found) == 2


def test_a_fingerprint_is_of_the_weights(tmp_path: Path) -> None:
    changed = weights()
    next(iter(changed.values()))[0] += 1
    folders = [write_checkpoint(tmp_path / name) for name in ("one", "same")]
    folders.append(write_checkpoint(tmp_path / "other", changed))
    one, same, other = (fingerprint(load(folder), str(folder)) for folder in folders)
    assert one == same != other
