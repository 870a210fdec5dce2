"""Prints a module as text. Names of values are chosen here: hints where they are free, numbers otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

from moaic.ir.graph import Attr, Function, Location, Module, Op, Operand, Role, Value
from moaic.ir.layout import Layout, Mesh
from moaic.ir.polynomials import render_terms
from moaic.ir.specialize import symbols_of
from moaic.ir.symbols import Symbols
from moaic.ir.types import TensorType

VERSION = 1
"""Version of the language, in the first line of every file."""

LINE_LENGTH = 120
LOCATION_COLUMN = 72

_SYMBOL = re.compile(r"[A-Za-z0-9_.]+")
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.]")

ValueNames = Mapping[Value, str]


def render(module: Module) -> str:
    """The text of a module, ending in a newline."""
    head = [f"// moai {VERSION}"]
    if (symbols := symbols_of(module)) is not None:
        head.append(f"sizes {_symbols(symbols)}")
    if module.mesh.axes:
        head.append(f"mesh {module.mesh}")
    if module.schedule:
        head.append("schedule\n" + "\n".join(f"  {json.dumps(row)}" for row in module.schedule))
    type_text = type_printer(module.mesh)
    functions = (_function(function, type_text) for function in module.functions)
    return "\n".join(["\n".join(head) + "\n", *functions])


def _symbols(symbols: Symbols) -> str:
    """The number of each symbol in the example, the quotients that symbols stand for, and which products are equal."""
    numbers = (f"{name} = {number}" for name, number in symbols.example.items())
    floors = (f"{name} = floor({render_terms(each.dividend)}, {each.divisor})" for name, each in symbols.floors.items())
    same = [f"{render_terms(((gone, 1),))} = {render_terms(kept)}" for gone, kept in symbols.same.items()]
    return ", ".join((*numbers, *floors)) + (f" where {', '.join(same)}" if same else "")


def render_function(function: Function, mesh: Mesh) -> str:
    """The text of one function, ending in a newline."""
    return _function(function, type_printer(mesh))


def render_op(op: Op, names: ValueNames, mesh: Mesh) -> str:
    """One line without indentation or newline; a value without a name in `names` prints as `%?`."""
    return _op(op, names, type_printer(mesh))


def render_type(tensor: TensorType, mesh: Mesh) -> str:
    return type_printer(mesh)(tensor)


def value_names(function: Function) -> dict[Value, str]:
    """Unique names: a hint that an earlier value has not taken, a hint with a number, or a bare number."""
    names: dict[Value, str] = {}
    taken: set[str] = set()
    numbers: dict[str, int] = {}
    unnamed = 0
    for value in function.values():
        hint = _NOT_A_NAME.sub("_", value.name)
        if not hint or hint.isdigit():
            name = str(unnamed)
            unnamed += 1
        else:
            name = _free(hint, taken, numbers)
            taken.add(name)
        names[value] = name
    return names


def _free(hint: str, taken: set[str], numbers: dict[str, int]) -> str:
    """The first free name of a hint; `numbers` keeps the last one given, so that many of one hint are not quadratic."""
    name = hint
    while name in taken:
        numbers[hint] = numbers.get(hint, 0) + 1
        name = f"{hint}_{numbers[hint]}"
    return name


def type_printer(mesh: Mesh) -> Callable[[TensorType], str]:
    """A function that prints types over `mesh`, each distinct one once."""
    known: dict[TensorType, str] = {}

    def text(tensor: TensorType) -> str:
        found = known.get(tensor)
        if found is None:
            found = known[tensor] = _type(tensor, mesh)
        return found

    return text


def _type(tensor: TensorType, mesh: Mesh) -> str:
    dims = ", ".join(_dim(size, dim, tensor.layout, mesh) for dim, size in enumerate(tensor.shape))
    partial = "".join(f" +{axis}" for axis in tensor.layout.partial)
    owner = "".join(f" on {axis}={rank}" for axis, rank in tensor.layout.owner)
    return f"{tensor.dtype}[{dims}]{partial}{owner}"


def _dim(size: int, dim: int, layout: Layout, mesh: Mesh) -> str:
    """A stride is printed unless the split is a contiguous chunk of the part that the outer splits leave."""
    parts: list[str] = []
    span = size
    for split in layout.on_dim(dim):
        contiguous = split.stride * mesh.size(split.axis) == span
        parts.append(split.axis if contiguous else f"{split.axis}:{split.stride!s}")
        span = split.stride
    return f"{size!s}{{{', '.join(parts)}}}" if parts else str(size)


def render_attr(value: Attr) -> str:
    """Floats print so that they read back bit for bit (a nan as some nan)."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(render_attr, value))}]"
    if isinstance(value, complex):
        return f"complex[{value.real!r}, {value.imag!r}]"
    return repr(value)


def _attrs(attrs: Iterable[tuple[str, Attr]]) -> str:
    inside = ", ".join(f"{name} = {render_attr(value)}" for name, value in attrs)
    return f" {{{inside}}}" if inside else ""


def _operand(operand: Operand, names: ValueNames) -> str:
    if operand is None:
        return "_"
    if isinstance(operand, tuple):
        return f"[{', '.join(_operand(value, names) for value in operand)}]"
    return "%" + names.get(operand, "?")


def _symbol(name: str) -> str:
    return f"@{name}" if _SYMBOL.fullmatch(name) else f"@{json.dumps(name)}"


def _op(op: Op, names: ValueNames, type_text: Callable[[TensorType], str]) -> str:
    targets = ", ".join("%" + names.get(value, "?") for value in op.results)
    head, attrs = op.name, op.attrs.items()
    if op.name == "call":
        head = f"call {_symbol(op.callee)}"
        attrs = [(name, value) for name, value in attrs if name != "callee"]
    operands = ", ".join(_operand(operand, names) for operand in op.operands)
    types = ", ".join(type_text(value.type) for value in op.results) or "()"
    line = f"{targets}{' = ' if targets else ''}{head}{' ' if operands else ''}{operands}{_attrs(attrs)} : {types}"
    location = _location(op.loc)
    return f"{line.ljust(LOCATION_COLUMN)}{location}" if location else line


def _location(loc: Location) -> str:
    text = f" at {json.dumps(loc.file)}:{loc.line}" if loc.file or loc.line else ""
    if loc.module:
        text += f" in {json.dumps(loc.module)}"
    return f"{text} {loc.side}" if loc.side else text


def _role(role: Role) -> str:
    label = f" {json.dumps(role.label)}" if role.label else ""
    return f" {role.kind}{label}" if role.kind else ""


def _function(function: Function, type_text: Callable[[TensorType], str]) -> str:
    names = value_names(function)
    body = "".join(f"  {_op(op, names, type_text)}\n" for op in function.ops)
    returned = ", ".join("%" + names.get(value, "?") for value in function.results)
    return f"{_header(function, names, type_text)} {{\n{body}  return{' ' if returned else ''}{returned}\n}}\n"


def _header(function: Function, names: ValueNames, type_text: Callable[[TensorType], str]) -> str:
    params = [
        f"%{names[value]}: {type_text(value.type)}{_role(function.param_role(index))}"
        for index, value in enumerate(function.params)
    ]
    results = [
        f"{type_text(value.type)}{_role(function.result_role(index))}" for index, value in enumerate(function.results)
    ]
    head = f"func {_symbol(function.name)}"
    line = f"{head}({', '.join(params)}) -> ({', '.join(results)})"
    return line if len(line) + 2 <= LINE_LENGTH else f"{head}{_list(params)} -> {_list(results)}"


def _list(items: list[str]) -> str:
    """A list that is too long for one line: an item per line."""
    line = f"({', '.join(items)})"
    return line if len(line) <= LINE_LENGTH // 2 else "(\n    " + ",\n    ".join(items) + "\n)"
