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
from moaic.passes.perf.links import RankGroup
from moaic.passes.perf.machine import MadeKernel
from moaic.passes.perf.numbers import MeasureSource
from moaic.planner.request import parse_request
from moaic.planner.worker import InProcessPool
from moaic.predict.captured_step import captured_step
from moaic.predict.guide import Question, planned
from moaic.predict.kernel_cache import MadeKernels
from moaic.predict.kernel_report import program_of
from moaic.predict.named_clusters import named_cluster, names, sources
from moaic.runtime.host.gpu_specs import LAUNCH_SECONDS, TARGETS
from tests.passes.steps import dense
from tests.predict.square import PLAN

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Inductor imports what warns of itself."""

PUBLISHED, ASSUMED = MeasureSource.PUBLISHED, MeasureSource.ASSUMED

TARGET = TARGETS["sm_90"]

GUIDE = (
    *("guide", "llama", "--set", "num_hidden_layers=1", "--set", "hidden_size=16", "--set", "intermediate_size=32"),
    *("--set", "num_attention_heads=2", "--set", "num_key_value_heads=2", "--set", "vocab_size=64"),
    *("--sequence", "8", "--plan", "dp=2,distribute_param=none,micro_batches=1", "--machine", "sm_90:2"),
)


@pytest.fixture
def program() -> Module:
    return program_of(load(PLAN))


@pytest.mark.parametrize("name", names())
def test_every_cluster_is_described_with_sources(name: str) -> None:
    machine = named_cluster(name).machine(64)
    target = named_cluster(name).device.target
    assert target is not None
    assert 0 < machine.rate("mm", "bf16").value < target.matmul["bf16"]
    assert machine.rate("mm", "bf16").source in (PUBLISHED, ASSUMED)
    assert machine.rate("sdpa", "bf16").value > machine.rate("sdpa_backward", "bf16").value
    assert machine.bandwidth.source in (PUBLISHED, ASSUMED)
    assert machine.launch.source is ASSUMED
    assert all(f"({PUBLISHED})" in line or f"({ASSUMED})" in line for line in sources(machine))
    inside, between = (machine.collective("all_gather", 1e9, RankGroup(2, stride)).value for stride in (1, 8))
    assert inside < between


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_means_its_cluster(target: str) -> None:
    device = named_cluster(target).device
    assert device.target == TARGETS[target]
    assert device.name in (TARGETS[target].device, TARGETS[target].device.replace("80GB ", "") + " 80GB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machine", "sm_90:many"), "error: `many` is no number of GPUs\nhint: for example sm_90:8"),
        (("--machine", "h100:0"), "error: `0` is no number of GPUs\nhint: for example h100:8"),
        (("--machine", "h100:" + "9" * 5000), f"error: `{'9' * 40}` is no number of GPUs"),
        (("--machine", "h100", "--workers", "\u00b2"), "--workers takes whole numbers such as 1,2,4, not `\u00b2`"),
        (("--machine", "none.toml"), "error: cannot read none.toml: there is no such file\n"),
        (("--machine", "folder.toml"), "error: cannot read folder.toml: it is a folder\n"),
        (("--machine", "file.toml:8"), "there is no such file\nhint: numbers of workers go to --workers\n"),
        (
            ("--machine", "sm_91:8"),
            "error: `sm_91:8` is no file that describes a machine, and no cluster's name\nhint: clusters are a100-40,",
        ),
        (("--machine", "docs/machines/h100.json", "--kernels"), "--kernels makes the kernels of GPUs"),
    ],
)
def test_what_is_no_machine_is_refused(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "file.toml").touch()
    (tmp_path / "docs").symlink_to(Path("docs").absolute())
    monkeypatch.chdir(tmp_path)
    assert main(["guide", "llama", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_without_rows_of_tokens_has_rows_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = [f"--set={name}={size}" for name, size in {**sizes, "image_size": 16, "patch_size": 8}.items()]
    assert main(["guide", "vit", *words, "--machine", "sm_90:1", "--batch", "8"]) == 0
    titles, _, cells, *_ = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert titles[5] == "rows/s"
    assert main([*GUIDE, "--batch", "8"]) == 0
    titles, _, of_tokens, *_ = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert titles[5] == "tokens/s"
    for each, row in ((1, cells), (8, of_tokens)):
        seconds = float(row[4].split()[0]) / 1e6
        assert row[4].endswith(" us")
        assert float(row[5].replace(",", "")) == pytest.approx(8 * each / seconds, rel=0.05)


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
    machine = named_cluster(TARGET.name).machine(2)
    asked = Question(ModelSource("llama", {}), (8,), 8, machine, (2,), parse_request("dp=2,micro_batches=1"))
    before = planned(dense(), 8, machine, asked, InProcessPool())
    after = planned(dense(), 8, machine, replace(asked, kernels=kernels, folder=tmp_path), InProcessPool())
    assert (before.known, after.known) == (0, before.functions)
    made = [kernel for each in kernels.known.values() for kernel in each]
    assert after.parts["launch"].value == pytest.approx(LAUNCH_SECONDS * sum(kernel.calls for kernel in made))
    # What was written is the plan, and its functions are those that were made.
    assert not kernels.make(program_of(load((tmp_path / "batch-8-on-2.moai").read_text(encoding="utf-8"))))


def test_the_guide_says_on_how_many_workers_a_plan_fits() -> None:
    step, machine = dense(width=64, hidden=64), replace(named_cluster(TARGET.name).machine(1), memory=60_000)
    asked = Question(ModelSource("llama", {}), (8,), 8, machine, (1,), parse_request("recompute=saved"))
    reason = planned(step, 8, machine, asked, InProcessPool()).reason
    assert re.search(r"no plan fits: .*; on (2|4) workers one does", reason)
    too_little = replace(machine, memory=1)
    assert "one does" not in planned(step, 8, too_little, asked, InProcessPool()).reason


@pytest.mark.exact
def test_the_guide_says_where_its_numbers_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOAI_CACHE", str(tmp_path / "cache"))
    assert main([*GUIDE, "--kernels"]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H100 SXM, h100:" in said
    assert re.search(r"launch [\d.]+ us \(assumed\), .*; kernels were made of ([1-9]\d*) of \1 functions", said)


def test_a_guide_without_any_plan_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GUIDE, "--workers", "1"]) == 1
    assert "dp=2 needs 2 workers, there is 1" in capsys.readouterr().out
    assert main([*GUIDE, "--workers", "1,2"]) == 0


def test_a_guide_over_many_batches_does_not_end_where_dynamo_gives_up() -> None:
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    source = ModelSource("llama", {**tiny, "num_key_value_heads": 2, "vocab_size": 64})
    with torch._dynamo.config.patch(recompile_limit=1):  # pyright: ignore[reportPrivateUsage]
        steps = [captured_step(source, Sample(batch, 8)) for batch in (2, 3, 4)]
    assert [step.main.params[0].type.shape[0] for step in steps] == [2, 3, 4]
