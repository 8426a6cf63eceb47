"""A checkpoint folder with quantised weights, in the layout of compressed-tensors: others read it, too."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dgraph.cache.store import open_store
from dgraph.compiler.base_graph import Weights, quantising
from dgraph.errors import CheckpointError, InputError
from dgraph.families import DIFFERENCE, Model, folder_of, resolve
from dgraph.families.hub import ADAPTER, CONFIG, INDEX
from dgraph.families.quantised import WHOLE, Format, QuantisedWeight, packed, quantise, sizes_of
from dgraph.families.weights import Shapes, weights_of
from dgraph.frontend.frozen import capture_or_load
from dgraph.ir.stored_weights import formats_of
from dgraph.passes.manager import run_passes
from dgraph.passes.quantize_weights import QuantizeWeights

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of files of weights, which are not copied as they are."""
SHARD_BYTES = 4 * 2**30
"""Bytes of weights in a file at most, unless one weight has more."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""Dtypes as safetensors names them."""
_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}


@dataclass(frozen=True)
class Saved:
    """Record of a written checkpoint.

    Attributes:
        folder: the folder that was written.
        quantised: number of tensors that were quantised.
        before, after: bytes of the weights as they were, and as they are.
    """

    folder: Path
    quantised: int
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class Fold:
    """Scales of inputs: weights are multiplied by them, and the maker of the inputs is divided; the function is the
    same.

    Attributes:
        made: the name in the graph of the weight whose entries along the first dimension are divided.
        read: the names of the weights whose columns are multiplied.
        scales: f32[in].
    """

    made: str
    read: tuple[str, ...]
    scales: Tensor

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """A weight's tensor, in fp32 if it has a part in this."""
        scales = self.scales.to(tensor.device)
        if name == self.made:
            tensor = tensor.float() / (scales if tensor.dim() == 1 else scales.unsqueeze(1))
        return tensor.float() * scales if name in self.read else tensor


@dataclass(frozen=True)
class Item:
    """A tensor of a checkpoint as it is written.

    Attributes:
        tensors: name, dtype and shape of each that is written of it.
        make: makes them.
    """

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    make: Callable[[], Sequence[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written of it."""
        return sum(_size(dtype, shape) for _, dtype, shape in self.tensors)


def _size(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def save_quantised(
    model: str | Path,
    out: str | Path,
    weights: Weights = "int4",
    *,
    device: str | torch.device = "cpu",
    shard_bytes: int = SHARD_BYTES,
    folds: Sequence[Fold] = (),
    rounded: Mapping[str, QuantisedWeight] = MappingProxyType({}),
    progress: Callable[[int, int], None] | None = None,
) -> Saved:
    """Write a checkpoint again, with quantised weights; `dgraph.load` and whatever reads compressed-tensors read it.

    A model that is read from it decodes with the same weights as `dgraph.optimize(model, weights=...)`. One weight is
    in memory at a time, and the folder appears whole or not at all.

    Args:
        model: the name of an embedded model or a checkpoint folder, of which weights are stored as they are.
        out: the folder to write, which does not exist.
        weights: format in which they are stored, as for `optimize`.
        device: device on which weights are quantised.
        shard_bytes: most bytes of weights in a file, unless one weight has more.
        folds: scales that weights round better with, see `dgraph.evaluate.scales.scales_for`. Adapters in the folder,
            which are copied else, were trained on inputs without them.
        rounded: by name in the graph, weights that are written as they are rounded here, and not to the nearest, see
            `dgraph.evaluate.gptq.gptq_for`.
        progress: called with (bytes read, bytes in all) after every weight.

    Raises:
        UnknownName, CheckpointError: no such model, a damaged folder, or one that cannot be written.
        InputError: `out` exists, the checkpoint is quantised already, or the layout has no word for the format.
    """
    out = Path(out)
    check_out(out)
    chosen = check_weights(weights)
    found = resolve(model, opened=True)
    if found.weights is None:
        raise InputError(
            f"the family {found.spec.family} reads weights where it opens a folder; none are left to copy."
        )
    formats = formats_for(found, chosen)
    stored = found.weights.stored()
    pieces = {
        name: iter(_pieces(weight, sum(native == name for native, _, _ in stored))) for name, weight in rounded.items()
    }
    items = [
        _item(
            name,
            tensor,
            formats.get(native),
            [f for f in folds if native in (f.made, *f.read)],
            next(pieces[native]) if native in pieces else None,
            native,
            device,
        )
        for native, name, tensor in stored
    ]
    before = sum(tensor.nbytes for _, _, tensor in stored)
    format = next(iter(formats.values()), None)
    ignored = [
        name.removesuffix(".weight")
        for native, name, tensor in stored
        if native not in formats and name.endswith(".weight") and tensor.dim() == 2
    ]
    folder = folder_of(model)
    if folder.is_file():
        raise InputError(f"{model} is a GGUF file; give the folder with safetensors that it was made from.")
    if (folder / DIFFERENCE).is_file():
        raise InputError(f"{model} is stored as a difference from its base, and has its tokenizer; give a whole one.")
    if not (folder / CONFIG).is_file():
        raise InputError(f"{model} is a pipeline, of which only the model can be written; give {folder / 'model'}.")
    embeds, tied = _embeddings(found)
    settings = None if format is None else settings_of(format, [*ignored, *tied], not embeds.isdisjoint(formats))
    try:
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as temporary:
            made = Path(temporary) / "checkpoint"
            made.mkdir()
            _copy(folder, made, settings, adapters=not folds)
            _write(made, items, shard_bytes, [tensor.nbytes for _, _, tensor in stored], progress)
            made.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}.") from error
    return Saved(out, sum(native in formats for native, _, _ in stored), before, sum(item.nbytes for item in items))


def check_out(out: Path) -> None:
    """Refuse a folder that could not be written, before any work is done.

    Raises:
        InputError: it exists, or is in no folder that can be written.
    """
    if out.exists():
        raise InputError(f"{out} exists already; give a folder that does not, or remove it.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no folder {out.absolute().parent}.")
    if not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written: permission denied in {out.absolute().parent}; give another.")


def check_weights(weights: Weights) -> QuantizeWeights:
    """Return the pass that chooses the weights to quantise and their format.

    Raises:
        UnknownName: an unknown format or key.
        InputError: rounding of rows, which a checkpoint cannot store.
    """
    chosen = quantising(weights)
    if chosen is None or chosen.activations:
        raise InputError(
            f"weights {weights!r} cannot be written: a checkpoint stores weights in fp8, int8 or int4, and rows are "
            f"rounded where it is read (weights='w8a8')."
        )
    return chosen


def formats_for(model: Model, chosen: QuantizeWeights) -> dict[str, Format]:
    """Format of each weight that is chosen, by every name that it has in the model.

    Its name in the graph is among them.

    Raises:
        InputError: the model comes quantised.
    """
    if model.weights is not None and model.weights.formats:
        raise InputError(
            f"the weights of {model.name} are quantised already, and what is rounded twice is worse; give the "
            f"checkpoint that it was made from."
        )
    graph = capture_or_load(model.module, model.spec, model.prefix, open_store())[0].copy()
    run_passes(graph, [replace(chosen, weights=Shapes())])
    names = weights_of(model.module, model.prefix)
    formats = {id(names[name]): format for name, format in formats_of(graph).items()}
    return {name: formats[id(tensor)] for name, tensor in names.items() if id(tensor) in formats}


def _embeddings(model: Model) -> tuple[set[str], list[str]]:
    """The weights that are vectors of ids, by their names in the graph; and the linear layers that have them, too."""
    modules = [(name.removeprefix(model.prefix), module) for name, module in model.module.named_modules()]
    own = {id(module.weight): name for name, module in modules if isinstance(module, nn.Embedding)}
    tied = [name for name, module in modules if isinstance(module, nn.Linear) and id(module.weight) in own]
    return {f"{name}.weight" for name in (*own.values(), *tied)}, tied


# -- the layout ----------------------------------------------------------------------------------------------------


def settings_of(format: Format, ignored: Sequence[str], embeddings: bool = False) -> dict[str, Any]:
    """Quantisation entry of config.json for weights of a format.

    Scales by row of "fp8" and "int8" go with activations that are quantised by row as they come.

    Args:
        ignored: modules whose weights are not quantised.
        embeddings: True if embeddings are quantised, too.

    Raises:
        InputError: blocks that compressed-tensors has no word for.
    """
    assert format.block is not None  # filled in by the format
    high, wide = format.block
    weights: dict[str, Any] = {"num_bits": 4 if format.kind == "int4" else 8}
    weights |= {"type": "float" if format.kind == "fp8" else "int", "symmetric": not format.zeros, "dynamic": False}
    if (high, wide) == (WHOLE, WHOLE):
        weights["strategy"] = "tensor"
    elif (high, wide) == (1, WHOLE):
        weights["strategy"] = "channel"
    elif high == 1:
        weights |= {"strategy": "group", "group_size": wide}
    elif WHOLE not in (high, wide):
        weights |= {"strategy": "block", "block_structure": [high, wide]}
    else:
        raise InputError(
            f"compressed-tensors has no word for blocks of {high} x {wide}; choose (1, -1), (1, 128), (128, 128) or "
            f"(-1, -1)."
        )
    activations = None
    if format.kind != "int4" and weights["strategy"] == "channel" and not format.zeros:
        activations = {**weights, "strategy": "token", "dynamic": True}
    groups = {"Linear": activations, **({"Embedding": None} if embeddings else {})}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[format.kind],
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": [of],
                "weights": weights,
                "input_activations": rows,
                "output_activations": None,
                "format": _FORMATS[format.kind],
            }
            for i, (of, rows) in enumerate(groups.items())
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _pieces(weight: QuantisedWeight, tensors: int) -> list[QuantisedWeight]:
    """Pieces of a weight, one for each tensor that stores it; a piece of a stack has some rows of an item."""
    if weight.dim() == 2 or tensors < len(weight):
        return [weight]
    each = tensors // len(weight)
    rows = weight.shape[1] // each
    return [
        item.rows(i * rows, (i + 1) * rows) for item in map(weight.__getitem__, range(len(weight))) for i in range(each)
    ]


def _item(
    name: str,
    tensor: Tensor,
    format: Format | None,
    folds: Sequence[Fold],
    rounded: QuantisedWeight | None,
    weight: str,
    device: str | torch.device,
) -> Item:
    """Record of what is written for one tensor of a weight."""

    def folded() -> Tensor:
        found = tensor.to(device) if format is not None or folds else tensor
        for fold in folds:
            found = fold.of(weight, found)
        return found

    if format is None:
        return Item(((name, tensor.dtype, tuple(tensor.shape)),), lambda: [folded().to("cpu", tensor.dtype)])
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or tensor.dim() != 2:
        raise InputError(
            f"{name} {list(tensor.shape)} is no weight of one layer, which is what compressed-tensors has; leave it as "
            f"it is (QuantizeWeights(but=...))."
        )
    if rounded is not None and folds:
        raise InputError(f"{name} has a fold, without which it was rounded; give folds or rounded weights.")
    if rounded is not None and (rounded.shape, rounded.block) != (tensor.shape, format.block):
        raise InputError(
            f"{name} {list(tensor.shape)} was rounded in blocks of {rounded.block}, and is to be written in "
            f"{format.block}; round the weights of this checkpoint in the format that is written."
        )
    assert format.block is not None  # filled in by the format
    rows, columns = map(int, tensor.shape)
    (_, dtype), (scales, _), *_ = sizes_of((rows, columns), format)
    kinds: list[tuple[str, torch.dtype, tuple[int, ...]]]
    if format.kind == "int4":
        kinds = [("weight_packed", torch.int32, (rows, -(-columns // 8))), ("weight_scale", torch.float32, scales)]
        kinds += [("weight_shape", torch.int64, (2,))]
        kinds += [("weight_zero_point", torch.int32, (-(-scales[0] // 8), scales[1]))] if format.zeros else []
    else:
        kinds = [("weight", dtype, (rows, columns)), ("weight_scale", torch.float32, scales)]
        kinds += [("weight_zero_point", torch.int8, scales)] if format.zeros else []
    chosen: Format = format

    def make() -> Sequence[Tensor]:
        found = quantise(folded(), chosen, name) if rounded is None else rounded
        return [part.cpu() for part in _parts(found, chosen)]

    return Item(tuple((f"{module}.{part}", dtype, shape) for part, dtype, shape in kinds), make)


def _parts(weight: QuantisedWeight, format: Format) -> Iterator[Tensor]:
    """The tensors of a quantised weight, in the order of `_item`."""
    if format.kind != "int4":
        yield weight.values
        yield weight.scales
        if weight.zeros is not None:
            yield weight.zeros.to(torch.int8)
        return
    yield _words(weight.values)
    yield weight.scales
    yield torch.tensor(weight.shape)
    if weight.zeros is not None:
        zeros = weight.zeros.t()
        yield _words(packed(torch.nn.functional.pad(zeros, (0, zeros.shape[1] % 2)))).t()


def _words(values: Tensor) -> Tensor:
    """uint8 [rows, n] as int32 [rows, ceil(n / 4)]."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % 4)).contiguous().view(torch.int32)


# -- the folder ----------------------------------------------------------------------------------------------------


def _copy(folder: Path, to: Path, settings: Mapping[str, Any] | None, adapters: bool) -> None:
    """All files but weights, folders of adapters if wanted, and the config with what it says of the weights."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix not in WEIGHTS and file.name not in (CONFIG, INDEX):
            shutil.copyfile(file, to / file.name)
        elif adapters and (file / ADAPTER).is_file():
            shutil.copytree(file, to / file.name)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if settings is not None:
        config["quantization_config"] = settings
    (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write(
    folder: Path,
    items: Sequence[Item],
    most: int,
    read: Sequence[int],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write weights in shards of at most `most` bytes, and their index."""
    shards: list[list[tuple[Item, int]]] = [[]]
    for item, size in zip(items, read, strict=True):
        if shards[-1] and sum(other.nbytes for other, _ in shards[-1]) + item.nbytes > most:
            shards.append([])
        shards[-1].append((item, size))
    done = 0
    places: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for _, size in _write_shard(folder / file, shard):
            done += size
            if progress is not None:
                progress(done, sum(read))
        places |= {name: file for item, _ in shard for name, _, _ in item.tensors}
    index = {"metadata": {"total_size": sum(item.nbytes for item in items)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(file: Path, shard: Sequence[tuple[Item, int]]) -> Iterator[tuple[Item, int]]:
    """Write a safetensors file, a tensor at a time: its header says beforehand where each lies; yields what is done."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item, _ in shard:
        for name, dtype, shape in item.tensors:
            begin, end = end, end + _size(dtype, shape)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for item, size in shard:
            for (_, dtype, shape), tensor in zip(item.tensors, item.make(), strict=True):
                assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
                data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                target.write(data)
            yield item, size
