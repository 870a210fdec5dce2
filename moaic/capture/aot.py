"""The backend for AOTAutograd: a whole training step goes in, a forward and a backward callable come out.

A training graph is not partitioned: the engine decides which ops run in the forward and which in the backward. Between
the two, AOTAutograd saves only a call token, a tensor that the forward returns after its outputs and whose storage owns
the engine's call. Once autograd frees it, no backward of the call can come, and the call is freed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch._guards import TracingContext

from moaic.capture.before_autograd import replace_calls
from moaic.capture.decompositions import decompositions
from moaic.capture.error_codes import keep_checks
from moaic.capture.fx.captured import Instance, Slot
from moaic.capture.fx.program import FxProgram
from moaic.capture.fx.stubs import backward_stub, example_token, forward_stub
from moaic.capture.fx.traced_graph import NameSupply, TracedGraph, names_of
from moaic.capture.op_by_op import EagerHalves, Kept
from moaic.capture.output_aliases import OutputView, with_strides
from moaic.capture.saved_tensors import Saved
from moaic.capture.second_derivative import depending_on_inputs
from moaic.ir.errors import Diagnostic
from moaic.support.traces import shorten

Boxed = Callable[[list[Any]], Sequence[Any]]


class Engine(Protocol):
    """Runs a captured program.

    Tensors are the user's own, in the order of the function's parameters (those of its kind) and results.
    """

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], object]:
        """Outputs and updates, which are the first `forward_results` results, and the call.

        The caller drops the call when no backward of it can come, on any thread: an engine refers to it weakly.
        """
        ...

    def backward(self, instance: Instance, call: Any, tangents: list[Tensor]) -> Sequence[Tensor]:
        """Gradients: the other results. May be called again for one call (retain_graph)."""
        ...

    def run_op_by_op(self, reason: Diagnostic) -> None:
        """Note that further calls bypass the engine, or raise `reason`, which says why there is no program."""
        ...


MakeEngine = Callable[[FxProgram], Engine]


def capture_backend(graph_module: Any, examples: Sequence[Any], make_engine: MakeEngine) -> Callable[..., Any]:
    """Compile one graph of Dynamo: the callable runs it on the engine that `make_engine` returns."""
    from torch._dynamo.backends.common import aot_autograd

    keep_checks()
    replace_calls(graph_module)
    capture = _Capture(names_of(graph_module, examples), make_engine)
    compile_graph = aot_autograd(
        fw_compiler=capture.compile_forward,
        bw_compiler=capture.compile_backward,
        inference_compiler=capture.compile_inference,
        partition_fn=capture.partition,
        decompositions=decompositions(),
    )
    return depending_on_inputs(compile_graph(graph_module, examples))


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
        try:
            return function(args)
        except Exception as error:
            shorten(error)
            raise

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class _Graph:
    """A program, its engine, and the sizes for which there is no program."""

    def __init__(self, program: FxProgram, engine: Engine) -> None:
        self.program = program
        self.engine = engine
        self._without: set[tuple[int, ...]] = set()

    def instance(self, sizes: tuple[int, ...]) -> Instance | None:
        """The program at these sizes; None if the ops run one by one."""
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
        instance = self.instance(self.program.sizes(args))
        if instance is None:
            return self.program.traced.graph(*args)
        captured = instance.captured
        arguments = [args[position] for position in captured.arguments]
        given = list(args)
        args.clear()
        results, _ = self.engine.forward(instance, arguments)
        return outputs_of(instance, results, given)


class _CallRecord(NamedTuple):
    """A call of a training program, for its backward."""

    read: Saved
    instance: Instance
    call: object
    """The engine's."""


class _Training(_Graph):
    def __init__(self, program: FxProgram, engine: Engine) -> None:
        super().__init__(program, engine)
        self._read = program.traced.read_by_backward()

    def forward(self, args: list[Any]) -> Sequence[Any]:
        instance = self.instance(self.program.sizes(args))
        if instance is None:
            outputs, kept = self._halves.forward(args)
            return (*outputs, _call_token(kept))
        captured = instance.captured
        arguments = [args[position] for position in captured.arguments]
        given = list(args)
        written = {captured.arguments[position] for position in captured.updates}
        read = Saved({at: name for at, name in self._read.items() if at not in written}, args)
        args.clear()
        results, call = self.engine.forward(instance, arguments)
        return (*outputs_of(instance, results, given), _call_token(_CallRecord(read, instance, call)))

    def backward(self, args: list[Any]) -> Sequence[Any]:
        token, *tangents = args
        args.clear()
        record = _record_of(token)
        if isinstance(record, Kept):
            record.check()
            return self._halves.backward(record, tangents)
        read, instance, call = record
        read.check()
        captured = instance.captured
        given = [tangents[position] for position in captured.tangents]
        grads = self.engine.backward(instance, call, given)
        return filled(instance.grads, [None] * captured.forward_results + list(grads))

    @cached_property
    def _halves(self) -> EagerHalves:
        return EagerHalves(self.program.traced)


def _call_token(record: Kept | _CallRecord) -> Tensor:
    """A tensor that owns `record` for as long as autograd keeps it."""
    token = example_token()
    # Autograd keeps the storage, whatever becomes of this tensor.
    token.untyped_storage().moai_call = record  # pyright: ignore[reportAttributeAccessIssue]
    return token


def _record_of(token: Tensor) -> Kept | _CallRecord:
    """The record of the call that a token belongs to; raises Diagnostic for a copy of a token, which has none."""
    record: Kept | _CallRecord | None = getattr(token.untyped_storage(), "moai_call", None)
    if record is None:
        raise Diagnostic(
            "a hook on saved tensors has put a copy in place of what a compiled forward saves on the CPU",
            hint="have both of torch.autograd.graph.saved_tensors_hooks return CPU tensors of integers as they are",
        )
    return record


def outputs_of(instance: Instance, results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
    """The outputs as AOTAutograd expects them of the forward: with their strides, and aliases of what they alias."""
    restored = [with_strides(result, order) for result, order in zip(results, instance.memory_orders, strict=True)]
    return filled(instance.outputs, restored, arguments)


def filled(slots: Sequence[Slot], results: Sequence[Any], arguments: Sequence[Any] = ()) -> list[Any]:
    """The slots that AOTAutograd expects, filled with views of results and arguments."""
    return [slot.of(results, arguments) if isinstance(slot, OutputView) else slot for slot in slots]
