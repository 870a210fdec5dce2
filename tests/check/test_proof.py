"""The command `moaic check`: its output and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moaic.check.proof import CapturedStep
from moaic.cli import main
from moaic.ir.graph import Module
from moaic.passes.lowering.programs import Programs

REMOTE = Path(__file__).parents[2] / "tutorial" / "baichuan2"

STEP = """// moai 1
func @step(%x: f32[8, 4] input "x", %w: f32[4, 4] param "w", %t: f32[] tangent "loss")
    -> (f32[] output "loss", f32[4, 4] grad "w") {
  %y = aten.mm %x, %w : f32[8, 4] forward
  %loss = aten.sum.dim_IntList %y {dim = [0, 1]} : f32[] forward
  %g = aten.expand %t {size = [8, 4]} : f32[8, 4] backward
  %xt = aten.permute %x {dims = [1, 0]} : f32[4, 8] backward
  %gw = aten.mm %xt, %g : f32[4, 4] backward
  return %loss, %gw
}
"""

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, int(sys.argv[1])))
compiled = torch.compile(model, backend="moai")
compiled(torch.randn(4, 6)).square().mean().backward()
raise AssertionError("its first step was run")
"""

BROKEN = SCRIPT.replace(
    "compiled = torch.compile(model, ",
    """
def after_a_view(x):
    columns = x[:, :6]
    torch._dynamo.graph_break()
    return model(columns)

compiled = torch.compile(after_a_view, """,
)
"""Of its two graphs the first computes nothing."""


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "step.moai"
    path.write_text(STEP, encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_every_plan_has_a_line_and_all_are_counted(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", step, "--devices", "1,2", "--all-plans"]) == 0
    head, *lines, blank, total = capsys.readouterr().out.splitlines()
    assert head.startswith("plan  ")
    assert head.endswith("  verdict")
    assert not blank
    passed = [line for line in lines if line.endswith(" pass")]
    dropped = [line for line in lines if " dropped: " in line]
    assert len(passed) + len(dropped) == len(lines)
    assert total.startswith(f"{len(lines)} (model, plan) pairs on virtual ranks: {len(passed)} passed")
    assert all(" w " in line for line in passed)
    plans = [line.split()[0] for line in lines]
    assert {"dp=1", "dp=2", "tp=2", "dp=2,micro_batches=2"} <= {line.split()[0] for line in passed}
    assert len(set(plans)) == len(plans)


def test_a_wrong_plan_ends_with_1_and_its_gradient_is_named(
    step: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moaic.check import proof

    right = proof.in_halves

    def doubled(step: CapturedStep, programs: Programs) -> Sequence[Tensor]:
        loss, gradient = right(step, programs)
        return [loss, gradient * 2]

    monkeypatch.setattr(proof, "in_halves", doubled)
    assert main(["check", step, "--devices", "2"]) == 1
    printed = capsys.readouterr().out
    assert "1.0e+00  w" in printed
    assert "fail: grad w is off by 1.0e+00 (forward, then backward)" in printed
    assert " 0 passed, " in printed.splitlines()[-1]


def test_a_program_that_is_not_well_formed_is_wrong(
    step: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moaic.check import proof

    right = proof.lower

    def without_an_op(module: Module, unread: Collection[int]) -> Programs:
        programs = right(module, unread)
        main = programs.joint.main
        spoilt = replace(programs.joint, functions=(*programs.joint.functions[:-1], replace(main, ops=main.ops[:-1])))
        return replace(programs, joint=spoilt)

    monkeypatch.setattr(proof, "lower", without_an_op)
    assert main(["check", step, "--devices", "2"]) == 1
    assert "fail: RuntimeError: pass lower made a module that is not well formed" in capsys.readouterr().out


def test_where_no_plan_passes_the_check_does_not_either(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", step, "--devices", "4", "--plan", "pp=4"]) == 1
    assert " 0 passed, 8 dropped" in capsys.readouterr().out


def test_on_workers_too(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", step, "--devices", "2", "--workers"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:-2]
    assert len([line for line in lines if "2 virtual" in line]) == len([line for line in lines if "2 workers" in line])


@pytest.mark.parametrize(
    "script", [pytest.param(SCRIPT, id="whole", marks=pytest.mark.exact), pytest.param(BROKEN, id="broken")]
)
def test_the_first_step_of_a_script(script: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "moaic", "check", str(path), "--devices", "2", "--", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " (model, plan) pairs on virtual ranks: " in done.stdout


def test_a_model_with_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    settings = [word for name, size in {**small, "vocab_size": 64}.items() for word in ("--set", f"{name}={size}")]
    arguments = ["check", str(REMOTE), "--devices", "2", "--batch", "2", *settings]
    assert main([*arguments, "--trust-remote-code"]) == 0
    assert " (model, plan) pairs on virtual ranks: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["STEP", "--devices", "two"], "error: --devices takes numbers of devices such as 2,4,8, not `two`"),
        (["llama"], "error: `llama` has 6,738 million parameters; the limit here is 67 million"),
        (["no-such-model"], "error: there is no model `no-such-model`"),
        ([str(REMOTE)], "let it run with --trust-remote-code"),
        (["nowhere.py"], "error: cannot read nowhere.py: there is no such file"),
    ],
)
def test_a_mistake_ends_with_2(
    arguments: list[str], message: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *(step if word == "STEP" else word for word in arguments)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out
