"""Whether a graph is a whole model, or a piece of it between two graph breaks of Dynamo."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch._dynamo import trace_rules

_MARK = "moai_model"


@dataclass(eq=False, slots=True)
class Model:
    """The model of one call of `torch.compile`, with what its graphs so far have shown."""

    has_followed: bool = False
    """Whether the plan of some graph followed all decisions of the user: then the request itself is valid."""
    is_planned: bool = False
    """Whether a graph of it has a plan: the log is brief on the others."""
    said: set[str] = field(default_factory=set[str])
    """The messages logged for this model, each of which is logged once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph's place in its model."""

    model: Model = field(default_factory=Model)
    is_whole: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether a decision that the plan cannot follow is an error: only in the first graph of a whole model."""
        return self.is_whole and not self.model.has_followed


def piece_of(graph_module: Any) -> Piece:
    """The piece of a graph; called while Dynamo passes the graph to its backend."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    goes_on = reason is not None and reason.graph_break
    return Piece(_model(), not goes_on and not _is_called_from_pieces())


def _model() -> Model:
    """The model, stored on Dynamo's backend object: each `torch.compile` makes one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    if getattr(tls, "current_tx", None) is None:
        return Model()
    backend = InstructionTranslator.current_tx().output.compiler_fn
    if not hasattr(backend, _MARK):
        setattr(backend, _MARK, Model())
    return getattr(backend, _MARK)


def _is_called_from_pieces() -> bool:
    """Whether a caller of the function being compiled is one that Dynamo compiles, and whose graph broke here."""
    around: list[CodeType] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        around.append(frame.f_code)
        if frame.f_code.co_filename.endswith("_dynamo/convert_frame.py"):
            around.clear()
        frame = frame.f_back
    return frame is not None and any(not trace_rules.check(code) for code in around)
