"""The trace of a user's error has the user's lines, and one of moaic's."""

from __future__ import annotations

import pytest

from tests.tools.conftest import Person

SCRIPT = """
import torch

x = torch.ones(4, device="moai")


def taken():
    y = x[torch.tensor([9])]
    return y.cpu()


taken()
"""


@pytest.mark.parametrize("asked", [{}, {"MOAI_TRACEBACK": "full"}])
def test_a_trace_has_one_line_of_moaic(person: Person, asked: dict[str, str]) -> None:
    program = person.start(SCRIPT, MOAI_LOG="warning", **asked)
    _, said = program.communicate(timeout=60)
    assert program.returncode == 1
    frames = [line for line in said.splitlines() if line.startswith('  File "')]
    ours = [line for line in frames if "/moaic/" in line]
    theirs = [line for line in frames if "train.py" in line]
    assert len(theirs) == 2
    if asked:
        assert len(ours) > 1
        assert "are left out" not in said
    else:
        assert len(ours) == 1
        assert "frames of moaic are left out; MOAI_TRACEBACK=full shows them" in said
    assert "aten.index.Tensor" in said.splitlines()[-1]
