"""Steps in which parameters are kept in float32 beside those that are computed with, as most software stacks do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moaic.ir.graph import Function, Location, Module, Op, Value
from moaic.ir.types import FLOATING

WIDE = "f32"


def with_masters(module: Module) -> Module:
    """`module` with narrow parameters in float32, cast where they are first read, and their gradients cast back."""
    main = module.main
    params = [param for index, param in enumerate(main.params) if main.param_role(index).kind == "param"]
    masters, gradients = (
        {value: _wide(value) for value in values if value.type.dtype in FLOATING and value.type.dtype != WIDE}
        for values in (params, [main.results[index] for index in main.gradients])
    )
    return replace(
        module,
        functions=(
            *module.functions[:-1],
            replace(
                main,
                params=tuple(masters.get(param, param) for param in main.params),
                ops=tuple(_ops(main, masters, gradients)),
                results=tuple(gradients.get(result, result) for result in main.results),
            ),
        ),
    )


def _wide(value: Value) -> Value:
    return Value(replace(value.type, dtype=WIDE), value.name)


def _ops(main: Function, masters: dict[Value, Value], gradients: dict[Value, Value]) -> Iterator[Op]:
    waiting = dict(masters)
    for op in main.ops:
        for value in op.inputs():
            if value in waiting:
                yield _cast(waiting.pop(value), value, op.loc)
        yield op
        for result in op.results:
            if result in gradients:
                yield _cast(result, gradients[result], op.loc)


def _cast(before: Value, after: Value, loc: Location) -> Op:
    return Op("aten._to_copy", (before,), (after,), {"dtype": after.type.dtype}, loc)
