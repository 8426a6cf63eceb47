"""The ops of dgraph: reference, contract and samples of each, one op per file.

Importing this package registers every op that a module of it defines, as `torch.ops.dgraph.*`. A call with CUDA tensors
runs the op's kernel where it has one, and the reference else; Triton is imported on the first such call. An op of
another package comes into the table when a module that calls `define` is imported:

    SCALED = define("mine::scaled", scaled, samples=samples, contract=CONTRACT, by_row=("x",), kernel="mine.gpu:kernel")

or when an op is looked up that is not there yet: then the modules that are named in the entry-point group "dgraph.ops"
are imported (`dgraph.plugins`). `dgraph.testing.ops.check_op` tests all that an op owes. A reference can compute values
once for all layers if it derives them from arguments that are the same in every layer (`dgraph.ops.per_stage`).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from dgraph.ops.registry import OPS, Op, Sample, define, launcher, numeric, op_of, register, targets_of

for _subject in iter_modules(__path__, f"{__name__}."):
    _package = import_module(_subject.name) if _subject.name != f"{__name__}.triton" else None
    for _module in iter_modules(getattr(_package, "__path__", ()), f"{_subject.name}."):
        if not _module.ispkg:  # kernels, which need Triton
            import_module(_module.name)

__all__ = ["OPS", "Op", "Sample", "define", "launcher", "numeric", "op_of", "register", "targets_of"]
