from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moaic.cli import main
from moaic.ir.printer import render
from moaic.ir.verify import load
from moaic.passes.perf.machine_text import from_text
from tests.passes.steps import dense

STEP = "func @step(%x: f32[4]) -> (f32[4]) {\n  %y = aten.neg %x : f32[4]\n  return %y\n}\n"
DATA = Path(__file__).parent / "data"


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "step.moai"
    path.write_text(STEP, encoding="utf-8")
    return str(path)


def test_several_files_are_verified(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", step, step]) == 0
    assert capsys.readouterr().out == f"{step}: 1 function, 1 op: well formed\n" * 2


def test_standard_input_is_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(STEP.replace("%x :", "%z :")))
    assert main(["verify", "-"]) == 2
    assert "<stdin>:2:17: error: `%z` is not defined above" in capsys.readouterr().err


def test_what_show_prints_is_a_file_too(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", step]) == 0
    assert load(capsys.readouterr().out).main.name == "step"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bake"], "invalid choice: 'bake'"),
        (["show"], "the following arguments are required: FILE"),
        (["show", "nowhere.moai"], "error: cannot read nowhere.moai: No such file or directory"),
        (["show", "--func", "main", "STEP"], "error: there is no function `@main`\nhint: the file has @step"),
        (["capture", "nowhere.py"], "error: cannot read nowhere.py: there is no such file"),
        (["capture", "llama", "--set", "layers"], "error: a setting reads NAME=VALUE, not `layers`"),
        (["capture", "no-such-model"], "error: there is no model `no-such-model`"),
        (["capture", "llama", "--set", "layers=2"], "error: the configuration of `llama` has no `layers`"),
    ],
)
def test_a_mistake_ends_with_2(
    arguments: list[str], message: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([step if word == "STEP" else word for word in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_no_text_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "binary.moai"
    path.write_bytes(b"\xff\xfe")
    assert main(["verify", str(path)]) == 2
    assert "it is no text (invalid start byte at byte 0)" in capsys.readouterr().err


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "verify" in capsys.readouterr().out


def test_a_machine_is_measured_with_the_kernels_of_a_step(tmp_path: Path) -> None:
    """And written for others, who plan by the same numbers."""
    step, machine = tmp_path / "step.moai", tmp_path / "machine.json"
    step.write_text(render(dense(1024, 512, 2048)), encoding="utf-8")
    environment = {**os.environ, "MOAI_CACHE": str(tmp_path / "cache"), "MOAI_FLAVOR": "2", "MOAI_LOG": "error"}
    environment["MOAI_COMPILE"] = "0"
    command = [sys.executable, "-m", "moaic", "calibrate", str(step), "-o", str(machine)]
    for _ in range(2):  # the second time over what the first has kept
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^mm\.f32 +[0-9.]+ +GFLOP/s +measured$", done.stdout, re.MULTILINE)
        assert re.search(r"^aten\.mm f32\[.*\] +[0-9.]+ +[0-9.]+$", done.stdout, re.MULTILINE)
    kernels = from_text(machine.read_text(encoding="utf-8")).kernels
    assert kernels
    assert all("aten.mm" in text and number.value > 0 for text, number in kernels.items())


def test_a_closed_pipe_is_no_crash() -> None:
    command = f"{sys.executable} -m moaic show {DATA / 'print.moai'} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("// 2 functions")
    assert not done.stderr


def test_a_model_is_captured_without_its_weights(tmp_path: Path) -> None:
    """A layer of the size of a 13B model: two gigabytes that are never made."""
    path = tmp_path / "llama.moai"
    sizes = ["hidden_size=5120", "num_attention_heads=40", "num_key_value_heads=40", "num_hidden_layers=1"]
    sizes += ["tie_word_embeddings=true", "attention_bias=false", "eos_token_id=null"]
    settings = [word for size in sizes for word in ("--set", size)]
    assert main(["capture", "llama", *settings, "--batch", "2", "--sequence", "64", "-o", str(path)]) == 0
    step = load(path.read_text(encoding="utf-8")).main
    roles = {(role.kind, role.label) for role in (*step.param_roles, *step.result_roles)}
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert {("input", "input_ids"), ("param", weight), ("grad", weight), ("output", "loss")} <= roles
    assert len({("param", "lm_head.weight"), ("param", "model.embed_tokens.weight")} & roles) == 1, "they are tied"


SCRIPT = """
import sys, torch
model = torch.compile(torch.nn.Linear(4, int(sys.argv[1])), backend="moai")
print("before", file=sys.stderr)
model(torch.ones(2, 4)).sum().backward()
raise AssertionError("the step ran")
"""


def test_a_script_is_captured_at_its_first_step(tmp_path: Path) -> None:
    """In a process of its own: the script's modules and its backend are that process's."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "moaic", "capture", str(script), "--", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "before\n"
    step = load(done.stdout).main
    assert [value.type.shape for value in step.params[:3]] == [(3, 4), (3,), (2, 4)]
    assert {role.kind for role in step.result_roles} == {"output", "grad"}
