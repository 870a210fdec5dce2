"""Plans for GPUs that are not here: the machine from a data sheet, and the kernels that determine the cost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moaic.capture.trace_only import ModelSource, Sample
from moaic.cli import main
from moaic.ir.graph import Module
from moaic.ir.verify import load
from moaic.passes.perf import machine as machines
from moaic.passes.perf.machine import MadeKernel
from moaic.planner.request import parse_request
from moaic.planner.worker import InProcessPool
from moaic.predict.gpu_machine import machine_of, sources
from moaic.predict.guide import Question, captured_step, planned
from moaic.predict.kernel_cache import MadeKernels
from moaic.predict.kernel_report import program_of
from moaic.runtime.host.gpu_specs import LAUNCH_SECONDS, TARGETS
from tests.passes.steps import dense
from tests.predict.square import PLAN

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Inductor imports what warns of itself."""

PUBLISHED, ASSUMED = machines.MeasureSource.PUBLISHED, machines.MeasureSource.ASSUMED

TARGET = TARGETS["sm_90"]

GUIDE = (
    *("guide", "llama", "--set", "num_hidden_layers=1", "--set", "hidden_size=16", "--set", "intermediate_size=32"),
    *("--set", "num_attention_heads=2", "--set", "num_key_value_heads=2", "--set", "vocab_size=64"),
    *("--sequence", "8", "--plan", "dp=2,distribute_param=none,micro_batches=1", "--machine", "sm_90:2"),
)


@pytest.fixture
def program() -> Module:
    return program_of(load(PLAN))


@pytest.mark.parametrize("name", TARGETS)
def test_rates_are_those_of_the_data_sheet(name: str) -> None:
    target = TARGETS[name]
    machine = machine_of(target, 8, {})
    assert machine.memory < target.memory
    assert (machine.bandwidth.value, machine.bandwidth.source) == (target.bandwidth, PUBLISHED)
    assert machine.rate("mm", "bf16").value == target.matmul["bf16"]
    assert machine.rate("cheap", "bf16").source is PUBLISHED
    assert machine.rate("sdpa", "bf16").source is ASSUMED
    assert machine.launch.source is ASSUMED
    assert all(f"({PUBLISHED})" in line or f"({ASSUMED})" in line for line in sources(machine))


def test_a_gather_sends_what_links_carry() -> None:
    # Seven eighths of a gigabyte at 450 GB/s, whether to seven others or, half of it, to one.
    machine = machine_of(TARGET, 8, {})
    begun = machine.collective("all_gather", 0, 8).value
    assert machine.collective("all_gather", 1e9, 8).value - begun == pytest.approx(7 / 8 / 450)
    assert machine.collective("all_gather", 1e9, 2).value - begun == pytest.approx(1 / 2 / 450)
    assert machine.collective("all_reduce", 1e9, 8).value - begun == pytest.approx(2 * 7 / 8 / 450)
    assert machine.collective("send", 1e9, 2).value - begun == pytest.approx(1 / 450)
    # Two of AMD's have one of their seven links between them.
    pairs = machine_of(TARGETS["gfx942"], 8, {})
    assert pairs.collective("all_gather", 1e9, 2).value - begun == pytest.approx(1 / 2 / 64)
    assert pairs.collective("send", 1e9, 2).value - begun == pytest.approx(1 / 64)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machine", "sm_90:16"), "16 GPUs are more than the 8 of NVIDIA H100 SXM"),
        (("--machine", "sm_90", "--workers", "8,9"), "9 GPUs are more than the 8"),
        (("--machine", "sm_90:many"), "error: `many` is no number of GPUs\nhint: for example sm_90:8"),
        (
            ("--machine", "sm_91:8"),
            "error: `sm_91:8` is no file that describes a machine, and no GPU's name\nhint: GPUs are sm_90, sm_80",
        ),
        (("--machine", "docs/machines/h100.json", "--kernels"), "--kernels makes the kernels of GPUs"),
    ],
)
def test_what_is_no_machine_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", "llama", *words]) == 2
    assert said in capsys.readouterr().err


def test_kernels_are_made_once(program: Module, tmp_path: Path) -> None:
    first = MadeKernels(TARGET, tmp_path)
    assert first.make(program)
    (kernels,) = first.known.values()
    product, square = kernels
    assert product == MadeKernel(1, 4.0 * (32 * 32 + 32 * 48 + 32 * 48), 2.0 * 32 * 32 * 48, "f32")
    assert square == MadeKernel(1, 4.0 * 2 * 32 * 48, 32.0 * 48)
    again = MadeKernels(TARGET, tmp_path)
    assert again.known == first.known
    assert not again.make(program)


def test_other_gpus_know_nothing_of_them(program: Module, tmp_path: Path) -> None:
    MadeKernels(TARGET, tmp_path).make(program)
    assert not MadeKernels(TARGETS["sm_80"], tmp_path).known
    assert not MadeKernels(replace(TARGET, multiprocessors=1), tmp_path).known


def test_a_damaged_file_says_nothing(program: Module, tmp_path: Path) -> None:
    MadeKernels(TARGET, tmp_path).make(program)
    (path,) = tmp_path.rglob("*.json")
    path.write_text("[[1]]", encoding="utf-8")
    assert not MadeKernels(TARGET, tmp_path).known


def test_without_a_folder_nothing_is_kept(program: Module) -> None:
    kernels = MadeKernels(TARGET, None)
    assert kernels.make(program)
    assert not kernels.make(program)


def test_a_plan_is_priced_by_its_kernels(tmp_path: Path) -> None:
    kernels = MadeKernels(TARGET, None)
    machine = machine_of(TARGET, 2, {})
    asked = Question(ModelSource("llama", {}), (8,), 8, machine, (2,), parse_request("dp=2,micro_batches=1"))
    before = planned(dense(), 8, machine, asked, InProcessPool())
    after = planned(dense(), 8, machine, replace(asked, kernels=kernels, folder=tmp_path), InProcessPool())
    assert (before.known, after.known) == (0, before.functions)
    made = [kernel for each in kernels.known.values() for kernel in each]
    assert after.parts["launch"].value == pytest.approx(LAUNCH_SECONDS * sum(kernel.calls for kernel in made))
    # What was written is the plan, and its functions are those that were made.
    assert not kernels.make(program_of(load((tmp_path / "batch-8-on-2.moai").read_text(encoding="utf-8"))))


@pytest.mark.exact
def test_the_guide_says_where_its_numbers_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOAI_CACHE", str(tmp_path / "cache"))
    assert main([*GUIDE, "--kernels"]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H100 SXM (sm_90), from its data sheet:" in said
    assert re.search(r"launch [\d.]+ us \(assumed\), .*; kernels were made of ([1-9]\d*) of \1 functions", said)


def test_a_guide_over_many_batches_does_not_end_where_dynamo_gives_up() -> None:
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    source = ModelSource("llama", {**tiny, "num_key_value_heads": 2, "vocab_size": 64})
    with torch._dynamo.config.patch(recompile_limit=1):  # pyright: ignore[reportPrivateUsage]
        steps = [captured_step(source, Sample(batch, 8)) for batch in (2, 3, 4)]
    assert [step.main.params[0].type.shape[0] for step in steps] == [2, 3, 4]
