"""What the libraries that publish a layout make of it; `tests.models.stored` writes it without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from dgraph.compiler.saving import save_quantised
from dgraph.families.quantised import Format, quantise
from dgraph.models.layouts import Module
from dgraph.models.quantised import METHODS
from dgraph.passes import QuantizeWeights
from tests.models.stored import CASES
from tests.models.test_quantised import CONFIG, weights
from tests.remote import write

LIBRARY = "needs {0}: pip install 'dgraph[quantised]'"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("compressed")])
def test_compressed_tensors_reads_the_same_weight(name: str) -> None:
    library: Any = pytest.importorskip("compressed_tensors", reason=LIBRARY.format("compressed-tensors"))
    case = CASES[name]
    stored, weight = case.store(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)))
    config = library.quantization.QuantizationConfig.model_validate(case.settings)
    (scheme,) = config.config_groups.values()
    reader: Any = library.compressors.BaseCompressor.get_value_from_registry(config.format)
    read = reader.decompress({leaf: tensor.clone() for leaf, tensor in stored.items()}, scheme)["weight"]
    scale = stored["weight_scale"]
    exact = scale.dtype == torch.float32  # it computes in the dtype of the scales
    torch.testing.assert_close(read.float(), weight, rtol=0 if exact else 2**-7, atol=0)


@pytest.mark.parametrize("settings", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_what_torchao_writes(settings: str) -> None:
    library: Any = pytest.importorskip("torchao", reason=LIBRARY.format("torchao"))
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    library.quantization.quantize_(model, getattr(library.quantization, settings)(version=2))
    written, _ = flatten_tensor_state_dict(model.state_dict())
    module = Module("0", "torchao", {name.removeprefix("0."): tensor for name, tensor in written.items()})
    found = METHODS["torchao"]({}).make(module)
    weight: Any = model[0].weight
    assert torch.equal(found.read().dequantised(torch.float32), weight.dequantize())


@pytest.mark.parametrize("step", [QuantizeWeights("fp8"), QuantizeWeights("int8"), QuantizeWeights("int4", (1, 8))])
def test_transformers_reads_what_is_written(step: QuantizeWeights, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason=LIBRARY.format("compressed-tensors"))
    stored = {name: weight.bfloat16() for name, weight in weights().items()}
    keys = {key: value for key, value in CONFIG.items() if not key.startswith("block")}
    folder = write(tmp_path / "m", {**keys, "model_type": "llama", "dtype": "bfloat16"}, stored)
    saved = save_quantised(folder, tmp_path / "q", step).folder
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert theirs(torch.tensor([[5, 6, 7]])).logits.isfinite().all()  # dequantises weights when it first runs
    weight = theirs.model.layers[1].mlp.up_proj.weight
    expected = quantise(stored["model.layers.1.mlp.up_proj.weight"], Format(step.format or "", step.block))
    torch.testing.assert_close(weight.float(), expected.dequantised(torch.float32), rtol=2**-7, atol=0)
