"""The backend for AOTAutograd: a whole training step goes in, a forward and a backward callable come out.

A training graph is not partitioned: the engine decides which ops run in the forward and which in the backward. Between
the two, AOTAutograd saves only a small call token that the forward returns after its outputs: the number of the call
and its sizes.
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

from moaic.capture.before_autograd import replace_calls
from moaic.capture.decompositions import decompositions
from moaic.capture.fx.captured import CALL_TOKEN_WORDS, Captured, Slot
from moaic.capture.fx.program import FxProgram
from moaic.capture.fx.stubs import backward_stub, forward_stub
from moaic.capture.fx.traced_graph import NameSupply, TracedGraph, names_of
from moaic.capture.op_by_op import EagerHalves, Kept
from moaic.capture.output_aliases import OutputView, with_strides
from moaic.capture.saved_tensors import Saved
from moaic.ir.errors import Diagnostic

Boxed = Callable[[list[Any]], Sequence[Any]]


class Engine(Protocol):
    """Runs a captured program.

    `call` numbers the calls of the forward of a training program and is None for an inference. Tensors are the user's
    own, in the order of the function's parameters (those of its kind) and results.
    """

    def forward(self, captured: Captured, call: int | None, arguments: list[Tensor]) -> Sequence[Tensor]:
        """Return outputs and updates: the first `captured.forward_results` results."""
        ...

    def backward(self, captured: Captured, call: int, tangents: list[Tensor]) -> Sequence[Tensor]:
        """Return gradients: the other results. May run more than once for one call (retain_graph)."""
        ...

    def forget(self, call: int) -> None:
        """Note that no backward of this call can follow. Called by any thread at any time, so it must not do more."""
        ...

    def run_op_by_op(self, reason: Diagnostic) -> None:
        """Note that further calls bypass the engine, or raise `reason`, which says why there is no program."""
        ...


MakeEngine = Callable[[FxProgram], Engine]


def capture_backend(graph_module: Any, examples: Sequence[Any], make_engine: MakeEngine) -> Callable[..., Any]:
    """Compile one graph of Dynamo: the callable runs it on the engine that `make_engine` returns."""
    from torch._dynamo.backends.common import aot_autograd

    replace_calls(graph_module)
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
    """The callbacks of AOTAutograd for one graph."""

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
        _keep_token_for_later_backwards()
        return boxed(self.training.forward)

    def compile_backward(self, graph_module: Any, inputs: Any) -> Boxed:
        assert self.training is not None
        return boxed(self.training.backward)

    def compile_inference(self, graph_module: Any, inputs: Any) -> Boxed:
        (returned,) = graph_module.graph.output_node().args
        program = FxProgram(TracedGraph(graph_module, len(returned), self.names))
        return boxed(_Inference(program, self.make_engine(program)).run)


def _keep_token_for_later_backwards() -> None:
    """Do not donate the call token: PyTorch donates buffers without an alias, and then forbids a second backward."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(function: Boxed) -> Boxed:
    """`function` as a callable that takes its arguments as one list, which it may empty."""

    def run(args: list[Any]) -> Sequence[Any]:
        return function(args)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class _Graph:
    """A program, its engine, and the sizes for which there is no program."""

    def __init__(self, program: FxProgram, engine: Engine) -> None:
        self.program = program
        self.engine = engine
        self._without: set[tuple[int, ...]] = set()

    def captured(self, sizes: tuple[int, ...]) -> Captured | None:
        """The program for these sizes; None if the ops run one by one."""
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
    """A token with the numbers for the backward and with `noted`, which lives as long as autograd's graph does."""
    token = torch.tensor([*words, *([0] * (CALL_TOKEN_WORDS - len(words)))])
    # Autograd keeps the storage alive, but not this tensor object.
    token.untyped_storage().moai_call = noted  # pyright: ignore[reportAttributeAccessIssue]
    return token


def outputs_of(captured: Captured, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
    """The outputs as AOTAutograd expects them of the forward: with their strides, and aliases of what they alias."""
    restored = [with_strides(result, order) for result, order in zip(results, captured.memory_orders, strict=True)]
    return filled(captured.outputs, restored, arguments)


def filled(slots: Sequence[Slot], results: Sequence[Any], arguments: Sequence[Any] = ()) -> list[Any]:
    """The slots that AOTAutograd expects, filled with views of results and arguments."""
    return [slot.of(results, arguments) if isinstance(slot, OutputView) else slot for slot in slots]
