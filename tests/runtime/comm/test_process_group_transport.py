"""Process groups give the bits of shared memory; here between CPU workers, by gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from moaic.runtime.comm.device_backend import CpuBackend
from moaic.runtime.comm.process_group_transport import GroupTransport
from moaic.runtime.comm.reshard import is_shared
from moaic.runtime.comm.transport import Group
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.controller.errors import WorkerError
from moaic.runtime.controller.launch import launch
from moaic.runtime.launch.local_workers import carrier_for
from moaic.runtime.protocol.carrier import Carrier
from tests.runtime.worker.test_program import MOVES, RINGS, SUMS, run, up


@pytest.fixture(scope="module")
def shared() -> Iterator[Accelerator]:
    yield from _four(Carrier.MEMORY)


@pytest.fixture(scope="module")
def grouped() -> Iterator[Accelerator]:
    yield from _four(Carrier.GLOO)


def _four(carrier: Carrier) -> Iterator[Accelerator]:
    accelerator = Accelerator(launch(4, {"MOAI_COMPILE": "0"}, carrier=carrier))
    yield accelerator
    accelerator.close()


def test_a_carrier_is_chosen_by_the_devices() -> None:
    assert carrier_for(("cpu", "cpu")) is Carrier.MEMORY
    assert carrier_for(("cuda:0", "cuda:1")) is Carrier.NCCL
    assert carrier_for(("cuda:0", "cuda:0")) is Carrier.GLOO
    assert carrier_for(("triton:sm_90", "triton:sm_90")) is Carrier.GLOO


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "triton:sm_90"])
def test_nothing_is_sent_unencrypted_where_others_may_read_it(device: str) -> None:
    assert carrier_for((device,), is_private=False) is Carrier.MEMORY


PARTS = """// moai 1
mesh [{mesh}]
func @main(%x: {dtype}[4{{a}}, {n}, 12] input "x")
    -> ({dtype}[{n}, 12], {dtype}[{n}, 12], {dtype}[{n}, 12]) {{
  %p = call @mine %x : {dtype}[{n}, 12] +a
  %all = moai.all_reduce %p {{axis = "a"}} : {dtype}[{n}, 12]
  %rows = moai.reduce_scatter %p {{axis = "a"}} : {dtype}[{n}{{a}}, 12]
  %one = moai.all_gather %rows {{axis = "a"}} : {dtype}[{n}, 12]
  %columns = moai.reduce_scatter %p {{axis = "a"}} : {dtype}[{n}, 12{{a}}]
  %other = moai.all_gather %columns {{axis = "a"}} : {dtype}[{n}, 12]
  return %all, %one, %other
}}
"""

MINE = """func @mine(%x: {dtype}[4{{a}}, {n}, 12]) -> ({dtype}[{n}, 12] +a) {{
  %s = aten.sum.dim_IntList %x {{dim = [0]}} : {dtype}[{n}, 12] +a
  return %s
}}
"""


@pytest.mark.parametrize("mesh", ["a=4", "b=2, a=2"])
@pytest.mark.parametrize("n", [4, 4000])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sums_have_the_bits_of_shared_memory(
    shared: Accelerator, grouped: Accelerator, mesh: str, n: int, dtype: str
) -> None:
    """Terms of every size, so that any other order of adding, or rounding in between, shows."""
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    torch.manual_seed(n)
    x = (torch.randn(4, n, 12) * 10 ** (3 * torch.randn(4, n, 12))).to(kind)
    head, rest = PARTS.format(mesh=mesh, dtype=dtype, n=n).split("func @main", 1)
    text = f"{head}{MINE.format(dtype=dtype, n=n)}func @main{rest}"
    expected = run(shared, text, x, dtype=dtype)
    for got in run(grouped, text, x, dtype=dtype):
        assert torch.equal(got, expected[0])
    assert torch.equal(expected[1], expected[0])


def test_an_odd_count_and_moves(grouped: Accelerator) -> None:
    x = torch.randn(10_007 * 4, 8)
    everything, rows, columns, same = run(grouped, SUMS.format(mesh="a=4", dtype="f32", n=len(x)), x)
    assert torch.equal(everything, 4 * x * x)
    assert torch.equal(rows, everything)
    assert torch.equal(columns, everything)
    assert torch.equal(same, x)
    x = torch.randn(8, 12, 6)
    assert all(torch.equal(got, x) for got in run(grouped, MOVES.replace("N", "6"), x))


def test_rings_have_the_bits_of_shared_memory(shared: Accelerator, grouped: Accelerator) -> None:
    for ring in RINGS[1:4]:
        inputs = ring.inputs()
        expected = run(shared, ring.text, *inputs, dtype=ring.dtype)
        for got, want in zip(run(grouped, ring.text, *inputs, dtype=ring.dtype), expected, strict=True):
            assert torch.equal(got, want)


class Slow:
    """A process group whose peers take their time; they have all that was sent once somebody waits for it."""

    def __init__(self) -> None:
        self.is_taken = False

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Slow:
        return self

    def is_completed(self) -> bool:
        return self.is_taken

    def wait(self) -> None:
        self.is_taken = True


def test_what_is_on_its_way_is_seen_to_be_in_use() -> None:
    slow, tensor = Slow(), torch.ones(4, 2)
    transport = GroupTransport(lambda group: slow, lambda peers, choice: True, CpuBackend(), stages=False)
    transport.broadcast(tensor, Group((0, 1), 0))
    assert not slow.is_taken
    assert is_shared(tensor)
    transport.wait_sends()
    assert slow.is_taken
    assert not is_shared(tensor)


def test_a_lost_worker_is_the_cause_and_not_its_peers() -> None:
    accelerator = Accelerator(launch(2, {"MOAI_COMPILE": "0"}, carrier=Carrier.GLOO))
    try:
        x = torch.randn(40_000, 8)
        text = SUMS.format(mesh="a=2", dtype="f32", n=len(x))
        run(accelerator, text, x)
        program, buffer = accelerator.load(text, compiled=False), up(accelerator, x)
        os.kill(accelerator.stats().workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"worker 1 of 2 failed .* was killed by SIGKILL"):
            run_on(accelerator, program, buffer)
    finally:
        accelerator.close()


def run_on(accelerator: Accelerator, program: int, buffer: Buffer) -> None:
    """Runs a program until a worker fails."""
    for _ in range(1000):
        outputs = [accelerator.buffer("f32", (40_000, 8)) for _ in range(4)]
        accelerator.run(program, [buffer], outputs)
        accelerator.download(whole(outputs[0]))
