"""Regions as Inductor makes them for a GPU that need not be there, and their kernels as Triton compiles them.

python -m tests.ops.triton.compiled_regions norm step mixed
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from triton.backends.compiler import GPUTarget

from dgraph.families.quantised import quantised_rows
from dgraph.lowering.traced import trace
from dgraph.ops import OPS
from dgraph.private.inductor import _for_devices, inductor_settings
from dgraph.runtime.loop.transition import TRANSITION_PARTS
from tests.ops.triton.compiled import ACCESS
from tests.runtime.test_compiled_transition import RULES, outputs, transition_of

GPU = torch.device("cuda", 0)


def stand_in() -> None:
    """From now on torch and Triton take this process to have a GPU with compute capability 9.0, for code alone."""
    sizes = {"multi_processor_count": 132, "regs_per_multiprocessor": 65536, "warp_size": 32}
    sizes |= {"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
    known = DeviceProperties(type="cuda", index=0, cc=90, major=9, **sizes)
    DeviceProperties.create = classmethod(lambda cls, device: known)  # type: ignore[assignment, method-assign]
    said = SimpleNamespace(**sizes, major=9, minor=0, name="stand-in", total_memory=80 << 30)
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_capability, cuda.get_device_properties = lambda *_: (9, 0), lambda *_: said
    target = GPUTarget("cuda", 90, 32)
    triton_helpers.set_driver_to_gpu = lambda: None
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_active_torch_device=lambda: GPU,
        )
    )


def on_gpu(value: Any) -> Any:
    """A device as the GPU; a value of one as a value there, that takes no memory anywhere."""
    if isinstance(value, torch.device):
        return GPU
    if isinstance(value, FakeTensor):
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, GPU)
    if isinstance(value, list | tuple):
        return type(value)(map(on_gpu, value))
    return value


def generated(function: Callable[..., Any], inputs: Sequence[Tensor], settings: Mapping[str, Any]) -> str:
    """The Python that Inductor generates of a function over tensors on the host, as if they lay on the GPU."""
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, on_gpu), map_aggregate(node.kwargs, on_gpu)
        if "val" in node.meta:
            node.meta["val"] = on_gpu(node.meta["val"])
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = values[0].fake_mode
    with ExitStack() as entered:
        for one in (config.patch({**inductor_settings(GPU), **settings}), V.set_fake_mode(mode), _for_devices({GPU})):
            entered.enter_context(one)
        lowering = GraphLowering(graph, example_inputs=values, shape_env=mode.shape_env)
        entered.enter_context(V.set_graph_handler(lowering))
        entered.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*values)
        code: Any = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def described(code: str) -> list[dict[str, Any]]:
    """Every kernel of generated Python, compiled: how it goes through rows, and what its PTX does first."""
    found = []
    for name, source in re.findall(
        r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.DOTALL
    ):
        kernel = getattr(PyCodeCache.load(source), name)
        with config.patch(use_static_cuda_launcher=False):
            kernel.precompile(warm_cache_only=True)
        lines = kernel.compile_results[0].kernel.asm["ptx"].splitlines()
        launch = [i for i, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
        access = next(i for i, line in enumerate(lines) if ACCESS.search(line))
        how = re.findall(r"@triton_heuristics\.(\w+)", source)[0]
        found.append({"name": name, "how": how, "lets_start": len(launch) == 1 and launch[0] < access})
    return found


def norm(x: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A norm of the stream of a step, rounded."""
    stream = stream + x
    wide = stream.float()
    rows = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight
    return stream, *quantised_rows(rows, "fp8")


def heads(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of queries and keys, side by side in a row with those of values, normed and rotated."""
    q, k, _ = x.split([4096, 1024, 1024], 1)
    norm, rope, angles = OPS["rms_norm"].reference, OPS["rope"].reference, (cos.unsqueeze(1), sin.unsqueeze(1))
    q, k = (rope(norm(part.reshape(len(x), -1, 128), weight, 1e-6), *angles) for part in (q, k))
    return q, k


def region_of(name: str) -> tuple[Callable[..., Any], Sequence[Tensor], Mapping[str, Any]]:
    """A region by name: "norm", "heads", or the kind of a transition between steps; its packing has that word, too."""
    if name in ("norm", "heads"):
        wide, row, head = (torch.zeros(32, size, dtype=torch.bfloat16) for size in (6144, 4096, 128))
        inputs = (wide, head[0].clone(), head, head.clone()) if name == "heads" else (row, row.clone(), row[0].clone())
        return heads if name == "heads" else norm, inputs, {}
    kind, packs = name.removesuffix(" packing"), name.endswith(" packing")
    transition = transition_of(kind, RULES["renoise" if kind == "random" else "confidence_threshold"])
    transition.take(outputs(transition, torch.Generator().manual_seed(3), kind == "step"))
    part = TRANSITION_PARTS[packs]
    held = transition._held(part)
    source = trace(transition._traceable(part, held), held).source
    return source.module(), [torch.zeros(v.shape, dtype=v.dtype) for v in source.inputs], source.settings


if __name__ == "__main__":
    regions = {name: region_of(name) for name in sys.argv[1:]}
    stand_in()
    print(json.dumps({name: described(generated(*region)) for name, region in regions.items()}))
