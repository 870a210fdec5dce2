"""Programs for GPU workers use no tensor of the host: they run on tensors that have a device and no data.

PyTorch refuses to mix devices in an op, with data or without. So the instructions of every rank, run on such tensors,
show that all intermediate tensors are on the GPU. The collectives are those of process groups, which carry no data
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moaic.ir.graph import Module, Value
from moaic.ir.op_names import ALL_GATHER, ALL_REDUCE
from moaic.ir.printer import render
from moaic.ir.verify import load
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.runtime.comm.device_backend import HostMoment, Moment, Result, Run
from moaic.runtime.comm.process_group_transport import GroupTransport
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.worker import cuda_graph
from moaic.runtime.worker.overlap_and_bucket import Placed, arranged, program_order
from moaic.runtime.worker.program import Program
from tests.exact.graphs import captured_step
from tests.exact.models import EXAMPLES, MIXTURE
from tests.runtime.rings import Ring

GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class Absent:
    """A GPU that is not here; what it would do to data is left out."""

    device: torch.device = GPU
    compiled_for: torch.device = GPU

    def begin(self) -> None: ...

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def to_device(self, tensor: Tensor) -> Tensor:
        assert tensor.device.type == "cpu"
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)

    def run_async(self, run: Run[Result], operands: list[Tensor]) -> Callable[[], Result]:
        result = run(operands)
        return lambda: result

    @property
    def records(self) -> bool:
        return True

    is_recording = False

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        return (lambda: None), run()

    def moment(self) -> Moment:
        return HostMoment(0.0)

    def synchronize(self) -> None: ...

    def resident_bytes(self) -> int:
        return 0

    def forget_peak(self) -> None: ...

    def launches(self) -> dict[str, int]:
        return {}

    device_bytes = private_bytes = free_bytes = peak = resident_bytes


class Done:
    """A collective that carried nothing and is over."""

    def wait(self) -> bool:
        return True

    is_completed = wait


class Silent:
    """A process group whose ranks are all somewhere else; it takes tensors of one device alone."""

    def __init__(self, device: str) -> None:
        self.device = device

    def take(self, *tensors: Tensor) -> Done:
        assert {tensor.device.type for tensor in tensors} == {self.device}
        assert {tensor.dtype for tensor in tensors} == {torch.uint8}
        return Done()

    def _allgather_base(self, out: Tensor, given: Tensor) -> Done:
        return self.take(out, given)

    def alltoall_base(self, out: Tensor, given: Tensor, *counts: Any) -> Done:
        return self.take(out, given)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Done:
        return self.take(*tensors)


def alike(peers: Sequence[int], choice: int) -> bool:
    return True


def stations(ranks: int, device: str) -> Iterator[WorkerContext]:
    """Every rank, with groups that carry tensors of such a device."""
    for rank in range(ranks):
        stages = device == "cpu"
        groups = GroupTransport(
            lambda group: Silent(device), alike, Absent(), stages=stages, can_be_recorded=not stages
        )
        yield WorkerContext(rank, Absent(), groups)


def copied(target: Tensor, source: Tensor) -> Tensor:
    return torch.ops.aten.copy_(target, source)


def item(tensor: Tensor, index: int | slice) -> Tensor:
    if isinstance(index, int):
        return torch.ops.aten.select(tensor, 0, index)
    return torch.ops.aten.slice(tensor, 0, index.start, index.stop)


def h100(device: torch.device) -> tuple[int, int]:
    """What it answers to who asks for its capability."""
    return 9, 0


def unshared(tensor: Tensor) -> bool:
    return False


def without_address(tensor: Tensor) -> int:
    return 0


def run_on(context: WorkerContext, module: Module, *, graphs: GraphMode = GraphMode.NEVER) -> None:
    """Runs a program as one rank, as often as it takes to record it; its results are on the GPU, of its types."""
    main, at = module.main, module.mesh.coordinates(context.rank)

    def held(value: Value) -> Tensor | None:
        if not value.type.layout.holds(at):
            return None
        return torch.empty(value.type.local_shape(module.mesh), dtype=DTYPES[value.type.dtype], device=GPU)

    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        # The methods would make the device the current one, and it is not here; the ops do not.
        patch.setattr(torch.Tensor, "copy_", copied)
        patch.setattr(torch.Tensor, "__getitem__", item)
        # Which kernels attention gets depends on the GPU.
        patch.setattr(torch.cuda, "get_device_capability", h100)
        # Tensors without data have no addresses, and count what uses them otherwise.
        patch.setattr(cuda_graph, "is_shared", unshared)
        patch.setattr(torch.Tensor, "data_ptr", without_address)
        noted: list[int] = []
        program = Program(render(module), context, compiled=False, graphs=graphs, note=noted.append)
        roles = [main.param_role(index).kind for index in range(len(main.params))]
        inputs = [held(param) for param, role in zip(main.params, roles, strict=True) if role != "key"]
        wanted, key = [True] * len(main.results), (1, 2) if "key" in roles else None
        for _ in range(cuda_graph.SETTLED + 1 if graphs is GraphMode.ALWAYS else 0):
            program.run(inputs, key, wanted)
        noted.clear()
        found = program.run(inputs, key, wanted)
        assert bool(noted) == (graphs is GraphMode.NEVER)
        for value, tensor in zip(main.results, found, strict=True):
            assert (tensor is None) == (held(value) is None)
            if tensor is not None:
                assert tensor.device == GPU
                assert tensor.shape == value.type.local_shape(module.mesh)
                assert tensor.dtype == DTYPES[value.type.dtype]


@cache
def builder(name: str) -> Builder:
    return Builder(captured_step({**EXAMPLES, "mixtral": MIXTURE}[name]).cast("f32").module)


PLANS = {
    "llama": [
        Config(dp=2, micro_batches=2),
        Config(dp=2, micro_batches=2, distribute_param="use"),
        Config(tp=2, recompute="full"),
        Config(pp=2, micro_batches=2),
        Config(cp=2),
        Config(dp=2, loss_chunks=2),
        Config(dp=2, tp=2, pp=2),
    ],
    "mixtral": [Config(ep=2)],
    "gpt2": [Config(dp=2, tp=2)],
}


LONG = (*PLANS["llama"][:2], Config(tp=2, recompute="full"), Config(dp=2, loss_chunks=2))
"""Which the others have parts of."""


@pytest.mark.parametrize(
    "config",
    [pytest.param(each, marks=pytest.mark.exact) if each in LONG else each for each in PLANS["llama"]],
    ids=str,
)
def test_a_recorded_step_stays_on_its_gpu(config: Config) -> None:
    program = builder("llama").build(config).programs.joint
    for context in stations(program.mesh.ranks, "cuda"):
        run_on(context, program, graphs=GraphMode.ALWAYS)


FEW = (PLANS["llama"][1], PLANS["llama"][3])


@pytest.mark.parametrize("config", FEW, ids=str)
def test_a_step_stays_on_its_gpu(config: Config) -> None:
    program = builder("llama").build(config).programs.joint
    for context in stations(program.mesh.ranks, "cuda"):
        run_on(context, program)


@pytest.mark.exact
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("name", "config"), [(name, config) for name, found in PLANS.items() for config in found])
def test_every_program_stays_on_its_gpu(name: str, config: Config, device: str) -> None:
    programs = builder(name).build(config).programs
    for program in filter(None, (programs.joint, programs.forward, programs.backward)):
        for context in stations(program.mesh.ranks, device):
            run_on(context, program)


RINGS = (
    Ring(2, 16, 16, causal=True, dtype="bf16", width=16, value_width=16),
    Ring(4, 16, 16, mask="numbers", width=8, value_width=8),
    Ring(2, 16, 32, mask="looks", dtype="bf16", width=16, value_width=16),
    Ring(3, 12, 12, causal=True, mask="looks", value_width=3),
)
"""Attention by each kind of kernel, and written out."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_a_ring_stays_on_its_gpu(ring: Ring, device: str) -> None:
    program = load(ring.text)
    for context in stations(program.mesh.ranks, device):
        run_on(context, program)


def test_a_stray_tensor_is_noticed() -> None:
    """The proof can fail: a collective that is given a tensor of the host, and an op that mixes devices."""
    with pytest.raises(AssertionError):
        Silent("cuda").take(torch.empty(1, dtype=torch.uint8))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.add(torch.empty(2, device=GPU), torch.empty(2))


@pytest.mark.parametrize("config", PLANS["llama"], ids=str)
def test_an_arranged_program_does_what_is_written(config: Config) -> None:
    """The same instructions, none of which reads what is not there yet; sums in fewer collectives."""
    module = builder("llama").build(config).programs.joint
    main = module.main
    written, steps = program_order(main), arranged(main, module.mesh)
    known = set(main.params)
    for step in steps:
        assert known.issuperset(step.op.inputs()), step.op
        known.update(step.op.results)
    assert known >= set(main.results)
    assert known == {*main.params, *(result for op in main.ops for result in op.results)}
    assert sorted(step.position for step in steps) == sorted({step.position for step in steps})
    if config.dp > 1 and config.distribute_param == "none":
        assert sums(steps) < sums(written) / 2


def sums(steps: Sequence[Placed]) -> int:
    return sum(step.op.name == ALL_REDUCE for step in steps)


def test_parameters_are_fetched_while_the_function_before_them_runs() -> None:
    module = builder("llama").build(Config(dp=2, distribute_param="use")).programs.joint
    before, after = (distances(steps) for steps in (program_order(module.main), arranged(module.main, module.mesh)))
    further = [after[value] - count for value, count in before.items()]
    assert set(further) == {0, 1}
    assert min(after.values()) == 0, "of what the first function reads"
    assert sum(further) > len(further) / 2


def distances(steps: Sequence[Placed]) -> dict[Value, int]:
    """For each parameter that is gathered the functions that run from then on before it is read."""
    found: dict[Value, int] = {}
    for at, step in enumerate(steps):
        if step.op.name == ALL_GATHER:
            (value,) = step.op.results
            reader = next(index for index, each in enumerate(steps) if value in each.op.inputs())
            found[value] = sum(each.op.name == "call" for each in steps[at:reader])
    return found


def test_bundles_have_a_limit() -> None:
    module = builder("llama").build(Config(dp=2)).programs.joint
    few, many = (arranged(module.main, module.mesh, most) for most in (1 << 25, 1 << 14))
    assert sums(few) < sums(many) < sums(program_order(module.main))
    for step in many:
        sizes = [result.type.local_nbytes(module.mesh) for result in step.op.results]
        assert step.op.name != ALL_REDUCE or len(sizes) == 1 or sum(sizes) <= 1 << 14
