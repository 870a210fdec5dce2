"""Parameter sharding over `dp` (ZeRO, FSDP): layouts of gradients and parameters, and when parameters are gathered.

Level `optimizer` shards gradients and optimizer state (ZeRO-2), `step` also parameters, gathered once per step, and
`use` parameters gathered for every use (ZeRO-3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Operand, Value
from moaic.ir.layout import REPLICATED, Mesh, Sharded, State, divided
from moaic.ir.op_names import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from moaic.ir.rules import fits, fits_unevenly
from moaic.ir.types import TensorType
from moaic.passes.config import Distribute
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.transforms.hoist_casts import hoist_casts, narrows

AXIS = "dp"


@dataclass(frozen=True, slots=True)
class FullyShardedDataParallel:
    name: ClassVar[str] = "distribute"
    summary: ClassVar[str] = "shard gradients and parameters over dp; then whether they are gathered in low precision"
    level: Distribute = "optimizer"
    low_precision: bool = False

    def apply(self, module: Module) -> Module:
        return distribute(module, self.level, self.low_precision)


def distribute(module: Module, level: Distribute, low_precision: bool = False) -> Module:
    """`module` with gradients reduce-scattered and, for the levels `step` and `use`, parameters sharded.

    With `low_precision` a parameter that is only read through a cast to a narrower type is cast before it is gathered.
    Raises Diagnostic where no dim of a gradient has an element for each rank.
    """
    ranks = module.mesh.size(AXIS)
    if level == "none" or ranks == 1:
        return module
    gradients = [module.main.results[index].type for index in module.main.gradients]
    if gradients and all(persistent_state(each, module.mesh) == REPLICATED for each in gradients):
        raise Diagnostic(f"distribute_param={level} shares out nothing: no dim of a parameter has dp={ranks} elements")
    if low_precision:
        module = hoist_casts(module)
    main = _scatter_gradients(module.main, module.mesh, per_micro_batch=level == "use")
    if low_precision and level == "step":
        main = _cast_once(main)
    if level in ("step", "use"):
        main = _gather_parameters(main, module.mesh, level, low_precision)
    return Module((*module.functions[:-1], main), module.mesh)


def persistent_state(type_: TensorType, mesh: Mesh) -> State:
    """The state of a persistent value on `dp`: its first dim that divides is sharded, contiguous within other shards.

    Where none divides the first is sharded that no other axis does, unevenly; where there is none the value is
    REPLICATED.
    """
    if type_.layout.state(AXIS) != REPLICATED:
        return type_.layout.state(AXIS)
    n = mesh.size(AXIS)
    for dim, size in enumerate(type_.local_shape(mesh)):
        inner = [split.stride for split in type_.layout.on_dim(dim)]
        stride = min(inner, default=type_.shape[dim]) // n
        if size % n == 0 and stride and fits(type_, AXIS, Sharded(dim, stride), mesh):
            return Sharded(dim, stride)
    uneven = (Sharded(dim, divided(size, n)) for dim, size in enumerate(type_.shape))
    return next((state for state in uneven if fits_unevenly(type_, AXIS, state, mesh)), REPLICATED)


def _persistent_type(type_: TensorType, mesh: Mesh) -> TensorType:
    return type_.with_layout(type_.layout.with_state(AXIS, persistent_state(type_, mesh)))


def _scatter_gradients(main: Function, mesh: Mesh, *, per_micro_batch: bool) -> Function:
    """`main` with each gradient reduce-scattered over `dp` where one of its dims divides, then summed over other axes.

        %c = moai.all_reduce %p {axis = "cp"} : f32[3, 6] +dp
        %g = moai.all_reduce %c {axis = "dp"} : f32[3, 6]
    becomes
        %s = moai.reduce_scatter %p {axis = "dp"} : f32[3, 6{dp}] +cp
        %g = moai.all_reduce %s {axis = "cp"} : f32[3, 6{dp}]

    With `per_micro_batch` the gradients of micro-batches are reduce-scattered and their shards added up, so that no
    rank holds a full sum:

        %s = moai.all_reduce %p {axis = "mb"} : f32[3, 6] +dp
        %g = moai.all_reduce %s {axis = "dp"} : f32[3, 6]
    becomes
        %s = moai.reduce_scatter %p {axis = "dp"} : f32[3, 6{dp}] +mb
        %g = moai.all_reduce %s {axis = "mb"} : f32[3, 6{dp}]
    """
    sums = _Sums(main)
    mapping: dict[Value, Value] = {}
    replacements: dict[Op, Sequence[Op]] = {op: [op] for op in main.ops}
    for gradient in dict.fromkeys(main.results[i] for i in main.gradients):
        chain = sums.before(gradient)
        new = Value(_persistent_type(gradient.type, mesh), gradient.name)
        if chain and new.type.layout.state(AXIS) != REPLICATED:
            mapping[gradient] = new
            replacements.update((op, ()) for op in chain)
            replacements[chain[-1]] = _scattered(chain, new, per_micro_batch=per_micro_batch)
    results = tuple(mapping.get(value, value) for value in main.results)
    return replace(main, ops=tuple(op for ops in replacements.values() for op in ops), results=results)


class _Sums:
    """The sums over axes of which the gradients of a function are the results."""

    def __init__(self, main: Function) -> None:
        self.reads = Counter(value for op in main.ops for value in op.inputs()) + Counter({*main.results})
        self.made = {op.results[0]: op for op in main.ops if op.name in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)}

    def before(self, gradient: Value) -> Sequence[Op]:
        """The ops that make a gradient from what is to be summed over `dp` and other axes; none if there are none.

        An all-reduce may be written as a reduce-scatter and, after other sums, an all-gather: the whole of these makes
        a value with the splits of the first operand.
        """
        found: Sequence[Op] = ()
        chain: list[Op] = []
        value = gradient
        while self.reads[value] == 1 and (op := self.made.get(value)) is not None:
            chain.insert(0, op)
            (value,) = op.inputs()
            sums_over_dp = any(op.name != ALL_GATHER and op.attrs["axis"] == AXIS for op in chain)
            if sums_over_dp and value.type.layout.splits == gradient.type.layout.splits:
                found = (*chain,)
        return found


def _scattered(chain: Sequence[Op], new: Value, *, per_micro_batch: bool) -> list[Op]:
    """The sums of a chain: a reduce-scatter over `dp` before or after that over micro-batches, then those of shards."""
    summing = {str(op.attrs["axis"]): op for op in reversed(chain) if op.name != ALL_GATHER}
    first = (AXIS, MICRO_BATCHES) if per_micro_batch else (MICRO_BATCHES, AXIS)
    axes = [axis for axis in (*first, *(axis for axis in summing if axis not in first)) if axis in summing]
    ops: list[Op] = []
    (value,) = chain[0].inputs()
    for axis in axes:
        state = new.type.layout.state(AXIS) if axis == AXIS else REPLICATED
        type_ = value.type.with_layout(value.type.layout.with_state(axis, state))
        result = new if axis == axes[-1] else Value(type_)
        name = REDUCE_SCATTER if axis == AXIS else ALL_REDUCE
        ops.append(Op(name, (value,), (result,), {"axis": axis}, summing[axis].loc))
        value = result
    return ops


def _gather_parameters(main: Function, mesh: Mesh, level: Distribute, low_precision: bool) -> Function:
    """`main` with sharded parameters, gathered before the first reader (of forward and of backward for `use`).

        %h = aten.mm %x, %w : f32[8, 6]
    becomes (%w: f32[3, 6{dp}])
        %f = moai.all_gather %w {axis = "dp"} : f32[3, 6]
        %h = aten.mm %x, %f : f32[8, 6]

    With `low_precision` a cast of a parameter runs on the shard, and its result is gathered:

        %c = aten._to_copy %w {dtype = "bf16"} : bf16[3, 6{dp}]
        %f = moai.all_gather %c {axis = "dp"} : bf16[3, 6]
    """
    shards = _param_shards(main, mesh)
    params = tuple(shards.get(param, param) for param in main.params)
    gathered: dict[tuple[Value, str], Value] = {}
    ops: list[Op] = []
    per_micro_batch = level == "use" and mesh.size(MICRO_BATCHES) > 1
    side_of: Callable[[Op], str] = (lambda op: op.loc.side) if level == "use" else (lambda op: "")
    for op in main.ops:
        if low_precision and narrows(op) and op.operands[0] in shards:
            (result,) = op.results
            shards[result] = Value(_persistent_type(result.type, mesh), result.name)
            ops.append(replace(op.with_operands(shards), results=(shards[result],)))
            continue
        mapping: dict[Value, Value] = {}
        for value in (value for value in dict.fromkeys(op.inputs()) if value in shards):
            key = (value, side_of(op))
            if key not in gathered:
                gathered[key] = Value(value.type, value.name)
                ops.append(_gather(shards[value], gathered[key], op, per_micro_batch))
            mapping[value] = gathered[key]
        ops.append(op.with_operands(mapping))
    results = tuple(shards.get(value, value) for value in main.results)
    return replace(main, params=params, ops=tuple(ops), results=results)


def _cast_once(main: Function) -> Function:
    """`main` with equal casts of a parameter made once: a backward that casts it again would gather it again."""
    params = {*main.params}
    first: dict[tuple[Sequence[Operand], str], Value] = {}
    same: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in main.ops:
        kept = op.with_operands(same)
        result = kept.results[0] if narrows(kept) and kept.operands[0] in params else None
        if result is None or first.setdefault((kept.operands, result.type.dtype), result) is result:
            ops.append(kept)
        else:
            same[result] = first[kept.operands, result.type.dtype]
    return replace(main, ops=tuple(ops), results=tuple(same.get(value, value) for value in main.results))


def _param_shards(main: Function, mesh: Mesh) -> dict[Value, Value]:
    """By parameter that `dp` can shard, the parameter as a shard."""
    return {
        param: Value(_persistent_type(param.type, mesh), param.name)
        for i, param in enumerate(main.params)
        if main.param_role(i).kind == "param" and persistent_state(param.type, mesh) != param.type.layout.state(AXIS)
    }


def _gather(source: Value, whole: Value, reader: Op, per_micro_batch: bool) -> Op:
    attrs = {"axis": AXIS, "each": MICRO_BATCHES} if per_micro_batch else {"axis": AXIS}
    return Op(ALL_GATHER, (source,), (whole,), attrs, reader.loc)
