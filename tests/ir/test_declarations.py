from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moaic.ir import op_names
from moaic.ir.collectives import COLLECTIVES, COMMUNICATING
from moaic.ir.graph import Op
from moaic.ir.ops import DECLARATIONS, OPS, Kind, declaration_of, joined, kind_of
from moaic.ir.ops.declaration import OpDecl, each
from moaic.runtime.codegen.lower_to_fx import LOWERINGS

ROOT = Path(__file__).parents[2]

NAMES = {value for name, value in vars(op_names).items() if name.isupper()}


def test_every_name_of_our_own_is_declared() -> None:
    assert {name for name in DECLARATIONS if name.startswith("moai.")} == NAMES
    assert set(OPS) >= NAMES


def test_names_of_our_own_are_written_once() -> None:
    quoted = re.compile("|".join(f'"{re.escape(name)}"' for name in sorted(NAMES)))
    files = (path for folder in ("ir", "passes", "runtime", "moaic") for path in (ROOT / folder).rglob("*.py"))
    users = {str(path.relative_to(ROOT)) for path in files if quoted.search(path.read_text(encoding="utf-8"))}
    assert {name for name in users if not name.startswith("moaic/ir/")} == {"ir/op_names.py"}


def test_every_declared_op_can_occur() -> None:
    """One of PyTorch's is an op of PyTorch; one of our own is made, or stands in a table by which it is made."""
    foreign = [name for name in OPS if name.startswith("aten.")]
    assert [name for name in foreign if not hasattr(torch.ops.aten, name.split(".")[1])] == []
    makers = [
        path for folder in ("ir", "passes", "moaic/capture", "moaic/device") for path in (ROOT / folder).rglob("*.py")
    ]
    texts = [path.read_text(encoding="utf-8") for path in makers if "ops" not in path.parts]
    lines = [line for text in texts for line in text.splitlines() if not re.match(r"from |import |    \w+,$|\)", line)]
    constants = [name for name in vars(op_names) if name.isupper()]
    used = {name for name in constants for line in lines if re.search(rf"\b{name}\b(?!: Final)", line)}
    assert used == set(constants)


def test_a_name_is_declared_once() -> None:
    one = OpDecl("aten.one", None)
    with pytest.raises(AssertionError, match=r"aten\.one is declared twice"):
        joined((one,), (one,))


def test_what_is_lowered_has_a_lowering() -> None:
    assert {name for name, declaration in DECLARATIONS.items() if declaration.lowered} == set(LOWERINGS)


def test_work_of_collectives_is_declared() -> None:
    assert {name for name in COLLECTIVES if not OPS[name].memory_passes} == set(COMMUNICATING)
    assert all(OPS[name].cost not in ("cheap", "costly") for name in OPS if OPS[name].kind is Kind.HEAVY)


def test_an_undeclared_op_is_light_and_has_no_rule() -> None:
    op = Op("aten.unheard_of")
    assert kind_of(op) is Kind.LIGHT
    assert declaration_of(op).make_rule is None


def test_one_pattern_declares_several_ops() -> None:
    assert [one.name for one in each("sin cos.out", OpDecl("aten.*", None))] == ["aten.sin", "aten.cos.out"]
