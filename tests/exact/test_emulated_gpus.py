"""Plans on workers that emulate a GPU: the Triton kernels that it would run give the results of one device.

Inductor's kernels and moaic's own, all of them whether measured or not, with the GPU's instruction lists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moaic.check.proof import CapturedStep, ProofOutcome, one_of_each_kind, plans_of, sampled
from moaic.check.workers import WorkerProof, workers
from moaic.device.host_tensor_cache import uploaded
from moaic.ir.printer import render
from moaic.passes.build import Builder
from moaic.passes.config import Config, Request
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.kernel_timing import kernel_seconds
from moaic.runtime.controller.probe_inputs import BLOCK, kernel_inputs_of
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.worker.cuda_graph import SETTLED
from tests.exact.graphs import captured_step
from tests.exact.models import DROPOUT, EXAMPLES, MIXTURE
from tests.runtime.worker.test_background import EXPECTED, TEXT, begun, ran, wait_until

DEMO = Path(__file__).parents[2] / "examples" / "emulated_gpus.py"

MODELS = {**EXAMPLES, "mixture": MIXTURE, "dropout": DROPOUT}

TARGETS = ("sm_90", "gfx942")

ADVERSE = [
    Config(dp=2, micro_batches=2, distribute_param="use"),
    Config(tp=2),
    Config(pp=2, micro_batches=2, schedule="zero-bubble"),
    Config(cp=2, gather_keys=False),
]
"""Plans with collectives on the side stream, sends, and a ring."""

MOST = 12
"""Kinds of plans on four workers, and on the second target."""


@cache
def captured(model: str) -> CapturedStep:
    return captured_step(MODELS[model])


@contextmanager
def emulated(target: str, count: int = 2, kernels: str = "all") -> Generator[Accelerator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOAI_KERNELS", kernels)
        with workers(count, f"triton:{target}") as accelerator:
            yield accelerator


@pytest.fixture(scope="module")
def gpus() -> Iterator[Accelerator]:
    with emulated("sm_90") as accelerator:
        yield accelerator


def check(model: str, config: Config, accelerator: Accelerator, *passing: ProofOutcome) -> None:
    verdict = WorkerProof(captured(model), compiled=True).verdict(config, accelerator)
    assert verdict.outcome in (ProofOutcome.PASS, *passing), f"{config}: {verdict.reason}"


ALIKE = [
    ("llama", Config(dp=2, distribute_param="use")),
    ("llama", Config(pp=2, micro_batches=2)),
    ("qwen2", Config(cp=2, gather_keys=False)),
    ("dropout", Config(dp=2, recompute="full")),
]
"""Their kernels are the others', and what the GPUs send each other is that of `ADVERSE`."""


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", Config(tp=2, loss_chunks=2)),
        ("mixture", Config(ep=2)),
        ("resnet", Config(dp=2)),
        *(pytest.param(*each, marks=pytest.mark.exact) for each in ALIKE),
    ],
    ids=str,
)
def test_a_plan_gives_the_results_of_one_device(gpus: Accelerator, model: str, config: Config) -> None:
    check(model, config, gpus)


def test_kernels_of_inductor_and_of_moaic_have_run(gpus: Accelerator) -> None:
    check("llama", Config(dp=2), gpus)
    for worker in gpus.stats().workers:
        assert {"norm._forward", "norm._backward", "rotary._forward", "gated._forward"} <= worker.launches.keys()
        assert sum(count for name, count in worker.launches.items() if name.startswith("triton_")) > 10


DRAWN = """// moai 1
mesh [dp=2]
func @draw(%k: i64[2]) -> (f32[8{dp}, 33]) {
  %k1 = moai.fold_key %k {instance = 3} : i64[2]
  %r = moai.rand %k1 : f32[8{dp}, 33]
  return %r
}
func @main(%k: i64[2] key) -> (f32[8{dp}, 33]) {
  %r = call @draw %k : f32[8{dp}, 33]
  return %r
}
"""


@pytest.mark.exact
@pytest.mark.parametrize("model", ["llama", "dropout"])
def test_a_replayed_step_is_the_step(model: str) -> None:
    """Another key for its dropout each time; parameters lie where they lay, and batches do not."""
    step = captured(model).cast("f32")
    programs = Builder(step.module).build(Config()).programs
    main, inputs = programs.joint.main, [step.inputs[at] for at in programs.joint_params]
    kinds = [main.param_role(at).kind for at in range(len(inputs))]
    with emulated("sm_90", count=1) as accelerator:

        def results(number: int, run: int) -> list[Tensor]:
            given = [
                kept.get(at) or uploaded(accelerator, inputs[at].roll(run, 0) if kind == "input" else inputs[at])
                for at, kind in enumerate(kinds)
                if kind != "key"
            ]
            made = [accelerator.buffer(each.type.dtype, each.type.shape) for each in main.results]
            accelerator.run(number, given, made, key=(run, 7) if "key" in kinds else None)
            return [accelerator.download(whole(each)) for each in made]

        kept = {at: uploaded(accelerator, inputs[at]) for at, kind in enumerate(kinds) if kind == "param"}
        modes = (GraphMode.ALONE, GraphMode.NEVER)
        numbers = [accelerator.load(render(programs.joint), graphs=graphs) for graphs in modes]
        for run in range(SETTLED + 3):
            for one, other in zip(*(results(number, run) for number in numbers), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
        (worker,) = accelerator.stats().workers
        assert [worker.programs[number].repeated for number in numbers] == [3, 0]


def drawn(accelerator: Accelerator) -> Tensor:
    result = accelerator.buffer("f32", (8, 33))
    accelerator.run(accelerator.load(DRAWN, compiled=True), [], [result], key=(1, 2))
    return accelerator.download(whole(result))


def test_dropout_draws_the_bits_of_the_cpu(gpus: Accelerator) -> None:
    with workers(2) as accelerator:
        assert torch.equal(drawn(gpus), drawn(accelerator))


@pytest.mark.exact
def test_the_demo_trains_as_the_cpu_does() -> None:
    command = [sys.executable, str(DEMO), "--plan", "dp=2", "--steps", "2"]
    environment = {**os.environ, "MOAI_LOG": "info"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    apart = re.search(r"difference of a loss from the CPU's: (\S+)$", done.stdout.strip())
    assert apart is not None
    assert float(apart[1]) < 1e-5
    assert "norm._forward" in done.stdout
    assert "Workers interpret the kernels of an NVIDIA H100 SXM (sm_90)" in done.stderr


@pytest.mark.parametrize("config", ADVERSE, ids=str)
def test_streams_that_are_late_change_nothing(gpus: Accelerator, config: Config) -> None:
    """Op by op, as fast as the host: the side stream is late in another way each time."""
    verdict = WorkerProof(captured("llama"), compiled=False).verdict(config, gpus, runs=8)
    assert verdict.outcome is ProofOutcome.PASS, f"{config}: {verdict.reason}"


SCRIPT = """
import torch, torch.nn.functional as F

def shifted(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y + 1

def convolved(x, w):
    return F.conv1d((2 * x).transpose(1, 2), w, padding=1).relu()

def added(x, places, rows):
    return x.index_add(0, places, rows)

CASES = {
    shifted: [torch.arange(32).view(4, 8)],
    convolved: [torch.randn(2, 33, 3), torch.randn(5, 3, 3)],
    added: [torch.randn(5, 7).bfloat16(), torch.tensor([3, 0, 3]), torch.randn(3, 7).bfloat16()],
}
for function, operands in CASES.items():
    found = torch.compile(function, backend="moai")(*(each.to("moai") for each in operands)).cpu()
    torch.testing.assert_close(found, function(*operands), rtol=1e-2, atol=1e-2)
try:
    looked_up = torch.compile(lambda table, places: table.gather(1, places) + 1, backend="moai")
    looked_up(torch.zeros(10, 5).to("moai"), torch.tensor([[7], [1]]).to("moai")).cpu()
except IndexError as error:
    print(error)
"""


PRODUCT = """func @kernel(%0: f32[64, 96], %1: f32[96, 32]) -> (f32[64, 32]) {
  %2 = aten.mm %0, %1 : f32[64, 32]
  return %2
}
"""


def test_kernels_are_timed_in_replays(gpus: Accelerator) -> None:
    before = {number for worker in gpus.stats().workers for number in worker.programs}
    assert 0 < kernel_seconds(gpus, PRODUCT, 1e-2) < 10
    for worker in gpus.stats().workers:
        (timed,) = (each for number, each in worker.programs.items() if number not in before and each.repeated)
        assert timed.repeated == 2, "the third run is captured and replayed, and the fourth is measured"
        assert timed.elapsed > 0


def test_kernels_are_timed_on_random_floats(gpus: Accelerator) -> None:
    """A buffer of an odd size, longer than what is drawn at once, and narrow types."""
    types = [f"f32[3, {BLOCK // 3 + 5}]", "bf16[7]", "f8e4m3fn[16, 16]", "f32[]", "f32[0, 4]", "i64[5]"]
    params = ", ".join(f"%p{index}: {each}" for index, each in enumerate(types))
    text = f"// moai 1\nmesh [dp=2]\nfunc @main({params}) -> (i64[5]) {{\n  return %p5\n}}\n"
    *floats, empty, integers = [gpus.download(whole(each)) for each in kernel_inputs_of(gpus, gpus.load(text))]
    for value in (each.float() for each in floats):
        assert value.abs().max() <= 0.5
        assert value.numel() == 1 or value.std() > 0.2
    assert empty.shape == (0, 4)
    assert integers.tolist() == [0] * 5


def launches(accelerator: Accelerator) -> int:
    return sum(accelerator.stats().workers[0].launches.values())


def test_a_gpu_goes_on_op_by_op_until_its_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    with emulated("sm_90", kernels="measured") as accelerator:
        program = begun(accelerator)
        assert launches(accelerator) == 0
        wait_until(lambda: accelerator.are_compiled([program]))
        torch.testing.assert_close(ran(accelerator, program, op_by_op=False), EXPECTED)
        assert launches(accelerator) == 2, "one of each function"
        again = accelerator.load(TEXT, background=True)
        assert accelerator.are_compiled([again]), "what the process compiled is in the cache"


@pytest.mark.exact
def test_ops_that_need_a_device_to_be_traced_and_an_index_out_of_range() -> None:
    environment = {**os.environ, "MOAI_WORKERS": "triton", "MOAI_COMPILE": "wait", "MOAI_FLAVOR": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("index out of range: one is negative, or not below 5")


@pytest.mark.exact
@pytest.mark.parametrize("config", ADVERSE, ids=str)
def test_streams_that_are_late_many_times_change_nothing(config: Config) -> None:
    with emulated("sm_90", kernels="measured") as accelerator:
        verdict = WorkerProof(captured("llama"), compiled=False).verdict(config, accelerator, runs=250)
        assert verdict.outcome is ProofOutcome.PASS, f"{config}: {verdict.reason}"


@pytest.mark.exact
@pytest.mark.parametrize("file", ["test_training.py", "test_precision.py", "test_dropout.py"])
def test_trainings_on_emulated_gpus(file: str) -> None:
    """Two kinds of optimizers, bfloat16, accumulation: the tests of workers on the CPU, on these."""
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name(file))]
    environment = {**os.environ, "MOAI_WORKERS": "triton", "MOAI_KERNELS": "all", "MOAI_COMPILE": "wait"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def of_every_kind(model: str, count: int) -> list[Config]:
    step = captured(model).module
    return one_of_each_kind(
        [*plans_of(step, count), *plans_of(step, count, Request(loss_chunks=2)), *plans_of(step, count, Request(cp=2))]
    )


@pytest.mark.exact
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("target", "count", "most"), [("sm_90", 2, None), ("gfx942", 2, MOST), ("sm_90", 4, MOST)])
def test_plans_of_every_kind(model: str, target: str, count: int, most: int | None) -> None:
    configs = of_every_kind(model, count)
    with emulated(target, count) as accelerator:
        for config in configs if most is None else sampled(configs, most):
            check(model, config, accelerator, ProofOutcome.DROPPED)
