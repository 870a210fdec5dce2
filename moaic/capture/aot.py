"""The seam to AOTAutograd: whole training steps in, one forward and one backward callable out.

A training graph is not partitioned. Its forward hands out, beside the outputs, one small call token that AOTAutograd
saves for the backward: the number of the call, and the sizes that it was called with. What runs when is the engine's
business.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext

from moaic.capture.before_autograd import say_otherwise
from moaic.capture.decompositions import decompositions
from moaic.capture.fx.captured import CALL_TOKEN_WORDS, Captured, Slot
from moaic.capture.fx.program import FxProgram
from moaic.capture.fx.stubs import backward_stub, forward_stub
from moaic.capture.fx.traced_graph import NameSupply, TracedGraph, names_of
from moaic.capture.op_by_op import EagerHalves, Kept
from moaic.capture.output_aliases import Seen, placed
from moaic.capture.saved_tensors import Saved
from moaic.ir.errors import Diagnostic

Boxed = Callable[[list[Any]], Sequence[Any]]


class Engine(Protocol):
    """What runs a captured program.

    `call` numbers the calls of the forward of a training program and is None for an inference. Tensors are the
    person's own, in the order of the function's parameters (those of its kind) and results.
    """

    def forward(self, captured: Captured, call: int | None, arguments: list[Tensor]) -> Sequence[Tensor]:
        """Outputs and updates: the first `captured.forward_results` results."""
        ...

    def backward(self, captured: Captured, call: int, tangents: list[Tensor]) -> Sequence[Tensor]:
        """Gradients: the other results. May be called again for one call (retain_graph)."""
        ...

    def forget(self, call: int) -> None:
        """No backward of this call can come any more. Any thread, at any time: only take note here."""
        ...

    def run_op_by_op(self, reason: Diagnostic) -> None:
        """Take note that calls run without the engine from now on, or raise `reason`: why there is no program."""
        ...


MakeEngine = Callable[[FxProgram], Engine]


def capture_backend(graph_module: Any, examples: Sequence[Any], make_engine: MakeEngine) -> Callable[..., Any]:
    """A Dynamo backend's answer for one graph: everything is run by the engine that `make_engine` gives for it."""
    from torch._dynamo.backends.common import aot_autograd

    say_otherwise(graph_module)
    capture = _Capture(names_of(graph_module, examples), make_engine)
    compile_graph = aot_autograd(
        fw_compiler=capture.compile_forward,
        bw_compiler=capture.compile_backward,
        inference_compiler=capture.compile_inference,
        partition_fn=capture.partition,
        decompositions=decompositions(),
    )
    return compile_graph(graph_module, examples)


class _Capture:
    """One graph on its way through AOTAutograd."""

    def __init__(self, names: NameSupply, make_engine: MakeEngine) -> None:
        self.names = names
        self.make_engine = make_engine
        self.training: _Training | None = None

    def partition(self, joint: Any, inputs: Any, *, num_fwd_outputs: int, **settings: Any) -> tuple[Any, Any]:
        traced = TracedGraph(joint, num_fwd_outputs, self.names)
        program = FxProgram(traced)
        self.training = _Training(program, self.make_engine(program))
        return forward_stub(traced), backward_stub(traced)

    def compile_forward(self, graph_module: Any, inputs: Any) -> Boxed:
        assert self.training is not None
        _serve_many_backwards()
        return boxed(self.training.forward)

    def compile_backward(self, graph_module: Any, inputs: Any) -> Boxed:
        assert self.training is not None
        return boxed(self.training.backward)

    def compile_inference(self, graph_module: Any, inputs: Any) -> Boxed:
        (returned,) = graph_module.graph.output_node().args
        program = FxProgram(TracedGraph(graph_module, len(returned), self.names))
        return boxed(_Inference(program, self.make_engine(program)).run)


def _serve_many_backwards() -> None:
    """PyTorch donates what nothing aliases, the call token, to the first backward, and would then forbid a second."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(function: Boxed) -> Boxed:
    """A callable that takes its arguments as one list, which it may empty."""

    def run(args: list[Any]) -> Sequence[Any]:
        return function(args)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class _Graph:
    """A program and its engine, and the sizes at which there is no program."""

    def __init__(self, program: FxProgram, engine: Engine) -> None:
        self.program = program
        self.engine = engine
        self._without: set[tuple[int, ...]] = set()

    def captured(self, sizes: tuple[int, ...]) -> Captured | None:
        """The program for these sizes; None where its ops are run one by one."""
        if sizes not in self._without:
            try:
                return self.program.instantiate(sizes)
            except Diagnostic as reason:
                if not self._without:
                    self.engine.run_op_by_op(reason)
                self._without.add(sizes)
        return None


class _Inference(_Graph):
    def run(self, args: list[Any]) -> Sequence[Any]:
        captured = self.captured(self.program.sizes(args))
        if captured is None:
            return self.program.traced.graph(*args)
        arguments = [args[position] for position in captured.arguments]
        given = list(args)
        args.clear()
        results = self.engine.forward(captured, None, arguments)
        return outputs_of(captured, results, given)


class _Training(_Graph):
    def __init__(self, program: FxProgram, engine: Engine) -> None:
        super().__init__(program, engine)
        self.calls: Iterator[int] = itertools.count()
        self._read = program.traced.read_by_backward()

    def forward(self, args: list[Any]) -> Sequence[Any]:
        sizes = self.program.sizes(args)
        captured = self.captured(sizes)
        if captured is None:
            outputs, kept = self._halves.forward(args)
            return (*outputs, _call_token([], kept))
        arguments = [args[position] for position in captured.arguments]
        given = list(args)
        written = {captured.arguments[position] for position in captured.updates}
        read = Saved({at: name for at, name in self._read.items() if at not in written}, args)
        args.clear()
        call = next(self.calls)
        outputs = outputs_of(captured, self.engine.forward(captured, call, arguments), given)
        weakref.finalize(read, self.engine.forget, call).atexit = False
        return (*outputs, _call_token([call, *sizes], read))

    def backward(self, args: list[Any]) -> Sequence[Any]:
        token, *tangents = args
        args.clear()
        noted = token.untyped_storage().moai_call
        noted.check()
        if isinstance(noted, Kept):
            return self._halves.backward(noted, tangents)
        words = token.tolist()
        captured = self.program.instantiate(tuple(words[1 : 1 + self.program.symbols]))
        given = [tangents[position] for position in captured.tangents]
        grads = self.engine.backward(captured, words[0], given)
        return filled(captured.grads, [None] * captured.forward_results + list(grads))

    @cached_property
    def _halves(self) -> EagerHalves:
        return EagerHalves(self.program.traced)


def _call_token(words: Sequence[int], noted: Saved) -> Tensor:
    """Numbers for the backward, and `noted`, which lives as long as autograd's graph does."""
    token = torch.tensor([*words, *([0] * (CALL_TOKEN_WORDS - len(words)))])
    # The storage does, whatever becomes of the tensor that we see.
    token.untyped_storage().moai_call = noted  # pyright: ignore[reportAttributeAccessIssue]
    return token


def outputs_of(captured: Captured, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
    """What AOTAutograd expects of the forward: each output in the memory that it shares, in the strides it has."""
    lying = [placed(result, lies) for result, lies in zip(results, captured.laid, strict=True)]
    return filled(captured.outputs, lying, arguments)


def filled(slots: Sequence[Slot], results: Sequence[Any], arguments: Sequence[Any] = ()) -> list[Any]:
    """What AOTAutograd expects, the results put in their places."""
    return [slot.among(results, arguments) if isinstance(slot, Seen) else slot for slot in slots]
