"""Dynamo's graph before autograd sees it.

Calls are replaced, so that their gradients have rules and fixed sizes; assignments of `.data` are found.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from moaic.capture.masked_writes import assign
from moaic.capture.multilabel_margin import multilabel_margin_loss
from moaic.capture.provenance import location
from moaic.capture.value_checks import DEFAULT_MESSAGE
from moaic.capture.windows import as_strided

_VIEWS = """view reshape transpose permute unsqueeze squeeze expand getitem flatten unflatten as_strided narrow select
    split chunk unbind contiguous t movedim swapaxes detach view_as getattr unfold"""
VIEWS = frozenset(_VIEWS.split())
"""Functions and methods, by name, whose result may share the operand's memory."""


def asserted(said: torch.Tensor, message: str = DEFAULT_MESSAGE) -> None:
    """`torch._assert_async` as the overload with a message: the one without would be dropped, as it has no result."""
    torch.ops.aten._assert_async.msg(said, message)


CALLS: Mapping[Any, Callable[..., Any]] = {
    operator.setitem: assign,
    torch.as_strided: as_strided,
    "as_strided": as_strided,
    torch.nn.functional.multilabel_margin_loss: multilabel_margin_loss,
    torch._assert_async: asserted,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
}
"""Functions, and methods by name, with the functions that replace them."""

COPIES = frozenset({as_strided})
"""Replacements that return a copy where PyTorch returns a view: used only if nothing is written through either."""


REPLACES_MEMORY = frozenset({torch.Tensor.set_, "set_"})
"""What an assignment of `.data` becomes. AOTAutograd refuses it on an argument, whose memory a program only writes."""


def assignment_of_data(graph_module: fx.GraphModule) -> str | None:
    """File and line where the `.data` of an argument is assigned; None if it is nowhere."""
    for node in graph_module.graph.nodes:
        if node.target in REPLACES_MEMORY and node.args[0].op == "placeholder":
            origin = location(node.meta)
            return f"{origin.file}:{origin.line}"
    return None


def replace_calls(graph_module: fx.GraphModule) -> None:
    """Replace the calls listed in `CALLS` in Dynamo's graph and in the graphs of its checkpointed parts."""
    for each in graph_module.modules():
        if isinstance(each, fx.GraphModule):
            for node in each.graph.nodes:
                _replace(node)
            each.recompile()


def _replace(node: fx.Node) -> None:
    called = CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
    if called is None or (called in COPIES and _is_written_to(node)):
        return
    node.op, node.target = "call_function", called


def _is_written_to(view: fx.Node) -> bool:
    """Whether an op writes in place to a value that may share the memory of `view`."""
    root = view
    while _name(root) in VIEWS and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    return any(_writes(user, alias) for alias in _aliases(root) for user in alias.users)


def _aliases(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if _name(user) in VIEWS:
            yield from _aliases(user)


def _writes(user: fx.Node, alias: fx.Node) -> bool:
    name = _name(user)
    in_place = name in ("setitem", "assign") or (name.endswith("_") and not name.endswith("__"))
    return in_place or user.kwargs.get("out") is alias or name.startswith("__i")


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
