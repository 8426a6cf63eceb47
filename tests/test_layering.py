"""Who may import whom, by walking the imports of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for folder in ("dgraph", "models", "training") for p in (ROOT / folder).rglob("*.py"))
LONGEST = 500
"""Lines of a file that can be read in one sitting."""

# Package, or file at the root -> what of dgraph it may import, lowest first. A package may import itself.
GROUND = {"errors", "moved", "plugins", "private", "ranks", "settings", "spec", "types"}
GRAPHS = GROUND | {"families", "ir", "ops"}
PROGRAMS = GRAPHS | {"cache", "frontend", "lowering", "passes", "plans", "recipes"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "moved": {"errors"},
    "plugins": {"errors"},
    "private": {"errors"},
    "ranks": {"errors"},
    "settings": {"errors"},
    "spec": {"errors"},
    "types": {"errors", "private"},
    "cache": {"errors", "private"},
    "plans": {"errors", "plugins", "spec"},
    "families": GROUND - {"private"} | {"plans"},
    "ops": GROUND | {"families"},
    "ir": GROUND | {"families", "ops"},
    "frontend": GRAPHS | {"cache"},
    "lowering": GRAPHS | {"cache"},
    "passes": GRAPHS - {"private"} | {"plans"},
    "recipes": GROUND - {"private"} | {"passes", "plans"},
    "runtime": GROUND | {"lowering", "ops", "plans"},
    "engine": GROUND | {"cache", "lowering", "ops", "plans", "recipes", "runtime"},
    "parallel": GRAPHS | {"passes", "runtime"},
    "bundles": PROGRAMS | {"runtime"},
    "compiler": PROGRAMS | {"bundles", "engine", "parallel", "runtime"},
    "viewer": {"engine"},
    "dataset": GROUND | {"engine", "runtime"},
    "serve": GROUND | {"engine", "runtime", "viewer"},
    "numerics": GRAPHS | {"compiler", "passes", "recipes"},
    "testing": PROGRAMS | {"compiler", "numerics"},
    "api": PROGRAMS | {"compiler", "numerics"},
    "opening": GROUND | {"api", "cache", "compiler"},
    "blueprint": GROUND | {"api", "cache", "compiler", "engine", "recipes"},
    "text": PROGRAMS | {"api", "compiler", "viewer"},
    "comparison": PROGRAMS | {"api", "compiler", "numerics", "runtime", "text"},
    "bundling": PROGRAMS | {"api", "bundles", "compiler", "numerics", "runtime", "text"},
    "bench": PROGRAMS | {"api", "compiler", "engine", "runtime"},
    "evaluate": PROGRAMS | {"api", "bench", "compiler", "runtime"},
    "ray": GROUND | {"blueprint", "cache", "compiler", "dataset", "engine", "families", "parallel", "runtime", "serve"},
}


@dataclass(frozen=True)
class Import:
    """One import: who, of what, on which line, and whether it runs when the importer is imported."""

    path: Path
    module: str
    line: int
    late: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    for node, late in _nodes(ast.parse(path.read_text(encoding="utf-8")), False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [_package(path, node.level), node.module]))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(path, name, node.lineno, late)


def _nodes(node: ast.AST, late: bool) -> Iterator[tuple[ast.AST, bool]]:
    """The statements below a node, and whether each runs later than an import of its file, if at all."""
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _only_for_types(node)
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case):
            yield inner, late
            yield from _nodes(inner, late)


def _package(path: Path, level: int) -> str:
    """The package that a relative import of that level starts from; "" for an absolute import."""
    if level == 0:
        return ""
    names = path.relative_to(ROOT).parent.parts
    installed = ("dgraph", *names) if names[0] == "models" else names
    return ".".join(installed[: len(installed) - level + 1])


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def part_of(path: Path) -> str:
    """The package or file below dgraph that a source belongs to ("passes", "spec"), or "models", or "training"."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] != "dgraph":
        return relative.parts[0]
    return relative.parts[1].removesuffix(".py")


IMPORTS = [found for path in SOURCES for found in imports_of(path)]


def within(part: str) -> list[Import]:
    return [i for i in IMPORTS if part_of(i.path) == part]


def offenders(found: Iterator[Import]) -> list[str]:
    return [str(i) for i in found]


def test_the_walk_sees_what_it_should() -> None:
    seen = {(str(i.path.relative_to(ROOT)), i.module, i.late) for i in IMPORTS}
    assert ("dgraph/ir/node_list.py", "dgraph.ops.op_of", False) in seen
    assert ("models/native.py", "transformers.AttentionInterface", True) in seen
    assert len(SOURCES) > 40
    assert set(ALLOWED) <= {part_of(p) for p in SOURCES}


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_it_may(part: str) -> None:
    def allowed(module: str) -> bool:
        if module.partition(".")[0] != "dgraph":
            return True
        names = module.split(".")
        return len(names) > 1 and names[1] in ALLOWED[part] | {part}

    assert offenders(i for i in within(part) if not allowed(i.module)) == []


def test_nothing_above_the_runtime_is_imported_below_it() -> None:
    """The entry points stand on top: nobody but they and the package itself imports them."""
    entries = {
        "api",
        "blueprint",
        "bundling",
        "cli",
        "comparison",
        "opening",
        "testing",
        "text",
        "__init__",
        "__main__",
    }
    top = entries | {"bench", "evaluate", "training"}
    above = ("dgraph.api", "dgraph.cli", "dgraph.compiler.compiled_model")
    found = (i for i in IMPORTS if i.module.startswith(above) and part_of(i.path) not in top)
    assert offenders(found) == []


PRIVATE_TORCH = [ROOT / "dgraph" / "private" / name for name in ("torch.py", "inductor.py")]
PRIVATE_TRITON = ROOT / "dgraph" / "private" / "triton.py"


def test_two_files_alone_use_private_parts_of_torch() -> None:
    assert offenders(i for i in IMPORTS if _private(i.module) and i.path not in PRIVATE_TORCH) == []
    for path in PRIVATE_TORCH:
        assert any(_private(i.module) for i in IMPORTS if i.path == path)
    reached = []
    for path in SOURCES:
        if path in PRIVATE_TORCH:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and _private(ast.unparse(node)):
                reached.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert reached == []


def _private(dotted: str) -> bool:
    """`torch._x`, `torch.a._x`, but not `torch.ops.aten._x`: an op is public, whatever its name."""
    names = dotted.split(".")
    if names[0] != "torch" or names[1:2] == ["ops"]:
        return False
    return any(n.startswith("_") and not n.startswith("__") for n in names[1:])


def test_only_one_file_uses_the_inside_of_triton() -> None:
    """Its runtime, its settings and its compiler; kernels are written in `triton`, `triton.language` and its tools."""
    inside = ("triton.backends", "triton.compiler", "triton.knobs", "triton.runtime")
    found = [i for i in IMPORTS if i.module.startswith(inside)]
    assert offenders(i for i in found if i.path != PRIVATE_TRITON) == []
    assert found
    assert {p for p in SOURCES if "device_caches" in p.read_text(encoding="utf-8")} == {PRIVATE_TRITON}


@pytest.mark.parametrize(
    ("file", "versions"),
    [*((path, "Checked on 2.11 and 2.13") for path in PRIVATE_TORCH), (PRIVATE_TRITON, "Checked on 3.6 and 3.7")],
)
def test_every_private_use_says_on_which_versions_it_was_checked(file: Path, versions: str) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(node)
        ):
            assert versions in (ast.get_docstring(node) or ""), node.name


def test_transformers_is_imported_late_and_only_by_models() -> None:
    found = [i for i in IMPORTS if i.module.split(".")[0] == "transformers"]
    assert offenders(i for i in found if part_of(i.path) not in {"models", "training"}) == []
    assert offenders(i for i in found if not i.late) == []
    assert found


def test_triton_is_imported_late_and_only_by_its_kernels() -> None:
    found = [i for i in IMPORTS if i.module.split(".")[0] == "triton"]
    assert (
        offenders(i for i in found if not (part_of(i.path) == "ops" and i.path.parent.name == "triton") and not i.late)
        == []
    )


def test_scheduling_is_arithmetic_on_the_host() -> None:
    """So that a policy can be judged on a hundred thousand requests without a model, a device or a tensor."""
    files = set((ROOT / "dgraph" / "engine" / "scheduling").rglob("*.py"))
    files |= {ROOT / "dgraph" / "engine" / "io" / "timings.py"}
    files |= {ROOT / "dgraph" / "bench" / name for name in ("arrivals.py", "simulate.py")}
    files -= {ROOT / "dgraph" / "engine" / "scheduling" / "demand.py"}  # it reads models and plans for the scheduler
    assert all(file.exists() for file in files)
    allowed = ("dgraph.bench.arrivals", "dgraph.engine.", "dgraph.errors", "dgraph.plugins", "dgraph.settings")
    found = [i for i in IMPORTS if i.path in files]
    assert offenders(i for i in found if i.module.startswith("dgraph") and not i.module.startswith(allowed)) == []
    outside = {i.module.partition(".")[0] for i in found} - set(sys.stdlib_module_names) - {"dgraph"}
    assert outside == {"numpy"}
    assert all(i.late for i in found if i.module == "numpy")


SERVING = {"fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"}
"""What the extra `serve` brings."""


def test_what_a_server_needs_is_imported_by_the_server_alone() -> None:
    found = [i for i in IMPORTS if i.module.partition(".")[0] in SERVING]
    assert offenders(i for i in found if part_of(i.path) != "serve") == []
    assert {i.module.partition(".")[0] for i in found} == SERVING
    served = [i for i in IMPORTS if i.module.startswith("dgraph.serve") and part_of(i.path) == "cli"]
    assert offenders(i for i in served if not i.late) == []


def test_ray_is_imported_late_and_only_where_replicas_are() -> None:
    found = [i for i in IMPORTS if i.module.partition(".")[0] == "ray"]
    assert offenders(i for i in found if part_of(i.path) != "ray" or not i.late) == []
    assert found
    used = [i for i in IMPORTS if i.module.startswith("dgraph.ray") and part_of(i.path) != "ray"]
    assert offenders(i for i in used if part_of(i.path) != "cli" or not i.late) == []


def test_models_are_found_by_entry_point_and_never_by_name() -> None:
    assert (
        offenders(
            i for i in IMPORTS if i.module.startswith("dgraph.models") and part_of(i.path) not in {"models", "training"}
        )
        == []
    )


def test_models_stand_on_the_core_alone() -> None:
    allowed = {"errors", "families", "models", "ops", "ranks", "spec", "types"}
    named = (i for i in within("models") if i.module.startswith("dgraph."))
    assert offenders(i for i in named if i.module.split(".")[1] not in allowed) == []


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dotted = {".".join(p.parent.relative_to(ROOT).parts) for p in ROOT.glob("dgraph/**/__init__.py")}
    dotted |= {f"dgraph.{'.'.join(p.parent.relative_to(ROOT).parts)}" for p in ROOT.glob("models/**/__init__.py")}
    embedded = {f"dgraph.models.{file.parent.name}" for file in (ROOT / "models").glob("*/config.json")}
    others = {p.parent for p in ROOT.glob("dgraph/**/*.*") if p.is_file() and p.suffix not in {".py", ".pyc"}}
    data = {".".join(folder.relative_to(ROOT).parts) for folder in others}
    assert set(project["tool"]["setuptools"]["packages"]) == dotted | embedded | data


def test_files_can_be_read_in_one_sitting() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_no_global_torch_setting_is_changed() -> None:
    setters = {"set_default_dtype", "set_default_device", "set_num_threads", "set_grad_enabled", "manual_seed"}
    setters |= {"set_float32_matmul_precision", "use_deterministic_algorithms"}
    found = []
    for path in SOURCES:
        if part_of(path) == "training":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in setters}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_importing_dgraph_pulls_in_neither_triton_nor_transformers() -> None:
    code = (
        "import sys, dgraph\n"
        "heavy = ('triton', 'transformers', 'torch._dynamo', 'torch._inductor', 'rich', 'typer', 'sympy.plotting')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
