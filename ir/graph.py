"""The data of the language: values, ops, functions, modules. Values, ops and functions compare by identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from moaic.ir.layout import Mesh
from moaic.ir.types import TensorType

Attr = None | bool | int | float | complex | str | tuple["Attr", ...]
"""An attribute: literals and tuples of them. A float keeps its exact value; dtypes are strings such as "f32"."""

NO_ATTRS: Mapping[str, Attr] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Location:
    """Source of an op: the user's source line, the module path, and the side of the step."""

    file: str = ""
    line: int = 0
    module: str = ""
    side: str = ""
    """"forward", "backward", or empty."""


NOWHERE = Location()


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One tensor of a function. Two values are the same only if they are the same object."""

    type: TensorType
    name: str = ""
    """A hint for the printer; it carries no meaning and need not be unique."""


Operand = Value | None | tuple[Value | None, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """`results = name operands {attrs} at loc`. Operands follow the tensor arguments of the op's schema, in order."""

    name: str
    operands: tuple[Operand, ...] = ()
    results: tuple[Value, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=lambda: NO_ATTRS)
    loc: Location = NOWHERE

    def inputs(self) -> Iterator[Value]:
        """Every value that the op reads, lists flattened, absent ones left out."""
        operands = self.operands
        if _PLAIN.issuperset(map(type, operands)):
            # The common case, which passes hit millions of times.
            return iter(cast("tuple[Value, ...]", operands))
        return _flattened(operands)

    @property
    def callee(self) -> str:
        """Name of the function that a `call` calls."""
        callee = self.attrs["callee"]
        assert isinstance(callee, str)
        return callee

    @property
    def times(self) -> int:
        """How many equal calls a `call` stands for: more than one only in a shallow copy of a step."""
        times = self.attrs.get("times", 1)
        assert isinstance(times, int)
        return times

    def with_operands(self, mapping: Mapping[Value, Value]) -> Op:
        """This op with every operand found in `mapping` replaced."""
        operands = tuple(substitute(operand, mapping) for operand in self.operands)
        return Op(self.name, operands, self.results, self.attrs, self.loc)


_PLAIN = frozenset({Value})


def _flattened(operands: Iterable[Operand]) -> Iterator[Value]:
    for operand in operands:
        if isinstance(operand, tuple):
            yield from (value for value in operand if value is not None)
        elif operand is not None:
            yield operand


def substitute(operand: Operand, mapping: Mapping[Value, Value]) -> Operand:
    if isinstance(operand, tuple):
        return tuple(None if value is None else mapping.get(value, value) for value in operand)
    return None if operand is None else mapping.get(operand, operand)


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a parameter or result outside the function.

    kinds of parameters: input, param, buffer, key (random key), tangent; of results: output, grad, update (new value of
    a buffer or of an input that the program writes in place). An empty kind says nothing.
    """

    kind: str = ""
    label: str = ""


NO_ROLE = Role()


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A named list of ops. `results` may repeat values and may name parameters."""

    name: str
    params: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Value, ...]
    param_roles: tuple[Role, ...] = ()
    result_roles: tuple[Role, ...] = ()

    def param_role(self, index: int) -> Role:
        return self.param_roles[index] if self.param_roles else NO_ROLE

    def result_role(self, index: int) -> Role:
        return self.result_roles[index] if self.result_roles else NO_ROLE

    @property
    def outputs(self) -> tuple[int, ...]:
        """Positions of the results that a forward gives: all but gradients."""
        return tuple(i for i in range(len(self.results)) if self.result_role(i).kind != "grad")

    @property
    def gradients(self) -> tuple[int, ...]:
        """Positions of the results that are gradients."""
        return tuple(i for i in range(len(self.results)) if self.result_role(i).kind == "grad")

    def reads(self) -> Counter[Value]:
        """How often each value is read, by ops and as a result."""
        reads = Counter(value for op in self.ops for value in op.inputs())
        reads.update(self.results)
        return reads

    def values(self) -> Iterator[Value]:
        """Every value that the function defines."""
        yield from self.params
        for op in self.ops:
            yield from op.results


@dataclass(frozen=True, eq=False, slots=True)
class Module:
    """Functions by name, in order; callees stand before their callers. The mesh is that of every layout inside.

    `schedule` holds, for a plan in pipeline stages, the actions of each worker in order.
    """

    functions: tuple[Function, ...]
    mesh: Mesh = Mesh()
    schedule: tuple[str, ...] = ()

    def function(self, name: str) -> Function:
        return next(function for function in self.functions if function.name == name)

    @property
    def main(self) -> Function:
        """The entry function: the last one, which no other calls."""
        return self.functions[-1]

    def runs(self) -> Counter[str]:
        """How often each function runs when the main function runs once."""
        runs = Counter({function.name: 1 for function in self.functions[-1:]})
        for function in reversed(self.functions):
            for op in function.ops:
                if op.name == "call":
                    runs[op.callee] += runs[function.name] * op.times
        return runs
