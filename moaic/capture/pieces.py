"""Which piece of a model a graph is: all of it, or what lies between places that Dynamo leaves to Python."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch._dynamo import trace_rules

_MARK = "moai_model"


@dataclass(eq=False, slots=True)
class Model:
    """What one `torch.compile` was called for, as far as its graphs have come."""

    has_followed: bool = False
    """Whether a graph of it has taken all that was asked for: the request is sound, and what comes now is another."""
    said: set[str] = field(default_factory=set[str])
    """What has been said of it, and need not be said again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph's place in its model."""

    model: Model = field(default_factory=Model)
    is_whole: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether what was asked for must be possible: it is the first whole graph, of the person's own batch."""
        return self.is_whole and not self.model.has_followed


def piece_of(graph_module: Any) -> Piece:
    """Asked while Dynamo hands the graph to its backend."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    goes_on = reason is not None and reason.graph_break
    return Piece(_model(), not goes_on and not _is_called_from_pieces())


def _model() -> Model:
    """Kept with the backend as Dynamo has it: each `torch.compile` makes one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    if getattr(tls, "current_tx", None) is None:
        return Model()
    backend = InstructionTranslator.current_tx().output.compiler_fn
    if not hasattr(backend, _MARK):
        setattr(backend, _MARK, Model())
    return getattr(backend, _MARK)


def _is_called_from_pieces() -> bool:
    """Whether a function that Dynamo would have compiled runs around the one that it compiles, so broke before it."""
    around: list[CodeType] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        around.append(frame.f_code)
        if frame.f_code.co_filename.endswith("_dynamo/convert_frame.py"):
            around.clear()
        frame = frame.f_back
    return frame is not None and any(not trace_rules.check(code) for code in around)
