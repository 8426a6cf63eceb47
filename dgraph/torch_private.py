"""The only file that imports private parts of torch.

Each use says why no public name serves, and the versions on which it was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The type of `torch.ops.aten.add.Tensor`; it has no public name. Checked on 2.11 and 2.13.
from torch._ops import OpOverload

from dgraph.errors import LoweringError

__all__ = ["OpOverload", "compile_region", "fake_mode", "inductor_settings", "new_symbol"]


def fake_mode() -> Any:
    """A fake-tensor mode with an empty shape environment of its own.

    `torch.export` gives fake tensors with symbolic sizes for a traced model, but nothing public makes them for a graph
    that a pass has rewritten. Checked on 2.11 and 2.13.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


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
    module: torch.fx.GraphModule, example_inputs: Sequence[Tensor], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a straight-line module with Inductor for every size of its symbolic dimensions.

    `torch.compile` would trace the module again and key its code by guards, and AOTInductor bakes weights in;
    `standalone_compile` takes a graph as it stands and weights as inputs. It specialises silently to the example's
    sizes unless the inputs are the placeholders' own fake tensors and `example_value` is set on the nodes, because
    that is where "from_graph" looks for the fake mode. Checked on 2.11 and 2.13.
    """
    import torch._inductor as inductor

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    with torch.no_grad():
        return inductor.standalone_compile(  # type: ignore[attr-defined]
            module, list(example_inputs), dynamic_shapes="from_graph", options={"config_patches": settings}
        )


def inductor_settings(device: torch.device) -> dict[str, Any]:
    """Inductor settings of a region; patched for one compilation, never set globally."""
    # A CUDA graph is captured over the whole stage, so Inductor must not capture its own.
    return {"triton.cudagraphs": False} if device.type == "cuda" else {}
