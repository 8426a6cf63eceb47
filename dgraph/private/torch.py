"""The only file that imports private parts of torch.

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The type of `torch.ops.aten.add.Tensor`; it has no public name. Checked on 2.11 and 2.13.
from torch._ops import OpOverload

# What sees every op that torch's dispatcher runs; it has no public name. Checked on 2.11 and 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

from dgraph.errors import LoweringError
from dgraph.processor import processor_features

__all__ = [
    "OpOverload",
    "StorageWatch",
    "compile_region",
    "copy_all",
    "fake_mode",
    "held",
    "inductor_config",
    "inductor_settings",
    "launched_by_triton",
    "let_written_be_left_out",
    "load_cpp",
    "load_region",
    "new_symbol",
    "pack_region",
    "settle_kernels",
    "symmetric",
    "tracing",
    "typing",
]


def held(tensors: list[Tensor]) -> list[Tensor]:
    """Those of tensors, which are in this list only, that C++ holds, too: for an op that has not ended in its thread.

    C++ has one reference to the object of Python for all of its own, and gives it back after the last of those. Nothing
    public counts those of C++. Checked on 2.11 and 2.13.
    """
    (alone,) = (sys.getrefcount(each) for each in [object()])
    counts = ((tensor._use_count(), sys.getrefcount(tensor)) for tensor in tensors)  # type: ignore[attr-defined]
    return [tensor for tensor, count in zip(tensors, [*counts], strict=True) if count > (1, alone)]


def let_written_be_left_out(custom: Any) -> None:
    """Let calls of a `torch.library.custom_op` leave out arguments that it writes, where they have a default.

    Before 2.13, what counts the versions of written tensors takes every one of them from the positional arguments, and
    the dispatcher drops those that equal their default: an IndexError, whether None is given or left out. Checked on
    2.11; 2.13 does as this.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return
    overload, past = custom._opoverload, torch._C._after_ADInplaceOrView_keyset
    arguments = overload._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def count(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for i in written:
            value = args[i] if i < len(args) else kwargs.get(arguments[i].name)
            if isinstance(value, Tensor):
                torch.autograd.graph.increment_version(value)
        return overload.redispatch(keyset & past, *args, **kwargs)

    custom._lib.impl(custom._name, count, "ADInplaceOrView", with_keyset=True, allow_override=True)


def fake_mode() -> Any:
    """A fake-tensor mode with an empty shape environment of its own.

    `torch.export` gives fake tensors with symbolic sizes for a traced model, but nothing public makes them for a graph
    that a pass has rewritten. Checked on 2.11 and 2.13.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


class StorageWatch(TorchDispatchMode):
    """While it is entered, counts the bytes of the memory that ops allocate, from when a result is made until nothing
    holds it any more: of real tensors on a CPU, and of fake ones.

    Not seen is what code allocates past torch's dispatcher: compiled regions, and kernels of torch for themselves.
    `memory_stats` counts a GPU's memory alone. Storages are counted as torch's own memory tracker counts them, by weak
    references to their Python objects. Checked on 2.11 and 2.13.

    Args:
        grain: an allocation takes a multiple of so many bytes.
        seen: called with the live bytes whenever they have risen.

    Attributes:
        live: bytes that are allocated now.
        peak: most that were at a time.
        quiet: whether ops are let pass uncounted.
    """

    def __init__(self, grain: int = 1, seen: Callable[[int], object] | None = None):
        super().__init__()
        self.grain, self._seen = grain, seen or (lambda live: None)
        self.live = self.peak = 0
        self.quiet = False
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op and count what it allocated: what is in none of its arguments."""
        result = func(*args, **(kwargs or {}))
        if not self.quiet:
            given = {id(storage) for storage in _storages((args, kwargs))}
            self._count(storage for storage in _storages(result) if id(storage) not in given)
        return result

    def note(self, value: Any) -> None:
        """Count the memory of the tensors in a value, unless it is counted."""
        self._count(_storages(value))

    def rise(self, size: int) -> None:
        """Count so many bytes that are allocated and freed again at once."""
        self.peak = max(self.peak, self.live + size)
        self._seen(self.live + size)

    def _count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            key = id(storage)
            if key not in self._sizes:
                self._sizes[key] = -(-storage.nbytes() // self.grain) * self.grain
                weakref.finalize(storage, self._forget, key)
                self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        self._seen(self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _storages(part)
    elif isinstance(value, dict):
        yield from _storages(tuple(value.values()))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """targets[i].copy_(sources[i]) for all i, in one launch per dtype on a GPU.

    Public torch copies one tensor per launch. `_foreach_copy_` falls back to that by itself where it must. Checked on
    2.11 and 2.13.
    """
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        mine = pairs.setdefault(target.dtype, ([], []))
        mine[0].append(target)
        mine[1].append(source)
    for target_list, source_list in pairs.values():
        torch._foreach_copy_(target_list, source_list)


@contextlib.contextmanager
def typing(mode: Any) -> Iterator[None]:
    """Run ops on fake tensors of a mode, to learn the types of their results.

    The Python dispatcher decomposes composite ops; without it torch 2.11 runs their C++ kernels, which refuse symbolic
    sizes (linear) or fix them (matmul). `torch.export` does the same. Checked on 2.11 and 2.13.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with torch.no_grad(), enable_python_dispatcher(), mode:
        yield


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace functions over real tensors: the types of all values are kept in one fake-tensor mode.

    `make_fx` alone makes another mode, and a stack trace for it, at every value: more than half of its time. It takes
    the mode of the tracing context where there is one, for which nothing public stands. Checked on 2.11 and 2.13.
    """
    from torch._guards import TracingContext
    from torch._guards import tracing as within

    with torch.no_grad(), within(TracingContext(fake_mode())):
        yield


def new_symbol(mode: Any, name: str, hint: int) -> torch.SymInt:
    """A size that shape checks must treat as variable; `hint` (at least 2) only settles comparisons.

    `ConstantSource` names a symbol that comes from no traced frame. Checked on 2.11 and 2.13. The imports are late
    because they pull in Dynamo and, with it, triton.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[arg-type]
    example = mode.from_tensor(torch.empty(hint), symbolic_context=context, source=ConstantSource(name))
    size = example.shape[0]
    if not isinstance(size, torch.SymInt):
        raise LoweringError(f"torch specialised the symbolic size {name} to {size}.")
    return size


def compile_region(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Tensor],
    settings: dict[str, Any],
    functions: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Compile a straight-line module with Inductor for every size of its symbolic dimensions.

    `torch.compile` would trace the module again and key its code by guards, and AOTInductor bakes weights in;
    `standalone_compile` takes a graph as it stands and weights as inputs. It specialises silently to the example's
    sizes unless the inputs are the placeholders' own fake tensors and `example_value` is set on the nodes, because
    that is where "from_graph" looks for the fake mode. Checked on 2.11 and 2.13.

    Args:
        module: the module; its targets are ops of torch and functions.
        example_inputs: fake values of its placeholders.
        settings: of Inductor, for this compilation.
        functions: if given, the result can be packed by `pack_region`. Torch keeps no code for functions that are not
            its own unless they are named, with a text that changes whenever they do: qualified name -> hash.
    """
    import torch._inductor as inductor

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    options = dict(settings)
    if functions is not None:
        options["unsafe_marked_cacheable_functions"] = dict(functions)
    with torch.no_grad():
        return inductor.standalone_compile(  # type: ignore[attr-defined]
            module,
            list(example_inputs),
            dynamic_shapes="from_graph",
            options={"config_patches": options},
            aot=functions is not None,
        )


_STARTS_COMPILING = "async_compile = AsyncCompile()"
"""The line of Inductor's generated Python after which each kernel of it is compiled, by methods of that object."""

REGION = "region.pickle"


def pack_region(compiled: Callable[..., Any]) -> dict[str, bytes]:
    """What `load_region` needs to make a compiled region again, as files by name.

    `CompiledArtifact.save` keeps the generated Python, and for a GPU the kernels' binaries, but no binary of a kernel
    in C++: each new process compiles it again for 2 to 15 seconds, and cannot without a compiler. So these are added.
    Checked on 2.11 and 2.13.

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
    """What torch keeps of a region, and the same pickled. Checked on 2.11 and 2.13."""
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
        settings: of Inductor, as it was compiled with.

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
    """Stands where generated Python expects the object that compiles, and hands out kernels that are built."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        """A kernel. Its module asks the environment for a function of torch. Checked on 2.11 and 2.13."""
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
        """Nothing is being compiled."""


class _BuiltKernels(StoredKernels):
    """Stands in the same place, and notes the files of the kernels that were compiled just now."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        """The kernel, which Inductor finds in its own cache. Checked on 2.11 and 2.13."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        kernel = CppPythonBindingsCodeCache.load_pybinding(argtypes, source)
        self.paths[_kernel_name(argtypes, source)] = Path(kernel.__self__.__file__)
        return kernel


def _kernel_name(argtypes: Sequence[str], source: str) -> str:
    """The file of a kernel: by its source, so that generated code never meets a kernel that it was not made for."""
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
    """Where Triton keeps kernels, say so now as Inductor would when it makes or loads its first one.

    What is put there before is then found. Checked on 2.11 and 2.13.
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

    Torch's own cache uses this list and publishes no other. The name of the C++ compiler is left out, since it says
    who compiles and not what. Checked on 2.11 and 2.13.
    """
    import torch._inductor.config as config

    return {k: v for k, v in config.save_config_portable(ignore_private_configs=False).items() if k != "cpp.cxx"}


def inductor_settings(device: torch.device) -> dict[str, Any]:
    """Inductor settings of a region; patched for one compilation, never set globally."""
    if device.type != "cuda":
        return {}
    # A CUDA graph is captured over the whole stage, so Inductor must not capture its own. Of its patterns one matches
    # here: product plus residual becomes `addmm`, for which torch copies the residual first, in a launch of its own;
    # left alone the sum is part of the norm after it. Layouts of kernels are not timed when a process first runs them:
    # that takes longer than loading them, and sums would differ from process to process. None starts early, whatever
    # the environment says: Inductor's wait where `dgraph.ops.triton.early` shows that they must not.
    return {
        "triton.cudagraphs": False,
        "pattern_matcher": False,
        "triton.autotune_pointwise": False,
        "triton.enable_pdl": False,
    }


def symmetric(size: int, device: torch.device, group: Any) -> tuple[Tensor, bool]:
    """u8[size] on this GPU that the other ranks of a process group can read and write, and whether its switch can, too.

    group: a process group. All ranks must call it together, and keep the buffer. The ops on such buffers are
    `torch.ops.symm_mem`; nothing public allocates them. Checked on 2.11 and 2.13.
    """
    from torch.distributed._symmetric_memory import empty, rendezvous

    buffer = empty(size, dtype=torch.uint8, device=device)
    handle = rendezvous(buffer, group)
    return buffer, handle.multicast_ptr != 0


def product_of_int8(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [..., columns] @ int8 [rows, columns].T in int32, on a CPU, of any sizes: torch's public products of int8
    sum in int8. Checked on 2.13.
    """
    made: Tensor = torch._int_mm(x.reshape(-1, x.shape[-1]), weight.t())
    return made.view(*x.shape[:-1], len(weight))


def load_cpp(source: str, name: str) -> Callable[..., Any]:
    """A function of C++ source, compiled for this CPU as Inductor compiles its own kernels, with OpenMP, and found in
    Inductor's cache the next time. It contracts a * b + c. Checked on 2.11 and 2.13.

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
