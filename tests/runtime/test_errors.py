"""An op that fails loses its own results: its error is PyTorch's, and everything else continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.protocol.carrier import Carrier

if TYPE_CHECKING:
    from tests.runtime.conftest import Script

# A program that fails on its way ends the session where peers wait in a transport that cannot cancel their wait.
CANCELABLE = pytest.mark.parametrize("two", [Carrier.MEMORY], indirect=True)


def up(device: Accelerator, tensor: Tensor) -> Buffer:
    names = {torch.float32: "f32", torch.int64: "i64"}
    buffer = device.buffer(names[tensor.dtype], tuple(tensor.shape))
    device.upload(buffer, tensor)
    return buffer


def launched(device: Accelerator, op: str, *args: Any, dtype: str = "f32", shape: tuple[int, ...] = (4,)) -> Buffer:
    out = device.buffer(dtype, shape)
    device.launch(op, args, {}, (out,))
    return out


def test_other_buffers_keep_their_values_and_what_is_made_of_the_failed_has_none(two: Accelerator) -> None:
    x, index = up(two, torch.ones(4)), up(two, torch.tensor([0, 9, 0, 0]))
    bad = launched(two, "aten.index_select", whole(x), 0, whole(index))
    worse = launched(two, "aten.mul.Scalar", whole(bad), 2)
    beside = launched(two, "aten.add.Scalar", whole(x), 1)
    assert two.download(whole(beside)).tolist() == [2] * 4
    for buffer in (worse, bad, worse):
        with pytest.raises(IndexError, match=r"index out of range in self\nat .*test_errors.py:\d+, in aten.index_sel"):
            two.download(whole(buffer))
    two.synchronize()
    assert two.download(whole(x)).tolist() == [1] * 4


def test_nothing_that_was_there_is_written_until_the_error_is_told(two: Accelerator) -> None:
    """As if it had been raised at its line: the lines after that one never ran."""
    x, moments, index = up(two, torch.ones(4)), up(two, torch.ones(4)), up(two, torch.tensor([9]))
    two.launch("aten._foreach_mul_.Scalar", ([whole(x), whole(moments)], 1), {}, ())
    bad = launched(two, "aten.index_select", whole(x), 0, whole(index), shape=(1,))
    two.launch("aten.mul_.Scalar", (whole(moments), 0.5), {}, ())
    two.launch("aten.add_.Tensor", (whole(x), whole(bad)), {}, ())
    two.upload(moments, torch.zeros(4))
    fresh = launched(two, "aten.add.Scalar", whole(moments), 1)
    with pytest.raises(IndexError):
        two.download(whole(moments))
    assert two.download(whole(moments)).tolist() == two.download(whole(x)).tolist() == [1] * 4
    with pytest.raises(IndexError):
        two.download(whole(fresh))
    two.launch("aten.add_.Tensor", (whole(x), whole(moments)), {}, ())
    assert two.download(whole(x)).tolist() == [2] * 4


def test_a_value_that_is_made_anew_is_there_again(two: Accelerator) -> None:
    x, index = up(two, torch.ones(4)), up(two, torch.tensor([9]))
    two.launch("aten.index_fill_.int_Scalar", (whole(x), 0, whole(index), 3), {}, ())
    with pytest.raises(IndexError):
        two.synchronize()
    with pytest.raises(IndexError):
        two.download(whole(x))
    two.upload(x, torch.zeros(4))
    assert two.download(whole(x)).tolist() == [0] * 4
    two.synchronize()


def test_an_assertion_is_raised_at_the_next_reading(two: Accelerator) -> None:
    x, no = up(two, torch.ones(4)), up(two, torch.zeros(()))
    two.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
    two.launch("aten._assert_async", (whole(no),), {}, ())
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        two.download(whole(x))
    assert two.download(whole(x)).tolist() == [2] * 4


SPLIT = """// moai 1
mesh [dp=2]
func @main(%x: i64[4{dp}] input "x") -> (i64[4{dp}]) {
  return %x
}
"""


FAILING = """// moai 1
mesh [dp=2]
func @divided(%x: i64[4{dp}], %y: i64[4{dp}]) -> (i64[4{dp}]) {
  %0 = aten.remainder.Tensor %x, %y : i64[4{dp}]
  return %0
}
func @main(%x: i64[4{dp}] input "x", %y: i64[4{dp}] input "y") -> (i64[4{dp}]) {
  %0 = call @divided %x, %y : i64[4{dp}]
  return %0
}
"""


@CANCELABLE
def test_a_run_that_failed_can_be_sent_again(two: Accelerator) -> None:
    """It has written nothing, until something later is withheld."""
    x, y = up(two, torch.ones(4, dtype=torch.int64)), up(two, torch.tensor([1, 1, 1, 0]))
    program, out = two.load(FAILING, compiled=False), two.buffer("i64", (4,))
    run = two.run(program, [x, y], [out])
    assert two.shortage_in(run) is None
    assert two.forgive(run)
    two.upload(y, torch.full((4,), 3))
    assert not two.forgive(two.run(program, [x, y], [out]))
    assert two.download(whole(out)).tolist() == [1] * 4
    two.synchronize()
    two.upload(y, torch.zeros(4, dtype=torch.int64))
    late = two.run(program, [x, y], [two.buffer("i64", (4,))])
    two.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
    two.shortage_in(late)
    assert not two.forgive(late)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        two.synchronize()
    assert two.download(whole(x)).tolist() == [1] * 4


def failing_on_one_worker(device: Accelerator) -> Buffer:
    """The remainder of split values, of which one part divides by zero."""
    values, divisors = up(device, torch.ones(4, dtype=torch.int64)), up(device, torch.tensor([1, 1, 1, 0]))
    program = device.load(SPLIT, compiled=False)
    for buffer in (values, divisors):
        device.run(program, [buffer], [None])
    return launched(device, "aten.remainder.Tensor", whole(values), whole(divisors), dtype="i64")


def test_workers_of_which_one_failed_meet_all_the_same(two: Accelerator) -> None:
    for _ in range(2):
        bad = failing_on_one_worker(two)
        total = launched(two, "aten.sum", whole(bad), dtype="i64", shape=())
        moved = launched(two, "aten.cumsum", whole(bad), 0, dtype="i64")
        for buffer in (moved, total, bad):
            with pytest.raises(RuntimeError, match=r"ZeroDivisionError\nat .*in aten.remainder.Tensor"):
                two.download(whole(buffer))
    x = up(two, torch.arange(4))
    two.run(two.load(SPLIT, compiled=False), [x], [None])
    assert two.download(whole(launched(two, "aten.sum", whole(x), dtype="i64", shape=()))).item() == 6


def test_replicas_of_which_some_were_written_on_get_the_latest_value(two: Accelerator) -> None:
    """The worker that failed withholds writes, and the other hears of the failure when it is raised."""
    x, unseen = up(two, torch.ones(4)), up(two, torch.ones(4))
    for buffer in (x, unseen):
        two.launch("aten.add_.Scalar", (whole(buffer), 1), {}, ())
    bad = failing_on_one_worker(two)
    for buffer in (x, x, unseen):
        two.launch("aten.add_.Scalar", (whole(buffer), 1), {}, ())
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        two.download(whole(bad))
    two.launch("aten.mul_.Scalar", (whole(x), 2), {}, ())
    assert two.download(whole(x)).tolist() == [8] * 4
    assert two.download(whole(unseen)).tolist() == [3] * 4
    here, there = ({row[0]: row for row in rows} for rows in two.contents().values())
    assert here[x.id] == there[x.id]
    assert here[unseen.id] == there[unseen.id]


def test_sharded_values_of_which_some_parts_were_written_are_lost(two: Accelerator) -> None:
    x = up(two, torch.ones(4, dtype=torch.int64))
    two.run(two.load(SPLIT, compiled=False), [x], [None])
    bad = failing_on_one_worker(two)
    two.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
    for buffer in (bad, x):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            two.download(whole(buffer))
    two.upload(x, torch.zeros(4, dtype=torch.int64))
    assert two.download(whole(x)).tolist() == [0] * 4


@CANCELABLE
def test_a_program_that_cannot_be_compiled_fails_where_it_runs(two: Accelerator) -> None:
    text = SPLIT.replace("return %x", "%y = aten.view %x {size = [3]} : i64[3]\n  return %x")
    x, out = up(two, torch.arange(4)), two.buffer("i64", (4,))
    two.run(two.load(text, compiled=False), [x], [out])
    with pytest.raises(Exception, match=r"test_errors.py:\d+"):
        two.download(whole(out))
    again = two.buffer("i64", (4,))
    two.run(two.load(SPLIT, compiled=False), [x], [again])
    assert two.download(whole(again)).tolist() == [0, 1, 2, 3]


UNKNOWN_TO_INDUCTOR = """// moai 1
mesh [dp=2]
func @pool(%g: f32[1, 1, 2, 2]) -> (f32[1, 1, 2, 2]) {
  %y = aten.avg_pool2d_backward %g, %g {WINDOW} : f32[1, 1, 2, 2]
  return %y
}
func @main(%x: f32[1, 1, 2, 2] input "x") -> (f32[1, 1, 2, 2]) {
  %y = call @pool %x : f32[1, 1, 2, 2]
  return %y
}
""".replace(
    "WINDOW",
    "kernel_size = [1], stride = [1], padding = [0], ceil_mode = false, "
    "count_include_pad = true, divisor_override = none",
)


@CANCELABLE
def test_where_it_runs_a_program_says_why_it_was_not_compiled(two: Accelerator) -> None:
    x = up(two, torch.ones(1, 1, 2, 2))
    program = two.load(UNKNOWN_TO_INDUCTOR)
    for _ in range(2):
        out = two.buffer("f32", (1, 1, 2, 2))
        two.run(program, [x], [out])
        with pytest.raises(Exception, match="avg_pool2d_backward"):
            two.download(whole(out))
    assert two.download(whole(x)).sum().item() == 4


TRAINING = """
import copy, os, sys, torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x, y):
        h = self.table(x)
        for each in self.layers:
            h = h + torch.relu(each(h))
        return F.cross_entropy(self.head(h), y)

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.ones(4, device=grad.device)[torch.full((1,), 9, device=grad.device)].sum()

def train(run, model, optimizer, x, y):
    optimizer.zero_grad()
    loss = run(x, y)
    loss.backward()
    optimizer.step()
    return loss

def check(options):
    expected = Model().double()
    model = copy.deepcopy(expected).to("moai")
    run = model if options is None else torch.compile(model, backend="moai", options=options)
    make = lambda of: torch.optim.AdamW(of.parameters(), lr=0.1, fused=True)
    optimizer, other = make(model), make(expected)
    x, y = torch.randint(0, 10, (12,)), torch.randint(0, 10, (12,))

    def steps():
        for _ in range(2):
            loss = train(expected, expected, other, x, y).item()
            found = train(run, model, optimizer, x.to("moai"), y.to("moai")).item()
            assert abs(loss - found) < 1e-9, (loss, found)
        for one, more in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(more.detach().cpu(), one.detach(), atol=1e-9, rtol=1e-9)

    def bad(values):
        return torch.cat([values[:-1], torch.full((1,), 99)]).to("moai")

    def told(act):
        try:
            act()
        except (IndexError, RuntimeError) as error:
            assert "script.py:" in str(error), error
            return
        raise AssertionError("nothing was raised")

    steps()
    for _ in range(2):
        loss = train(run, model, optimizer, bad(x), y.to("moai"))
        beside = torch.ones(3, device="moai") + 1
        told(loss.item)
        assert beside.sum().item() == 6
        steps()
        loss = train(run, model, optimizer, x.to("moai"), bad(y))
        told(torch.moai.synchronize)
        told(loss.item)
        steps()
    with torch.no_grad():
        told(run(bad(x), y.to("moai")).item)
    steps()
    optimizer.zero_grad()
    Failing.apply(run(x.to("moai"), y.to("moai"))).backward()
    optimizer.step()
    told(next(model.parameters()).cpu)
    steps()
    torch.compiler.reset()

print("begins", flush=True)
for options in OPTIONS:
    check(options)
    print("done", options, flush=True)
values = torch.ones(4, device="moai")
unread = values[torch.tensor([9])]
(values + 1).cpu()
"""

Plans = tuple[dict[str, int] | None, ...]
ONE: tuple[int, Plans] = (1, (None, {}))
TWO: tuple[int, Plans] = (2, (None, {"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2}))
THREE: tuple[int, Plans] = (3, (None, {"dp": 3}, {"pp": 3, "micro_batches": 3}))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "plans", "compiled"),
    [
        pytest.param(*ONE, "0", marks=pytest.mark.exact),
        (*TWO, "0"),
        pytest.param(*THREE, "0", marks=pytest.mark.exact),
        pytest.param(*ONE, "wait", marks=pytest.mark.exact),
        pytest.param(*TWO, "wait", marks=pytest.mark.exact),
    ],
)
def test_training_goes_on_as_if_the_step_had_never_been(
    script: Script, workers: int, plans: Plans, compiled: str
) -> None:
    text = f"OPTIONS = {plans!r}\n{TRAINING}"
    script.start(text, MOAI_FLAVOR=str(workers), MOAI_COMPILE=compiled, MOAI_LOG="warning")
    printed = script.finish()
    assert printed.count("done") == len(plans), printed
    # An error that nobody reads is said once in the end.
    assert printed.count("index 9 is out of bounds") == 1
    assert f"{script.place('unread =')}, in aten.index.Tensor" in printed
