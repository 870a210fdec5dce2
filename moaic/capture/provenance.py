"""Names and source lines of the user's program, read from Dynamo's sources and the metadata of nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from moaic.ir.graph import Location, Role

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\['([^']*)'\]|^self")
_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_NAMESPACES = frozenset({"kwargs", "args"})


def path_of(source: str) -> str:
    """The path behind the root: `model.layers.3` for `L['self']._modules['model'].layers[3]`."""
    root = _ROOT.match(source)
    rest = source[root.end() :] if root else source
    return ".".join(next(part for part in step.groups() if part is not None) for step in _STEP.finditer(rest))


def root_of(source: str) -> str:
    root = _ROOT.match(source)
    return (root.group(1) or "self") if root else ""


def role_of(source: str, is_parameter: bool) -> Role:
    """The role of a placeholder in Dynamo's graph: a parameter or a buffer of a module, or an input."""
    path = path_of(source)
    if is_parameter or "._parameters[" in source:
        return Role("param", path or root_of(source))
    if "._buffers[" in source or root_of(source) == "self":
        return Role("buffer", path)
    root = root_of(source)
    if root in _NAMESPACES and path:
        return Role("input", path if root == "kwargs" else f"{root}.{path}")
    return Role("input", f"{root}.{path}" if path else root)


def location(meta: Mapping[str, Any]) -> Location:
    """The origin of a node of the graph: source line, module path and side."""
    backward = meta.get("partitioner_tag") == "is_backward"
    file, line = _frame(meta.get("stack_trace") or "")
    stack: Any = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return Location(file, line, _module(stack), "backward" if backward else "forward")


def _frame(trace: str) -> tuple[str, int]:
    """File name and line of the innermost frame that is not PyTorch's own."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace)]
    for file, line in reversed(frames):
        if "torch" not in PurePath(file).parts:
            return PurePath(file).name, line
    return (PurePath(frames[-1][0]).name, frames[-1][1]) if frames else ("", 0)


def _module(stack: Mapping[str, Any]) -> str:
    return path_of(list(stack.values())[-1][0]) if stack else ""


def described(loc: Location) -> str:
    """` at "train.py":12 in model.layers.3`, to be appended to a message; unknown parts are left out."""
    module = f" in {loc.module}" if loc.module else ""
    return f' at "{loc.file}":{loc.line}{module}' if loc.file else module
