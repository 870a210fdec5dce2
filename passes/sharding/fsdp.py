"""Parameter sharding over `dp`: where gradients and parameters rest, and when parameters are gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import REPLICATED, Mesh, Sharded, State
from moaic.ir.op_names import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from moaic.ir.rules import fits
from moaic.ir.types import TensorType
from moaic.passes.config import Distribute
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.transforms.hoist_casts import hoist_casts, narrows

AXIS = "dp"


@dataclass(frozen=True, slots=True)
class ShardParameters:
    name: ClassVar[str] = "distribute"
    summary: ClassVar[str] = "shard gradients and parameters over dp; gathered in low precision or not"
    level: Distribute = "optimizer"
    low_precision: bool = False

    def apply(self, module: Module) -> Module:
        return distribute(module, self.level, self.low_precision)


def distribute(module: Module, level: Distribute, low_precision: bool = False) -> Module:
    """`module` with gradients scattered and, from level `step` on, parameters at rest in shards.

    With `low_precision` a parameter that is only read cast to a narrower type is cast in shards and gathered narrow.
    """
    if level == "none" or module.mesh.size(AXIS) == 1:
        return module
    if low_precision:
        module = hoist_casts(module)
    main = _scatter_gradients(module.main, module.mesh, each=level == "use")
    if level in ("step", "use"):
        main = _gather_parameters(main, module.mesh, level, low_precision)
    return Module((*module.functions[:-1], main), module.mesh)


def resting_state(type_: TensorType, mesh: Mesh) -> State:
    """The first dim that divides, in contiguous parts of what other axes left; whole where none does."""
    if type_.layout.state(AXIS) != REPLICATED:
        return type_.layout.state(AXIS)
    n = mesh.size(AXIS)
    for dim, size in enumerate(type_.local_shape(mesh)):
        inner = [split.stride for split in type_.layout.on_dim(dim)]
        stride = min(inner, default=type_.shape[dim]) // n
        if size % n == 0 and stride and fits(type_, AXIS, Sharded(dim, stride), mesh):
            return Sharded(dim, stride)
    return REPLICATED


def _resting(type_: TensorType, mesh: Mesh) -> TensorType:
    return type_.with_layout(type_.layout.with_state(AXIS, resting_state(type_, mesh)))


def _scatter_gradients(main: Function, mesh: Mesh, *, each: bool) -> Function:
    """Each gradient's final sum becomes a reduce-scatter where one of its dims divides.

    With `each` the gradients of micro-batches are scattered, and their shards added up: nobody has a whole sum.
    """
    finals = {main.results[i] for i in main.gradients}
    read = Counter(value for op in main.ops for value in op.inputs())
    sums = {
        op.results[0]: op for op in main.ops if each and op.name == ALL_REDUCE and op.attrs["axis"] == MICRO_BATCHES
    }
    mapping: dict[Value, Value] = {}
    instead: dict[Op, Sequence[Op]] = {}
    for op in main.ops:
        done = op.results[0] if op.name == ALL_REDUCE and op.attrs["axis"] == AXIS else None
        if done is None or done not in finals or read[done]:
            instead[op] = [op]
            continue
        (total,) = op.inputs()
        new = mapping[done] = Value(_resting(done.type, mesh), done.name)
        if new.type.layout.state(AXIS) == REPLICATED:
            instead[op] = [replace(op, results=(new,))]
        elif total in sums and read[total] == 1:
            instead[sums[total]], instead[op] = [], _scattered_each(op, sums[total], new)
        else:
            instead[op] = [replace(op, name=REDUCE_SCATTER, results=(new,))]
    results = tuple(mapping.get(value, value) for value in main.results)
    return replace(main, ops=tuple(op for ops in instead.values() for op in ops), results=results)


def _scattered_each(over_ranks: Op, over_time: Op, new: Value) -> list[Op]:
    """The two sums that make `new`, in the other order."""
    (part,) = over_time.inputs()
    shard = Value(part.type.with_layout(part.type.layout.with_state(AXIS, new.type.layout.state(AXIS))))
    return [
        replace(over_ranks, name=REDUCE_SCATTER, operands=(part,), results=(shard,)),
        replace(over_time, operands=(shard,), results=(new,)),
    ]


def _gather_parameters(main: Function, mesh: Mesh, level: Distribute, low_precision: bool) -> Function:
    """Parameters rest in shards; a gather stands before the first reader (of each side for level `use`)."""
    resting = {
        param: Value(_resting(param.type, mesh), param.name)
        for i, param in enumerate(main.params)
        if main.param_role(i).kind == "param" and resting_state(param.type, mesh) != param.type.layout.state(AXIS)
    }
    params = tuple(resting.get(param, param) for param in main.params)
    gathered: dict[tuple[Value, str], Value] = {}
    ops: list[Op] = []
    each = level == "use" and mesh.size(MICRO_BATCHES) > 1
    when: Callable[[Op], str] = (lambda op: op.loc.side) if level == "use" else (lambda op: "")
    for op in main.ops:
        if low_precision and narrows(op) and op.operands[0] in resting:
            (result,) = op.results
            resting[result] = Value(_resting(result.type, mesh), result.name)
            ops.append(replace(op.with_operands(resting), results=(resting[result],)))
            continue
        mapping: dict[Value, Value] = {}
        for value in dict.fromkeys(op.inputs()):
            if value not in resting:
                continue
            key = (value, when(op))
            if key not in gathered:
                gathered[key] = Value(value.type, value.name)
                ops.append(_gather(resting[value], gathered[key], op, each))
            mapping[value] = gathered[key]
        ops.append(op.with_operands(mapping))
    results = tuple(resting.get(value, value) for value in main.results)
    return replace(main, params=params, ops=tuple(ops), results=results)


def _gather(source: Value, whole: Value, reader: Op, each: bool) -> Op:
    attrs = {"axis": AXIS, "each": MICRO_BATCHES} if each else {"axis": AXIS}
    return Op(ALL_GATHER, (source,), (whole,), attrs, reader.loc)
