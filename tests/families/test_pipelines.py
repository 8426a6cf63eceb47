"""Pipeline folders of diffusers: their model, their tokenizer, and their scheduler as the rule of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dgraph
from dgraph.cli import app
from dgraph.compiler.saving import save_quantised
from dgraph.errors import CacheError, CheckpointError, DgraphWarning, InputError
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import DynamicThreshold, JointThreshold, Renoise
from dgraph.spec import ModelSpec
from tests.models.test_published import write_tokenizer
from tests.oracle import llada2
from tests.remote import write

SIZES = llada2.Config()
WEIGHTS = llada2.random_weights(SIZES, 0)
REFINEMENT = {
    "_class_name": "BlockRefinementScheduler",
    "_diffusers_version": "0.39.0",
    "block_length": 8,
    "editing_threshold": None,
    "minimal_topk": 1,
    "num_inference_steps": 4,
    "threshold": 0.6,
}


def pipeline(folder: Path, scheduler: dict[str, Any] | None = REFINEMENT, kind: str = "LLaDA2Pipeline") -> Path:
    """A folder as `save_pretrained` of a pipeline writes it, without the model's generation config."""
    folder.mkdir()
    index = {
        "_class_name": kind,
        "_diffusers_version": "0.39.0",
        "model": ["transformers_modules.modeling_llada2_moe", "LLaDA2MoeModelLM"],
        "scheduler": ["diffusers", "BlockRefinementScheduler"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    write(folder / "model", {**llada2.keys(SIZES), "mask_token_id": None}, WEIGHTS)
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    if scheduler is not None:
        (folder / "scheduler").mkdir()
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    return folder


def test_model_tokenizer_and_scheduler_are_read(tmp_path: Path) -> None:
    """Tokens are those of the model alone, decoded by the same rule in words of its own."""
    folder = pipeline(tmp_path / "pipe")
    model = dgraph.load(folder, "float32")
    assert (model.name, model.spec.family, model.spec.block_length) == ("pipe", "llada2", 8)
    assert model.tokenizer is not None
    assert model.spec.mask_id == 96, "as the tokenizer says"
    assert ModelSpec.from_json(json.loads(json.dumps(model.spec.to_json()))) == model.spec
    assert dgraph.load(folder, "float32", block_length=4).spec.block_length == 4
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    made = dgraph.optimize(model, "dense", backend="eager")
    plain = dgraph.optimize(folder / "model", "dense", dtype="float32", backend="eager", facts={"block_length": 8})
    found = made.generate(["w3 w4 w6"], **settings)
    assert found.token_ids == plain.generate(["w3 w4 w6"], policy=DynamicThreshold(0.6, 4), **settings).token_ids
    chosen = made.generate(["w3 w4 w6"], steps=8, **settings)
    assert chosen.stats.sequence_steps != found.stats.sequence_steps, "a rule that a caller chooses holds"


def test_the_command_line_takes_such_a_folder(tmp_path: Path) -> None:
    words = ["generate", str(pipeline(tmp_path / "pipe")), "-p", "w3 w4", "--backend", "eager", "--json"]
    result = CliRunner().invoke(app, [*words, "--max-new-tokens", "6", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == "pipe"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, DynamicThreshold(0.6, 4)),
        ({"editing_threshold": 0.0}, DynamicThreshold(0.6, 4)),
        ({"editing_threshold": 0.5}, JointThreshold(0.6, 0.5)),
    ],
)
def test_settings_of_a_scheduler_are_those_of_the_rule(changes: dict[str, Any], rule: Any, tmp_path: Path) -> None:
    spec = dgraph.load(pipeline(tmp_path / "pipe", {**REFINEMENT, **changes})).spec
    found = Decoding().for_model(spec).rule
    assert type(found) is type(rule)
    for name in ("threshold", "steps", "edit_threshold"):
        assert getattr(found, name, None) == getattr(rule, name, None)
    assert Decoding(steps=2).for_model(spec).says_rule


def test_the_scheduler_of_a_model_without_a_mask_token(tmp_path: Path) -> None:
    from dgraph.families.pipelines import pipeline_of

    said = {"_class_name": "EntropyBoundScheduler", "entropy_bound": 0.2, "t_max": 0.9, "num_inference_steps": 16}
    found = pipeline_of(pipeline(tmp_path / "pipe", said, "DiffusionGemmaPipeline"))
    assert found is not None
    from dgraph.runtime.policies import policy_of

    assert policy_of(**dict(found.rule)) == Renoise(bound=0.2, t_max=0.9, steps=16)


def test_without_a_scheduler_the_default_holds(tmp_path: Path) -> None:
    assert dgraph.load(pipeline(tmp_path / "none", None)).spec.rule == ()
    with pytest.warns(DgraphWarning, match="decodes a LLaDA2Pipeline by no DiscreteDDIMScheduler"):
        spec = dgraph.load(pipeline(tmp_path / "other", {"_class_name": "DiscreteDDIMScheduler"})).spec
    assert spec.rule == ()


def test_other_pipelines_are_refused_by_their_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"_class_name is 'FluxPipeline', expected one of LLaDA2Pipeline, Diff"):
        dgraph.load(pipeline(tmp_path / "flux", kind="FluxPipeline"))
    folder = pipeline(tmp_path / "half")
    with pytest.raises(InputError, match=r"is a pipeline, of which only the model can be written; give .*model"):
        save_quantised(folder, tmp_path / "int8", "int8")
    (folder / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"half is a LLaDA2Pipeline without model/config\.json"):
        dgraph.load(folder)
    (folder / "model_index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model_index\.json holds a list, expected an object"):
        dgraph.load(folder)


def test_a_saved_program_has_every_part_of_a_pipeline(tmp_path: Path) -> None:
    folder, store = pipeline(tmp_path / "pipe"), tmp_path / "store"
    made = dgraph.optimize(folder, "dense", backend="eager", artifacts=store)
    made.save(tmp_path / "program", weights=True)
    opened = dgraph.open(tmp_path / "program", trust=True, artifacts=store)
    ids = [[5, 6, 7]]
    wanted = made.generate(input_ids=ids, max_new_tokens=8).token_ids
    assert opened.generate(input_ids=ids, max_new_tokens=8).token_ids == wanted
    made.save(tmp_path / "beside")
    (folder / "model" / "config.json").write_text("{}")
    with pytest.raises(CacheError, match=r"model/config\.json is not the file"):
        dgraph.open(tmp_path / "beside", trust=True, artifacts=store)
