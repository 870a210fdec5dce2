"""Patches of Dynamo that let it capture a model as one graph, by removing graph breaks that do not change results.

* Log calls are left out of the graph.
* Hooks of transformers that record outputs are installed during tracing, not by traced code, which takes a lock that
  Dynamo cannot trace.
* Experts of a mixture are traced in a form that indexes, for every token, the matrices of its experts. The forms of
  transformers loop or sort depending on values; all of them compute the same.
* Where a second shape opens a size of an input, its first dim, mostly of the batch, is opened with it, and so are first
  dims of the same size: the smaller last batch of an epoch needs no capture of its own.
* The shapes of an LSTM cell without biases are found: PyTorch's check of them asks for the device of each bias.
* Recurrent layers are traced: the device has each stack as one op. Dynamo refuses them, as other devices have many ops.
* Lists and dictionaries that are only passed on to a function at a graph break are not looked into: the sizes of each
  tensor in the targets of a batch would be guarded, and other targets be a capture of their own.
* After a graph break, the functions of the runtime and of `torch.moai` are skipped: Dynamo would look for graphs in
  them.

Nothing is patched before a backend is marked by `captures_whole`; for other backends experts keep their form.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

from torch._dynamo import assume_constant_result, config, trace_rules, utils  # pyright: ignore[reportUnknownVariableType]
from torch._dynamo.comptime import ComptimeContext, comptime

from moaic.capture.experts import experts_forward
from moaic.device import torch_module
from moaic.device.collector import collecting_seldom
from moaic.device.torch_private import pass_over

Backend = TypeVar("Backend", bound=Callable[..., Any])

_MARK = "captures_whole"


def captures_whole(backend: Backend) -> Backend:
    """`backend`, marked: Dynamo traces models for it with the patches described above."""
    from torch._dynamo.callback import callback_handler

    setattr(backend, _MARK, True)
    trace_rules.add("moaic.runtime")
    for each in vars(torch_module).values():
        pass_over(each)
    _patch()
    _allow_logging_of_config()
    # Libraries to patch may be imported later.
    if _patch not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_patch)
        _collect_seldom_during_compilation(callback_handler)
    return backend


def _collect_seldom_during_compilation(handler: Any) -> None:
    during = ExitStack()

    def begin(started: Any) -> None:
        during.enter_context(collecting_seldom())

    def end(ended: Any) -> None:
        during.close()

    handler.register_start_callback(begin)
    handler.register_end_callback(end)


def _patch(*started: Any) -> None:
    """Patch what is not patched yet; runs before each compilation, as a reset of Dynamo drops some patches."""
    _leave_out_log_calls()
    _open_batches()
    _take_cells_without_bias()
    _take_recurrent_layers()
    _pass_data_on_unseen()
    recording: Any = sys.modules.get("transformers.utils.output_capturing")
    if recording is not None and not hasattr(recording.maybe_install_capturing_hooks, _MARK):
        _install_hooks_during_tracing(recording)
    experts: Any = sys.modules.get("transformers.integrations.moe")
    if experts is not None and not hasattr(experts.ExpertsInterface.get_interface, _MARK):
        _take_experts_by_token(experts)


def _leave_out_log_calls() -> None:
    """Ignore the log methods of every logger, and the methods that libraries add to loggers."""
    own = {getattr(logging.Logger, name) for name in _LOG_CALLS}
    added = {method for method in vars(logging.Logger).values() if callable(method) and method.__module__ != "logging"}
    config.ignore_logging_functions |= own | added


def _take_cells_without_bias() -> None:
    shapes: Any = import_module("torch._meta_registrations")
    check = shapes.rnn_cell_checkSizes
    if hasattr(check, _MARK):
        return

    @wraps(check)
    def check_with_bias(gates: Any, hidden_gates: Any, bias: Any, hidden_bias: Any, *rest: Any) -> None:
        if bias is None and hidden_bias is None:
            bias = hidden_bias = gates.new_empty(gates.shape[1:2])
        check(gates, hidden_gates, bias, hidden_bias, *rest)

    setattr(check_with_bias, _MARK, True)
    shapes.rnn_cell_checkSizes = check_with_bias


def _take_recurrent_layers() -> None:
    from torch._dynamo.variables.builder import VariableBuilder

    wrap = cast("Any", VariableBuilder).wrap_module
    if hasattr(wrap, _MARK):
        return

    @wraps(wrap)
    def wrap_module(self: Any, module: Any) -> Any:
        with config.patch(allow_rnn=config.allow_rnn or _captures_whole(self.tx)):
            return wrap(self, module)

    setattr(wrap_module, _MARK, True)
    cast("Any", VariableBuilder).wrap_module = wrap_module


def _pass_data_on_unseen() -> None:
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.lazy import LazyVariableTracker

    graph, lazy = cast("Any", OutputGraph), cast("Any", LazyVariableTracker)
    restored = getattr(graph, "_get_stack_values_to_restore", None)
    if restored is None or hasattr(restored, _MARK):
        return
    look_into = lazy.realize_all.__func__

    def look_into_all_but_data(cls: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is lazy and not value.is_realized() and type(value.original_value()) in (list, dict):
            return value
        return look_into(cls, value, *args, **kwargs)

    @wraps(restored)
    def values_to_restore(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not _captures_whole(tx):
            return restored(self, tx, *args, **kwargs)
        lazy.realize_all = classmethod(look_into_all_but_data)
        try:
            return restored(self, tx, *args, **kwargs)
        finally:
            lazy.realize_all = classmethod(look_into)

    setattr(values_to_restore, _MARK, True)
    graph._get_stack_values_to_restore = values_to_restore


def _open_batches() -> None:
    from torch._dynamo.variables import builder

    dims: Any = builder
    record = dims.record_automatic_dynamic
    if hasattr(record, _MARK):
        return

    @wraps(record)
    def record_with_batch(tx: Any, name: str, tensor: Any) -> Any:
        entry = record(tx, name, tensor)
        return _with_open_batch(entry, tx.output) if _captures_whole(tx) else entry

    setattr(record_with_batch, _MARK, True)
    dims.record_automatic_dynamic = record_with_batch


def _with_open_batch(entry: Any, output: Any) -> Any:
    """What Dynamo knows of an input's sizes in the trace `output`, of which the first may be opened."""
    from torch._dynamo.pgo import auto_dynamic

    batches = cast("set[int]", vars(output).setdefault("moai_batches", set[int]()))
    sizes = cast("tuple[object, ...]", entry.size) if isinstance(entry.size, tuple) else ()
    if not sizes or not isinstance(first := sizes[0], int):
        return entry
    if auto_dynamic in sizes:
        batches.add(first)
    return replace(entry, size=(auto_dynamic, *sizes[1:])) if first in batches else entry


def _install_hooks_during_tracing(recording: Any) -> None:
    install = recording.maybe_install_capturing_hooks

    @wraps(install)
    def install_now(model: Any) -> None:
        comptime(_install_hooks, lambda: install(model))

    setattr(install_now, _MARK, True)
    recording.maybe_install_capturing_hooks = install_now


def _install_hooks(context: ComptimeContext) -> None:
    """Run by Dynamo when it traces the call; the model is no constant, so it is read from Dynamo's variable."""
    found: Any = context.get_local("model")
    model = found._i_will_not_complain_if_bc_breaks_VariableTracker().value
    sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks.__wrapped__(model)


def _allow_logging_of_config() -> None:
    """Hide the log calls from PyTorch 2.11, which logs its config with every graph and cannot serialize them."""
    keeper: Any = utils
    note = keeper._get_dynamo_config_for_logging
    try:
        note()
    except TypeError:
        keeper._get_dynamo_config_for_logging = config.patch(ignore_logging_functions=set())(note)


_LOG_CALLS = ("debug", "info", "warning", "error", "exception", "critical", "log")


def _take_experts_by_token(experts: Any) -> None:
    chosen = experts.ExpertsInterface.get_interface

    @wraps(chosen)
    def get_interface(self: Any, name: str, default: Any) -> Any:
        if _is_traced_whole():
            return experts_forward
        return chosen(self, name, default)

    setattr(get_interface, _MARK, True)
    experts.ExpertsInterface.get_interface = get_interface


@assume_constant_result
def _is_traced_whole() -> bool:
    """Whether Dynamo is tracing for a backend that captures whole. Dynamo runs this function and does not trace it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    return getattr(tls, "current_tx", None) is not None and _captures_whole(InstructionTranslator.current_tx())


def _captures_whole(tx: Any) -> bool:
    backend = tx.output.compiler_fn
    return any(hasattr(each, _MARK) for each in (backend, getattr(backend, "compiler_fn", None)))
