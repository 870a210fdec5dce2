"""What is said otherwise in Dynamo's graph before autograd sees it, so that its gradient has rules and fixed sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from moaic.capture.masked_writes import assign
from moaic.capture.value_checks import DEFAULT_MESSAGE
from moaic.capture.windows import as_strided

_VIEWS = """view reshape transpose permute unsqueeze squeeze expand getitem flatten unflatten as_strided narrow select
    split chunk unbind contiguous t movedim swapaxes detach view_as getattr unfold"""
VIEWS = frozenset(_VIEWS.split())
"""What may share its operand's memory, by name; a function and the method that is called so."""


def asserted(said: torch.Tensor, message: str = DEFAULT_MESSAGE) -> None:
    """`torch._assert_async`: a call that gives nothing is dropped, unless it has a message."""
    torch.ops.aten._assert_async.msg(said, message)


CALLS: Mapping[Any, Callable[..., Any]] = {
    operator.setitem: assign,
    torch.as_strided: as_strided,
    "as_strided": as_strided,
    torch._assert_async: asserted,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
}
"""Calls of functions, and of methods by name, with what is called in their place."""

COPIES = frozenset({as_strided})
"""What gives a copy where PyTorch gives a view: only if nothing is written through either."""


def say_otherwise(graph_module: fx.GraphModule) -> None:
    """Has Dynamo's graph, and those of checkpointed parts in it, call what stands in `CALLS`."""
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
    """Whether anything is written in place to what may share the memory of `view`."""
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
