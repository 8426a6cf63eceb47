"""Private parts of Inductor, torch's compiler, that dgraph uses; see torch.py beside this.

Each use says why no public name serves, and the versions on which it was checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.private.early_start import starts_early
from dgraph.private.processor import processor_features

__all__ = [
    "compile_region",
    "inductor_config",
    "inductor_settings",
    "launched_by_triton",
    "load_cpp",
    "load_region",
    "pack_region",
    "settle_kernels",
]


def compile_region(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Tensor],
    settings: dict[str, Any],
    functions: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Compile a straight-line module with Inductor for every size of its symbolic dimensions.

    `torch.compile` would trace the module again and key its code by guards, and AOTInductor bakes weights in;
    `standalone_compile` takes a graph as it stands and weights as inputs. Inputs must be the placeholders' own fake
    tensors, and `example_value` must be set on the nodes: "from_graph" looks for the fake mode there. Otherwise it
    specialises silently to the example's sizes. Checked on 2.11 and 2.13.

    Args:
        module: the module; its targets are ops of torch and functions.
        example_inputs: fake values of its placeholders.
        settings: settings of Inductor, for this compilation.
        functions: qualified name -> hash; if given, the result can be packed by `pack_region`. Torch keeps code for
            functions that are not its own only if they are named here. A hash must change whenever its function does.
    """
    import torch._inductor as inductor

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    options = dict(settings)
    if functions is not None:
        options["unsafe_marked_cacheable_functions"] = dict(functions)
    with torch.no_grad(), _for_devices({value.device for value in example_inputs}) as more:
        return inductor.standalone_compile(  # type: ignore[attr-defined]
            module,
            list(example_inputs),
            dynamic_shapes="from_graph",
            options={"config_patches": {**options, **more}},
            aot=functions is not None,
        )


WHOLE_ROWS = 16384
"""Longest row, in values, that a kernel on a GPU holds in registers while it reduces it."""
WHOLE_HEADS = 512
"""The same limit where Inductor does not see how neighbours lie, as for heads that are part of a wider row."""


def _choices() -> Any:
    """Handler that chooses how Inductor reduces rows: long ones stay in registers.

    Inductor's own rule reads rows of more than 1,024 values again for each sum over them. A norm whose result is
    rounded then takes three passes, each as long as memory takes to answer. Torch says that the class is to be
    overridden in this way, but gives no public name for it. Checked on 2.11 and 2.13.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class WholeRows(InductorChoices):
        """Rows of up to WHOLE_ROWS values, and heads of up to WHOLE_HEADS, lie in registers."""

        def uuid(self) -> str:
            """Name of these choices in torch's own caches."""
            return f"dgraph whole rows {WHOLE_ROWS} heads {WHOLE_HEADS}"

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            """True if a kernel holds the values that it reduces in registers."""
            import torch._inductor.config as config

            whole = {ReductionHint.INNER: WHOLE_ROWS, ReductionHint.DEFAULT: WHOLE_HEADS}
            most = 0 if cooperative_reduction else whole.get(features.get_reduction_hint(), 0)
            if most and config.triton.persistent_reductions:
                return bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, most))
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    return WholeRows()


@contextlib.contextmanager
def _letting_start() -> Iterator[None]:
    """Context manager in which kernels that Inductor generates let the next one start early
    (`dgraph.private.early_start`).

    By itself Inductor makes kernels either start early and let start, or neither, and waits where that is unsound. It
    hands the generated body of a kernel to a function that sorts the waits out. Here that function puts the line that
    lets start before all others. Two threads must not enter it at a time. Checked on 2.11 and 2.13.
    """
    from torch._inductor.codegen.triton import TritonKernel

    def begin(kernel: Any, body: Any) -> None:
        body._lines.insert(0, kernel.GDC_LAUNCH)

    own = TritonKernel._filter_pdl
    TritonKernel._filter_pdl = begin  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TritonKernel._filter_pdl = own  # type: ignore[assignment, method-assign]


@contextlib.contextmanager
def _for_devices(devices: Collection[torch.device]) -> Iterator[dict[str, Any]]:
    """Context manager in which Inductor generates what pays on these devices.

    It yields the settings by which torch's own caches tell so. Checked on 2.11 and 2.13.
    """
    if all(device.type != "cuda" for device in devices):
        yield {}
        return
    from torch._inductor.virtualized import V

    early = _letting_start() if all(map(starts_early, devices)) else contextlib.nullcontext()
    with V.set_choices_handler(_choices()), early:
        yield {"inductor_choices_class": _choices}


_STARTS_COMPILING = "async_compile = AsyncCompile()"
"""The line of Inductor's generated Python after which each kernel of it is compiled, by methods of that object."""

REGION = "region.pickle"


def pack_region(compiled: Callable[..., Any]) -> dict[str, bytes]:
    """Pack a compiled region as files by name, from which `load_region` makes it again.

    `CompiledArtifact.save` keeps the generated Python, and for a GPU the kernels' binaries, but no binary of a kernel
    in C++. Each new process would compile that kernel again for 2 to 15 seconds, and cannot without a compiler. So
    binaries of kernels in C++ are added. Checked on 2.11 and 2.13.

    Raises:
        LoweringError: torch keeps no copy, or has changed what it generates.
    """
    entry, content = _copy(compiled)
    files = {REGION: content}
    code = _generated(entry)
    if set(code.device_types) == {"cpu"}:
        built = _BuiltKernels()
        source = _with_kernels(code.source_code, "_built_kernels")
        exec(compile(source, "region", "exec", dont_inherit=True), {"__name__": "region", "_built_kernels": built})
        files |= {name: path.read_bytes() for name, path in built.paths.items()}
    return files


def _copy(compiled: Callable[..., Any]) -> tuple[Any, bytes]:
    """Torch's cache entry of a region, and the same pickled. Checked on 2.11 and 2.13."""
    import torch._functorch.config as functorch

    with functorch.patch("bundled_autograd_cache", True):
        try:
            entry = compiled.inner_fn.compiled_fn.serialize()  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            raise LoweringError("torch keeps no copy of it; are torch's own caches switched off?") from None
        return entry, pickle.dumps(entry)


def load_region(files: Mapping[str, bytes], folder: Path, settings: dict[str, Any]) -> Callable[..., Any]:
    """Make a region from what `pack_region` gave, without compiling anything.

    `CompiledArtifact.load` asserts where this raises, and compiles kernels in C++ again. Checked on 2.11 and 2.13.

    Args:
        files: content by name.
        folder: where the same files lie; kernels in C++ are mapped from there.
        settings: settings of Inductor, as it was compiled with.

    Raises:
        Exception: whatever torch, pickle or the loader of shared objects makes of files that do not fit.
    """
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry
    from torch._inductor import config
    from torch._inductor.codecache import get_path

    entry = pickle.loads(files[REGION])
    code = _generated(entry)
    if set(code.device_types) != {"cpu"}:
        with config.patch(settings):
            return deserialize_bundled_cache_entry(entry)
    kernels = f'__import__("{__name__}", fromlist=["StoredKernels"]).StoredKernels({str(folder)!r})'
    code.source_code = _with_kernels(code.source_code, kernels)
    code.cache_key = f"dgraph_{uuid.uuid4().hex}"  # torch writes the source to a file of this name, and runs that
    try:
        with config.patch(settings):
            return deserialize_bundled_cache_entry(entry)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(get_path(code.cache_key, "py")[2])


class StoredKernels:
    """Stand-in for the object that compiles kernels in generated Python; hands out kernels that are built."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        """Load a kernel. Its module asks the environment for a function of torch. Checked on 2.11 and 2.13."""
        from torch._C._dynamo import guards

        path = self._folder / _kernel_name(argtypes, source)
        data_ptr = guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data_ptr)
        # Python keeps one module per file and name; the part after the dot names the function that makes it.
        spec = spec_from_file_location(f"dgraph_{uuid.uuid4().hex}.kernel", path)
        if spec is None or spec.loader is None:
            raise LoweringError(f"{path} is not a kernel.")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    def wait(self, scope: dict[str, Any]) -> None:
        """Return at once: nothing is being compiled."""


class _BuiltKernels(StoredKernels):
    """The same stand-in, which notes the files of the kernels that were compiled just now."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        """The kernel, which Inductor finds in its own cache. Checked on 2.11 and 2.13."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        kernel = CppPythonBindingsCodeCache.load_pybinding(argtypes, source)
        self.paths[_kernel_name(argtypes, source)] = Path(kernel.__self__.__file__)
        return kernel


def _kernel_name(argtypes: Sequence[str], source: str) -> str:
    """File name of a kernel: by its source, so that generated code never meets a kernel that it was not made for."""
    return f"kernel-{hashlib.sha256(repr((list(argtypes), source)).encode()).hexdigest()[:16]}.so"


def _generated(entry: Any) -> Any:
    """The part of an entry that holds the generated Python."""
    code = getattr(getattr(entry, "compiled_fw", None), "result", None)
    if not all(hasattr(code, name) for name in ("source_code", "cache_key", "device_types")):
        raise LoweringError(f"torch {torch.__version__} packs a compiled graph in another way than dgraph knows.")
    return code


def _with_kernels(source: str, kernels: str) -> str:
    if _STARTS_COMPILING not in source:
        raise LoweringError(f"torch {torch.__version__} generates other code than dgraph knows.")
    return source.replace(_STARTS_COMPILING, f"async_compile = {kernels}")


def settle_kernels() -> None:
    """Set the folder in which Triton keeps kernels now, as Inductor would when it makes or loads its first one.

    Kernels that are put there before that are then found. Checked on 2.11 and 2.13.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(0))


def launched_by_triton() -> list[Any]:
    """Triton's objects of the kernels in compiled regions that Triton launches, as far as this process has loaded them.

    Inductor launches most by a library of its own, but none whose name has more than 150 characters: it looks for a
    file of that name, which Triton cuts there. Checked on 2.11 and 2.13.
    """
    if "torch._inductor.codecache" not in sys.modules:
        return []
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    made = (v for module in PyCodeCache.modules for v in vars(module).values() if isinstance(v, CachingAutotuner))
    kernels = (result.kernel for kernel in made for result in kernel.compile_results)
    return [k for k in kernels if getattr(k, "_run", None) is not None]


def inductor_config() -> dict[str, Any]:
    """Every setting of Inductor that shapes what it generates, from defaults, the environment and assignments.

    Torch's own cache uses this list and publishes no other. The name of the C++ compiler is left out, since it
    names who compiles, not the code. Checked on 2.11 and 2.13.
    """
    import torch._inductor.config as config

    return {k: v for k, v in config.save_config_portable(ignore_private_configs=False).items() if k != "cpp.cxx"}


def inductor_settings(device: torch.device) -> dict[str, Any]:
    """Inductor settings of a region; patched for one compilation, never set globally."""
    if device.type != "cuda":
        return {}
    # A CUDA graph is captured over the whole stage, so Inductor must not capture its own. One of its
    # patterns matches here: product plus residual becomes `addmm`, for which torch copies the residual in a launch of
    # its own. Left alone, the sum is part of the norm after it. Layouts of kernels are not timed in a first run: that
    # takes longer than loading them, and sums would differ between processes. Programmatic launches stay off, whatever
    # the environment says: Inductor's kernels wait where `dgraph.private.early_start` shows that they must not.
    return {
        "triton.cudagraphs": False,
        "pattern_matcher": False,
        "triton.autotune_pointwise": False,
        "triton.enable_pdl": False,
    }


def load_cpp(source: str, name: str) -> Callable[..., Any]:
    """Compile a function of C++ source for this CPU as Inductor compiles its own kernels, with OpenMP.

    The function is found in Inductor's cache the next time. It contracts a * b + c. Checked on 2.11 and 2.13.

    Inductor finds it by source and command line, which says "native" on every CPU; so the source names the CPU's
    features, or machines that share a cache would run what one of them lacks.

    Raises:
        LoweringError: there is no compiler, or it refuses the source.
    """
    from torch._inductor.codecache import CppCodeCache

    flags = ["-ffp-contract=fast", "-w", "-g0"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mtune=generic")  # what gcc 12 tunes for some CPUs loads an operand again for each product
    try:
        library = CppCodeCache.load(f"{source}// {processor_features()}\n", "cpu", extra_flags=flags)
    except (RuntimeError, OSError) as error:
        raise LoweringError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    function: Callable[..., Any] = getattr(library, name)
    return function
