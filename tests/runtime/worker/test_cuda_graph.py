"""Captured runs, on a test device that replays calls of PyTorch and discards the results of the capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.runtime.comm.device_backend import CpuBackend, Result
from moaic.runtime.comm.process_group_transport import GroupTransport
from moaic.runtime.comm.transport import Group
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.emulation.recording import Recording
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.worker.cuda_graph import LENT, MISFITS, SETTLED, TRIES, GraphRecorder, RunMode
from moaic.runtime.worker.program import Program
from tests.exact.graphs import captured_step
from tests.exact.models import EXAMPLES


@dataclass(frozen=True)
class RecordingCpu(CpuBackend):
    """The CPU as a device that can do again what it was told once."""

    space: int = 1 << 40
    fails: bool = False
    tapes: list[Recording] = field(default_factory=list[Recording])

    @property
    def records(self) -> bool:
        return True

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        tape = Recording()
        self.tapes.append(tape)
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        with tape:
            result = run()
        tape.spoil()
        return tape.repeat, result

    def free_bytes(self) -> int:
        return self.space

    def resident_bytes(self) -> int:
        return 0

    def peak(self) -> int:
        return 1 << 20


def no_group(group: Group) -> None:
    pass


def alone(peers: Sequence[int], choice: int) -> bool:
    return True


class Trained:
    """A program on one such device, and what to give it: the same parameters and another batch each time."""

    def __init__(self, module: Module, inputs: list[Tensor], device: RecordingCpu) -> None:
        self.main = module.main
        self.device = device
        context = WorkerContext(0, device, GroupTransport(no_group, alone, device, stages=False, can_be_recorded=True))
        self.noted: list[int] = []
        self.said: list[str] = []
        self.program = Program(
            render(module),
            context,
            compiled=False,
            graphs=GraphMode.ALWAYS,
            say=self.said.append,
            note=self.noted.append,
        )
        roles = [self.main.param_role(index).kind for index in range(len(self.main.params))]
        self.inputs: list[Tensor] = [tensor for tensor, role in zip(inputs, roles, strict=True) if role != "key"]
        self.roles = [role for role in roles if role != "key"]
        self.labels = [role.label for role in self.main.param_roles if role.kind != "key"]
        self.draws = "key" in roles

    def run(self, number: int, *, eager: bool = False, wanted: list[bool] | None = None) -> list[Tensor | None]:
        """The results for batch `number`; parameters change where they lie, and buffers are what was made of them."""
        for tensor, role in zip(self.inputs, self.roles, strict=True):
            if role == "param":
                tensor.mul_(1 + 0.01 * number)
        given = [
            tensor.roll(number, 0).clone() if role == "input" else tensor
            for tensor, role in zip(self.inputs, self.roles, strict=True)
        ]
        key = (number, 7) if self.draws else None
        results = self.program.run(given, key, wanted or [True] * len(self.main.results), eager=eager)
        for index, tensor in enumerate(results):
            role = self.main.result_role(index)
            if role.kind == "update" and tensor is not None:
                self.inputs[self.labels.index(role.label)] = tensor
        return results

    def is_repeated(self, number: int) -> bool:
        self.noted.clear()
        self.run(number)
        return not self.noted


@cache
def step(name: str, config: Config) -> tuple[Module, tuple[Tensor, ...]]:
    found = captured_step(EXAMPLES[name]).cast("f32")
    return Builder(found.module).build(config).programs.joint, found.inputs


def trained(name: str = "llama", config: Config | None = None, **device: Any) -> Trained:
    module, inputs = step(name, config or Config())
    return Trained(module, [tensor.clone() for tensor in inputs], RecordingCpu(**device))


def settle(trained: Trained) -> None:
    for number in range(SETTLED + 1):
        trained.run(number)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", Config(micro_batches=2, loss_chunks=2)),
        ("gpt2", Config(recompute="full")),
        ("resnet", Config()),
    ],
)
def test_every_run_gives_the_results_of_an_eager_run(name: str, config: Config) -> None:
    """GPT-2 draws its dropout from another key each time; the buffers of convolutions change each time."""
    recorded, plain = trained(name, config), trained(name, config)
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(SETTLED + 4):
        recorded.noted.clear()
        kept += compared(recorded, plain, number)
        assert bool(recorded.noted) == (number <= SETTLED)
    assert all(torch.equal(one, other) for one, other in kept), "what is no gradient stays what it was"
    assert len(recorded.device.tapes) == 1


def compared(recorded: Trained, plain: Trained, number: int) -> list[tuple[Tensor, Tensor]]:
    """Runs both; their results, but for gradients."""
    found, wanted = recorded.run(number), plain.run(number, eager=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    pairs = enumerate(zip(found, wanted, strict=True))
    return [
        (one, other)
        for index, (one, other) in pairs
        if index in recorded.main.outputs and one is not None and other is not None
    ]


def test_a_gradient_that_somebody_has_is_not_overwritten() -> None:
    subject = trained()
    settle(subject)
    held = subject.run(SETTLED + 1)
    before = [None if tensor is None else tensor.clone() for tensor in held]
    view = held[subject.main.gradients[-1]]
    assert view is not None
    view = view[:1]
    del held
    assert not subject.is_repeated(SETTLED + 2)
    last = before[subject.main.gradients[-1]]
    assert last is not None
    assert torch.equal(view, last[:1])
    del view
    assert subject.is_repeated(SETTLED + 3)


def test_a_recording_that_no_longer_fits_is_given_up_and_made_anew() -> None:
    subject = trained()
    settle(subject)
    assert subject.is_repeated(0)
    subject.inputs = [tensor.clone() for tensor in subject.inputs]
    number, seen = 1, list[bool]()
    while len(seen) < MISFITS + SETTLED + 2:
        seen.append(subject.is_repeated(number))
        number += 1
    assert seen == [False] * (len(seen) - 1) + [True]
    assert len(subject.device.tapes) == 2


def test_what_is_wanted_is_what_was_recorded() -> None:
    subject = trained()
    settle(subject)
    (first, *rest) = range(len(subject.main.results))
    subject.noted.clear()
    found = subject.run(1, wanted=[True, *(False for _ in rest)])
    assert subject.noted
    assert found[first] is not None
    assert all(tensor is None for tensor in found[1:])


def test_a_trace_sees_every_instruction() -> None:
    subject = trained()
    settle(subject)
    subject.noted.clear()
    subject.run(1, eager=True)
    assert len(subject.noted) == len(subject.main.ops)


def test_it_is_made_as_often_as_is_worth_it() -> None:
    subject = trained()
    for number in range(20):
        subject.inputs = [tensor.clone() for tensor in subject.inputs]
        subject.run(number)
    assert len(subject.device.tapes) == TRIES
    assert subject.said == ["3 captures no longer fitted, as parameters moved or other results were asked for"]


def test_a_device_that_cannot_is_not_asked_again() -> None:
    subject, plain = trained(fails=True), trained()
    for number in range(SETTLED + 3):
        compared(subject, plain, number)
    assert len(subject.device.tapes) == 1
    assert subject.said == ["the capture failed (operation not permitted when stream is capturing)"]


DOUBLED = """// moai 1
mesh [dp=1]
func @double(%x: f32[4]) -> (f32[4]) {
  %y = aten.mul.Tensor %x, _ {other = 2} : f32[4]
  return %y
}
func @main(%x: f32[4] input "x") -> (f32[4] output "y") {
  %y = call @double %x : f32[4]
  return %y
}
"""


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_nothing_is_captured_before_its_functions_are_compiled() -> None:
    device = RecordingCpu()
    context = WorkerContext(0, device, GroupTransport(no_group, alone, device, stages=False))
    program = Program(DOUBLED, context, compiled=True, background=True, graphs=GraphMode.ALONE, note=lambda index: None)

    def run_often(*, op_by_op: bool = False) -> None:
        for _ in range(SETTLED + 2):
            (found,) = program.run([torch.ones(4)], None, [True], op_by_op=op_by_op)
            assert found is not None

    run_often()
    assert not device.tapes
    program.compile()
    program.adopt()
    run_often(op_by_op=True)
    assert not device.tapes
    run_often()
    assert len(device.tapes) == 1


@pytest.mark.parametrize(
    ("config", "graphs", "reason"),
    [
        (Config(), GraphMode.ALONE, None),
        (Config(dp=2), GraphMode.ALONE, "its GPUs communicate; cuda_graphs=True captures that, too"),
        (Config(dp=2), GraphMode.ALWAYS, None),
        (Config(dp=2), GraphMode.NEVER, None),
    ],
    ids=str,
)
def test_it_says_why_steps_are_not_captured(config: Config, graphs: GraphMode, reason: str | None) -> None:
    module, _ = step("llama", config)
    device, said = RecordingCpu(), list[str]()
    context = WorkerContext(0, device, GroupTransport(no_group, alone, device, stages=False, can_be_recorded=True))
    Program(render(module), context, compiled=False, graphs=graphs, say=said.append, note=lambda index: None)
    assert said == ([] if reason is None else [reason])


def test_a_group_over_the_host_is_not_captured() -> None:
    module, _ = step("llama", Config(dp=2))
    device, said = RecordingCpu(), list[str]()
    context = WorkerContext(0, device, GroupTransport(no_group, alone, device, stages=True))
    Program(render(module), context, compiled=False, graphs=GraphMode.ALWAYS, say=said.append, note=lambda index: None)
    assert said == ["its workers communicate over the host"]


@pytest.mark.parametrize("other", list(RunMode))
def test_ranks_do_what_all_of_them_would(other: RunMode) -> None:
    """Beside a rank that always wants the same, also when it is asked whether it could record."""
    main = Builder(captured_step(EXAMPLES["llama"]).cast("f32").module).build(Config()).programs.joint.main
    asked: list[int] = []

    def execute(operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        return [None for _ in wanted]

    def agree(peers: Sequence[int], choice: int) -> bool:
        assert peers == (1,)
        asked.append(choice)
        return choice == other

    device = RecordingCpu()
    transport = GroupTransport(no_group, agree, device, stages=False, can_be_recorded=True)
    recorder = GraphRecorder(main, WorkerContext(0, device, transport), Group((0, 1), 0), execute, lambda reason: None)
    for _ in range(SETTLED + 3):
        recorder.run([None] * len(main.params), [False] * len(main.results))
    assert asked[: SETTLED + 1] == [RunMode.EAGER] * SETTLED + [RunMode.CAPTURE]
    assert bool(device.tapes) == bool(recorder.repeated) == (other is RunMode.CAPTURE)


def test_nothing_is_recorded_where_memory_is_short() -> None:
    subject = trained(space=1 << 20)
    settle(subject)
    assert not subject.is_repeated(1)
    assert not subject.device.tapes
    assert {*subject.said} == {"memory is too short for a second pool as large as the highest peak"}


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_gradients_of_several_runs_may_be_summed(steps: int) -> None:
    """The first of each sum is made by a replay, as often as one likes."""
    subject = trained()
    held: list[Tensor | None] = []
    seen = list[bool]()
    for number in range(10 * steps):
        if number % steps == 0:
            held.clear()
        subject.noted.clear()
        results = subject.run(number)
        seen.append(not subject.noted)
        if not held:
            held += [results[index] for index in subject.main.gradients]
        del results
    assert all(seen[steps * SETTLED :: steps])
    assert not subject.said
    assert len(subject.device.tapes) == 1


def test_a_graph_whose_gradients_are_always_in_use_is_given_up() -> None:
    subject = trained()
    settle(subject)
    held = subject.run(0)
    for number in range(LENT):
        subject.run(number)
    assert subject.said == ["gradients of an earlier run are always in use"]
    del held
    settle(subject)
    assert not subject.is_repeated(1)


def test_a_forward_that_saves_for_a_backward_is_not_recorded() -> None:
    forward = Builder(captured_step(EXAMPLES["llama"]).cast("f32").module).build(Config()).programs.forward
    device, said = RecordingCpu(), list[str]()
    context = WorkerContext(0, device, GroupTransport(no_group, alone, device, stages=False))
    Program(render(forward), context, compiled=False, graphs=GraphMode.ALWAYS, say=said.append, note=lambda index: None)
    assert said == ["a backward reads what it saves"]


def test_memory_is_given_back_for_another_program() -> None:
    subject = trained()
    settle(subject)
    for _ in range(2 * TRIES):
        subject.program.release_graph()
        settle(subject)
    subject.program.release_graph()
    assert [subject.is_repeated(number) for number in range(SETTLED + 2)] == [False] * (SETTLED + 1) + [True]


def test_a_backward_that_finds_what_a_forward_saved_is_not_recorded() -> None:
    found = captured_step(EXAMPLES["llama"]).cast("f32")
    backward = Builder(found.module).build(Config()).programs.backward
    assert backward is not None
    generator = torch.Generator().manual_seed(0)
    shapes = [(param.type.shape, DTYPES[param.type.dtype]) for param in backward.main.params]
    inputs = [torch.randint(0, 2, shape, generator=generator).to(dtype) for shape, dtype in shapes]
    subject = Trained(backward, inputs, RecordingCpu())
    assert subject.said == ["it reads what a forward has saved"]
    settle(subject)
    assert not subject.is_repeated(1)
    assert not subject.device.tapes
