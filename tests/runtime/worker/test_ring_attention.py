"""Ring attention equals attention: every rank in a thread, over the shared memory of one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.ir.ring_attention import is_ring
from moaic.ir.verify import load
from moaic.passes.perf.ring_attention import handed_on_in
from moaic.runtime.comm.device_backend import CpuBackend
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import Group
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.interpreter import run_function, run_ranks
from moaic.runtime.protocol.shared_memory import SLOT_BYTES, create_memory
from moaic.runtime.rank_arrays import gather, scatter
from moaic.runtime.worker.program import Program
from tests.runtime.rings import MASKS, Ring


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    ranks, causal = draw(st.integers(2, 4)), draw(st.booleans())
    mask = draw(st.sampled_from(MASKS))
    rows = ranks * draw(st.integers(1, 5))
    # A row of lowest numbers alone is an average only for the kernel that takes values as wide as keys.
    widths = st.just(4) if mask == "lowest" else st.sampled_from([3, 4])
    return Ring(
        ranks,
        rows,
        columns=rows if causal else ranks * draw(st.integers(1, 5)),
        causal=causal,
        striped=draw(st.booleans()),
        mask=mask,
        dtype="f64",
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 2)),
        value_width=draw(widths),
    )


class Counting(SharedMemoryTransport):
    """Writes down the bytes that it passes on."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.passed: list[int] = []

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        self.passed += [tensor.nbytes for tensor in tensors]
        return super().begin_pass(tensors, group)


def in_threads(module: Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Counting]]:
    """The results of a program, each of whose ranks is a thread, and what carried their data."""
    ranks, memory = range(module.mesh.ranks), create_memory(module.mesh.ranks)
    carriers = [Counting(Mailbox(memory, rank, len(ranks), (), spins=0)) for rank in ranks]
    os.close(memory)
    stations = [WorkerContext(rank, CpuBackend(), carrier) for rank, carrier in zip(ranks, carriers, strict=True)]
    programs = [Program(render(module), each, compiled=False, note=lambda index: None) for each in stations]
    main = module.main
    parts = [scatter(tensor, param.type, module.mesh) for tensor, param in zip(inputs, main.params, strict=True)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        runs = [
            pool.submit(program.run, [part[rank] for part in parts], None, [True] * len(main.results))
            for rank, program in enumerate(programs)
        ]
        made = [run.result(timeout=60) for run in runs]
    results = [[tensor for tensor in of_ranks if tensor is not None] for of_ranks in zip(*made, strict=True)]
    gathered = (
        gather(of_ranks, value.type, module.mesh) for of_ranks, value in zip(results, main.results, strict=True)
    )
    return list(gathered), carriers


@settings(max_examples=40)
@given(rings(), st.integers(0, 1000))
def test_a_ring_is_attention(ring: Ring, seed: int) -> None:
    module, inputs = load(ring.text), ring.inputs(seed)
    expected = run_function(module, "main", inputs)
    results, carriers = in_threads(module, inputs)
    for got, meant, want in zip(results, run_ranks(module, inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(meant, want, rtol=1e-12, atol=1e-12)
    predicted = [nbytes for op in module.main.ops if is_ring(op) for nbytes in handed_on_in(op, module.mesh)]
    for carrier in carriers:
        assert sorted(carrier.passed) == sorted(predicted)


def test_a_block_larger_than_a_room_goes_in_pieces() -> None:
    ring = Ring(3, rows=6, columns=3 * 5000, batch=4, heads=4, width=8, value_width=8)
    module, inputs = load(ring.text), ring.inputs()
    results, carriers = in_threads(module, inputs)
    assert min(carriers[0].passed) > SLOT_BYTES
    for got, want in zip(results, run_function(module, "main", inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
