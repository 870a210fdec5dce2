"""Unroll the loop axes: chunks of the loss, then micro-batches.

For each axis an op belongs to the *prologue* (reads no value of a part), the *loop body* (reads or makes a value that
is sharded or partial over the axis) or the *epilogue* (reads a complete sum). Prologue and epilogue run once, the body
once per part:

    %x0 = moai.shard %x {axis = "mb"} : f32[8{mb}, 64]
    %t = aten.sum %x0 : f32[] +mb
    %s = moai.all_reduce %t {axis = "mb"} : f32[]
    %y = aten.neg %s : f32[]
becomes
    %p0 = moai.part %x {axis = "mb", index = 0, count = 2, dim = 0, stride = 4} : f32[4, 64]     # body, part 0
    %t0 = aten.sum %p0 : f32[]
    %s0 = moai.accumulate _, %t0 : f32[]
    %p1 = moai.part %x {axis = "mb", index = 1, count = 2, dim = 0, stride = 4} : f32[4, 64]     # body, part 1
    %t1 = aten.sum %p1 : f32[]
    %s1 = moai.accumulate %s0, %t1 : f32[]
    %y = aten.neg %s1 : f32[]                                                                    # epilogue

Where ops of the body read a complete sum, there are several loop passes: the ops that make the sum run for every part,
then the ops that read it for every part. In a pipeline the body's ops of each stage come in the order of the schedule,
and stages become the workers that run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import NO_ROLE, Function, Module, Op, Value, substitute
from moaic.ir.layout import PARTIAL, REPLICATED, Mesh
from moaic.ir.localize import asked_axes, local_type, localize, refit
from moaic.ir.op_names import ACCUMULATE, FIRST, JOIN, PART, SHARD
from moaic.ir.types import FLOATING, TensorType
from moaic.passes.loop_axes import CHUNKS, EPILOGUE, MICRO_BATCHES, PROLOGUE, Phase, Unrolled, combines_parts
from moaic.passes.lowering.grad_accumulation import merged_accumulation
from moaic.passes.pipeline.stage_actions import actions_of, on_workers
from moaic.passes.schedules import Schedule, part_by_part, schedule_in

NUMBER = TensorType("i64", (1,))
"""Type of the number of a part."""


def runs_per_part(op: Op, axis: str) -> bool:
    """Whether an op reads or makes a value of one part over `axis`."""
    values = (*op.inputs(), *op.results)
    return op.attrs.get("each") == axis or any(value.type.layout.state(axis) != REPLICATED for value in values)


def function_of_part(function: Function, axis: str, mesh: Mesh) -> Function:
    """A function of compute ops, localized to one part over `axis`.

    It takes the part's number as a further parameter, i64[1], if it draws random numbers for the part.
    """
    local = localize(function, mesh, (axis,))
    added = local.params[len(function.params) :]
    # The number is an operand like any other: only coordinates of ranks are supplied by the workers.
    numbers = {param: Value(NUMBER, axis) for param in added}
    scalars = [Op("aten.view", (numbers[param],), (param,), {"size": ()}, local.ops[0].loc) for param in added]
    return replace(
        local,
        params=tuple(numbers.get(param, param) for param in local.params),
        ops=(*scalars, *local.ops),
        param_roles=(*function.param_roles, *(NO_ROLE for _ in added)) if function.param_roles else (),
    )


def unroll(module: Module, parts: int | None = None) -> Unrolled:
    """The main function of `module` with both loop axes unrolled; its callees are functions of one part.

    At most `parts` micro-batches are unrolled, of the size that all have: enough for estimates, as those between the
    first and the last are alike. Raises Diagnostic where an op reads a value that the module's schedule makes later.
    """
    schedule, chunks = schedule_in(module), dict[Op, int]()
    if module.mesh.size(CHUNKS) > 1:
        module, chunks = _with_chunks_unrolled(module)
    unroller = _Unroller(module, MICRO_BATCHES, chunks, parts)
    function = unroller.run(schedule)
    unrolled = Unrolled(function, unroller.without, tuple(unroller.phases))
    unrolled = merged_accumulation(unrolled) if chunks else unrolled
    return unrolled if schedule is None else on_workers(unrolled, schedule)


def _with_chunks_unrolled(module: Module) -> tuple[Module, dict[Op, int]]:
    """`module` with the axis of chunks unrolled, and the chunk of each op of its main function."""
    unroller = _Unroller(module, CHUNKS, {}, None)
    main = unroller.run(None)
    chunks = {op: chunk for op, (chunk, _) in zip(main.ops, unroller.phases, strict=True)}
    return replace(module, functions=(*module.functions[:-1], main), mesh=unroller.without), chunks


class _Unroller:
    """Unrolls one loop axis of the main function of a module."""

    def __init__(self, module: Module, axis: str, chunks: Mapping[Op, int], parts: int | None) -> None:
        self.axis = axis
        self.mesh = module.mesh
        self.without = Mesh(tuple((name, size) for name, size in module.mesh.axes if name != axis))
        self.chunks = chunks
        self.count = module.mesh.size(axis)
        self.unrolled = min(self.count, parts or self.count)
        """Number of parts that are unrolled."""
        self.old = module.main
        self.functions = {function.name: function for function in module.functions[:-1]}
        self.ops: list[Op] = []
        self.phases: list[Phase] = []
        self.whole: dict[Value, Value] = {}
        self.parts: dict[Value, dict[int, Value]] = {}
        self.of_part: dict[Op, Op] = {}
        """By op, its copy for the first part: copies for other parts differ in values alone."""
        self.phase = PROLOGUE
        self.chunk = PROLOGUE
        self.all_numbers: Value | None = None
        self.numbers: dict[int, Value] = {}
        self.loop_pass = self._loop_passes()
        self.body = self._body_ops()
        self.in_parts = {result for op in self.body for result in op.results}
        self.sums = {
            value: op
            for op in self.old.ops
            if self._combines(op)
            for value in op.inputs()
            if value.type.layout.state(axis) == PARTIAL
        }

    def run(self, schedule: Schedule | None) -> Function:
        for param in self.old.params:
            self.whole[param] = Value(param.type, param.name)
        pass_count = 1 + max((self.loop_pass[op] for op in self.body), default=0)
        if schedule is not None and pass_count > 1:
            raise self._not_in_a_pipeline()
        for number in range(pass_count):
            phase = PROLOGUE if number == 0 else EPILOGUE - number
            self._all_once(phase, lambda op, now=number: self.loop_pass[op] == now)
            body = [op for op in self.old.ops if op in self.body and self.loop_pass[op] == number]
            for action, (ops, index) in enumerate(self._actions(body, schedule)):
                self.phase = number * self.unrolled + action
                for op in ops:
                    self._part_of(op, index)
        self._all_once(EPILOGUE, lambda op: self.loop_pass[op] >= pass_count)
        params = tuple(self.whole[param] for param in self.old.params)
        results = tuple(self.whole[value] for value in self.old.results)
        return replace(self.old, params=params, ops=tuple(self.ops), results=results)

    def _all_once(self, phase: int, is_due: Callable[[Op], bool]) -> None:
        for op in self.old.ops:
            if op not in self.body and is_due(op):
                self._once(op, phase)

    def _not_in_a_pipeline(self) -> Diagnostic:
        late = next(op for op in self.old.ops if self.loop_pass[op] > 0 and op in self.body and op.name[:5] != "moai.")
        where = f' ("{late.loc.file}":{late.loc.line})' if late.loc.file else ""
        return Diagnostic(
            f"a pipeline begins the backward of a micro-batch before the forward of others, and {late.name}{where} "
            f"needs a sum over all of them"
        )

    def _actions(self, body: Sequence[Op], schedule: Schedule | None) -> Iterator[tuple[Sequence[Op], int]]:
        """Groups of body ops in the order in which they run, each with the number of its part."""
        if schedule is None:
            yield from ((body, index) for index in range(self.unrolled))
            return
        chunked = {op for op, chunk in self.chunks.items() if chunk >= 0}
        groups = actions_of(self.old, body, chunked, splits_backward=schedule.splits_backward)
        merged = schedule.merged if self.unrolled == self.count else part_by_part(schedule, self.unrolled)
        for action in merged:
            yield groups.get((action.kind, action.stage), ()), action.part

    def _loop_passes(self) -> dict[Op, int]:
        """By op, the number of loop passes that must be complete before it can run."""
        known: dict[Value, int] = {}
        loop_passes: dict[Op, int] = {}
        for op in self.old.ops:
            loop_passes[op] = max((known.get(value, 0) for value in op.inputs()), default=0) + self._combines(op)
            known.update(dict.fromkeys(op.results, loop_passes[op]))
        return loop_passes

    def _combines(self, op: Op) -> bool:
        return combines_parts(op, self.axis)

    def _body_ops(self) -> set[Op]:
        """Ops that run once per part: those with a value of one part, and those that read a value made anew per part.

        A parameter that level `use` of fsdp gathers once per micro-batch is such a value:

            %g = moai.all_gather %w {axis = "dp", each = "mb"} : f32[3, 6]
            %c = aten.permute %g {dims = [1, 0]} : f32[6, 3]        # has no axis mb, and runs once per part
        """
        remade: set[Value] = set()
        body: set[Op] = set()
        for op in self.old.ops:
            if self._combines(op):
                continue
            # An op of the epilogue runs once, and reads the value that the last part made.
            reads_remade = self.loop_pass[op] == 0 and any(value in remade for value in op.inputs())
            if runs_per_part(op, self.axis) or reads_remade:
                body.add(op)
                remade.update(value for value in op.results if value.type.layout.state(self.axis) == REPLICATED)
        return body

    def _once(self, op: Op, phase: int) -> None:
        self.chunk = self.chunks.get(op, PROLOGUE)
        if self._combines(op):
            self._combine(op)
            return
        results = tuple(Value(result.type, result.name) for result in op.results)
        self._append(replace(op.with_operands(self.whole), results=results), phase)
        self.whole.update(zip(op.results, results, strict=True))

    def _append(self, op: Op, phase: int) -> None:
        self.ops.append(op)
        self.phases.append((phase, self.chunk))

    def _part_of(self, op: Op, index: int) -> None:
        self.chunk = self.chunks.get(op, PROLOGUE)
        if op.name == SHARD and op.attrs["axis"] == self.axis:
            self._take_part(op, index)
            return
        if op.name == FIRST and op.attrs["axis"] == self.axis:
            raise AssertionError("a whole value enters a sum over micro-batches: propagation never asks for that")
        mapping = {value: self._operand(value, index, op) for value in op.inputs()}
        localized = self._localized(op, mapping, index) if asked_axes(op, (self.axis,)) else []
        new_ops = localized or [self._computed(op, mapping, index)]
        for new_op in new_ops:
            self._append(new_op, self.phase)
        for old, new in zip(op.results, new_ops[-1].results, strict=True):
            self.parts.setdefault(old, {})[index] = new
            if old.type.layout.state(self.axis) == REPLICATED:
                # Every part makes the same value: the epilogue reads that of the last.
                self.whole[old] = new
            if old in self.sums:
                self._accumulate(self.sums[old], new, len(self.parts[old]))

    def _operand(self, value: Value, index: int, reader: Op) -> Value:
        operand = self.whole.get(value) if value not in self.in_parts else self.parts.get(value, {}).get(index)
        if operand is None:
            raise Diagnostic(f"pp cannot pass {reader.name}: the schedule runs it before what makes `%{value.name}`")
        return operand

    def _computed(self, op: Op, mapping: Mapping[Value, Value], index: int) -> Op:
        known = self.of_part.get(op)
        if known is None:
            types = [local_type(result.type, self.mesh, (self.axis,)) for result in op.results]
            results = tuple(Value(type_, result.name) for type_, result in zip(types, op.results, strict=True))
            new = self.of_part[op] = refit(op, replace(op.with_operands(mapping), results=results))
        else:
            operands = tuple(substitute(operand, mapping) for operand in op.operands)
            results = tuple(Value(result.type, result.name) for result in known.results)
            new = Op(known.name, operands, results, known.attrs, known.loc)
        wants_number = op.name == "call" and len(self.functions[op.callee].params) > len(op.operands)
        return replace(new, operands=(*new.operands, self._number(index))) if wants_number else new

    def _localized(self, op: Op, mapping: Mapping[Value, Value], index: int) -> list[Op]:
        """The ops for an op of the main function that depends on where in the unsharded value its part lies."""
        inputs = tuple(dict.fromkeys(op.inputs()))
        local = function_of_part(Function(op.name, inputs, (op,), op.results), self.axis, self.mesh)
        given = [mapping[value] for value in inputs]
        if len(local.params) > len(inputs):
            given.append(self._number(index))
        bound = dict(zip(local.params, given, strict=True))
        owner = op.results[0].type.layout.owner
        for value in (result for inner in local.ops for result in inner.results):
            bound[value] = Value(value.type.at(owner), value.name)
        return [
            replace(inner.with_operands(bound), results=tuple(bound[result] for result in inner.results))
            for inner in local.ops
        ]

    def _number(self, index: int) -> Value:
        """The part's number, taken from a tensor of all of them: a constant would give every part its own segment."""
        if index not in self.numbers:
            if self.all_numbers is None:
                self.all_numbers = Value(TensorType("i64", (self.count,)), self.axis)
                self._append(Op("aten.arange", (), (self.all_numbers,), {"end": self.count}), PROLOGUE)
            number = Value(NUMBER, self.axis)
            attrs = {"axis": self.axis, "index": index, "count": self.count, "dim": 0, "stride": 1}
            self._append(Op(PART, (self.all_numbers,), (number,), attrs), self.phase)
            self.numbers[index] = number
        return self.numbers[index]

    def _take_part(self, op: Op, index: int) -> None:
        (result,) = op.results
        split = result.type.layout.split_of(self.axis)
        assert split is not None
        (source,) = op.inputs()
        stride = result.type.layout.local_stride(split, self.mesh)
        attrs = {"axis": self.axis, "index": index, "count": self.count, "dim": split.dim, "stride": stride}
        part = Value(local_type(result.type, self.mesh, (self.axis,)), result.name)
        self._append(Op(PART, (self.whole[source],), (part,), attrs, op.loc), self.phase)
        self.parts.setdefault(result, {})[index] = part

    def _combine(self, op: Op) -> None:
        (source,), (result,) = op.inputs(), op.results
        if source in self.sums:
            # Two readers of a value may each have their own all-reduce of it: there is one sum.
            self.whole[result] = self.whole[self.sums[source].results[0]]
            return
        split = source.type.layout.split_of(self.axis)
        assert split is not None
        joined = Value(result.type, result.name)
        attrs = {"dim": split.dim, "stride": source.type.layout.local_stride(split, self.mesh)}
        self._append(Op(JOIN, self._all_parts(source), (joined,), attrs, op.loc), EPILOGUE)
        self.whole[result] = joined

    def _all_parts(self, value: Value) -> tuple[Value, ...]:
        return tuple(part for _, part in sorted(self.parts[value].items(), key=lambda item: item[0]))

    def _accumulate(self, op: Op, part: Value, count: int) -> None:
        """Add the part number `count` as soon as it exists, so that it is freed with its micro-batch.

        The sum of narrower parts stays in float32 until the last part: in bfloat16 the error of gradients would be 12 %
        larger at 8 micro-batches.
        """
        (result,) = op.results
        dtype = part.type.dtype
        wide = "f32" if dtype in FLOATING - {"f64"} and count < self.unrolled else dtype
        total = Value(TensorType(wide, part.type.shape, part.type.layout), result.name)
        self._append(Op(ACCUMULATE, (self.whole.get(result), part), (total,), {}, op.loc), self.phase)
        self.whole[result] = total
