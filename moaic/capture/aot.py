"""The seam to AOTAutograd: whole training steps in, one forward and one backward callable out.

A training graph is not partitioned. Its forward hands out, beside the outputs, a call token: a tensor that AOTAutograd
saves for the backward, and whose storage owns the engine's call. A call ends with that storage: once autograd frees
what it has saved, no backward of the call can come, and nothing else keeps it. What runs when is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch._guards import TracingContext

from moaic.capture.before_autograd import say_otherwise
from moaic.capture.decompositions import decompositions
from moaic.capture.fx.captured import Captured, Slot
from moaic.capture.fx.program import FxProgram
from moaic.capture.fx.stubs import backward_stub, example_token, forward_stub
from moaic.capture.fx.traced_graph import NameSupply, TracedGraph, names_of
from moaic.capture.op_by_op import EagerHalves, Kept
from moaic.capture.output_aliases import Seen, placed
from moaic.capture.saved_tensors import Saved
from moaic.ir.errors import Diagnostic

Boxed = Callable[[list[Any]], Sequence[Any]]


class Engine(Protocol):
    """What runs a captured program.

    Tensors are the user's own, in the order of the function's parameters (those of its kind) and results.
    """

    def forward(self, captured: Captured, arguments: list[Tensor]) -> tuple[Sequence[Tensor], object]:
        """Outputs and updates, which are the first `captured.forward_results` results, and the call.

        The caller drops the call when no backward of it can come, on any thread: an engine refers to it weakly.
        """
        ...

    def backward(self, captured: Captured, call: Any, tangents: list[Tensor]) -> Sequence[Tensor]:
        """Gradients: the other results. May be called again for one call (retain_graph)."""
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
        results, _ = self.engine.forward(captured, arguments)
        return outputs_of(captured, results, given)


class _CallRecord(NamedTuple):
    """A call of a training program, for its backward."""

    read: Saved
    captured: Captured
    call: object
    """The engine's."""


class _Training(_Graph):
    def __init__(self, program: FxProgram, engine: Engine) -> None:
        super().__init__(program, engine)
        self._read = program.traced.read_by_backward()

    def forward(self, args: list[Any]) -> Sequence[Any]:
        captured = self.captured(self.program.sizes(args))
        if captured is None:
            outputs, kept = self._halves.forward(args)
            return (*outputs, _call_token(kept))
        arguments = [args[position] for position in captured.arguments]
        given = list(args)
        written = {captured.arguments[position] for position in captured.updates}
        read = Saved({at: name for at, name in self._read.items() if at not in written}, args)
        args.clear()
        results, call = self.engine.forward(captured, arguments)
        return (*outputs_of(captured, results, given), _call_token(_CallRecord(read, captured, call)))

    def backward(self, args: list[Any]) -> Sequence[Any]:
        token, *tangents = args
        args.clear()
        record: Kept | _CallRecord = token.untyped_storage().moai_call
        if isinstance(record, Kept):
            record.check()
            return self._halves.backward(record, tangents)
        read, captured, call = record
        read.check()
        given = [tangents[position] for position in captured.tangents]
        grads = self.engine.backward(captured, call, given)
        return filled(captured.grads, [None] * captured.forward_results + list(grads))

    @cached_property
    def _halves(self) -> EagerHalves:
        return EagerHalves(self.program.traced)


def _call_token(record: Kept | _CallRecord) -> Tensor:
    """A tensor that owns `record` for as long as autograd keeps it."""
    token = example_token()
    # Autograd keeps the storage, whatever becomes of this tensor.
    token.untyped_storage().moai_call = record  # pyright: ignore[reportAttributeAccessIssue]
    return token


def outputs_of(captured: Captured, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
    """What AOTAutograd expects of the forward: each output in the memory that it shares, in the strides it has."""
    lying = [placed(result, lies) for result, lies in zip(results, captured.laid, strict=True)]
    return filled(captured.outputs, lying, arguments)


def filled(slots: Sequence[Slot], results: Sequence[Any], arguments: Sequence[Any] = ()) -> list[Any]:
    """What AOTAutograd expects, the results put in their places."""
    return [slot.among(results, arguments) if isinstance(slot, Seen) else slot for slot in slots]
