"""Store a converted model as a small difference from its base, and measure what that loses.

    python -m training.compress OUT --megabytes 10 --folder models/NAME
    python -m training.compress OUT --mean OTHER/small --mean OUT/small --folder models/NAME

OUT is a run of `training.convert`. The folder is one that `dgraph.load` takes wherever the base is installed;
compression.json in it says how much of the squared difference was kept, and the held-out loss before and after. Its
difference.safetensors takes at most `--megabytes` of 10^6 bytes.

Runs that begin with the same weights end in different ones, and the mean of these may answer better than each ("model
soups", arXiv 2203.05482). With --mean the mean of folders that this command wrote is stored. OUT is then only where the
held-out documents come from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import DgraphError, InputError
from dgraph.families import DIFFERENCE
from dgraph.models import difference
from dgraph.models.checkpoint import read_tensors
from dgraph.models.objects import read_config

from .checkpoint import write_json
from .conversion import Conversion, Settings, documents_of_files, load_base
from .convert import MODEL, SETTINGS

MEGABYTE = 10**6
REPORT = "compression.json"


def compress(
    out: Path, folder: Path, megabytes: float, bits: int = 8, device: str = "cpu", mean: Sequence[Path] = ()
) -> dict[str, Any]:
    """Write the folder; return the content of compression.json.

    mean: folders that this wrote, whose weights are averaged and stored instead of the run's.

    Raises:
        InputError: `out` is no run with a model, folders of different configurations, or the limit is too low.
        CheckpointError: a folder that is damaged, or a difference from another base.
    """
    if not (out / SETTINGS).is_file() or not (mean or (out / MODEL).is_dir()):
        raise InputError(f"{out} is no run of training.convert: no {SETTINGS}, or no {MODEL}/ yet.")
    configs = {each: read_config(each) for each in mean or [out / MODEL]}
    config = next(iter(configs.values()))
    if other := [each for each, found in configs.items() if found != config]:
        raise InputError(f"{other[0]} and {next(iter(configs))} have different config.json; give models of one form.")
    described = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    name, mask, data = (described.pop(key) for key in ("base", "mask_token", "data"))
    described.pop("begin", None)  # the difference is one from the base, whatever the run began with
    settings = Settings(**described)
    base = load_base(name, mask, device)
    documents = documents_of_files(base, [Path(path) for path in data], settings)
    before = {key: value.cpu().clone() for key, value in difference.tensors_of(base.model).items()}
    made = _mean(mean, before) if mean else read_tensors(out / MODEL)
    parts = difference.compress(before, made, int(megabytes * MEGABYTE), bits, device)
    base_name = str(Path(name).absolute()) if (Path(name) / "config.json").is_file() else name
    dtype = next(iter(made.values())).dtype
    difference.write(folder, parts, base_name, before, dtype)
    write_json(folder / "config.json", config)
    restored, plain = difference.restore(before, parts, dtype), difference.restore(before, {}, dtype)
    losses: dict[str, float | None] = {}
    autocast = torch.bfloat16 if base.model.device.type == "cuda" else torch.float32
    conversion = Conversion(base, replace(settings, rank=0), documents, autocast=autocast)
    for key, weights in (("base", plain), ("converted", made), ("restored", restored)):
        base.model.load_state_dict(weights, strict=False)  # what is tied is not named
        losses[key] = conversion.held_out_loss()
    report = {
        "bytes": (folder / DIFFERENCE).stat().st_size,
        "bits": bits,
        "squared_difference_kept": round(1 - _squares(restored, made) / _squares(plain, made), 4),
        "held_out_loss": losses,
    }
    write_json(folder / REPORT, report)
    return report


def _mean(folders: Sequence[Path], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of folders' weights, taken in fp32, in bf16. base: the weights of their base."""
    total: dict[str, Tensor] = {}
    for folder in folders:
        weights = difference.restore(base, difference.read_parts(folder, base))
        total = {name: value + total[name] if total else value for name, value in weights.items()}
    return {name: (value / len(folders)).bfloat16() for name, value in total.items()}


def _squares(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a run of training.convert")
    parser.add_argument("--folder", type=Path, required=True, help="where the difference goes")
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--mean", type=Path, action="append", default=[], help="a folder to be averaged; may repeat")
    parser.add_argument("--bits", type=int, default=8, choices=list(difference.BITS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(compress(args.out, args.folder, args.megabytes, args.bits, args.device, args.mean), indent=1))
    except DgraphError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
