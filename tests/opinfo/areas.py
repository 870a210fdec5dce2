"""The areas of the sweep over ops, modules and optimizers: each runs one sample on the device and on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from tests.opinfo import database
from tests.opinfo.compare import MOAI, carried, check, copied, tensors
from tests.opinfo.database import Sample

Run = Callable[[], None]
"""Compares one sample; raises Differs, or what the device raised."""


class Absent(Exception):
    """The CPU itself cannot do it, so there is nothing to compare with."""


@contextmanager
def reference() -> Generator[None]:
    """What is raised here the CPU raised."""
    try:
        yield
    except Exception as error:
        raise Absent(str(error)) from error


UNDEFINED: Final = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty_strided",
    "resize_",
)
"""Ops whose results hold anything."""


def _call(op: Any, sample: Sample) -> Any:
    torch.manual_seed(1)
    return op(sample.input, *sample.args, **sample.kwargs)


def _moved(sample: Sample, move: Callable[[Any], Any]) -> Sample:
    source, args, kwargs = move((sample.input, sample.args, sample.kwargs))
    return Sample(source, args, kwargs, sample.process, sample.broadcasts)


HOST_OPERANDS: Final = ("tensor_split",)
"""Ops of which PyTorch wants all operands but the first on the host, whatever the device."""


def _on_device(op: Any, sample: Sample) -> Sample:
    moved = _moved(sample, carried)
    return replace(moved, args=copied(sample.args)) if op.name in HOST_OPERANDS else moved


def _is_held(sample: Sample) -> bool:
    """Whether the results of the call belong to the device: by an operand, or because the call says so."""
    return bool(tensors((sample.input, sample.args, sample.kwargs))) or "device" in sample.kwargs


def _forward(op: Any, sample: Sample) -> Run:
    def run() -> None:
        with reference():
            wanted = _call(op, _moved(sample, copied))
        given = _call(op, _on_device(op, sample))
        check(given, wanted, device=_is_held(sample), values=op.name not in UNDEFINED)

    return run


def _gradients(call: Callable[[Sample], Any], sample: Sample) -> tuple[Any, list[torch.Tensor | None] | None]:
    """The results of a call, and the gradients of the operands that ask for them; None where nothing has any."""
    result = call(sample)
    process = sample.process
    made = [each for each in tensors(process(result)) if each.requires_grad]
    asked = [each for each in tensors((sample.input, sample.args, sample.kwargs)) if each.requires_grad]
    if not made or not asked:
        return result, None
    torch.manual_seed(2)
    grads = [torch.randn(each.shape, dtype=each.dtype, device="cpu").to(each.device) for each in made]
    return result, list(torch.autograd.grad(made, asked, grads, allow_unused=True))


def _backward(op: Any, sample: Sample) -> Run:
    def run() -> None:
        with reference():
            _, wanted = _gradients(lambda each: _call(op, each), _moved(sample, copied))
        if wanted is None:
            raise Absent("no gradient")
        _, given = _gradients(lambda each: _call(op, each), _on_device(op, sample))
        check(given, wanted, device=True, strides=False)

    return run


def _in_place(op: Any, sample: Sample) -> Run:
    def written(moved: Sample) -> Any:
        torch.manual_seed(1)
        target = moved.input
        result = op.inplace_variant(target, *moved.args, **moved.kwargs)
        if result is not target:
            raise AssertionError("gave another tensor than the one that it wrote")
        return target

    def run() -> None:
        with reference():
            wanted = written(_moved(sample, copied))
        check(written(_moved(sample, carried)), wanted, device=True)

    return run


_OUTS: Final[tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = (
    torch.empty_like,
    lambda like: like.new_empty(0),
    lambda like: like.new_empty((*like.shape, 2))[..., 0],
)
"""What results are written into: a tensor that fits, one that must grow, one with gaps."""


def _listed(results: Any) -> list[Any]:
    return [*results] if isinstance(results, tuple | list) else [results]


def _out(op: Any, sample: Sample, make: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def written(moved: Sample, like: Any, device: torch.device) -> Any:
        outs = [make(each.detach()).fill_(0) for each in _listed(like)]
        placed: Any = tuple(copied(outs) if device.type == "cpu" else carried(outs))
        torch.manual_seed(1)
        named = placed if isinstance(like, tuple | list) else placed[0]
        op(moved.input, *moved.args, **moved.kwargs, out=named)
        return placed

    def run() -> None:
        with reference():
            like = _call(op, _moved(sample, copied))
            if not all(isinstance(each, torch.Tensor) for each in _listed(like)):
                raise Absent("results that are no tensors")
            wanted = written(_moved(sample, copied), like, torch.device("cpu"))
        given = written(_moved(sample, carried), like, MOAI)
        check(given, wanted, device=True, values=op.name not in UNDEFINED)

    return run


def _compiled(op: Any, sample: Sample, options: dict[str, object]) -> Run:
    def call(each: Sample) -> Any:
        return _call(op, each)

    def body(source: Any, args: Any, kwargs: Any) -> Any:
        return op(source, *args, **kwargs)

    settings: Any = options
    compiled: Any = torch.compile(body, backend="moai", options=settings)

    def on_device(each: Sample) -> Any:
        torch.manual_seed(1)
        return compiled(each.input, each.args, each.kwargs)

    def run() -> None:
        torch.compiler.reset()
        with reference():
            wanted = _gradients(call, _moved(sample, copied))
            is_random = _is_random(op, sample)
        given = _gradients(on_device, _on_device(op, sample))
        values = op.name not in UNDEFINED and not is_random
        check(given, wanted, device=False, values=values, strides=False, loose=True)

    return run


def _is_random(op: Any, sample: Sample) -> bool:
    """Whether another seed gives another result: compiled functions draw from a generator of their own."""
    state = torch.get_rng_state()
    one = _call(op, _moved(sample, copied))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    drew = not torch.equal(after, torch.get_rng_state())
    torch.set_rng_state(state)
    del one
    return drew


def _is_batched(sample: Sample) -> bool:
    """Whether two workers can share the rows of the first operand."""
    first = next(iter(tensors((sample.input, sample.args, sample.kwargs))), None)
    return first is not None and first.dim() > 0 and first.shape[0] >= 2 and first.shape[0] % 2 == 0


EAGER_SAMPLES: Final = 4


def _forwards(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    return (_forward(op, sample) for sample in database.samples(op, EAGER_SAMPLES, gradients=False))


def _strided(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    return (_forward(op, sample) for sample in database.samples(op, EAGER_SAMPLES, gradients=False, strided=True))


def _backwards(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    return (_backward(op, sample) for sample in database.samples(op, EAGER_SAMPLES, gradients=True))


def _strided_backwards(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    chosen = database.samples(op, EAGER_SAMPLES, gradients=True, strided=True)
    return (_backward(op, sample) for sample in chosen)


def _in_places(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    chosen = database.samples(op, 2, gradients=False)
    return (_in_place(op, sample) for sample in chosen if not sample.broadcasts)


def _outs(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    sample = next(database.samples(op, 1, gradients=False))
    return (_out(op, sample, make) for make in _OUTS)


def _compileds(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    gradients = op.supports_autograd and database.dtype_of(op).is_floating_point
    return (_compiled(op, sample, {}) for sample in database.samples(op, 1, gradients=gradients))


def _dp(name: str) -> Iterator[Run]:
    op = database.ops()[name]
    gradients = op.supports_autograd and database.dtype_of(op).is_floating_point
    chosen = [each for each in database.samples(op, 8, gradients=gradients) if _is_batched(each)]
    return (_compiled(op, sample, {"dp": 2}) for sample in chosen[:1])


def _modules(name: str) -> Iterator[Run]:
    info = database.modules()[name]
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        yield from (_module(info.module_cls, each, training) for each in inputs if each.forward_input is not None)


def _module(kind: Any, given: Any, training: bool) -> Run:
    def trained(module: Any, call: Sample) -> Any:
        torch.manual_seed(1)
        result = module(*call.args, **call.kwargs)
        made = [each for each in tensors(result) if each.requires_grad]
        torch.manual_seed(2)
        grads = [torch.randn(each.shape, dtype=each.dtype, device="cpu").to(each.device) for each in made]
        if made:
            torch.autograd.backward(made, grads)
        operands = [each.grad for each in tensors((call.args, call.kwargs))]
        return result, operands, [each.grad for each in module.parameters()], list(module.buffers())

    def run() -> None:
        forward = given.forward_input
        sample = Sample(None, forward.args, forward.kwargs, lambda result: result, False)
        with reference():
            torch.manual_seed(0)
            module = kind(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
            twin = copy.deepcopy(module)
            wanted = trained(module, _moved(sample, copied))
        check(trained(twin.to(MOAI), _moved(sample, carried)), wanted, device=True, strides=False, loose=True)

    return run


def _optimizers(name: str) -> Iterator[Run]:
    info = database.optimizers()[name]
    return (_optimizer(info.optim_cls, each.kwargs) for each in info.optim_inputs_func(device="cpu"))


_STEPS: Final = 3


def _optimizer(kind: Any, options: dict[str, Any]) -> Run:
    def trained(device: torch.device | str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        drawn = [torch.randn(shape) for shape in ((3, 4), (4, 3))]
        parameters = [torch.nn.Parameter(each.to(device)) for each in drawn]
        optimizer = kind(parameters, **carried(options) if device != "cpu" else copied(options))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameters[0] @ parameters[1]).square().mean()
            loss.backward()
            return loss

        for _ in range(_STEPS):
            optimizer.step(closure)
        return [each.detach() for each in parameters]

    def run() -> None:
        with reference():
            wanted = trained("cpu")
        check(trained(MOAI), wanted, device=True, strides=False)

    return run


@dataclass(frozen=True)
class Area:
    """One thing that is asked: the names of its ops, and the samples of one of them."""

    names: Callable[[], Sequence[str]]
    samples: Callable[[str], Iterator[Run]]


def _differentiable() -> list[str]:
    return [name for name, op in database.ops().items() if op.supports_autograd]


AREAS: Final[Mapping[str, Area]] = {
    "forward": Area(lambda: list(database.ops()), _forwards),
    "backward": Area(_differentiable, _backwards),
    "strided": Area(lambda: list(database.ops()), _strided),
    "strided, backward": Area(_differentiable, _strided_backwards),
    "in place": Area(lambda: [name for name, op in database.ops().items() if op.inplace_variant], _in_places),
    "out=": Area(lambda: [name for name, op in database.ops().items() if op.supports_out], _outs),
    "modules": Area(lambda: list(database.modules()), _modules),
    "optimizers": Area(lambda: list(database.optimizers()), _optimizers),
    "compiled": Area(lambda: list(database.ops()), _compileds),
    "dp=2": Area(lambda: list(database.ops()), _dp),
}
