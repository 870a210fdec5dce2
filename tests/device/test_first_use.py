"""What a program may begin with on the device: nothing else has made its ops known by then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GRAPH = """
import torch
compiled = torch.compile(lambda: torch.tril_indices(3, 3, device="moai"), backend="moai")
assert torch.equal(compiled().cpu(), torch.tril_indices(3, 3))
"""

LAYERS = """
import torch
assert torch.nn.GRU(4, 5).to("moai")(torch.ones(2, 3, 4, device="moai"))[0].cpu().shape == (2, 3, 5)
"""


@pytest.mark.parametrize("program", [GRAPH, LAYERS], ids=["a graph without operands", "recurrent layers"])
def test_it_may_be_the_first_that_a_program_computes(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "MOAI_COMPILE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
