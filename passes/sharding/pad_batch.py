"""Pad the batch with copies of its last row that count nowhere, so that it divides into any number of equal parts.

Every row is put on a rank of its own: what the partitioner then has to move or to sum is where rows meet. There copies
are cut off, or are zero in what is summed. Elsewhere every op runs on more rows, and a copy computes what its row does,
so that it is as finite as that. In the backward copies are zero from the start, and ops linear in a zero keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Final

from moaic.ir.collectives import COLLECTIVES
from moaic.ir.coordinate_dependent import MASKED_FILL, zero_of
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import NOWHERE, Attr, Function, Module, Op, Role, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Sharded, State
from moaic.ir.localize import asked_axes, refit
from moaic.ir.op_names import RAND, REPEAT_LAST
from moaic.ir.ops import rule_of
from moaic.ir.rules import Rule
from moaic.ir.sizes import Size
from moaic.ir.types import TensorType
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.data_parallel import batch_size, batch_states, cheapest_in_space, decomposed
from moaic.passes.sharding.partitioner import partition
from moaic.passes.transforms.dce import without_dead_ops

ROW: Final = "row"
"""The axis on which every row of the batch is a rank."""


@dataclass(frozen=True, slots=True)
class PadBatch:
    name: ClassVar[str] = "pad"
    summary: ClassVar[str] = "pad the batch with copies of its last row that count nowhere"
    rows: int = 2

    def apply(self, module: Module) -> Module:
        return pad_batch(module, self.rows)


def pad_batch(module: Module, rows: int) -> Module:
    """A captured step with its batch padded to `rows`; what it takes and returns is as before.

    Raises Diagnostic where it has as many rows, or open ones, and where all that reads it tells its rows apart.
    """
    have = batch_size(module.main)
    if module.mesh.axes or len(module.functions) > 1:
        raise Diagnostic("a batch is padded before all else", hint=f"let {PadBatch.name} be the first pass")
    if isinstance(have, Size):
        raise Diagnostic(f"a batch whose size is open is not padded to {rows} rows")
    if not 1 < have < rows:
        raise Diagnostic(f"a batch of {have} is not padded to {rows} rows")
    axis = Axis(ROW, have)
    spread = decomposed(module, axis)
    by_row = partition(spread, axis, batch_states(spread, axis), _whole, cheapest_in_space).module.main
    padded = without_dead_ops(Module((_Padding(have, rows).padded(by_row),), module.mesh))
    if batch_size(padded.main) != rows:
        raise Diagnostic(
            f"a batch of {have} is not padded to {rows} rows: what reads it tells its rows apart",
            hint=f"micro-batches and parts of dp that together divide {have} need no padding",
        )
    return padded


def _whole(role: Role, value: Value, state: State) -> State:
    return REPLICATED


class _Padding:
    """The step with more rows, written from that with each row on its own rank."""

    def __init__(self, have: int, rows: int) -> None:
        self._have = have
        self._rows = rows
        self._ops: list[Op] = []
        self._real: dict[Value, Value] = {}
        """By old value, the new one without the copies."""
        self._longer: dict[Value, Value] = {}
        """By old value that is sharded by rows, the new one with the copies."""
        self._source: dict[Value, Value] = {}
        """By what a collective makes, the old value that it is made of: without ranks the two are the same."""
        self._zero: set[Value] = set()
        """New values whose copies are zero."""
        self._gradients: set[Value] = set()
        """Old values that depend on tangents."""
        self._loc = NOWHERE

    def padded(self, by_row: Function) -> Function:
        params = [Value(_without_rows(param.type), param.name) for param in by_row.params]
        self._real.update(zip(by_row.params, params, strict=True))
        for index, param in enumerate(by_row.params):
            if by_row.param_role(index).kind == "tangent":
                self._gradients.add(param)
                if _is_by_row(param):
                    self._longer[param] = self._with_zeros(param, self._with_copies(param))
        for op in by_row.ops:
            self._loc = op.loc
            self._op(op)
        self._loc = NOWHERE
        results = tuple(self._without_copies(value) for value in by_row.results)
        return replace(by_row, params=tuple(params), ops=tuple(self._ops), results=results)

    def _op(self, op: Op) -> None:
        if not self._gradients.isdisjoint(op.inputs()):
            self._gradients.update(op.results)
        if op.name in COLLECTIVES and op.attrs["axis"] == ROW:
            (source,), (result,) = op.inputs(), op.results
            self._source[result] = self._source.get(source, source)
        elif not self._is_on_more_rows(op):
            self._on_real_rows(op)

    def _on_real_rows(self, op: Op) -> None:
        """Run an op that tells rows apart without the copies."""
        operands = {value: self._without_copies(value) for value in op.inputs()}
        results = tuple(Value(_without_rows(value.type), value.name) for value in op.results)
        self._ops.append(replace(op.with_operands(operands), results=results))
        self._real.update(zip(op.results, results, strict=True))

    def _is_on_more_rows(self, op: Op) -> bool:
        """Run an op on the copies, too; False, and nothing is run, where that is not possible."""
        if asked_axes(op, {ROW}) and not self._begins_alike(op):
            return False
        rule, inputs = rule_of(op), list(op.inputs())
        operands = {value: self._with_rows(value) for value in inputs}
        if PARTIAL in map(_state, op.results) and any(map(_is_by_row, inputs)):
            summed = self._summed(op, rule)
            if not summed:
                return False
            operands |= {value: self._with_zeros(value, operands[value]) for value in summed}
        results = tuple(Value(self._type(value, self._rows), value.name) for value in op.results)
        try:
            self._ops.append(refit(op, replace(op.with_operands(operands), results=results)))
        except Diagnostic:
            return False
        for old, new in zip(op.results, results, strict=True):
            (self._longer if _is_by_row(old) else self._real)[old] = new
        self._note_zeros(op, rule, operands)
        return True

    def _summed(self, op: Op, rule: Rule) -> Sequence[Value]:
        """The operands that have to be zero for the copies to count nothing in sums over rows; none for no such.

        In products of gradients one of the factors: a copy of a row whose values are not finite makes the gradient as
        little finite as the row does.
        """
        inputs = list(op.inputs())
        linear = [[inputs[i] for i in each] for each in rule.linear]
        summed = [
            [value for value in values if _is_by_row(value)]
            for values in linear
            if any(map(_is_by_row, values)) and REPLICATED not in map(_state, values)
        ]
        if self._gradients.isdisjoint(inputs):
            return [value for values in summed for value in values]
        return min(summed, key=self._not_zero, default=())

    def _not_zero(self, values: Sequence[Value]) -> int:
        return sum(self._longer[value] not in self._zero for value in values)

    def _note_zeros(self, op: Op, rule: Rule, operands: Mapping[Value, Value]) -> None:
        """Zero in the copies are constants, what is linear in zeros, and gradients of rows from those of sums."""
        by_row = [value for value in op.results if _is_by_row(value)]
        zero = [operands[value] in self._zero for value in op.inputs()]
        if op.attrs.get("fill_value") == 0:
            self._zero.update(map(self._with_rows, op.results))
        elif any(linear and all(zero[i] for i in linear) for linear in rule.linear):
            self._zero.update(self._longer[value] for value in by_row)
        elif self._begins_gradients(op):
            self._longer |= {value: self._with_zeros(value, self._longer[value]) for value in by_row}

    def _begins_alike(self, op: Op) -> bool:
        """Whether an op that depends on where a row is makes of more rows what it makes of these, and then more.

        Not a range, by whose further numbers a look-up of rows would find none.
        """
        if op.name != RAND:
            return False
        shape, dim = self._by_rows(op.results[0], self._have)
        return prod(shape[:dim]) == 1

    def _begins_gradients(self, op: Op) -> bool:
        """Whether an op makes gradients of rows from those of sums over rows."""
        gradients = self._gradients.intersection(op.inputs())
        return bool(gradients) and not any(map(_is_by_row, gradients))

    def _with_rows(self, old: Value) -> Value:
        """The new value for `old`, with the copies if it is sharded by rows."""
        if not _is_by_row(old):
            return self._without_copies(old)
        if old not in self._longer:
            source = self._source.get(old, old)
            is_same = source in self._longer and _state(source) == _state(old)
            self._longer[old] = self._longer[source] if is_same else self._with_copies(old)
        return self._longer[old]

    def _without_copies(self, old: Value) -> Value:
        """The new value for `old`, without copies."""
        old = self._source.get(old, old)
        if old not in self._real:
            rows, end = (self._rows, self._have), {"start": 0, "end": self._have}
            self._real[old] = self._resized(old, self._longer[old], rows, "aten.slice.Tensor", **end)
        return self._real[old]

    def _with_copies(self, old: Value) -> Value:
        return self._resized(old, self._without_copies(old), (self._have, self._rows), REPEAT_LAST)

    def _resized(self, old: Value, new: Value, rows: tuple[int, int], name: str, **attrs: Attr) -> Value:
        """What an op makes of the new value for `old`, with so many rows before and after it."""
        before, after = rows
        shape, dim = self._by_rows(old, before)
        made = TensorType(new.type.dtype, (*shape[:dim], after, *shape[dim + 1 :]))
        value = self._emit(name, (self._viewed(new, shape),), made, dim=dim, **attrs)
        return self._viewed(value, self._type(old, after).shape)

    def _with_zeros(self, old: Value, new: Value) -> Value:
        """The new value for `old` with zeros in place of the copies."""
        if new in self._zero:
            return new
        shape, dim = self._by_rows(old, self._rows)
        rows = self._emit("aten.arange", (), TensorType("i64", (self._rows,)), end=self._rows)
        copies = self._emit("aten.ge.Scalar", (rows, None), TensorType("bool", (self._rows,)), other=self._have)
        copies = self._viewed(copies, (self._rows, *(1 for _ in shape[dim + 1 :])))
        wide = self._viewed(new, shape)
        filled = self._emit(MASKED_FILL, (wide, copies), wide.type, value=zero_of(new))
        zero = self._viewed(filled, new.type.shape)
        self._zero.add(zero)
        return zero

    def _by_rows(self, old: Value, rows: int) -> tuple[tuple[int, ...], int]:
        """The shape that an old value has with so many rows, in which the rows are a dim, and that dim."""
        split = old.type.layout.split_of(ROW)
        assert split is not None
        outer = old.type.shape[split.dim] // (split.stride * self._have)
        inside = [size for size in (outer, rows, split.stride) if size != 1]
        dim = split.dim + (outer != 1)
        return (*old.type.shape[: split.dim], *inside, *old.type.shape[split.dim + 1 :]), dim

    def _viewed(self, value: Value, shape: tuple[int, ...]) -> Value:
        if value.type.shape == shape:
            return value
        return self._emit("aten.view", (value,), TensorType(value.type.dtype, shape), size=shape)

    def _emit(self, name: str, operands: tuple[Value | None, ...], kind: TensorType, **attrs: Attr) -> Value:
        result = Value(kind)
        self._ops.append(Op(name, operands, (result,), attrs, self._loc))
        return result

    def _type(self, old: Value, rows: int) -> TensorType:
        """The type of an old value with so many rows, if it is sharded by rows."""
        state, shape = _state(old), list(old.type.shape)
        if isinstance(state, Sharded):
            shape[state.dim] = shape[state.dim] // self._have * rows
        return TensorType(old.type.dtype, tuple(shape))


def _state(value: Value) -> State:
    return value.type.layout.state(ROW)


def _is_by_row(value: Value) -> bool:
    return isinstance(_state(value), Sharded)


def _without_rows(kind: TensorType) -> TensorType:
    return TensorType(kind.dtype, kind.shape)
