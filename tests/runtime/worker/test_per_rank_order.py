"""The order of a pipeline's instructions on workers: no worker waits for a slot that is never freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.op_names import SEND
from moaic.ir.verify import load
from moaic.passes.build import build
from moaic.passes.config import Config
from moaic.runtime.worker.overlap_and_bucket import program_order
from moaic.runtime.worker.per_rank_order import rank_order
from tests.passes.pipeline.test_assign_stages import tied
from tests.passes.steps import dense


class Workers:
    """Workers that do their instructions by turns; what is computed takes no time, what is sent takes slots."""

    def __init__(self, program: Module, slots: int, size: int) -> None:
        self.main, self.mesh, self.slots, self.size = program.main, program.mesh, slots, size
        places = {rank: program.mesh.coordinates(rank) for rank in range(program.mesh.ranks)}
        steps = program_order(self.main)
        self.left = {rank: deque(rank_order(steps, self.mesh, at, slots, size)) for rank, at in places.items()}
        self.free = dict.fromkeys(places, slots)
        self.posted: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def run(self) -> None:
        """Until nobody can go on."""
        while any(self._advance(rank) for rank in self.left):
            pass

    def _advance(self, rank: int) -> bool:
        """One instruction, or one slot of it; false where the worker has to wait, or is done."""
        if not self.left[rank]:
            return False
        index, op = self.left[rank][0]
        if op.name != SEND:
            self.left[rank].popleft()
            return True
        value = op.results[0]
        turns = -(-value.type.local_nbytes(self.mesh) // self.size)
        if value.type.layout.holds(self.mesh.coordinates(rank)):
            return self._take(rank, index, turns)
        return self._post(rank, index, turns)

    def _post(self, rank: int, index: int, turns: int) -> bool:
        if not self.free[rank]:
            return False
        self.free[rank] -= 1
        self.posted[index] = self.posted.get(index, 0) + 1
        if self.posted[index] == turns:
            self.left[rank].popleft()
        return True

    def _take(self, rank: int, index: int, turns: int) -> bool:
        if self.posted.get(index, 0) == self.taken.get(index, 0):
            return False
        self.taken[index] = self.taken.get(index, 0) + 1
        home = next(self.main.ops[index].inputs()).type.layout.owner_on("pp")
        assert home is not None
        self.free[self.mesh.rank({"pp": home})] += 1
        if self.taken[index] == turns:
            self.left[rank].popleft()
        return True


@given(
    make=st.sampled_from([dense, tied]),
    workers=st.sampled_from([2, 3]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    micro_batches=st.sampled_from([2, 4, 8]),
    slots=st.integers(1, 6),
    size=st.sampled_from([16, 64, 200, 4096]),
)
def test_no_number_of_rooms_is_too_few(
    make: Callable[[], Module], workers: int, schedule: str, micro_batches: int, slots: int, size: int
) -> None:
    try:
        program = build(make(), Config(pp=workers, micro_batches=micro_batches, schedule=schedule)).programs.joint
    except Diagnostic:
        return
    running = Workers(program, slots, size)
    running.run()
    assert not any(running.left.values())


RING = """// moai 1
mesh [pp=2, cp=2]
func @main(%x: f32[1, 1, 4{cp}, 2] on pp=0 input "x", %q: f32[1, 1, 4{cp}, 2] on pp=1 input "q")
    -> (f32[1, 1, 4{cp}, 2] on pp=1, f32[1, 1, 4{cp}, 2] on pp=1) {
  %y = moai.send %x {axis = "pp"} : f32[1, 1, 4{cp}, 2] on pp=1
  %o, %l = moai.ring_sdpa %q, %q, %q, _ {axis = "cp"} : f32[1, 1, 4{cp}, 2] on pp=1, f32[1, 1, 4{cp}] on pp=1
  return %o, %y
}
"""


def test_what_was_sent_is_taken_before_a_ring() -> None:
    program = load(RING)
    steps = rank_order(program_order(program.main), program.mesh, {"pp": 1, "cp": 0}, slots=2)
    assert [step.op.name for step in steps] == ["moai.send", "moai.ring_sdpa"]
