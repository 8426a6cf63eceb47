"""The pages of the reference, made from registries, dataclasses, the command line and the server's OpenAPI document.

Each function returns Markdown. `PAGES` names the page of docs/ that it is appended to.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from papers import tables
from prose import first_paragraphs, inline, literal, table

import dgraph
from dgraph import passes as all_passes
from dgraph import testing
from dgraph.cli.app import app
from dgraph.engine.scheduling.schedulers import SCHEDULERS
from dgraph.ir.verifier import RULES
from dgraph.ops import OPS, Op
from dgraph.plans.papers import Paper
from dgraph.recipes import RECIPES, costs_of
from dgraph.recipes.options import documented
from dgraph.runtime import policies
from dgraph.runtime.loop.step_inputs import STEP_INPUTS
from dgraph.serve.application import build
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.settings import ServerConfig

FUNCTIONS = (
    *("optimize", "load", "adopt", "recipe", "capture", "rewrite", "dump", "diff", "explain", "compare", "bisect"),
    "calibrate",
)
"""Public names that come first, in this order."""
SETTINGS = ("Decoding", "Sampler", "Compilation", "WarmUp", "EngineConfig")
"""Public names that are settings, in the order of their page."""
SHAPES = {"row": "[N]", "sequence": "[b]", "offsets": "[b + 1]", "key": "[M]", "constant": "[]"}
WANTED = {
    "": "always",
    "plan": "under a row plan",
    "hides": "under a region that hides rows",
    "adds": "under a row plan that adds rows",
    "kv": "to recipes that keep some keys",
    "modes": "to canvases of random tokens",
    "adjusts": "while a request adjusts its logits",
}
"""When an input is offered, by `StepInput.needs`."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
"""Signs of bounds of JSON Schema."""
ANY = (1 << 31) - 1
"""A bound that stands for the range of a machine's integer."""


def python_api() -> str:
    """Every public name of `dgraph`, by mkdocstrings; functions first, without what the page of settings has."""
    others = sorted({*dgraph.__all__} - {*FUNCTIONS, *SETTINGS}, key=str.lower)
    named = [(f"dgraph.{name}", getattr(dgraph, name)) for name in (*FUNCTIONS, *others)]
    written = [(f"dgraph.passes.{name}", getattr(all_passes, name)) for name in ("Pass", "Effect", "Report")]
    written.append(("dgraph.runtime.policies.DecodeRule", policies.DecodeRule))
    kit = [(f"dgraph.testing.{name}", getattr(testing, name)) for name in testing.__all__]
    parts = (("Names of `dgraph`", named), ("Base classes of methods", written), ("The kit for tests", kit))
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(map(_documented, found)) for title, found in parts)


def _documented(named: tuple[str, Any]) -> str:
    """The documentation of an object under its public name."""
    shown, value = named
    place = getattr(value, "__qualname__", None)
    if place is None:
        return f"### {shown}\n\nA table of type `{type(value).__name__}`, by name."
    return f"::: {value.__module__}.{place}\n    options:\n      heading: {shown}\n      heading_level: 3"


def command_line() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(_command(("dgraph",), typer.main.get_command(app)))


def _command(names: tuple[str, ...], command: Any) -> Iterator[str]:
    """The section of a command, and those of its own commands."""
    if len(names) > 1:
        yield f"{'#' * len(names)} {' '.join(names)}"
    text, *examples = (command.help or "").split("\b")
    yield inline(" ".join(text.split()))
    yield from (f"```sh\n{inspect.cleandoc(example.lstrip())}\n```" for example in examples)
    rows = [row for each in command.params if (row := _parameter(each))]
    if rows:
        yield table(("name", "default", "meaning"), rows)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command((*names, name), inner)


def _parameter(given: Any) -> tuple[str, str, str] | None:
    """The row of an argument or option; None for a hidden one."""
    if getattr(given, "hidden", False):
        return None
    names = (*given.opts, *given.secondary_opts)
    shown = ", ".join(names) if given.param_type_name == "option" else given.name.upper()
    default = given.default
    if given.required:
        default = "required"
    elif default is True:
        default = given.opts[0]
    elif default in (None, False) or callable(default):
        default = ""
    return f"`{shown}`", str(default), inline(given.help or "")


def recipes() -> str:
    """Every recipe: its summary, its paper, what it was measured to cost, and its options."""
    return "\n\n".join(part for name in RECIPES for part in _recipe(name))


def _recipe(name: str) -> Iterator[str]:
    builder = RECIPES[name]
    yield f"## {name}"
    yield first_paragraphs(builder.options)
    yield _papers(builder.options.papers)
    costs = [
        f"- {cost} ({cost.hardware}, {cost.date}, commit {cost.commit}; [table](../results/{cost.page}.md))"
        for cost in costs_of(builder)
    ]
    if costs:
        yield "Against `dense`:\n\n" + "\n".join(costs)
    listed = builder.listed
    yield _options({each.name: each.default for each in listed}, {each.name: each.doc for each in listed})


def _papers(papers: Sequence[Paper]) -> str:
    """A paragraph that names papers, with links."""
    said = []
    for paper in papers:
        link = f", [arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})" if paper.arxiv else ""
        said.append(f"*{paper.title}*{link}{f', {paper.where}' if paper.where else ''}")
    return f"Paper: {'; '.join(said)}."


def decoding_rules() -> str:
    """Every decoding rule, then the settings that systems publish."""
    found = ["## Rules"]
    for name, rule in policies.POLICIES.items():
        found += [*_dataclass(f"### {name}", rule), _papers(rule.papers)]
    rows = []
    for name, preset in policies.PRESETS.items():
        options = ", ".join(f"`{key}={literal(value)}`" for key, value in policies.options_of(name).items())
        rows.append((f"`{name}`", f"`{preset.name}`", options))
    found += ["## Published settings", table(("name", "rule", "settings"), rows)]
    return "\n\n".join(found)


def passes() -> str:
    """Every pass by mkdocstrings, with its effect on the numbers."""
    options = "\n      ".join(
        ("show_root_heading: false", "show_root_toc_entry: false", "members: []", "show_bases: false")
    )
    return "\n\n".join(
        f"## {name}\n\nEffect on the numbers: {cls.effect.value}.\n\n{_papers(cls.papers)}\n\n"
        f"::: {cls.__module__}.{cls.__qualname__}\n    options:\n      {options}"
        for name, cls in all_passes.PASSES.items()
    )


def ops() -> str:
    """Every op: schema, facts and contract."""
    return "\n\n".join(part for name in sorted(OPS) for part in _op(OPS[name]))


def _op(op: Op) -> Iterator[str]:
    yield f"## {op.name}"
    yield f"```text\n{str(op.overload._schema).replace(', ', chr(10) + '    , ')}\n```"
    facts = {
        "writes": op.mutates,
        "row by row": op.by_row,
        "own rows": op.own_rows,
        "float8, with scales": tuple(op.scales),
        "weights, may be quantised": op.stored,
    }
    said = [f"{fact}: {', '.join(f'`{name}`' for name in names)}" for fact, names in facts.items() if names]
    runs = "fused by Inductor" if op.inline else "a Triton kernel" if op.kernel else "the reference"
    yield f"On a GPU: {runs}." + "".join(f" {each[:1].upper()}{each[1:]}." for each in said)
    yield f"```text\n{inspect.cleandoc(op.contract)}\n```"


def settings() -> str:
    """Every dataclass of settings: its fields with defaults and meanings; then the schedulers."""
    classes = {f"dgraph.{name}": getattr(dgraph, name) for name in SETTINGS}
    classes |= {"dgraph.serve.settings.ServerConfig": ServerConfig, "dgraph.ModelSpec": dgraph.ModelSpec}
    found = [part for name, cls in classes.items() for part in _dataclass(f"## {name}", cls)]
    found.append("## Schedulers")
    found += [part for name, cls in SCHEDULERS.items() for part in _dataclass(f"### {name}", cls)]
    return "\n\n".join(found)


def _dataclass(title: str, cls: Any) -> Iterator[str]:
    """The section of a dataclass: its docstring, and its fields with their defaults."""
    yield title
    yield first_paragraphs(cls)
    defaults = {field.name: _default(field) for field in fields(cls) if field.init}
    if defaults:
        yield _options(defaults, documented(inspect.getdoc(cls) or ""))


def _default(field: Any) -> Any:
    """The default of a field; `MISSING` for a field that must be given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _options(defaults: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    """A table of options with their defaults, and their meanings where the docstring has a section of them."""
    rows = [
        (f"`{name}`", "required" if value is MISSING else f"`{literal(value)}`", inline(meanings.get(name, "")))
        for name, value in defaults.items()
    ]
    width = 3 if meanings else 2
    return table(("option", "default", "meaning")[:width], [row[:width] for row in rows])


def http_api() -> str:
    """Every path with its bodies and statuses, the meanings of statuses, then every schema that they name."""
    document = build(Lifetime(), ServerConfig()).openapi()
    found, meanings = ["## Paths"], dict[str, str]()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found += [f"### {method.upper()} {path}", *_operation(operation)]
            meanings |= {status: answer["description"] for status, answer in operation["responses"].items()}
    found += ["## Statuses", table(("status", "meaning"), [(s, inline(meanings[s])) for s in sorted(meanings)])]
    found.append("## Schemas")
    for name, schema in document["components"]["schemas"].items():
        found += [f"### {name}", inline(schema.get("description", "")), _fields(schema)]
    return "\n\n".join(filter(None, found))


def _operation(operation: Mapping[str, Any]) -> Iterator[str]:
    """An operation in words, the bodies that it reads and answers, and its statuses."""
    yield inline(operation.get("description", ""))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    lines = [f"- request: {_type(body['schema'])}"] if body else []
    answers = operation["responses"]
    for kind, content in answers["200"].get("content", {}).items():
        event = content.get("itemSchema", {}).get("properties", {}).get("data", {}).get("contentSchema")
        schema = content["schema"] if event is None else event["anyOf"][0]
        lines.append(f"- answer, `{kind}`: {_type(schema)}")
    lines.append(f"- statuses: {', '.join(answers)}; refusals as {_type({'$ref': 'ErrorBody'})}")
    yield "\n".join(lines)


def _fields(schema: Mapping[str, Any]) -> str:
    """The fields of an object that are served, then the names of those that are refused."""
    served, refused = [], []
    for name, value in schema.get("properties", {}).items():
        said = value.get("description", "")
        if said.startswith("Not served"):
            refused.append(f"`{name}`")
            continue
        needed = "yes" if name in schema.get("required", ()) else ""
        served.append((f"`{name}`", _type(value), needed, inline(said)))
    text = table(("field", "type", "required", "meaning"), served) if served else ""
    return f"{text}\n\nRefused unless left out, or neutral: {', '.join(refused)}." if refused else text


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a value in words, bounds included."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in several if each.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{literal(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    said = [f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if abs(schema.get(key, ANY)) < ANY]
    return ", ".join([kind, *said])


def step_inputs() -> str:
    """Every input that the decode loop offers to programs."""
    rows = []
    for name, each in STEP_INPUTS.items():
        said, _, rest = each.meaning.rpartition("]: ")
        shape = f"{said}]" if said else SHAPES[each.per]
        kind = f"`{str(each.dtype).removeprefix('torch.')}{shape}`"
        rows.append((f"`{name}`", kind, inline(rest), WANTED[each.needs]))
    return table(("input", "type", "meaning, of a row or of a sequence", "offered"), rows)


def rules() -> str:
    """Every rule of the verifier."""
    return table(("rule", "what must hold"), [(rule.name, inline(rule.demands)) for rule in RULES])


def modules(package: str) -> str:
    """The modules of a package and of those in it, with the first line of each docstring."""
    folder = Path(import_module(package).__path__[0])
    rows = []
    for file in sorted(folder.rglob("*.py")):
        name = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        if file.stem != "__init__":
            rows.append((f"`{name}`", inline(text.partition("\n")[0])))
    return "## Modules\n\n" + table(("module", "holds"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "papers.md": tables,
    "reference/python-api.md": python_api,
    "reference/cli.md": command_line,
    "reference/http-api.md": http_api,
    "reference/recipes.md": recipes,
    "reference/policies.md": decoding_rules,
    "reference/passes.md": passes,
    "reference/ops.md": ops,
    "reference/settings.md": settings,
    "reference/step-inputs.md": step_inputs,
    "internals/verifier.md": lambda: f"{rules()}\n\n{modules('dgraph.ir')}",
    "internals/capture.md": partial(modules, "dgraph.frontend"),
    "internals/lowering.md": partial(modules, "dgraph.lowering"),
    "internals/decode-loop.md": partial(modules, "dgraph.runtime"),
    "internals/engine.md": partial(modules, "dgraph.engine"),
    "internals/artifact-cache.md": partial(modules, "dgraph.cache"),
}
"""Functions that finish a page, by its place in docs/."""
