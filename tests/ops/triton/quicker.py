"""Shortcuts of Triton's interpreter, for values that it finds again at every operation of a kernel.

Small calls spend nearly all of their time there: types, shapes and constants of what is computed, hardly ever numbers.
The numbers are those of the interpreter. Checked on Triton 3.7; one without the functions below interprets as it likes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


class _Stays:
    """What Triton restores after a launch: nothing."""

    def restore(self) -> None:
        """Leave everything as it is."""


def quicken() -> None:
    """Let the interpreter of this process find its types, shapes and constants once."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_patch_attr", "_get_np_dtype")):
        return
    _replace_once(interpreter, core)
    _compute_only_what_is_used(interpreter)
    _describe_once(core)
    _prepare_once(TritonSemantic, core)


def _replace_once(interpreter: Any, core: Any) -> None:
    """Replace the functions of the language once, not at every call of a function within a kernel; without detours."""
    replace, done, stays = interpreter._patch_lang, set(), _Stays()

    @functools.cache
    def once(fn: Any) -> _Stays:
        sees = tuple(any(value is module for value in fn.__globals__.values()) for module in (interpreter.tl, core))
        if sees not in done:
            replace(fn)
            done.add(sees)
        return stays

    def bind(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_lang, interpreter._patch_attr = once, bind


def _compute_only_what_is_used(interpreter: Any) -> None:
    """Leave out the table of number types at each look-up; overflows of sums, which only Triton's debug mode reads;
    and whether numbers fit their types, which each operation sees to.
    """
    number_type = interpreter._get_np_dtype
    remembered = functools.cache(number_type)
    interpreter._get_np_dtype = lambda t: number_type(t.scalar) if t.scalar.is_ptr() else remembered(t.scalar)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _describe_once(core: Any) -> None:
    """Let types and values of equal sizes share what Triton says of their sizes, which nothing changes."""
    of_type, of_value = core.block_type.__init__, core.tensor.__init__

    @functools.cache
    def type_facts(sizes: tuple[int, ...], element: Any) -> dict[str, Any]:
        of_type(made := core.block_type.__new__(core.block_type), element, list(sizes))
        return {name: fact for name, fact in vars(made).items() if name != "element_ty"}

    @functools.cache
    def value_facts(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        of = core.block_type(core.int32, list(sizes)) if sizes else core.int32
        of_value(made := core.tensor.__new__(core.tensor), None, of)
        return made.shape, made.numel

    def start_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        self.__dict__ = {**type_facts(sizes, element_ty.name), "element_ty": element_ty}

    def start_value(self: Any, handle: Any, type: Any) -> None:
        shape, numel = value_facts(tuple(type.shape.values) if type.is_block() else ())
        self.__dict__ = {"handle": handle, "type": type, "dtype": type.scalar, "shape": shape, "numel": numel}

    core.block_type.__init__, core.tensor.__init__ = start_type, start_value


def _prepare_once(semantic: Any, core: Any) -> None:
    """Prepare the operands of two types once, and make constants once; leave alone what is as wanted.

    The interpreter spreads an operand over the shape of the other one, and NumPy's functions would do so by themselves.
    """
    operands, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constant, cast = semantic.scalar_constant, semantic.cast
    plans: dict[Any, tuple[Any, ...]] = {}
    constants: dict[Any, Any] = {}

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = constant(self, value, dtype)
        return constants[key]

    def cast_others(self: Any, value: Any, dtype: Any, *how: Any) -> Any:
        return value if value.type.scalar.name == dtype.scalar.name else cast(self, value, dtype, *how)

    def broadcast_others(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        of_a, of_b = a.type, b.type
        if of_a.is_block() and of_b.is_block():
            alike = of_a.shape.values == of_b.shape.values
        else:
            alike = not of_a.is_block() and not of_b.is_block()
        return (a, b) if alike else broadcast(self, a, b)

    def operands_once(self: Any, a: Any, b: Any, *how: bool) -> tuple[Any, ...]:
        given = a, b
        kinds = [x.type.name if isinstance(x, core.tensor) else (type(x), x) for x in given]
        key = (*kinds, how)
        if key not in plans:
            found = operands(self, a, b, *how)
            plans[key] = tuple(
                new.type if isinstance(x, core.tensor) else new for x, new in zip(given, found, strict=True)
            )
            return found
        return tuple(fit(self, x, wanted) for x, wanted in zip(given, plans[key], strict=True))

    def fit(self: Any, value: Any, wanted: Any) -> Any:
        """A value in the type that is wanted of it, or the constant that stands for it."""
        if isinstance(wanted, core.tensor):
            return wanted
        if value.type.name == wanted.name:
            return value
        value = cast_others(self, value, wanted)
        return value if value.type.name == wanted.name else core.tensor(value.handle, wanted)

    semantic.scalar_constant, semantic.cast, semantic.broadcast_impl_value = (
        constant_once,
        cast_others,
        broadcast_others,
    )
    semantic.binary_op_type_checking_impl = operands_once
