"""What Dynamo is told so that it takes a model as one graph: what breaks a graph without changing what it computes.

Log calls are left out of the graph. Hooks that record outputs are installed while Dynamo looks on, not by code that it
traces: the lock around that is beyond it. Experts that are looped over, or sorted by, depending on values are taken in
a form that names for every token the matrices that it meets; all forms compute the same.

What the runtime and `torch.moai` do where a graph was broken is passed over: Dynamo would look for graphs in it.

Nothing of this is done before a backend that `captures_whole` is named, and experts keep their form for all others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch._dynamo import assume_constant_result, config, trace_rules, utils  # pyright: ignore[reportUnknownVariableType]
from torch._dynamo.comptime import ComptimeContext, comptime

from moaic.capture.experts import experts_forward
from moaic.device import torch_module
from moaic.device.torch_private import pass_over

Backend = TypeVar("Backend", bound=Callable[..., Any])

_MARK = "captures_whole"


def captures_whole(backend: Backend) -> Backend:
    """`backend`, for which Dynamo will trace models in the way described above."""
    from torch._dynamo.callback import callback_handler

    setattr(backend, _MARK, True)
    trace_rules.add("moaic.runtime")
    for each in vars(torch_module).values():
        pass_over(each)
    _teach()
    _let_settings_be_noted()
    # Libraries may be imported later.
    if _teach not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_teach)
    return backend


def _teach(*started: Any) -> None:
    """Once more where it was done before: a reset of Dynamo forgets some of it."""
    _leave_out_log_calls()
    recording: Any = sys.modules.get("transformers.utils.output_capturing")
    if recording is not None and not hasattr(recording.maybe_install_capturing_hooks, _MARK):
        _install_hooks_while_looking_on(recording)
    experts: Any = sys.modules.get("transformers.integrations.moe")
    if experts is not None and not hasattr(experts.ExpertsInterface.get_interface, _MARK):
        _take_experts_by_token(experts)


def _leave_out_log_calls() -> None:
    """Those of every logger, and those that libraries add to loggers."""
    own = {getattr(logging.Logger, name) for name in _LOG_CALLS}
    added = {method for method in vars(logging.Logger).values() if callable(method) and method.__module__ != "logging"}
    config.ignore_logging_functions |= own | added


def _install_hooks_while_looking_on(recording: Any) -> None:
    install = recording.maybe_install_capturing_hooks

    @wraps(install)
    def install_now(model: Any) -> None:
        comptime(_install_hooks, lambda: install(model))

    setattr(install_now, _MARK, True)
    recording.maybe_install_capturing_hooks = install_now


def _install_hooks(context: ComptimeContext) -> None:
    """What Dynamo runs where it comes upon the call: of a model it takes no constant, so it is asked for its own."""
    found: Any = context.get_local("model")
    model = found._i_will_not_complain_if_bc_breaks_VariableTracker().value
    sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks.__wrapped__(model)


def _let_settings_be_noted() -> None:
    """PyTorch 2.11 writes its settings down with every graph, and cannot write the log calls among them."""
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
    """Whether Dynamo is at work, for a backend that captures whole. Dynamo runs this instead of tracing it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    if getattr(tls, "current_tx", None) is None:
        return False
    backend = InstructionTranslator.current_tx().output.compiler_fn
    return any(hasattr(each, _MARK) for each in (backend, getattr(backend, "compiler_fn", None)))
