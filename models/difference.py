"""Weights as a difference from an autoregressive model: what a converted model needs beside its base.

A folder with `difference.safetensors` has its config.json, and the part of its weights that differs. Vectors are stored
whole. A matrix in which only a few rows changed is stored as these rows. Any other matrix is stored as the strongest
parts of the singular value decomposition of its difference. Weights that are not named are the base's, and so is the
tokenizer of a folder without one. The base is named in the file's header, with a digest that tells another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError, InputError
from dgraph.families import DIFFERENCE
from dgraph.families.causal import Causal, load_causal

FEW_ROWS = 16
"""Most changed rows of a matrix that are stored as they are."""
DIGEST_STEP = 4099
"""Step between the numbers that the digest of a base reads: a prime, so that no layout hides another base."""
BITS = {8: torch.int8, 16: torch.float16}
"""Bits and dtype in which the numbers of a factor can be stored."""
HEADER, ENTRY = 1024, 96
"""Bytes of a file beside its tensors, at most: for the whole file, and for each tensor besides its name."""

Parts = dict[str, Tensor]
"""Tensors of a file: NAME/whole; NAME/at and NAME/rows; NAME/left [out, r] and NAME/right [r, in], and their scales."""


def compress(
    base: Mapping[str, Tensor], made: Mapping[str, Tensor], limit: int, bits: int = 8, device: str = "cpu"
) -> Parts:
    """Difference of `made` from `base`, by name, in a file of at most `limit` bytes.

    A number of the base that was only rounded to the dtype of `made` has not changed. Components of all matrices are
    chosen together, by their share of the squared difference per byte.

    Args:
        base: f32.
        bits: bits of a factor's numbers: 8, each component with a scale of its own, or 16.
        device: where matrices are decomposed.

    Raises:
        InputError: names or shapes that differ, or vectors and rows that take more than the limit.
    """
    if bits not in BITS:
        raise InputError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}.")
    for name in sorted({*base, *made}):
        one, other = (tuple(t[name].shape) if name in t else "not there" for t in (base, made))
        if one != other:
            raise InputError(f"{name} is {one} in the base and {other} in the model; give a model that it was made of.")
    parts: Parts = {}
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, before in base.items():
        changed = made[name] != before.to(made[name].dtype)
        if not changed.any():
            continue
        rows = changed.any(1).nonzero().flatten() if changed.dim() == 2 else None
        if rows is None:
            parts[f"{name}/whole"] = made[name].float()
        elif len(rows) <= FEW_ROWS:
            parts |= {f"{name}/at": rows, f"{name}/rows": made[name][rows].float()}
        else:
            found[name] = _components((made[name].float() - before).to(device))
    left = limit - HEADER - sum(t.nbytes + ENTRY + len(part) for part, t in parts.items())
    if left < 0:
        raise InputError(f"vectors and single rows take {limit - left:,} bytes, and the limit is {limit:,}; raise it.")
    for name, count in _counts(found, left, bits).items():
        u, s, v = found[name]
        root = s[:count].sqrt()
        parts |= _factor(f"{name}/left", u[:, :count] * root, 0, bits)
        parts |= _factor(f"{name}/right", root[:, None] * v[:count], 1, bits)
    return {name: tensor.contiguous() for name, tensor in parts.items()}


def _components(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition of a matrix, on the CPU: u [out, k], values f32 [k], v [k, in].

    By the eigenvectors of the smaller Gram matrix in f64, which a GPU finds, too: on 16 cores that another process kept
    busy, the decompositions of 210 matrices of at most 1536 x 576 took longer than five minutes.
    """
    wide = matrix.shape[0] < matrix.shape[1]
    tall = (matrix.T if wide else matrix).double()
    squares, right = torch.linalg.eigh(tall.T @ tall)  # the largest last
    values, right = squares.clamp_min(0).sqrt().flip(0), right.flip(1)
    left = tall @ right / values.clamp_min(torch.finfo(torch.double).tiny)
    u, v = (right, left) if wide else (left, right)
    return u.float().cpu(), values.float().cpu(), v.T.float().cpu()


def _counts(found: Mapping[str, tuple[Tensor, Tensor, Tensor]], limit: int, bits: int) -> dict[str, int]:
    """Number of components to keep, by matrix."""
    worth = []
    for name, (u, s, v) in found.items():
        size = (u.shape[0] + v.shape[1]) * bits // 8 + (8 if bits == 8 else 0)
        worth += [(float(value) ** 2 / size, size, name) for value in s]
    counts: dict[str, int] = {}
    for value, size, name in sorted(worth, reverse=True):
        if name not in counts:
            size += sum(ENTRY + len(part) for part in _factor_parts(name, bits))
        if size > limit or value == 0:
            break
        limit -= size
        counts[name] = counts.get(name, 0) + 1
    return counts


def _factor_parts(name: str, bits: int) -> list[str]:
    """Names in a file for a matrix that is stored as two factors."""
    factors = [f"{name}/left", f"{name}/right"]
    return [*factors, *(f"{factor}_scale" for factor in factors)] if bits == 8 else factors


def _factor(name: str, values: Tensor, axis: int, bits: int) -> Parts:
    if bits != 8:
        return {name: values.to(BITS[bits])}
    scale = values.abs().amax(axis).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return {name: (values / scale.unsqueeze(axis)).round().to(torch.int8), f"{name}_scale": scale}


def restore(base: Mapping[str, Tensor], parts: Parts, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights, by name, from the base's in fp32 and what `compress` gave: the sum in fp32, then in `dtype`.

    Raises:
        KeyError: parts of a tensor that the base has not.
    """
    changed = {part.rpartition("/")[0] for part in parts}
    if other := sorted(changed - set(base)):
        raise KeyError(other[0])
    return {name: (_changed(name, t, parts) if name in changed else t).to(dtype) for name, t in base.items()}


def _changed(name: str, before: Tensor, parts: Parts) -> Tensor:
    """A tensor of which there are parts, f32."""
    if f"{name}/whole" in parts:
        return parts[f"{name}/whole"]
    if f"{name}/at" in parts:
        return before.float().index_copy(0, parts[f"{name}/at"], parts[f"{name}/rows"])
    left, right = _factors(name, parts)
    return before.float() + left @ right


def _factors(name: str, parts: Parts) -> tuple[Tensor, Tensor]:
    """The two factors of a matrix's difference, f32 [out, r] and [r, in], the strongest component first."""
    left, right = parts[f"{name}/left"].float(), parts[f"{name}/right"].float()
    if f"{name}/left_scale" in parts:
        left, right = left * parts[f"{name}/left_scale"], right * parts[f"{name}/right_scale"][:, None]
    return left, right


def digest_of(base: Mapping[str, Tensor]) -> str:
    """Digest that tells a base from others: a hash of names, shapes and a sample of the numbers."""
    digest = hashlib.sha256()
    for name in sorted(base):
        sample = base[name].detach().float().flatten()[::DIGEST_STEP].cpu().numpy()
        digest.update(f"{name} {tuple(base[name].shape)} ".encode() + sample.tobytes())
    return digest.hexdigest()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """The weights of a causal class of transformers, tied ones once."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    return {name: value.detach() for name, value in model.state_dict().items() if name not in tied}


def write(folder: Path, parts: Parts, base: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write the file of a difference.

    Args:
        base: what `dgraph.families.causal.load_causal` takes; a path is that from `folder`, or absolute.
        tensors: the base's.
        dtype: dtype of the weights that are restored.
    """
    from safetensors.torch import save_file

    header = {"base": base, "digest": digest_of(tensors), "dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(parts, folder / f"{DIFFERENCE}.part", metadata=header)
    (folder / f"{DIFFERENCE}.part").replace(folder / DIFFERENCE)


def read(folder: Path, loaded: Causal) -> dict[str, Tensor]:
    """The weights of a folder with a difference, in the dtype that its header names.

    Args:
        loaded: what `base_of` gives.

    Raises:
        CheckpointError: a damaged file, or another base than it was made from.
    """
    base = tensors_of(loaded.module.model)
    return restore(base, read_parts(folder, base), getattr(torch, _header(folder)["dtype"]))


def read_factors(folder: Path, loaded: Causal) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """A folder's weights in fp32, and by name the factors whose products are in them; see `read`."""
    base = tensors_of(loaded.module.model)
    parts = read_parts(folder, base)
    names = [part.removesuffix("/left") for part in parts if part.endswith("/left")]
    return restore(base, parts), {name: _factors(name, parts) for name in names}


def read_parts(folder: Path, base: Mapping[str, Tensor]) -> Parts:
    """Read the parts in a folder's file, each of a tensor of the base, which is given by name; see `read`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / DIFFERENCE
    header = _header(folder)
    if digest_of(base) != header["digest"]:
        raise CheckpointError(
            f"{path} is a difference from another {header['base']} than the one that is here; install the version "
            f"that it was made from, or make the difference again."
        )
    try:
        parts = load_file(path, str(next(iter(base.values())).device))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if other := sorted({part.rpartition("/")[0] for part in parts} - set(base)):
        raise CheckpointError(f"{path} is damaged: it has {other[0]}, and the base does not.")
    return parts


def base_of(folder: Path) -> Causal | None:
    """The model that a folder is a difference from, in fp32; None if it is not a difference.

    Raises:
        InputError: what the base needs is not installed.
        CheckpointError: a damaged file.
    """
    if not (folder / DIFFERENCE).is_file():
        return None
    name = _header(folder)["base"]
    beside = folder / name
    try:
        return load_causal(str(beside) if (beside / "config.json").is_file() else name, torch.float32)
    except InputError as error:
        raise InputError(f"{folder.name} is stored as a difference from {name!r}: {error}") from None


def _header(folder: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    path = folder / DIFFERENCE
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}.") from error
    if lacking := [name for name in ("base", "digest", "dtype") if name not in header]:
        raise CheckpointError(f"{path} does not name its {' or '.join(lacking)}; make the difference again.")
    return header
