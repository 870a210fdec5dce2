"""Training of a model that does not fit on one worker with its gradients and optimizer state, as DDP needs it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from peers import PEERS, Run, Setting, launch, write_data
from pytest_benchmark.fixture import BenchmarkFixture

LIMIT = 2_500_000_000
"""Bytes of private memory per process, of which an idle worker takes some 540 million."""

WIDE = ("--hidden", "1024", "--intermediate", "4096", "--heads", "16", "--seq", "64")
"""With 16 layers 285 million parameters: in bfloat16 with gradients and AdamW's state 2.3 GB."""


@pytest.mark.timeout(1800)
def test_what_fits_no_worker(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan that fits is selected and trains; DDP runs out of memory under the same limit, and does not without."""
    write_data(tmp_path)
    batches = cast("list[dict[str, torch.Tensor]]", torch.load(tmp_path / "data.pt"))
    torch.save([{name: tensor[:4, :64] for name, tensor in batch.items()} for batch in batches], tmp_path / "data.pt")
    limited = Setting("bfloat16", 16, 4, tmp_path, WIDE, LIMIT)
    ours = cast("Run", benchmark.pedantic(launch, args=(PEERS["moai"], limited), rounds=1, iterations=1))
    with pytest.raises(RuntimeError, match=r"(?i)allocate|memory"):
        launch(PEERS["ddp + inductor"], limited)
    free = launch(PEERS["ddp + inductor"], Setting("bfloat16", 16, 2, tmp_path, WIDE))
    assert len(free.steps) == 2
    losses = [step["loss"] for step in ours.steps]
    benchmark.extra_info["losses"] = losses
    with capsys.disabled():
        print(f"\nunder {LIMIT / 1e9} GB per process: moai's losses {losses}, DDP out of memory")
