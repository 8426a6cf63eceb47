"""Prompts, settings of decoding and of compilation: options of the commands that continue prompts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli.completion import completing
from dgraph.cli.output import ERR
from dgraph.errors import InputError

if TYPE_CHECKING:
    from dgraph.compiler.compiled_model import CompiledModel
    from dgraph.runtime.constraints.constraint import Constraint
    from dgraph.runtime.decoding import Decoding

Prompt = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")]
PromptFile = Annotated[str | None, typer.Option(help="A file with a prompt per line; - for stdin.")]
Recipe = Annotated[
    str, typer.Option("--recipe", "-r", help="See `dgraph recipes`.", autocompletion=completing("recipes"))
]
MaxNewTokens = Annotated[int, typer.Option(help="Length limit of a response.")]
Threshold = Annotated[
    float | None, typer.Option(help="Commit tokens above this confidence, in (0, 1].", show_default="0.9")
]
Steps = Annotated[int | None, typer.Option(help="Fixed steps per block, instead of --threshold.", show_default=False)]
Policy = Annotated[
    str | None,
    typer.Option(
        help="A decoding rule by name; see `dgraph policies`.",
        show_default=False,
        autocompletion=completing("policies"),
    ),
]
BlockLength = Annotated[int | None, typer.Option(help="Rows per block.", show_default="the model's")]
OpenBlocks = Annotated[int, typer.Option(help="Blocks of a response that are decoded together.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature; 0 takes the most likely token.", show_default="the policy's, or 0"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most likely tokens whose probabilities add up to this share.",
        show_default="the policy's, or 1",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample from the K most likely tokens; 0 for all.", show_default="the policy's, or 0"),
]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends a response; may be repeated.")]
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A JSON schema that every response satisfies.", show_default=False),
]
Regex = Annotated[
    str | None, typer.Option(help="A regular expression that every response matches as a whole.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Random seed for sampling.")]
Backend = Annotated[
    str,
    typer.Option(help="inductor, eager to run op by op, or auto: inductor if its code is in the cache, else eager."),
]
Cache = Annotated[bool, typer.Option(help="Keep compiled code for later runs; see `dgraph cache`.")]


def decoding_of(given: Mapping[str, Any], usual: Decoding | None = None) -> Decoding:
    """The settings of decoding among the values of a command.

    Args:
        given: values by name.
        usual: settings that hold where none is given; None for those of `Decoding`.

    Raises:
        UnknownName, InputError: as `Decoding`.
    """
    from dataclasses import fields

    from dgraph.runtime.decoding import Decoding

    found = {field.name: given[field.name] for field in fields(Decoding) if given.get(field.name) is not None}
    constraint = _constraint_of(given)
    if constraint is not None:
        found["constraint"] = constraint
    return (usual or Decoding()).changed(found)


def _constraint_of(given: Mapping[str, Any]) -> Constraint | None:
    schema, regex = given.get("json_schema"), given.get("regex")
    if schema is None and regex is None:
        return None
    from dgraph.runtime.constraints.constraint import Constraint

    if schema is None:
        return Constraint.regex(str(regex))
    if regex is not None:
        raise InputError("--json-schema and --regex exclude each other; leave one of them out.")
    try:
        text = Path(schema).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--json-schema {schema} cannot be read: {error}.") from None
    return Constraint.json_schema(text)


def said(context: typer.Context) -> dict[str, Any]:
    """Values of the parameters that stand on the command line, by name."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name: context.params[name] for name, from_ in sources if from_ is not None and from_.name == "COMMANDLINE"}


def tell_backend(context: typer.Context, optimized: CompiledModel, **instead: Any) -> None:
    """Say on stderr that a program of the backend "auto" runs op by op, and which command compiles it.

    instead: values of options that hold instead of those of the command line.
    """
    if context.params["backend"] != "auto" or optimized.compiler.backend != "eager":
        return
    compiling = f"`{command_line(context, 'compile', **instead)}`" if context.params["cache"] else "--backend inductor"
    ERR.print(f"note: no compiled code yet, so this runs op by op; {compiling} compiles it, once and for all.")


def command_line(context: typer.Context, name: str, *more: str, **instead: Any) -> str:
    """The command line of another command with the options that were given to this one, as far as it has them.

    The form of the output (--json) is not among them.

    Args:
        context: of this command, which ran with them.
        name: of the other command.
        more: options besides.
        instead: values by name that hold instead of what was given.
    """
    from dgraph.cli.app import Imported

    there = {**said(context), **instead}
    words = ["dgraph", name]
    for param in Imported()[name].params:
        if param.name not in there or param.name == "json":
            continue
        value = there[param.name]
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if param.param_type_name == "argument":
                words.append(str(one))
            elif isinstance(one, bool):
                words.append((param.opts if one else param.secondary_opts)[0])
            else:
                words += [param.opts[0], str(one)]
    return shlex.join([*words, *more])
