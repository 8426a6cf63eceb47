"""Values from the command line: recipe options, facts of a model, buckets, dtypes, devices, prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from dgraph.cli.completion import completing
from dgraph.errors import InputError, UnknownName
from dgraph.errors.former import tell_former
from dgraph.settings import AUTO, DTYPES, SHORT_DTYPES, DtypeLike, typed
from dgraph.settings import torch_device as torch_device
from dgraph.settings import torch_dtype as torch_dtype
from dgraph.types.texts import check_text, read_text

if TYPE_CHECKING:
    import torch

CHOICE = "NAME[:KEY=VALUE,...]"
"""Form of the text that names a recipe or a rule with options of its own; see `dgraph.settings.named`."""
FORMAT = "FORMAT[:KEY=VALUE,...]"
"""Form of the text that gives the storage of weights; see `dgraph.compiler.base_graph.quantising`."""

MODEL = (
    "Name of an embedded model, a checkpoint folder or GGUF file, or ORG/NAME[@REVISION] on Hugging Face, from its "
    "cache or downloaded."
)
"""Help for an argument that names a model."""


def fetched(context: typer.Context, model: str | None) -> str | None:
    """A model's name, its checkpoint downloaded if it is an id of one: before a status line, for its bars."""
    from dgraph.families.hub import folder_of_id, is_id

    if model is not None and not context.resilient_parsing and is_id(model):
        folder_of_id(model)
    return model


Model = Annotated[
    str,
    typer.Argument(
        help=MODEL,
        show_default=False,
        autocompletion=completing("models"),
        callback=fetched,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the recipe, see `dgraph recipes NAME`; may be repeated.",
    ),
]
Facts = Annotated[
    list[str] | None,
    typer.Option(
        "--fact",
        metavar="NAME=VALUE",
        help="Override a model property of config.json, as block_length=4; may be repeated.",
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Measurements of the model's layers, written by `dgraph calibrate --out FILE`.",
        show_default="calibration.json beside the model",
    ),
]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write a self-contained page.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Buckets = Annotated[
    str | None,
    typer.Option(
        help="Row counts to pad to: exact, hybrid, fine, or a list as 8,16,32.",
        show_default="exact on a CPU, hybrid on a GPU",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="N",
        help="GPUs of this machine (on a CPU, processes) that share one model (tensor parallel).",
        show_default="1, or the ranks that torchrun has started",
    ),
]
Device = Annotated[str | None, typer.Option(help="Device: cpu, cuda, cuda:1, ...", show_default="cpu")]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar=FORMAT,
        help="Store the weights of linear layers and experts as fp8, int8 or int4; w8a8-fp8 and w8a8-int8 also round "
        "the rows that they meet. Keys: embeddings, lm_head, router, zeros, block, which, but; as "
        "fp8:lm_head=true,embeddings=true or int4:block=1x64,but=*.down_proj.*.",
        show_default="as they are",
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="A low-rank adapter in PEFT's format, added to the weights before they are divided or quantised; a model "
        "that verifies its drafts drafts by it instead.",
        show_default="none",
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="FORMAT",
        help="Store keys and values as fp8; short for --option kv_dtype=fp8.",
        show_default="as they are computed",
    ),
]
Check = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="numerics: run every pass on small inputs first, and refuse one that is not what it declares.",
        envvar="DGRAPH_CHECK",
        show_default="no check",
    ),
]
OldScheduler = Annotated[list[str] | None, typer.Option("--policy", hidden=True, help="Old name of --scheduler.")]
DTYPE = f"Of the weights: {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)}), or auto: as the checkpoint has them."
Dtype = Annotated[str | None, typer.Option(help=DTYPE, show_default="float32 on a CPU, auto on a GPU")]


def schedulers(given: Sequence[str] | None, old: Sequence[str] | None) -> list[str]:
    """Schedulers by name: those of --scheduler, and with a warning those of --policy, as the option was called."""
    if old:
        tell_former("--policy of this command", "--scheduler")
    return [*(given or ()), *(old or ())]


def recipe_options(recipe: str, given: Sequence[str] | None, kv_dtype: str | None = None) -> dict[str, Any]:
    """`key=value` texts as options of a recipe, each read as the type of its default.

    kv_dtype: the option of that name, given by itself.

    Raises:
        UnknownName: an unknown recipe or option.
        InputError: no `=`, or a value of another type.
    """
    from dgraph.recipes import RECIPES, builder_of, types_of

    return read_options(f"option of recipe {recipe!r}", types_of(builder_of(RECIPES, recipe)), _with(given, kv_dtype))


def shared_options(recipes: Sequence[str], given: Sequence[str] | None, kv_dtype: str | None = None) -> dict[str, Any]:
    """`key=value` texts, and `kv_dtype`, as options that at least one of several recipes has ("captured" has none).

    Raises:
        UnknownName, InputError: as `recipe_options`.
    """
    from dgraph.recipes import RECIPES, builder_of, types_of
    from dgraph.recipes.compose import singles
    from dgraph.text.views import CAPTURED

    types: dict[str, type] = {}
    for recipe in recipes:
        if recipe != CAPTURED and recipe not in RECIPES and "+" not in recipe:
            raise UnknownName("recipe", recipe, [*singles(RECIPES.names()), CAPTURED])
        types |= types_of(builder_of(RECIPES, recipe)) if recipe != CAPTURED else {}
    return read_options(f"option of {' or '.join(map(repr, recipes))}", types, _with(given, kv_dtype))


def _with(given: Sequence[str] | None, kv_dtype: str | None) -> Sequence[str]:
    return (*(given or ()), *(() if kv_dtype is None else (f"kv_dtype={kv_dtype}",)))


def facts(given: Sequence[str] | None, calibration: str | None = None) -> dict[str, Any]:
    """`name=value` texts as facts of a model, each read as the type of that field of `ModelSpec`; lists with commas.

    calibration: a file whose measurements are among the facts; one that is also given by name holds.

    Raises:
        UnknownName: no fact that a caller can give.
        InputError: no `=`, or a value of another type.
        CheckpointError: the file is no calibration.
    """
    from dgraph.plans.calibration import read_calibration
    from dgraph.spec import FACTS, ModelSpec

    types, found = get_type_hints(ModelSpec), dict[str, Any]()
    if calibration is not None:
        found |= read_calibration(calibration).facts
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--fact takes NAME=VALUE, got {text!r}.")
        if name not in FACTS:
            raise UnknownName("fact", name, FACTS)
        found[name] = typed("fact", name, value, types[name])
    return found


def read_options(kind: str, defaults: dict[str, Any], given: Sequence[str] | None) -> dict[str, Any]:
    """`key=value` texts, each read as the type of its default, or as the type that is given for one; see
    `recipe_options`.

    None is read as a whole number, and a tuple as one of the type that it begins with.
    """
    options = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--option takes KEY=VALUE, got {text!r}.")
        if key not in defaults:
            raise UnknownName(kind, key, defaults)
        if key in options:
            raise InputError(f"option {key!r} is given twice, the second time as {value!r}; give it once.")
        default = defaults[key]
        if isinstance(default, tuple) and default:
            default = GenericAlias(tuple, (type(default[0]), ...))
        given_type = isinstance(default, type) or get_origin(default) is tuple
        read = default if given_type else int if default is None else type(default)
        options[key] = typed("option", key, value, read)
    return options


def shape_dtype(given: DtypeLike, default: torch.dtype) -> torch.dtype:
    """The dtype of random weights, which no checkpoint has.

    Raises:
        UnknownName: not a dtype that weights can have.
        InputError: "auto".
    """
    found = torch_dtype(given)
    if found == AUTO:
        raise InputError(
            f"--dtype auto is what a checkpoint has, and --shape has none; name one of {', '.join(DTYPES)}."
        )
    return default if found is None else found


def bucket_list(text: str | None) -> str | list[int] | None:
    """Row counts from `8,16,32`; anything else is the name of a kind of buckets. None stays None."""
    parts = (text or "").split(",")
    return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else text


def replicas(text: str) -> int | str:
    """A number of replicas, or "auto".

    Raises:
        InputError: neither.
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--replicas is auto or a whole number, at least 1, got {text!r}.")
    return int(text)


def read_prompts(given: Sequence[str] | None, file: str | None) -> list[str]:
    """Prompts of the command line, then those of a file, one per line; `-` reads standard input.

    Raises:
        InputError: none at all, an empty one, one with half of a character, or a file that cannot be read.
    """
    prompts = list(given or ())
    if file is not None:
        if file == "-" and sys.stdin is None:
            raise InputError("--prompt-file - cannot be read: standard input is closed.")
        try:
            text = sys.stdin.read().removeprefix("\ufeff") if file == "-" else read_text(file, f"--prompt-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompt-file - cannot be read: {error}.") from None
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InputError("no prompt; give --prompt TEXT (several times for several) or --prompt-file FILE.")
    for i, prompt in enumerate(prompts):
        if not prompt.strip():
            raise InputError(f"prompt {i} is empty; give at least one token.")
        check_text(prompt)
    return prompts
