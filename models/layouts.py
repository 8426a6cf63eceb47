"""Published layouts of quantised weights: the tensors that each stores of a layer, as values, scales and zeros
(`dgraph.families.quantised`).

    compressed-tensors  weight, or weight_packed (int32, eight 4-bit numbers of neighbouring columns in a word)
    fp8                 weight, weight_scale_inv of blocks (DeepSeek-V3)
    awq                 qweight [in, out / 8], neighbouring outputs in a word, in an order of its own
    gptq                qweight [in / 8, out], neighbouring inputs in a word
    torchao             the tensors of its classes, flattened

Words are little-endian: as bytes, the numbers of a word lie in the order of their bits, which is ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.families.quantised import KINDS, WHOLE, Format, QuantisedWeight, blocks_of, packed, unpacked
from dgraph.families.weights import Made, Stored, made
from dgraph.models import e2m1

UNREAD = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("k_scale", "v_scale", "q_scale", "output_scale"),
)
"""Tensors of scales of activations, keys and values, which are not read."""

EMBEDDING = "Embedding"
"""The class of modules that look up vectors of ids; other classes that a layout names have linear layers."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight neighbouring outputs among the 4-bit numbers of a word, from the lowest bits on."""


@dataclass(frozen=True)
class Quantised:
    """A weight as a checkpoint stores it, in the place of its tensors.

    Attributes:
        shape: shape of the weight.
        format: its form in storage.
        parts: values, scales, and zeros if there are any, as `dgraph.families.quantised.QuantisedWeight` has them.
    """

    shape: tuple[int, int]
    format: Format
    parts: tuple[Stored, ...]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        assert self.format.block is not None  # filled in by the format
        return self.format.block

    def read(self) -> QuantisedWeight:
        """All of it, in memory."""
        values, scales, *zeros = map(made, self.parts)
        return QuantisedWeight(values, scales, zeros[0] if zeros else None, self.block)

    def by_rows(self) -> Quantised:
        """The same with a scale for each row: so its rows can be divided, and stacked with those of others."""
        (rows, columns), (high, wide) = self.shape, self.block
        size = blocks_of((rows, columns), (1, wide))

        def spread(part: Stored) -> Made:
            def make() -> Tensor:
                found = made(part)
                return found.expand(size) if high == WHOLE else found.repeat_interleave(high, 0)[:rows]

            return Made(size, torch.float32, make)

        values, *others = self.parts
        format = Format(self.format.kind, (1, wide), self.format.zeros)
        return self if high == 1 else Quantised(self.shape, format, (values, *map(spread, others)))

    def with_zeros(self) -> Quantised:
        """The same with the zero of every block written down."""
        if self.format.zeros:
            return self
        size, zero = tuple(self.parts[1].shape), float(KINDS[self.format.kind].zero)
        zeros = Made(size, torch.float32, lambda: torch.full(size, zero))
        return Quantised(self.shape, Format(self.format.kind, self.block, zeros=True), (*self.parts, zeros))


@dataclass(frozen=True)
class Module:
    """Tensors that a checkpoint stores for one quantised layer.

    Attributes:
        name: its path.
        method: by which it was quantised.
        tensors: by the last part of their names.
        embeds: True if it looks up vectors of ids, and is no linear layer.
    """

    name: str
    method: str
    tensors: Mapping[str, Tensor]
    embeds: bool = False

    def get(self, leaf: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None) -> Tensor:
        """A tensor.

        Args:
            leaf: the last part of its name.
            dtypes: dtypes that it may have.
            shape: its shape; None for any of two dimensions, () for any of one element.

        Raises:
            CheckpointError: missing, or another dtype or shape.
        """
        if leaf not in self.tensors:
            raise CheckpointError(
                f"{self.name}.{leaf} is missing, without which {', '.join(sorted(self.tensors))} of this layer, as "
                f"{self.method} stores it, mean nothing; fetch or export the checkpoint again."
            )
        found = self.tensors[leaf]
        expected = "two dimensions" if shape is None else list(shape) or "one number"
        fits = found.dim() == 2 if shape is None else list(found.shape) == list(shape) if shape else found.numel() == 1
        if found.dtype not in dtypes or not fits:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"{self.name}.{leaf} is {str(found.dtype).removeprefix('torch.')} {list(found.shape)}, expected "
                f"{kinds} {expected}, as the settings of {self.method} in config.json say."
            )
        return found

    def scales(self, leaf: str, shape: tuple[int, int], block: tuple[int, int]) -> Made:
        """Scales, or zeros, of the blocks of a weight; a single one, and one per row, in whatever dimensions."""
        size = blocks_of(shape, block)
        found = self.get(leaf, _NUMBERS, self.tensors[leaf].shape if leaf in self.tensors else ())
        if block[1] == WHOLE and found.numel() == size[0] and block[0] in (1, WHOLE):
            return Made(size, torch.float32, lambda: found.float().reshape(size))
        return _float(self.get(leaf, _NUMBERS, size))


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NUMBERS = (*_FLOATS, torch.int8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Layout:
    """Form in which a method stores quantised layers.

    Attributes:
        leaves: the last parts of the names of a layer's tensors, but for its bias.
        make: a layer's weight; raises CheckpointError for tensors that are not as they should be.
    """

    leaves: tuple[str, ...]
    make: Callable[[Module], Quantised]


def weight(kind: str, shape: tuple[int, int], block: tuple[int, int], *parts: Stored | None) -> Quantised:
    """Make a weight of its parts. A single scale is repeated for each row: rows can be divided then."""
    found = tuple(part for part in parts if part is not None)
    stored = Quantised(shape, Format(kind, block, zeros=len(found) == 3), found)
    return stored.by_rows() if block[0] == WHOLE else stored


def _float(tensor: Tensor, transposed: bool = False) -> Made:
    """A tensor in f32, transposed if asked."""
    shape = tuple(reversed(tensor.shape)) if transposed else tuple(tensor.shape)
    return Made(shape, torch.float32, lambda: (tensor.t() if transposed else tensor).float())


def _group(settings: Mapping[str, Any], *names: str) -> tuple[int, int]:
    """The block of a scale per group of columns."""
    size = next((settings[name] for name in names if settings.get(name) is not None), 128)
    if type(size) is not int or (size < 1 and size != WHOLE):
        raise CheckpointError(f"{names[0]} is {size!r}, expected a number of columns, or -1 for all.")
    return 1, size


def _require(settings: Mapping[str, Any], method: str, key: str, allowed: Sequence[object], default: object) -> Any:
    """A setting that has one of some values."""
    value = settings.get(key, default)
    value = default if value is None else value
    if value not in allowed:
        raise CheckpointError(f"{key} of {method} is {value!r}, expected {' or '.join(map(repr, allowed))}.")
    return value


# -- compressed-tensors --------------------------------------------------------------------------------------------


def compressed_tensors(settings: Mapping[str, Any]) -> Layout:
    """Formats "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", and those of e2m1 (RedHatAI)."""
    groups = settings.get("config_groups") or {}
    formats = {str(g.get("format") or settings.get("format")) for g in groups.values() if isinstance(g, Mapping)}
    known = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *e2m1.FORMATS}
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    transformed = ["transforms"] if settings.get("transform_config") else []
    unknown = sorted(formats - known) + ([] if sparse == "dense" else [str(sparse)]) + transformed
    if unknown or not groups or any(not isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError(
            f"it is stored by compressed-tensors as {', '.join(unknown) or 'no group of layers'}; dgraph reads "
            f"{', '.join(sorted(known))}."
        )
    leaves = "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", e2m1.WHOLE
    return Layout(leaves, lambda module: _compressed(module, _scheme(groups, module)))


def _scheme(groups: Mapping[str, Mapping[str, Any]], module: Module) -> Mapping[str, Any]:
    """Quantisation scheme of a module: a target with its name goes before a pattern, and that before a class."""
    ranked: list[tuple[int, Mapping[str, Any]]] = []
    for group in groups.values():
        for target in group.get("targets") or ():
            if target == module.name:
                ranked.append((0, group))
            elif target.startswith("re:") and re.match(target[3:], module.name):
                ranked.append((1, group))
            elif target.isidentifier() and (target == EMBEDDING) == module.embeds:
                ranked.append((2, group))
    found = min(ranked, key=lambda pair: pair[0])[1] if ranked else {}
    scheme: Mapping[str, Any] | None = found.get("weights")
    if scheme is None:
        raise CheckpointError(f"{module.name} is stored quantised, but no group of config_groups says how.")
    return scheme


def _compressed(module: Module, scheme: Mapping[str, Any]) -> Quantised:
    bits, type_ = scheme.get("num_bits", 8), scheme.get("type", "int")
    strategy = scheme.get("strategy") or ("tensor" if scheme.get("group_size") is None else "group")
    if (bits, type_) == (4, "float"):
        return _e2m1(module)
    kind = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}.get((bits, type_))
    if kind is None or strategy not in ("tensor", "channel", "group", "block"):
        raise CheckpointError(
            f"{module.name} has weights of type {type_!r} in {bits} bits by {strategy}, which dgraph does not read; it "
            f"reads 8 or 4 bits of 'float' and of 'int', by tensor, channel, group or block."
        )
    block = (WHOLE, WHOLE) if strategy == "tensor" else (1, WHOLE)
    if strategy == "group":
        block = _group(scheme, "group_size")
    elif strategy == "block":
        high, wide = scheme.get("block_structure") or (128, 128)
        block = int(high), int(wide)
    symmetric = scheme.get("symmetric", True)
    if "weight_packed" not in module.tensors:
        values = module.get("weight", (KINDS[kind].dtype,))
        shape = int(values.shape[0]), int(values.shape[1])
        zeros = None if symmetric else module.scales("weight_zero_point", shape, block)
        return weight(kind, shape, block, values, module.scales("weight_scale", shape, block), zeros)
    rows, columns = map(int, module.get("weight_shape", (torch.int64, torch.int32), (2,)).tolist())
    if columns * bits % 8:
        raise CheckpointError(f"{module.name}.weight has {columns} columns of {bits} bits, expected an even number.")
    words = -(-columns * bits // 32)
    numbers = _as_bytes(module.get("weight_packed", (torch.int32,), (rows, words)), columns, bits)
    if "weight_g_idx" in module.tensors:
        _plain_order(module, "weight_g_idx", columns, block[1])
    zeros = None
    if not symmetric:
        size = blocks_of((rows, columns), block)
        stored = module.get("weight_zero_point", (torch.int32,), (-(-size[0] * bits // 32), size[1]))
        zeros = Made(size, torch.float32, lambda: _numbers(stored.t(), bits)[:, : size[0]].t().float())
    return weight(kind, (rows, columns), block, numbers, module.scales("weight_scale", (rows, columns), block), zeros)


def _e2m1(module: Module) -> Quantised:
    """NVFP4, whose scales are divided by one of the whole weight, or MXFP4, whose scales are exponents."""
    codes = module.get("weight_packed", (torch.uint8,))
    shape = int(codes.shape[0]), 2 * int(codes.shape[1])
    whole, wide, dtype = None, e2m1.MXFP4, torch.uint8
    if e2m1.WHOLE in module.tensors:
        whole, wide, dtype = module.get(e2m1.WHOLE, _FLOATS, ()), e2m1.NVFP4, torch.float8_e4m3fn
    scales = module.get("weight_scale", (dtype,), blocks_of(shape, (1, wide)))
    return weight("int8", shape, (1, wide), e2m1.doubled(codes), e2m1.halved(scales, whole, divides=True))


def _as_bytes(words: Tensor, columns: int, bits: int) -> Stored:
    """int32 [rows, words] of unsigned numbers as our values: two of 4 bits in a byte, or int8 around 0."""
    rows, size = words.shape[0], columns * bits // 8
    if bits == 4:
        if words.shape[1] * 4 == size:
            return words.view(torch.uint8)
        return Made((rows, size), torch.uint8, lambda: words.view(torch.uint8)[:, :size].contiguous())
    return Made((rows, size), torch.int8, lambda: _around_zero(words.view(torch.uint8)[:, :size]))


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] of unsigned numbers as the stored number of each: 0..15 of 4 bits, or int8 around 0."""
    # For one column torch calls strides contiguous although the bytes of its words do not lie side by side.
    as_bytes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return unpacked(as_bytes) if bits == 4 else _around_zero(as_bytes)


def _around_zero(numbers: Tensor) -> Tensor:
    """uint8 around 128 as int8 around 0."""
    return (numbers ^ 0x80).view(torch.int8)


# -- fp8 -----------------------------------------------------------------------------------------------------------


def block_fp8(settings: Mapping[str, Any]) -> Layout:
    """e4m3 with a scale for each block of a weight (DeepSeek-V3, section 3.3.2), or, without `weight_block_size`, one
    for each weight.
    """
    _require(settings, "fp8", "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    high, wide = settings.get("weight_block_size") or (WHOLE, WHOLE)
    block = int(high), int(wide)

    def make(module: Module) -> Quantised:
        values = module.get("weight", (torch.float8_e4m3fn,))
        shape = int(values.shape[0]), int(values.shape[1])
        return weight("fp8", shape, block, values, module.scales("weight_scale_inv", shape, block))

    return Layout(("weight", "weight_scale_inv"), make)


# -- awq and gptq --------------------------------------------------------------------------------------------------


def awq(settings: Mapping[str, Any]) -> Layout:
    """4 bits in groups of inputs with zeros, packed for `gemm` (Lin et al., 2023, arXiv 2306.00978; AutoAWQ)."""
    _require(settings, "awq", "bits", (4,), settings.get("w_bit", 4))
    _require(settings, "awq", "version", ("gemm", "GEMM"), "gemm")
    block = _group(settings, "group_size", "q_group_size")

    def columns_of(words: Tensor) -> Tensor:
        """int32 [rows, outputs / 8] as numbers 0..15 [rows, outputs]."""
        numbers = unpacked(words.contiguous().view(torch.uint8)).unflatten(1, (-1, 8))
        return numbers[..., AWQ_ORDER].flatten(1)

    def make(module: Module) -> Quantised:
        words = module.get("qweight", (torch.int32,))
        inputs, outputs = int(words.shape[0]), 8 * int(words.shape[1])
        groups = blocks_of((outputs, inputs), block)[1]
        zeros = module.get("qzeros", (torch.int32,), (groups, words.shape[1]))
        scales = module.get("scales", _FLOATS, (groups, outputs))
        values = Made((outputs, inputs // 2), torch.uint8, lambda: packed(columns_of(words).t()))
        lowest = Made((outputs, groups), torch.float32, lambda: columns_of(zeros).t().float())
        symmetric = _all(zeros, KINDS["int4"].zero, 4)
        return weight(
            "int4", (outputs, inputs), block, values, _float(scales, transposed=True), None if symmetric else lowest
        )

    return Layout(("qweight", "qzeros", "scales"), make)


def gptq(settings: Mapping[str, Any]) -> Layout:
    """4 or 8 bits in groups of inputs (Frantar et al., 2022, arXiv 2210.17323; AutoGPTQ, GPTQModel).

    Format "gptq" stores zeros less one, "gptq_v2" as they are. Where `sym` says that all are the middle, either is
    found: writers of "gptq" differ. Entries of `dynamic` for some layers go before the settings for all layers.
    """
    _gptq_scheme(settings)  # so that what is wrong for all layers is not said of the first

    def make(module: Module) -> Quantised:
        own = _own_settings(settings.get("dynamic") or {}, module.name)
        try:
            bits, less, block = _gptq_scheme({**settings, **own})
        except CheckpointError as error:
            raise CheckpointError(f"{module.name}, of which `dynamic` says {dict(own)!r}: {error}") from None
        sym, middle, most = own.get("sym", settings.get("sym")), 2 ** (bits - 1), 2**bits - 1
        words = module.get("qweight", (torch.int32,))
        inputs, outputs = 32 // bits * int(words.shape[0]), int(words.shape[1])
        groups = blocks_of((outputs, inputs), block)[1]
        zeros = module.get("qzeros", (torch.int32,), (groups, -(-outputs * bits // 32)))
        scales = module.get("scales", _FLOATS, (groups, outputs))
        if "g_idx" in module.tensors:
            _plain_order(module, "g_idx", inputs, block[1])
        shape, dtype = (outputs, inputs * bits // 8), torch.uint8 if bits == 4 else torch.int8
        values = Made(shape, dtype, lambda: made(_as_bytes(words.t().contiguous(), inputs, bits)))

        def lowest() -> Tensor:
            as_bytes = zeros.contiguous().view(torch.uint8)
            numbers = (unpacked(as_bytes) if bits == 4 else as_bytes).int()[:, :outputs]
            return (((numbers + less) & most).t() - (0 if bits == 4 else middle)).float()

        symmetric = _all(zeros, middle - less, bits) or (sym is True and _all(zeros, middle, bits))
        asked = None if symmetric else Made((outputs, groups), torch.float32, lowest)
        kind = "int4" if bits == 4 else "int8"
        return weight(kind, (outputs, inputs), block, values, _float(scales, transposed=True), asked)

    return Layout(("qweight", "qzeros", "scales", "g_idx"), make)


def _gptq_scheme(settings: Mapping[str, Any]) -> tuple[int, int, tuple[int, int]]:
    """Bits of a number, the amount by which stored zeros are too small, and the block of a scale."""
    bits = _require(settings, "gptq", "bits", (4, 8), 4)
    less = 1 - int(_require(settings, "gptq", "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq_v2")
    return bits, less, _group(settings, "group_size")


def _own_settings(dynamic: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Settings of a layer in `dynamic`, by the first pattern that the beginning of its name matches.

    "+:pattern" or only the pattern has settings, "-:pattern" leaves layers as they are.
    """
    for pattern, own in dynamic.items():
        if re.match(re.sub("^[+-]:", "", pattern), name):
            return {} if pattern.startswith("-:") else own
    return {}


def _all(words: Tensor, number: int, bits: int) -> bool:
    """True if every number in some words is this one."""
    return bool((words.contiguous().view(torch.uint8) == (number * 17 if bits == 4 else number)).all())


def _plain_order(module: Module, leaf: str, columns: int, wide: int) -> None:
    """Raise CheckpointError if groups of columns that share a scale are not neighbours."""
    found = module.get(leaf, (torch.int32, torch.int64), (columns,))
    if not torch.equal(found.long(), torch.arange(columns) // (columns if wide == WHOLE else wide)):
        by, instead = 'actorder="group"', 'actorder="weight" or none'
        if module.method == "gptq":
            by, instead = "desc_act=True", "desc_act=False, or static_groups=True besides"
        raise CheckpointError(
            f"{module.name}.{leaf} puts inputs into groups in the order of their activations (act-order, {by}); dgraph "
            f"reads groups of neighbouring inputs. Take a checkpoint that was quantised with {instead}."
        )


# -- torchao -------------------------------------------------------------------------------------------------------


def torchao(settings: Mapping[str, Any]) -> Layout:
    """`Float8Tensor`, `Int8Tensor` and `IntxUnpackedToInt8Tensor`: values of 8 bits in the order of the weight; and
    `Int4Tensor`, packed "plain": two numbers -8..7 in each int8, the first in the low half.
    """
    leaves = "weight", *(f"_weight_{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale"))
    name, data = _torchao_class(settings)
    packing = data.get("int4_packing_format")
    packing = str(packing.get("_data") if isinstance(packing, Mapping) else packing or "").lower()
    of_4_bits = bool(packing) or name.startswith("Int4")

    def make(module: Module) -> Quantised:
        if "_weight_act_pre_scale" in module.tensors:
            raise CheckpointError(f"{module.name}._weight_act_pre_scale scales activations, which dgraph does not do.")
        stored = module.tensors.get("_weight_qdata")
        dtypes = (torch.int8,) if of_4_bits else (torch.float8_e4m3fn, torch.int8)
        if stored is not None and (stored.dtype not in dtypes or (of_4_bits and packing != "plain")):
            by = f"{name or 'a class that config.json does not name'}{f' in packing {packing!r}' if packing else ''}"
            raise CheckpointError(
                f"{module.name}._weight_qdata is {str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}, as "
                f"torchao stores it by {by}; dgraph reads float8_e4m3fn and int8 of Float8WeightOnlyConfig, "
                f"Int8WeightOnlyConfig and the like, and int8 of Int4WeightOnlyConfig in packing 'plain'. Quantise "
                f"the model by one of these, or load the checkpoint that this one was made from."
            )
        return _torchao_int4(module, _group(data, "group_size")) if of_4_bits else _torchao_8_bits(module)

    return Layout(leaves, make)


def _torchao_class(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The class by which all layers were quantised, "" where none is named, and its settings."""
    kinds = settings.get("quant_type")
    of = kinds.get("default") if isinstance(kinds, Mapping) else kinds
    if not isinstance(of, Mapping):
        return str(of or ""), {}
    return str(of.get("_type") or ""), of.get("_data") or {}


def _torchao_int4(module: Module, block: tuple[int, int]) -> Quantised:
    """number * scale + zero_point, both [groups, rows] and floating; zero_point lies at the middle number."""
    pairs = module.get("_weight_qdata", (torch.int8,))
    shape = rows, columns = int(pairs.shape[0]), 2 * int(pairs.shape[1])
    groups = blocks_of(shape, block)[1]
    scales = module.get("_weight_scale", _FLOATS, (groups, rows))
    offsets = module.get("_weight_zero_point", _FLOATS, (groups, rows))
    values = Made((rows, columns // 2), torch.uint8, lambda: pairs.view(torch.uint8) ^ 0x88)
    zeros = Made((rows, groups), torch.float32, lambda: (KINDS["int4"].zero - offsets.float() / scales.float()).t())
    return weight("int4", shape, block, values, _float(scales, transposed=True), zeros if offsets.any() else None)


def _torchao_8_bits(module: Module) -> Quantised:
    values = module.get("_weight_qdata", (torch.float8_e4m3fn, torch.int8))
    shape = rows, columns = int(values.shape[0]), int(values.shape[1])
    sizes = tuple(module.tensors["_weight_scale"].shape) if "_weight_scale" in module.tensors else (rows, 1)
    high, wide = sizes if len(sizes) == 2 else (1, 1)
    if not high or not wide or rows % high or columns % wide:
        high, wide = rows, 1  # what is refused below is compared with a scale per row
    block = WHOLE if high == 1 else rows // high, WHOLE if wide == 1 else columns // wide
    kind = "int8" if values.dtype == torch.int8 else "fp8"
    zeros = module.tensors.get("_weight_zero_point")
    shifted = zeros is not None and kind == "int8" and bool(zeros.any())
    return weight(
        kind,
        shape,
        block,
        values,
        module.scales("_weight_scale", shape, block),
        module.scales("_weight_zero_point", shape, block) if shifted else None,
    )
